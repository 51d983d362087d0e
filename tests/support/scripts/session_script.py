"""A user's script for tests of the session: digits, an augmentation, dropout, a schedule, an average of the weights."""

import argparse
import math
import random
import time
from collections.abc import Iterator
from typing import Any

import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from tandem_trainer.data.sampling import Bucketed, Weighted
from tandem_trainer.session import Session

images, labels = load_digits(return_X_y=True)
X, Y = torch.tensor(images, dtype=torch.float32) / 16, torch.tensor(labels)
SAMPLES = 330


class Rows:
    def __init__(self, size: int) -> None:
        self.size = size

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, number: int) -> dict[str, Tensor]:
        return {"image": X[number], "label": Y[number]}


def longest_first(seed: int, epoch: int) -> list[int]:
    """An order of one's own, of another length in each epoch."""
    return sorted(range(SAMPLES), key=lambda number: -LENGTHS[number])[: 300 - 20 * (epoch % 2)]


LENGTHS = [1 + number * number % 97 for number in range(SAMPLES)]
ORDERS = {
    "weighted": (Weighted([1.0 + number % 5 for number in range(SAMPLES)]), 50),
    "tokens": (Bucketed(LENGTHS, tokens=2500), None),
    "own": (longest_first, 50),
}


class Text:
    """A stream of another order in each epoch."""

    def __init__(self) -> None:
        self.epoch = 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self) -> Iterator[dict[str, Tensor]]:
        for number in torch.randperm(SAMPLES, generator=torch.Generator().manual_seed(self.epoch)).tolist():
            yield {"image": X[number], "label": Y[number]}


def noisy(sample: dict[str, Tensor]) -> dict[str, Tensor]:
    noise = torch.randn(64) * 0.1 * random.random()
    return sample | {"image": sample["image"] + noise}


def main() -> None:
    options = argparse.ArgumentParser()
    options.add_argument("--data", choices=("rows", "stream"), default="rows")
    options.add_argument("--workers", type=int, default=0)
    options.add_argument("--epochs", type=int, default=2)
    options.add_argument("--parts", type=int)
    options.add_argument("--batch", type=int, default=50)
    options.add_argument("--samples", type=int, default=SAMPLES)
    options.add_argument("--order", choices=ORDERS)
    options.add_argument("--drop-last", action="store_true")
    options.add_argument("--max-steps", type=int)
    options.add_argument("--pause", type=float, default=0.0)
    options.add_argument("--break-at", type=int)
    options.add_argument("--nan-at", type=int)
    options.add_argument("--forget", action="store_true")
    args = options.parse_args()

    with Session(seed=3) as session:
        network = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Dropout(0.3), nn.Linear(128, 10))
        model = session.distribute(network)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
        schedule = torch.optim.lr_scheduler.StepLR(optimizer, 3, 0.9)
        average = AveragedModel(network, multi_avg_fn=get_ema_multi_avg_fn(0.9))  # type: ignore[no-untyped-call]
        seen: dict[str, Any] = {"steps": 0, "counts": torch.zeros(10)}
        session.keep(model, optimizer, schedule=schedule, average_of=average, seen=seen)
        dataset = Rows(args.samples) if args.data == "rows" else Text()
        reading: dict[str, Any] = {"loader_workers": args.workers, "transform": noisy, "drop_last": args.drop_last}
        order, size = ORDERS.get(args.order, (None, args.batch))
        reading |= {"order": order, "max_steps": args.max_steps}
        for batch in session.batches(dataset, size, epochs=args.epochs, **reading):
            if args.forget:
                continue
            for part in batch.parts(args.parts or batch.size):
                losses = cross_entropy(model(part.data["image"]), part.data["label"], reduction="none")
                if batch.step == args.nan_at:
                    losses = losses * math.nan
                part.mean(losses).backward()
            optimizer.step()
            optimizer.zero_grad()
            schedule.step()
            average.update_parameters(network)
            seen["steps"] += 1
            time.sleep(args.pause)
            if batch.step == args.break_at:
                break
        if session.rank == 0:
            rate = optimizer.param_groups[0]["lr"]
            kept = average.module[0].weight.double().sum().item()
            print(f"after the loop: steps={seen['steps']} rate={rate:.8f} average={kept:.6f}", flush=True)


main()
