"""Sampling orders other than a plain shuffle: weighted, bucketed by length, or your own.

An order is a function of seed and epoch:

    def easy_first(seed: int, epoch: int) -> list[int]:
        return sorted(range(len(dataset)), key=difficulty.__getitem__)

It returns either the sample ids of the epoch in order, which are cut into global batches, or a list of global batches,
each a list of ids. It may repeat ids, omit some, and return another number of them for each epoch. Every rank calls it,
and every start does, so its result must follow from seed and epoch alone: then a run sees the same batches whatever the
number of ranks and restarts (tandem_trainer.data.sampling).

An order that has a length, the number of items that it returns for each epoch, lets the run know its total number of
steps from the beginning.

Rejected: samplers of torch's kind (an iterator with a state of its own, which belongs to one world size and one start).

An epoch may have any number of batches, so the step alone does not determine the position in the data: the position
counts the samples of the epoch that were used. A start calls the function for that epoch and continues from there.

Random numbers for a sample, its augmentation and its dropout, follow from its position in the epoch and not from its
id: a sample that comes twice is augmented in two ways.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import torch
import xxhash
from numpy.typing import NDArray
from torch import Tensor
from torch.utils.data import DataLoader, IterableDataset

from tandem.rundir.checkpoint import DataPosition
from tandem_trainer.data.feeding import Indexed, Lookahead, Planned, RankBatch, Reading, read
from tandem_trainer.data.keyed import mixed
from tandem_trainer.data.order import Order
from tandem_trainer.data.sharded import shards_of
from tandem_trainer.failure import ConfigurationError

EpochOrder = Callable[[int, int], Any]
"""Function (seed, epoch) → ids, [N] (a sequence, an array or a tensor of integers), or a sequence of such, the
batches."""

BATCHES_PER_POOL = 100
"""Number of batches whose samples are sorted by length together: enough for batches of even length, few enough to stay
random."""


@dataclass(frozen=True, eq=False)
class Weighted:
    """Samples drawn with a probability proportional to their weight, anew in each epoch.

    Args:
        weights: [samples of the data set], none negative.
        replacement: whether a sample may come more than once in an epoch. Its augmentation and dropout then differ each
            time.
        samples: number of samples in an epoch; default: the number of weights.

    Raises:
        ValueError: a weight is negative or not finite, or there are not enough of them above 0.
    """

    weights: Sequence[float] | NDArray[Any] | Tensor
    replacement: bool = True
    samples: int | None = None

    def __post_init__(self) -> None:
        weights = self._array()
        positive = int((weights > 0).sum())
        if weights.ndim != 1 or not np.isfinite(weights).all() or (weights < 0).any() or not positive:
            raise ValueError("weights are one number for each sample, none negative, not all 0")
        if len(self) < 1:
            raise ValueError(f"samples={self.samples}: an epoch has at least one")
        if not self.replacement and len(self) > positive:
            raise ValueError(
                f"{len(self)} samples cannot be drawn without replacement from {positive} with a weight above 0"
            )

    def __len__(self) -> int:
        return self._array().shape[0] if self.samples is None else self.samples

    def __call__(self, seed: int, epoch: int) -> Tensor:
        """Draw the ids of an epoch: [samples], int64."""
        weights, generator = self._array(), _generator(seed, epoch)
        if self.replacement:
            # Not torch.multinomial, which takes at most 2^24 weights, in single precision.
            sums = weights.cumsum()
            points = torch.rand(len(self), dtype=torch.float64, generator=generator).numpy() * sums[-1]
            ids = np.searchsorted(sums, points, side="right")
            return torch.from_numpy(np.minimum(ids, np.flatnonzero(weights)[-1]))
        # The sample with the smallest of exponential times is drawn first (Efraimidis and Spirakis, 2006).
        times = -torch.log1p(-torch.rand(len(weights), dtype=torch.float64, generator=generator)).numpy()
        with np.errstate(divide="ignore", invalid="ignore"):
            times = np.where(weights > 0, times / weights, np.inf)
        return torch.from_numpy(np.argsort(times, kind="stable")[: len(self)].copy())

    def _array(self) -> NDArray[np.float64]:
        return np.asarray(self.weights, dtype=np.float64)


@dataclass(frozen=True, eq=False)
class Bucketed:
    """Each sample once in an epoch, in batches of samples of similar length, so that little is padded.

    An epoch is shuffled and divided into pools, a pool is sorted by length and cut into batches, and the batches of all
    pools are shuffled. So both the samples in a batch and the order of the batches differ in each epoch.

    Args:
        lengths: [samples of the data set], at least 1 each, in any unit.
        samples: number of samples in a global batch.
        tokens: alternative: maximum size of a global batch when all of it is padded to its longest sample.
        pool: number of samples that are sorted together; default: those of some 100 batches.

    Raises:
        ValueError: neither samples nor tokens are given, or both; or a sample is longer than the tokens.
    """

    lengths: Sequence[int] | NDArray[Any] | Tensor
    samples: int | None = None
    tokens: int | None = None
    pool: int | None = None

    def __post_init__(self) -> None:
        lengths = self._array()
        if lengths.ndim != 1 or not len(lengths) or lengths.min() < 1:
            raise ValueError("lengths are one number of at least 1 for each sample")
        if (self.samples is None) == (self.tokens is None):
            raise ValueError(
                "Bucketed: set either samples=, the size of a global batch, or tokens=, its maximum number of tokens"
            )
        if self.samples is not None and self.samples < 1:
            raise ValueError(f"samples={self.samples}: a global batch has at least one")
        if self.tokens is not None and lengths.max() > self.tokens:
            longest = int(lengths.argmax())
            raise ValueError(
                f"sample {longest} is {lengths[longest]} long, and a global batch may have tokens={self.tokens}"
            )

    def __len__(self) -> int:
        """Return the number of batches in an epoch.

        Raises:
            TypeError: it differs from epoch to epoch.
        """
        if self.samples is None:
            raise TypeError("with tokens= the number of batches differs between epochs")
        count, pool = len(self._array()), self._pool()
        in_full_pools = count // pool * pool
        return in_full_pools // pool * -(-pool // self.samples) + -(-(count - in_full_pools) // self.samples)

    def __call__(self, seed: int, epoch: int) -> list[Tensor]:
        """Compute the batches of an epoch: each [samples in it], int64."""
        lengths, generator = self._array(), _generator(seed, epoch)
        shuffled = torch.randperm(len(lengths), generator=generator).numpy()
        batches: list[NDArray[np.int64]] = []
        for start in range(0, len(shuffled), self._pool()):
            pool = shuffled[start : start + self._pool()]
            pool = pool[np.argsort(lengths[pool], kind="stable")]
            batches += np.split(pool, self._cuts(lengths[pool]))
        order = torch.randperm(len(batches), generator=generator).tolist()
        # A rank takes neighbouring samples of a batch: without a shuffle the last rank would always get the longest
        # ones.
        return [_shuffled(torch.from_numpy(batches[number]), generator) for number in order]

    def _cuts(self, lengths: NDArray[np.int64]) -> list[int]:
        """Return where to cut batches in a pool that is sorted by length."""
        if self.samples is not None:
            return list(range(self.samples, len(lengths), self.samples))
        assert self.tokens is not None
        cuts, start = [], 0
        for place, length in enumerate(lengths.tolist()):
            if (place + 1 - start) * length > self.tokens:
                cuts.append(place)
                start = place
        return cuts

    def _pool(self) -> int:
        if self.pool is not None:
            return max(1, self.pool)
        if self.samples is not None:
            return BATCHES_PER_POOL * self.samples
        assert self.tokens is not None
        return BATCHES_PER_POOL * max(1, int(self.tokens / self._array().mean()))

    def _array(self) -> NDArray[np.int64]:
        return np.asarray(self.lengths, dtype=np.int64)


def _generator(seed: int, epoch: int) -> torch.Generator:
    return torch.Generator().manual_seed(mixed(seed, epoch))


def _shuffled(batch: Tensor, generator: torch.Generator) -> Tensor:
    return batch[torch.randperm(len(batch), generator=generator)]


def has_indices(dataset: Any) -> bool:
    """Return whether samples are read by index; a stream yields them in its own order."""
    # torch's IterableDataset has a __getitem__ that only raises, and may have a length.
    indexed = hasattr(dataset, "__len__") and hasattr(dataset, "__getitem__")
    return indexed and not isinstance(dataset, IterableDataset)


def plain_order(dataset: Indexed, global_batch_size: int, seed: int, drop_last: bool) -> Order:
    """Create an order that takes each sample of a data set once in an epoch.

    Raises:
        ConfigurationError: without its partial last batch an epoch is empty.
    """
    samples = len(dataset)
    if drop_last and samples < global_batch_size:
        raise ConfigurationError(
            f"drop_last leaves out all of the {samples} samples, because global_batch_size={global_batch_size} is more"
        )
    return Order(samples, global_batch_size, seed, drop_last=drop_last, shards=shards_of(dataset))


def check_data(
    dataset: Any, global_batch_size: int | None, order: EpochOrder | None, epochs: int, max_steps: int | None
) -> None:
    """Check the arguments of `session.batches`.

    Raises:
        ConfigurationError: the data cannot be used with them.
    """
    for name, number in (("global_batch_size", global_batch_size), ("epochs", epochs), ("max_steps", max_steps)):
        if number is not None and number < 1:
            raise ConfigurationError(f"{name}={number}: it must be at least 1")
    if isinstance(dataset, DataLoader):
        raise ConfigurationError(
            "pass the data set itself to session.batches and not a DataLoader, whose batches depend on the number of "
            "processes; collate and loader_workers are arguments of session.batches"
        )
    if isinstance(dataset, Iterator):
        raise ConfigurationError(
            f"a {type(dataset).__name__} can be read only once; pass an iterable that starts anew for each epoch"
        )
    if has_indices(dataset) and not len(dataset):
        raise ConfigurationError("the data set is empty")
    if order is not None and not has_indices(dataset):
        raise ConfigurationError("order= needs a data set with indices; a stream is read in its own order")
    if order is None and global_batch_size is None:
        raise ConfigurationError("set global_batch_size, the number of samples in a step")


@dataclass(frozen=True)
class Epoch:
    """One pass over the data."""

    ids: Tensor
    """Sample ids in order, [N], int64."""
    batches: list[tuple[int, int]] | None
    """Start and end of each batch, if the function returned batches."""

    @cached_property
    def digest(self) -> int:
        """A 64-bit digest, to compare ranks."""
        ends = [] if self.batches is None else [end for _, end in self.batches]
        return xxhash.xxh3_64_intdigest(torch.cat([self.ids, torch.tensor(ends, dtype=torch.int64)]).numpy().data)


class Listing:
    """Data steps from a function of seed and epoch."""

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
            samples: number of samples in the data set.
            batch: number of samples in a global batch; None if the function returns batches.

        Raises:
            ConfigurationError: the function's result cannot be used.
        """
        self._order, self._samples, self._batch, self._epochs = order, samples, batch, epochs
        self._seed, self._drop_last = seed, drop_last
        self._number, self._epoch = 0, self._call_order(0)
        if self._epoch.batches is not None and (batch is not None or drop_last):
            raise ConfigurationError(
                "the order gives whole batches, so it determines their size: do not set global_batch_size or drop_last"
            )
        if self._epoch.batches is None and batch is None:
            raise ConfigurationError(
                "the order returns sample ids: set global_batch_size, the number of samples in a step"
            )
        self.steps_per_epoch = self._steps() if _length(order) is not None else None
        self.data_steps = max_steps
        if self.steps_per_epoch is not None:
            steps = epochs * self.steps_per_epoch
            self.data_steps = steps if max_steps is None else min(steps, max_steps)
        self._next = self._end = self._position(epochs, 0)

    @property
    def name(self) -> str:
        """Name of the function, with a digest of the first epoch."""
        return f"{_name(self._order)} {self._epoch_of(0).digest:016x}"

    def position(self, step: int) -> DataPosition:
        """Return the data position before the next batch."""
        return self._next

    def feed(
        self,
        dataset: Indexed,
        start: DataPosition | None,
        passed: int,
        skipped: Callable[[int], bool],
        reading: Reading,
    ) -> Lookahead:
        """Return the batches from a position on.

        Args:
            start: the position; None for the beginning.
            passed: number of data steps before it.
            skipped: returns whether a data step is left out.

        Raises:
            ConfigurationError: no batch begins at the position.
        """
        self._next = start = start or self._position(0, 0)
        self._check_start(start)
        return Lookahead(read(dataset, self._plan(start, passed, skipped), reading), self._set_next, self._advance)

    def _plan(self, start: DataPosition, step: int, skipped: Callable[[int], bool]) -> Iterator[Planned]:
        for number in range(start.epoch, self._epochs):
            epoch, cursor = self._epoch_of(number), start.cursor if number == start.epoch else 0
            for begin, end in self._cuts(epoch):
                if begin < cursor:
                    continue
                if self.data_steps is not None and step >= self.data_steps:
                    return
                if not skipped(step):
                    position, keys = self._position(number, begin, epoch.digest), torch.arange(begin, end)
                    # Each batch has the digest of the whole epoch: ranks whose epochs differ in length would hang at
                    # the end.
                    yield Planned(position, epoch.ids[begin:end], keys, epoch.digest)
                step += 1

    def _check_start(self, start: DataPosition) -> None:
        if start.cursor == 0 or start.epoch >= self._epochs:
            return
        epoch = self._epoch_of(start.epoch)
        ends = {end for _, end in self._cuts(epoch)}
        if start.order not in (None, f"{epoch.digest:016x}"):
            raise ConfigurationError(
                f"order {_name(self._order)} gives other samples for epoch {start.epoch} than it gave when the "
                "checkpoint was written, so resuming would skip samples or use them twice. Undo the change (another "
                "version of torch may draw other numbers), or start a new run from the checkpoint's weights, in a "
                "folder of its own (tandem checkpoints export)"
            )
        if start.cursor not in ends:
            raise ConfigurationError(
                f"the checkpoint stands after {start.cursor:,} samples of epoch {start.epoch}, where no batch of this "
                "order ends: the checkpoint was written with another order. Undo the change, or start a new run from "
                "the checkpoint's weights, in a folder of its own (tandem checkpoints export)"
            )

    def _set_next(self, batch: RankBatch | None) -> None:
        self._next = self._end if batch is None else batch.position

    def _advance(self, batch: RankBatch) -> None:
        self._next = self._position(batch.position.epoch, batch.position.cursor + len(batch.ids), batch.content)

    def _position(self, epoch: int, cursor: int, order: int | None = None) -> DataPosition:
        return DataPosition(
            seed=self._seed,
            epoch=epoch,
            cursor=cursor,
            samples=self._samples,
            batch=self._batch,
            drop_last=None if self._batch is None else self._drop_last,
            order=f"{order:016x}" if order is not None and cursor else None,
        )

    def _steps(self) -> int:
        return len(self._cuts(self._epoch_of(0)))

    def _cuts(self, epoch: Epoch) -> list[tuple[int, int]]:
        if epoch.batches is not None:
            return epoch.batches
        assert self._batch is not None
        count = len(epoch.ids)
        end = count - count % self._batch if self._drop_last else count
        return [(start, min(start + self._batch, count)) for start in range(0, end, self._batch)]

    def _epoch_of(self, number: int) -> Epoch:
        if number != self._number:
            self._number, self._epoch = number, self._call_order(number)
        return self._epoch

    def _call_order(self, number: int) -> Epoch:
        """Call the function for an epoch, and check its result.

        Raises:
            ConfigurationError: the result cannot be used.
        """
        name = _name(self._order)
        result = self._order(self._seed, number)
        try:
            epoch = _epoch(result)
        except (TypeError, ValueError, RuntimeError) as error:
            raise ConfigurationError(f"order {name} in epoch {number}: {error}") from error
        count = len(epoch.ids if epoch.batches is None else epoch.batches)
        length = _length(self._order)
        if length is not None and count != length:
            raise ConfigurationError(f"order {name} has the length {length}, and gives {count} in epoch {number}")
        if not len(epoch.ids) or (epoch.batches is None and self._drop_last and len(epoch.ids) < (self._batch or 0)):
            raise ConfigurationError(f"order {name} gives no batch for epoch {number}")
        if epoch.ids.min() < 0 or epoch.ids.max() >= self._samples:
            raise ConfigurationError(
                f"order {name} gives ids from {int(epoch.ids.min())} to {int(epoch.ids.max())} in epoch {number}; the "
                f"data set has those from 0 to {self._samples - 1}"
            )
        return epoch


def _name(order: EpochOrder) -> str:
    return str(getattr(order, "__name__", type(order).__name__))


def _epoch(result: Any) -> Epoch:
    """Build an epoch from the result of an order.

    Raises:
        TypeError, ValueError, RuntimeError: it is neither ids nor batches.
    """
    if (
        isinstance(result, Tensor)
        or not hasattr(result, "__len__")
        or not len(result)
        or not hasattr(result[0], "__len__")
    ):
        return Epoch(_ids(result), None)
    parts = [_ids(part) for part in result]
    if not all(len(part) for part in parts):
        raise ValueError("a batch is empty")
    ends = torch.tensor([len(part) for part in parts]).cumsum(0).tolist()
    return Epoch(torch.cat(parts), list(zip([0, *ends[:-1]], ends, strict=True)))


def _ids(result: Any) -> Tensor:
    ids = torch.as_tensor(result).to("cpu")
    if ids.ndim != 1 or ids.is_floating_point() or ids.is_complex():
        if not ids.numel():
            return torch.empty(0, dtype=torch.int64)
        raise ValueError("it returns neither a sequence of integers (ids) nor a sequence of such sequences (batches)")
    return ids.to(torch.int64)


def _length(order: EpochOrder) -> int | None:
    try:
        return len(order)  # type: ignore[arg-type]
    except TypeError:
        return None
