"""A user's script in which a part of Tandem makes the mistake that is named on the command line."""

import os
import signal
import sys
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from tandem_trainer import session_data
from tandem_trainer.checkpoint.file_names import OPTIMIZER
from tandem_trainer.checkpoint.state import NamedOptimizer, OptimizerState
from tandem_trainer.checkpoint.train_state import Contents, TrainState
from tandem_trainer.data.feeding import RankBatch
from tandem_trainer.session import Session

how, optimizer_name, *leaves_at = sys.argv[1:]
SAMPLES, BATCH = 120, 12
drawn = torch.Generator().manual_seed(1)
X, Y = torch.randn(SAMPLES, 8, generator=drawn), torch.randint(0, 3, (SAMPLES,), generator=drawn)
real_feed, real_load, real_files = session_data.feed, NamedOptimizer.load, Contents.files
real_load_all = TrainState.load
first_moments: dict[str, Tensor] = {}


def repeating(*arguments: Any) -> Iterator[RankBatch]:
    """One batch comes twice, and all that follow come late."""
    for number, batch in enumerate(real_feed(*arguments)):
        yield batch
        if number == 7:
            yield batch


def swapping(*arguments: Any) -> Iterator[RankBatch]:
    """Two batches come in the wrong order."""
    batches = real_feed(*arguments)
    for number, batch in enumerate(batches):
        if number == 7:
            yield next(batches)
        yield batch


def load_older(self: NamedOptimizer, state: OptimizerState) -> None:
    """Moments are those of five steps earlier."""
    real_load(self, state)
    for entries in self.optimizer.state.values():
        entries["step"] -= 5


def stale_files(self: Contents, rounds: bool) -> Mapping[str, Any]:
    """Each save writes the moments of the first one."""
    files = real_files(self, rounds)
    if not first_moments:
        first_moments.update({name: tensor.clone() for name, tensor in files[OPTIMIZER].items()})
    return files | {OPTIMIZER: first_moments}


def load_wrongly(self: TrainState, contents: Contents) -> None:
    """Memory of rank 1 changes a bit of a weight."""
    real_load_all(self, contents)
    if os.environ["RANK"] == "1":
        next(iter(self.learned().values())).data.view(torch.int32).view(-1)[3] ^= 1 << 20


match how:
    case "repeats":
        session_data.feed = repeating
    case "swaps":
        session_data.feed = swapping
    case "forgets":
        TrainState._load_moments = lambda self, contents: None  # type: ignore[method-assign]
    case "older":
        NamedOptimizer.load = load_older  # type: ignore[method-assign]
    case "flips":
        TrainState.load = load_wrongly  # type: ignore[method-assign]
    case "stale":
        Contents.files = stale_files  # type: ignore[assignment, method-assign]

with Session() as session:
    network = nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.Linear(16, 3), nn.Linear(3, 3))
    network[3].requires_grad_(False)
    model = session.distribute(network)
    optimizer = getattr(torch.optim, optimizer_name)(network.parameters(), lr=0.01)
    session.keep(model, optimizer)
    for batch in session.batches(torch.utils.data.TensorDataset(X, Y), BATCH, epochs=3):
        x, y = batch.data
        batch.mean(cross_entropy(model(x), y, reduction="none")).backward()
        # Gradients of two batches for one step.
        if optimizer_name != "Adam" or batch.step % 2:
            optimizer.step()
            optimizer.zero_grad()
        if leaves_at and batch.step == int(leaves_at[0]):
            os.kill(os.getpid(), signal.SIGTERM)
