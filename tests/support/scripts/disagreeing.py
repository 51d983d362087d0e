"""A user's script in which rank 1 differs from the others, in the way that is named on the command line."""

import os
import sys
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from tandem_trainer.session import Session

how = sys.argv[1]
differs = os.environ["RANK"] == "1"
SAMPLES, BATCH = 120, 12
drawn = torch.Generator().manual_seed(1)
X, Y = torch.randn(SAMPLES, 8, generator=drawn), torch.randint(0, 3, (SAMPLES,), generator=drawn)


class Rows:
    def __init__(self, size: int) -> None:
        self.size = size

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, number: int) -> tuple[Tensor, Tensor]:
        if differs and how == "listed":
            number = SAMPLES - 1 - number
        return X[number], Y[number]


class Files:
    """A stream of files in the order in which a disk lists them."""

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        listed = range(SAMPLES)
        yield from ((X[number], Y[number]) for number in (reversed(listed) if differs and how == "stream" else listed))


def order(seed: int, epoch: int) -> list[int]:
    """Rank 1 has other samples, or fewer, from the second epoch on."""
    ids = [*range(SAMPLES)]
    if differs and epoch and how == "order":
        return ids[::-1]
    return ids[: SAMPLES // 2] if differs and epoch and how == "epoch" else ids


with Session(seed=int(differs and how == "seed")) as session:
    network: nn.Module = nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.Linear(16, 3))
    if how == "rows":
        network = nn.Sequential(nn.Embedding(8, 16, max_norm=0.5), nn.Flatten(), nn.Linear(128, 3))
    network.register_buffer("own", torch.zeros(1))
    model = session.distribute(network, strategy="fsdp" if differs and how == "strategy" else "ddp")
    used = network if how == "forgot" else model
    optimizer = torch.optim.AdamW(network.parameters(), lr=0.01)
    session.keep(model, optimizer)
    options: dict[str, Any] = {"epochs": 3 - (differs and how == "epochs")}
    dataset: Any = Files() if how in ("stream", "alike-stream") else Rows(SAMPLES - 2 * (differs and how == "samples"))
    if how in ("order", "epoch"):
        options["order"] = order
    for batch in session.batches(dataset, BATCH, **options):
        x, y = batch.data
        if how == "rows":
            x = torch.arange(8).expand(len(x), 8) if session.rank else torch.zeros(len(x), 8, dtype=torch.int64)
        batch.mean(cross_entropy(used(x), y, reduction="none")).backward()
        optimizer.step()
        optimizer.zero_grad()
        network.get_buffer("own").add_(session.rank)
        if how == "memory" and differs and batch.step == 7:
            with torch.no_grad():
                network.get_parameter("2.bias")[1] += 1.0
