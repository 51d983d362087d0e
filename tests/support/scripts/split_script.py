"""A user's script for tests of a session that splits its model over the ranks: digits, dropout, clipping, an average of
the weights."""

import argparse
import time

import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.optim.swa_utils import AveragedModel, get_ema_avg_fn

from tandem_trainer.session import Session

SAMPLES, WIDTH = 330, 46
"""A number of rows that no number of ranks but 2 divides."""
PLAN = {"*.up": "colwise", "*.dropout": "colwise", "*.down": "rowwise"}


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, 2 * WIDTH)
        self.dropout = nn.Dropout(0.2)
        self.down = nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, rows: Tensor) -> Tensor:
        hidden: Tensor = rows + self.down(self.dropout(self.up(self.norm(rows)).relu()))
        return hidden


def main() -> None:
    options = argparse.ArgumentParser()
    options.add_argument("--strategy", choices=("ddp", "fsdp"), default="ddp")
    options.add_argument("--tensor", type=int, default=1)
    options.add_argument("--by-hand", action="store_true")
    options.add_argument("--pause", type=float, default=0.0)
    options.add_argument("--other-weights", action="store_true")
    args = options.parse_args()

    images, labels = load_digits(return_X_y=True)
    pictures = torch.tensor(images, dtype=torch.float32) / 16
    rows = list(zip(pictures, labels.tolist(), strict=True))
    with Session(seed=3, tensor_parallel=args.tensor) as session:
        if args.other_weights:
            torch.manual_seed(session.rank)
        network = nn.Sequential(nn.Linear(64, WIDTH), Block(), Block(), nn.Linear(WIDTH, 10))
        average = AveragedModel(network, avg_fn=get_ema_avg_fn(0.9))  # type: ignore[no-untyped-call]
        model: nn.Module = network
        if args.by_hand:
            from torch.distributed.fsdp import fully_shard

            fully_shard(network, mesh=session.mesh["shard"])
            fully_shard(average.module, mesh=session.mesh["shard"])
            model = session.distribute(network)
        else:
            plan = PLAN if args.tensor > 1 else None
            model = session.distribute(network, strategy=args.strategy, tensor_plan=plan)
            if args.strategy == "fsdp":
                session.distribute(average.module, False, strategy="fsdp", tensor_plan=plan)
        optimizer = torch.optim.SGD(network.parameters(), lr=0.05, momentum=0.9, foreach=False)
        session.keep(model, optimizer, average=None if args.other_weights else average)
        for batch in session.batches(rows[:SAMPLES], 50, epochs=6):
            for part in batch.parts(7):
                images_of, labels_of = part.data
                part.mean(cross_entropy(model(images_of), labels_of, reduction="none")).backward()
            norm = session.clip_grad_norm_(network.parameters(), 0.5)
            optimizer.step()
            optimizer.zero_grad()
            average.update_parameters(network)
            if session.rank == 0:
                print(f"step {batch.step} norm {float(norm):.5f}", flush=True)
            time.sleep(args.pause)


main()
