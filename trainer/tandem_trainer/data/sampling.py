"""Sampling orders other than a plain shuffle: weighted, bucketed by length, or your own.

An order is a function of seed and epoch:

    def easy_first(seed: int, epoch: int) -> list[int]:
        return sorted(range(len(dataset)), key=difficulty.__getitem__)

It returns either the sample ids of the epoch in their order, which are cut into global batches, or a list of global
batches, each a list of ids. It may return ids more than once, leave some out, and give each epoch another number of
them. Every rank calls it, and every start does, so what it returns must follow from seed and epoch alone: then a run
sees the same batches whatever the number of ranks and restarts (tandem_trainer.data.sampling).

An order that has a length, the number of what it returns for each epoch, lets the run know its total number of steps
from the beginning.

Rejected: samplers of torch's kind (an iterator with a state of its own, which belongs to one world size and one start).

An epoch may have any number of batches, so the step alone does not say where the data stands: its position does, which
counts the samples of the epoch that are used. A start asks the function for that epoch and goes on from there.

What is drawn at random for a sample, its augmentation and its dropout, follows from its place in the epoch and not from
its id: a sample that comes twice is augmented in two ways.
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
from tandem_trainer.data.feeding import Fed, Indexed, Lookahead, Planned, Reading, read
from tandem_trainer.data.keyed import mixed
from tandem_trainer.data.order import Order
from tandem_trainer.failure import ConfigurationError

EpochOrder = Callable[[int, int], Any]
"""(seed, epoch) → ids, [N] (a sequence, an array or a tensor of whole numbers), or a sequence of such, the batches."""

BATCHES_IN_A_POOL = 100
"""The samples of this many batches are sorted by length together: enough for batches of even length, few enough to stay
random."""


@dataclass(frozen=True, eq=False)
class Weighted:
    """Samples drawn with a probability that is proportional to their weight, anew in each epoch.

    Args:
        weights: [samples of the data set], none negative.
        replacement: a sample may come more than once in an epoch. Its augmentation and dropout then differ each time.
        samples: in an epoch; default: as many as there are weights.

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
        """The ids of an epoch: [samples], int64."""
        weights, generator = self._array(), _generator(seed, epoch)
        if self.replacement:
            # Not torch.multinomial, which takes at most 2^24 weights, in single precision.
            sums = weights.cumsum()
            drawn = torch.rand(len(self), dtype=torch.float64, generator=generator).numpy() * sums[-1]
            ids = np.searchsorted(sums, drawn, side="right")
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
    pools are shuffled. So both what is together in a batch and the order of the batches differ in each epoch.

    Args:
        lengths: [samples of the data set], at least 1 each, in whatever unit.
        samples: in a global batch.
        tokens: instead: the most that a global batch has when all of it is padded to its longest sample.
        pool: samples that are sorted together; default: those of some 100 batches.

    Raises:
        ValueError: there are neither samples nor tokens, or both; or a sample is longer than the tokens.
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
            raise ValueError("give Bucketed either samples=, the size of a global batch, or tokens=, its most tokens")
        if self.samples is not None and self.samples < 1:
            raise ValueError(f"samples={self.samples}: a global batch has at least one")
        if self.tokens is not None and lengths.max() > self.tokens:
            longest = int(lengths.argmax())
            raise ValueError(
                f"sample {longest} is {lengths[longest]} long, and a global batch may have tokens={self.tokens}"
            )

    def __len__(self) -> int:
        """Batches of an epoch.

        Raises:
            TypeError: they differ from epoch to epoch.
        """
        if self.samples is None:
            raise TypeError("batches of so many tokens are not as many in each epoch")
        count, pool = len(self._array()), self._pool()
        whole = count // pool * pool
        return whole // pool * -(-pool // self.samples) + -(-(count - whole) // self.samples)

    def __call__(self, seed: int, epoch: int) -> list[Tensor]:
        """The batches of an epoch: each [samples in it], int64."""
        lengths, generator = self._array(), _generator(seed, epoch)
        shuffled = torch.randperm(len(lengths), generator=generator).numpy()
        batches: list[NDArray[np.int64]] = []
        for start in range(0, len(shuffled), self._pool()):
            pool = shuffled[start : start + self._pool()]
            pool = pool[np.argsort(lengths[pool], kind="stable")]
            batches += np.split(pool, self._cuts(lengths[pool]))
        order = torch.randperm(len(batches), generator=generator).tolist()
        # A rank takes the samples at neighbouring places: it should not always get the longest ones.
        return [_shuffled(torch.from_numpy(batches[number]), generator) for number in order]

    def _cuts(self, lengths: NDArray[np.int64]) -> list[int]:
        """Where a batch ends and another one begins, in a pool that is sorted by length."""
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
            return BATCHES_IN_A_POOL * self.samples
        assert self.tokens is not None
        return BATCHES_IN_A_POOL * max(1, int(self.tokens / self._array().mean()))

    def _array(self) -> NDArray[np.int64]:
        return np.asarray(self.lengths, dtype=np.int64)


def _generator(seed: int, epoch: int) -> torch.Generator:
    return torch.Generator().manual_seed(mixed(seed, epoch))


def _shuffled(batch: Tensor, generator: torch.Generator) -> Tensor:
    return batch[torch.randperm(len(batch), generator=generator)]


def has_indices(dataset: Any) -> bool:
    """Whether samples are asked for by number; a stream gives them in its own order."""
    # torch's IterableDataset has a __getitem__ that only raises, and may have a length.
    indexed = hasattr(dataset, "__len__") and hasattr(dataset, "__getitem__")
    return indexed and not isinstance(dataset, IterableDataset)


def plain_order(samples: int, global_batch_size: int, seed: int, drop_last: bool) -> Order:
    """Each sample once in an epoch.

    Raises:
        ConfigurationError: without its last partial batch an epoch has none.
    """
    if drop_last and samples < global_batch_size:
        raise ConfigurationError(
            f"drop_last leaves out all of the {samples} samples, because global_batch_size={global_batch_size} is more"
        )
    return Order(samples, global_batch_size, seed, drop_last=drop_last)


def check_data(
    dataset: Any, global_batch_size: int | None, order: EpochOrder | None, epochs: int, max_steps: int | None
) -> None:
    """Make sure that `session.batches` can do what it is asked for.

    Raises:
        ConfigurationError: the data cannot be used like that.
    """
    for name, number in (("global_batch_size", global_batch_size), ("epochs", epochs), ("max_steps", max_steps)):
        if number is not None and number < 1:
            raise ConfigurationError(f"{name}={number}: it must be at least 1")
    if isinstance(dataset, DataLoader):
        raise ConfigurationError(
            "give session.batches the data set itself and not a DataLoader, whose batches belong to one number of "
            "processes; collate and loader_workers are arguments of session.batches"
        )
    if isinstance(dataset, Iterator):
        raise ConfigurationError(
            f"a {type(dataset).__name__} can be read only once; give something that begins anew for each epoch"
        )
    if has_indices(dataset) and not len(dataset):
        raise ConfigurationError("the data set is empty")
    if order is not None and not has_indices(dataset):
        raise ConfigurationError("order= needs a data set with indices; a stream is read in its own order")
    if order is None and global_batch_size is None:
        raise ConfigurationError("say with global_batch_size how many samples make a step")


@dataclass(frozen=True)
class Epoch:
    """One pass."""

    ids: Tensor
    """[N], int64, in their order."""
    batches: list[tuple[int, int]] | None
    """Start and end of each batch, if the function made them."""

    @cached_property
    def digest(self) -> int:
        """Tells whether ranks have the same, 64 bits."""
        ends = [] if self.batches is None else [end for _, end in self.batches]
        return xxhash.xxh3_64_intdigest(torch.cat([self.ids, torch.tensor(ends, dtype=torch.int64)]).numpy().data)


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
    def name(self) -> str:
        """The function's, with a digest of the first epoch."""
        return f"{_name(self._order)} {self._at(0).digest:016x}"

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
                    position, keys = self._position(number, begin, epoch.digest), torch.arange(begin, end)
                    # With each batch the whole epoch: ranks whose epochs end at different steps would hang there.
                    yield Planned(position, epoch.ids[begin:end], keys, epoch.digest)
                step += 1

    def _check_start(self, start: DataPosition) -> None:
        if start.cursor == 0 or start.epoch >= self._epochs:
            return
        epoch = self._at(start.epoch)
        ends = {end for _, end in self._cuts(epoch)}
        if start.order not in (None, f"{epoch.digest:016x}"):
            raise ConfigurationError(
                f"order {_name(self._order)} gives other samples for epoch {start.epoch} than it gave when the "
                "checkpoint was written, and the rest of them would leave samples out or take them twice. Set it back "
                "(another version of torch may draw otherwise), or begin a new run from the checkpoint's weights, in a "
                "folder of its own (tandem checkpoints export)"
            )
        if start.cursor not in ends:
            raise ConfigurationError(
                f"the checkpoint stands after {start.cursor:,} samples of epoch {start.epoch}, where no batch of this "
                "order ends: it is another order than the one that the checkpoint was written with. Set it back, or "
                "begin a new run from the checkpoint's weights, in a folder of its own (tandem checkpoints export)"
            )

    def _found(self, fed: Fed | None) -> None:
        self._next = self._end if fed is None else fed.position

    def _used(self, fed: Fed) -> None:
        self._next = self._position(fed.position.epoch, fed.position.cursor + len(fed.ids), fed.content)

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
        name = _name(self._order)
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


def _name(order: EpochOrder) -> str:
    return str(getattr(order, "__name__", type(order).__name__))


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
