"""A user's script with two models that learn against each other, each with its own optimizer and dropout."""

import argparse
import time

import torch
from torch import Tensor, nn
from torch.nn.functional import softplus

from tandem_trainer.session import Session

ROWS = torch.rand(170, 8, generator=torch.Generator().manual_seed(2)) + 1


class Critic(nn.Module):
    """With a branch that no step uses."""

    def __init__(self) -> None:
        super().__init__()
        self.used = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Dropout(0.3), nn.Linear(16, 1))
        self.unused = nn.Linear(3, 3)

    def forward(self, rows: Tensor) -> Tensor:
        scores: Tensor = self.used(rows).squeeze(1)
        return scores


def noise(count: int) -> Tensor:
    """Of each row by itself, whichever rank has it: what torch draws follows from the rank."""
    return torch.linspace(0, 1, 4).expand(count, 4)


def main() -> None:
    options = argparse.ArgumentParser()
    options.add_argument("--epochs", type=int, default=3)
    options.add_argument("--parts", type=int, default=9)
    options.add_argument("--pause", type=float, default=0.0)
    options.add_argument("--lost", action="store_true", help="without what DistributedDataParallel has to know")
    args = options.parse_args()
    with Session(seed=5) as session:
        generator = nn.Sequential(nn.Linear(4, 16), nn.ReLU(), nn.Dropout(0.3), nn.Linear(16, 8))
        critic = Critic()
        known = {} if args.lost else {"find_unused_parameters": True}
        generating = session.distribute(generator)
        judging = session.distribute(critic, **known)
        optimizers = {
            "generator": torch.optim.SGD(generator.parameters(), lr=0.05),
            "critic": torch.optim.SGD(critic.parameters(), lr=0.05),
        }
        session.keep({"generator": generating, "critic": judging}, optimizers)
        for batch in session.batches(ROWS, 50, epochs=args.epochs):
            for part in batch.parts(args.parts):
                made = generating(noise(len(part)))
                part.mean(softplus(judging(made.detach())) + softplus(-judging(part.data))).backward()
            optimizers["critic"].step()
            optimizers["critic"].zero_grad()
            for part in batch.parts(args.parts):
                part.mean(softplus(-judging(generating(noise(len(part)))))).backward()
            optimizers["generator"].step()
            for optimizer in optimizers.values():
                optimizer.zero_grad()
            time.sleep(args.pause)


main()
