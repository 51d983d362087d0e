"""The steps of a run whose epochs are put in order by a function (tandem_trainer.data.sampling).

An epoch may have any number of batches, so the step alone does not say where the data stands: its position does, which
counts the samples of the epoch that are used. A start asks the function for that epoch and goes on from there.

What is drawn at random for a sample, its augmentation and its dropout, follows from its place in the epoch and not from
its id: a sample that comes twice is augmented in two ways.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from tandem.rundir.checkpoint import DataPosition
from tandem_trainer.data.feeding import Fed, Indexed, Lookahead, Planned, Reading, read
from tandem_trainer.data.order import digest
from tandem_trainer.data.sampling import EpochOrder
from tandem_trainer.errors import ConfigurationError


@dataclass(frozen=True)
class Epoch:
    """One pass."""

    ids: Tensor
    """[N], int64, in their order."""
    batches: list[tuple[int, int]] | None
    """Start and end of each batch, if the function made them."""


class Listing:
    """The steps that a function of seed and epoch gives."""

    def __init__(
        self,
        order: EpochOrder,
        samples: int,
        batch: int | None,
        epochs: int,
        max_steps: int | None,
        seed: int,
        drop_last: bool = False,
    ) -> None:
        """
        Args:
            samples: in the data set.
            batch: samples of a global batch; None if the function makes the batches.

        Raises:
            ConfigurationError: the function returns what cannot be used.
        """
        self._order, self._samples, self._batch, self._epochs = order, samples, batch, epochs
        self._seed, self._drop_last = seed, drop_last
        self._number, self._epoch = 0, self._asked(0)
        if self._epoch.batches is not None and (batch is not None or drop_last):
            raise ConfigurationError(
                "the order gives whole batches, so their size is its own business: "
                "leave global_batch_size and drop_last out"
            )
        if self._epoch.batches is None and batch is None:
            raise ConfigurationError("the order gives sample ids: say with global_batch_size how many make a step")
        self.steps_per_epoch = self._steps() if _length(order) is not None else None
        self.data_steps = max_steps
        if self.steps_per_epoch is not None:
            steps = epochs * self.steps_per_epoch
            self.data_steps = steps if max_steps is None else min(steps, max_steps)
        self._next = self._end = self._position(epochs, 0)

    @property
    def digest(self) -> str:
        """Tells whether the ranks have the same order."""
        epoch = self._at(0)
        ends = [] if epoch.batches is None else [end for _, end in epoch.batches]
        return digest(torch.cat([epoch.ids, torch.tensor(ends, dtype=torch.int64)]))

    def position(self, step: int) -> DataPosition:
        """Where the data stands before the batch that comes next."""
        return self._next

    def feed(
        self,
        dataset: Indexed,
        start: DataPosition | None,
        passed: int,
        skipped: Callable[[int], bool],
        reading: Reading,
    ) -> Lookahead:
        """The batches from a position on.

        Args:
            start: None: from the beginning.
            passed: data steps before it.
            skipped: whether a data step is left out.

        Raises:
            ConfigurationError: no batch begins at the position.
        """
        self._next = start = start or self._position(0, 0)
        self._check_start(start)
        return Lookahead(read(dataset, self._plan(start, passed, skipped), reading), self._found, self._used)

    def _plan(self, start: DataPosition, step: int, skipped: Callable[[int], bool]) -> Iterator[Planned]:
        for number in range(start.epoch, self._epochs):
            epoch, cursor = self._at(number), start.cursor if number == start.epoch else 0
            for begin, end in self._cuts(epoch):
                if begin < cursor:
                    continue
                if self.data_steps is not None and step >= self.data_steps:
                    return
                if not skipped(step):
                    yield Planned(self._position(number, begin), epoch.ids[begin:end], torch.arange(begin, end))
                step += 1

    def _check_start(self, start: DataPosition) -> None:
        if start.cursor == 0 or start.epoch >= self._epochs:
            return
        ends = {end for _, end in self._cuts(self._at(start.epoch))}
        if start.cursor not in ends:
            raise ConfigurationError(
                f"the checkpoint stands after {start.cursor:,} samples of epoch {start.epoch}, where no batch of this "
                "order ends: it is another order than the one that the checkpoint was written with. Set it back, or "
                "begin a new run from the checkpoint's weights, in a folder of its own (tandem checkpoints export)"
            )

    def _found(self, fed: Fed | None) -> None:
        self._next = self._end if fed is None else fed.position

    def _used(self, fed: Fed) -> None:
        self._next = self._position(fed.position.epoch, fed.position.cursor + len(fed.ids))

    def _position(self, epoch: int, cursor: int) -> DataPosition:
        return DataPosition(
            seed=self._seed,
            epoch=epoch,
            cursor=cursor,
            samples=self._samples,
            batch=self._batch,
            drop_last=None if self._batch is None else self._drop_last,
        )

    def _steps(self) -> int:
        return len(self._cuts(self._at(0)))

    def _cuts(self, epoch: Epoch) -> list[tuple[int, int]]:
        if epoch.batches is not None:
            return epoch.batches
        assert self._batch is not None
        count = len(epoch.ids)
        end = count - count % self._batch if self._drop_last else count
        return [(start, min(start + self._batch, count)) for start in range(0, end, self._batch)]

    def _at(self, number: int) -> Epoch:
        if number != self._number:
            self._number, self._epoch = number, self._asked(number)
        return self._epoch

    def _asked(self, number: int) -> Epoch:
        """What the function gives for an epoch.

        Raises:
            ConfigurationError: it cannot be used.
        """
        name = getattr(self._order, "__name__", type(self._order).__name__)
        given = self._order(self._seed, number)
        try:
            epoch = _epoch(given)
        except (TypeError, ValueError, RuntimeError) as error:
            raise ConfigurationError(f"order {name} in epoch {number}: {error}") from error
        count = len(epoch.ids if epoch.batches is None else epoch.batches)
        told = _length(self._order)
        if told is not None and count != told:
            raise ConfigurationError(f"order {name} has the length {told}, and gives {count} in epoch {number}")
        if not len(epoch.ids) or (epoch.batches is None and self._drop_last and len(epoch.ids) < (self._batch or 0)):
            raise ConfigurationError(f"order {name} gives no batch for epoch {number}")
        if epoch.ids.min() < 0 or epoch.ids.max() >= self._samples:
            raise ConfigurationError(
                f"order {name} gives ids from {int(epoch.ids.min())} to {int(epoch.ids.max())} in epoch {number}; the "
                f"data set has those from 0 to {self._samples - 1}"
            )
        return epoch


def _epoch(given: Any) -> Epoch:
    """
    Raises:
        TypeError, ValueError, RuntimeError: it is neither ids nor batches.
    """
    if isinstance(given, Tensor) or not hasattr(given, "__len__") or not len(given) or not hasattr(given[0], "__len__"):
        return Epoch(_ids(given), None)
    parts = [_ids(part) for part in given]
    if not all(len(part) for part in parts):
        raise ValueError("a batch is empty")
    ends = torch.tensor([len(part) for part in parts]).cumsum(0).tolist()
    return Epoch(torch.cat(parts), list(zip([0, *ends[:-1]], ends, strict=True)))


def _ids(given: Any) -> Tensor:
    found = torch.as_tensor(given).to("cpu")
    if found.ndim != 1 or found.is_floating_point() or found.is_complex():
        if not found.numel():
            return torch.empty(0, dtype=torch.int64)
        raise ValueError("it returns neither whole numbers in a row, the ids, nor a row of such, the batches")
    return found.to(torch.int64)


def _length(order: EpochOrder) -> int | None:
    try:
        return len(order)  # type: ignore[arg-type]
    except TypeError:
        return None
