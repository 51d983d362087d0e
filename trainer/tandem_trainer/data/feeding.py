"""Batches from any torch data set, with each sample exactly once in an epoch, whatever the number of ranks, loader
workers and restarts.

What a step sees is a function of the step (tandem_trainer.data.order), never of who has read how far ahead: loader
workers get the steps' own lists of ids, in order, and a start in the middle of an epoch begins with the list that is
next. Whatever is drawn at random while a sample is read (an augmentation) follows from seed, epoch and sample.

A number stands for the same sample on every rank only if all have listed the samples alike, and a folder is listed in
another order on another node. So of the first batch of a start every rank reads COMMON samples, in its own share or
not, and a digest of them is compared with that of the others: of texts and whole numbers, where two readings agree.

A *stream*, a data set without indices, is read by every rank from where the checkpoint stands; each takes its share of
each global batch and passes over the rest, so a stream must give the same samples to every rank. A digest of the first
sample of each batch shows whether it does: of its texts and whole numbers, such as labels and tokens, for a stream may
augment pictures at random. One that has a method
`start_at(epoch, cursor)` is asked to begin there; any other is read from the beginning of the epoch up to there.

Rejected: DistributedSampler and a stream's own division by rank (both depend on the number of ranks, and a resumed
epoch would repeat and lose samples), the state of a loader in the checkpoint (of one world and one number of workers).
"""

import itertools
import signal
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol, Self

import numpy as np
import torch
import xxhash
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, IterableDataset, default_collate

from tandem.rundir.checkpoint import DataPosition
from tandem_trainer.data.keyed import mixed, seed_everything
from tandem_trainer.data.order import Batches, Order, share
from tandem_trainer.failure import ConfigurationError
from tandem_trainer.pulse import die_with_parent

Collate = Callable[[list[Any]], Any]
CPU = torch.device("cpu")
CONTAINERS = (Tensor, np.ndarray, Mapping, list, tuple)
WHOLE = {torch.int64, torch.int32, torch.int16}
"""Types of labels and tokens. Bytes are pixels."""
COMMON = 2
"""Samples that every rank reads at a start."""


@dataclass(frozen=True)
class Fed:
    """One rank's share of a global batch."""

    position: DataPosition
    """Where the data stands before this batch."""
    ids: Tensor
    """[global batch], int64, sample ids of all ranks together; in a stream a sample's id is its place in the epoch."""
    mine: Tensor
    """[at least 1], int64, those of this rank, or what stands in their place where ids repeat (`Planned.keys`). A rank
    without a share gets the first one, to be weighed with 0."""
    data: Any
    """What the collate function made of them."""
    weight: float
    """1; 0 where a rank has no share of so small a batch, and its one sample stands in for it."""
    content: int = 0
    """A digest of what the ids stand for, where they do not say it themselves; the same on every rank."""
    common: int = 0
    """A digest of samples that every rank has read; 0 but for the first batch of a start."""
    of_fields: bool = False
    """Lists in the data hold fields and not samples: torch's own `default_collate` made them."""


class Indexed(Protocol):
    """A data set with a length whose samples are asked for by number."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: int, /) -> Any: ...


@dataclass(frozen=True)
class Reading:
    """How samples are read."""

    rank: int
    """This rank."""
    world_size: int
    """Ranks in all."""
    seed: int
    """Of what is drawn while a sample is read."""
    workers: int = 0
    """Processes that read ahead; 0: read when it is asked for."""
    collate: Collate = default_collate
    """Makes a batch of a list of samples."""
    transform: Callable[[Any], Any] | None = None
    """Applied to each of this rank's samples."""
    pin: bool = False
    """Into memory from which a GPU copies by itself."""

    def own(self, ids: Tensor) -> Tensor:
        """This rank's share of a global batch, or, if that is empty, its first sample."""
        mine = share(ids, self.rank, self.world_size)
        return mine if len(mine) else ids[:1]

    def fed(self, position: DataPosition, ids: Tensor, keys: Tensor, data: Any, content: int, common: int = 0) -> Fed:
        """A batch that has been read."""
        weight = 1.0 if len(share(ids, self.rank, self.world_size)) else 0.0
        return Fed(position, ids, self.own(keys), data, weight, content, common, self.collate is default_collate)

    def sample(self, epoch: int, key: int, read: Callable[[], Any]) -> Any:
        """Read a sample with random numbers that follow from its key."""
        found = self.untransformed(epoch, key, read)
        return found if self.transform is None else self.transform(found)

    def untransformed(self, epoch: int, key: int, read: Callable[[], Any]) -> Any:
        """The same without its transform."""
        seed_everything(mixed(self.seed, epoch, key), CPU)
        return read()

    def loader(self, source: Any, **options: Any) -> DataLoader[Any]:
        """A loader over a source, with torch's own options for what a batch is."""
        return DataLoader(source, num_workers=self.workers, worker_init_fn=_is_worker, pin_memory=self.pin, **options)


def feed(dataset: Indexed, order: Order, steps: Iterable[int], reading: Reading) -> Iterator[Fed]:
    """The batches of these data steps, of a data set whose samples have numbers."""
    batches = Batches(order)
    planned = ((order.position(step), batches.ids(step)) for step in steps)
    return read(dataset, (Planned(position, ids, ids) for position, ids in planned), reading)


@dataclass(frozen=True)
class Planned:
    """A global batch that is to be read."""

    position: DataPosition
    """Where the data stands before it."""
    ids: Tensor
    """[global batch], int64, its sample ids."""
    keys: Tensor
    """[global batch], int64, what is drawn at random for each follows from this: the ids, where none repeats."""
    content: int = 0
    """A digest of the epoch, where a function of the script's own gives it."""


def read(dataset: Indexed, planned: Iterable[Planned], reading: Reading) -> Iterator[Fed]:
    """This rank's shares of global batches."""
    asked: deque[Planned] = deque()

    def lists() -> Iterator[list[_Asked]]:
        """What loader workers read next, some steps ahead of what is fed."""
        for place, plan in enumerate(planned):
            asked.append(plan)
            mine = _asked(plan.position.epoch, reading.own(plan.ids), reading.own(plan.keys))
            if place:
                yield mine
                continue
            spread = slice(None, None, -(-len(plan.ids) // COMMON))
            yield [*_asked(plan.position.epoch, plan.ids[spread], plan.keys[spread], of_all=True), *mine]

    rows = _Rows(dataset, reading)
    for data, common in reading.loader(rows, batch_sampler=lists(), collate_fn=_Collate(reading.collate)):
        plan = asked.popleft()
        yield reading.fed(plan.position, plan.ids, plan.keys, data, plan.content, common)


class _Asked(NamedTuple):
    """A sample that is to be read."""

    epoch: int
    number: int
    key: int
    of_all: bool
    """Whether every rank reads it, and a digest of it is wanted alone."""


def _asked(epoch: int, ids: Tensor, keys: Tensor, of_all: bool = False) -> list[_Asked]:
    return [_Asked(epoch, *one, of_all) for one in zip(ids.tolist(), keys.tolist(), strict=True)]


READINGS = 8
"""Of a sample that every rank reads: one that has something of its own drawn at random, such as one of two captions, is
the same each time on one rank alone by a chance of 1 in 100."""


@dataclass(frozen=True)
class _Common:
    """A sample that every rank reads."""

    content: int
    """Its digest; 0 where it is another one each time that it is read."""


@dataclass(frozen=True)
class _Collate:
    """Makes a batch of the samples of this rank, and a digest of those that every rank reads and that come first."""

    collate: Collate

    def __call__(self, samples: list[Any]) -> tuple[Any, int]:
        common = [one.content for one in samples if isinstance(one, _Common)]
        digest = xxhash.xxh3_64_intdigest(repr(common).encode()) if common else 0
        return self.collate(samples[len(common) :]), digest


class Stream:
    """A data set that is read from its beginning to its end."""

    def __init__(
        self,
        dataset: Iterable[Any],
        batch: int,
        epochs: int,
        data_steps: int | None,
        reading: Reading,
        drop_last: bool = False,
    ) -> None:
        """
        Args:
            drop_last: leave out the last batch of an epoch where it is a partial one.

        Raises:
            ConfigurationError: more than one loader worker.
        """
        if reading.workers > 1:
            raise ConfigurationError(
                f"loader_workers={reading.workers}: a stream is read by one process, which may read ahead "
                "(loader_workers=1); only a data set with indices can be divided"
            )
        self._dataset, self._batch, self._epochs, self._reading = dataset, batch, epochs, reading
        self._drop_last = drop_last
        self.data_steps = data_steps
        self.steps_per_epoch: int | None = None
        self._next = self._end = DataPosition(seed=reading.seed, epoch=epochs, cursor=0)

    def position(self, step: int) -> DataPosition:
        """Where the data stands before the batch that comes next."""
        return self._next

    def feed(self, start: DataPosition | None, passed: int, skipped: Callable[[int], bool]) -> "Lookahead":
        """The batches from a position on.

        Args:
            start: None: from the beginning.
            passed: data steps before it.
            skipped: whether a data step is left out.
        """
        self._next = start = start or DataPosition(seed=self._reading.seed, epoch=0, cursor=0)
        least = self._batch if self._drop_last else 1
        pages = _Pages(
            self._dataset, self._batch, least, self._epochs, start, passed, self.data_steps, skipped, self._reading
        )
        fed = iter(self._reading.loader(pages, batch_size=None, collate_fn=_as_it_is))
        return Lookahead(fed, self._found, self._used)

    def _found(self, fed: Fed | None) -> None:
        self._next = self._end if fed is None else fed.position

    def _used(self, fed: Fed) -> None:
        # Whether there is another batch is not asked after the last of `data_steps`.
        self._next = fed.position.model_copy(update={"cursor": fed.position.cursor + len(fed.ids)})


class Lookahead:
    """Batches of which the next one is known before it is asked for: whether there is one, and where it begins."""

    def __init__(self, fed: Iterator[Fed], found: Callable[[Fed | None], None], used: Callable[[Fed], None]) -> None:
        """
        Args:
            found: called with the batch that comes next, None at the end.
            used: called with a batch that is given out.
        """
        self._fed, self._found, self._used = fed, found, used
        self._ahead: Fed | None = None
        self._is_used = True

    def more(self) -> bool:
        """Whether there is another batch."""
        if self._is_used:
            self._ahead = next(self._fed, None)
            self._found(self._ahead)
            self._is_used = False
        return self._ahead is not None

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> Fed:
        if not self.more():
            raise StopIteration
        self._is_used = True
        assert self._ahead is not None
        self._used(self._ahead)
        return self._ahead


class _Rows(Dataset[Any]):
    """What loader workers ask: samples by epoch, number and what is drawn by."""

    def __init__(self, dataset: Indexed, reading: Reading) -> None:
        self._dataset, self._reading = dataset, reading

    def __getitem__(self, asked: _Asked) -> Any:
        def read() -> Any:
            return self._dataset[asked.number]

        if not asked.of_all:
            return self._reading.sample(asked.epoch, asked.key, read)
        readings = (content_of(self._reading.untransformed(asked.epoch, asked.key, read)) for _ in range(READINGS))
        first = next(readings)
        return _Common(first if all(one == first for one in readings) else 0)


class _Pages(IterableDataset[Any]):
    """Reads a stream and puts this rank's batches together."""

    def __init__(
        self,
        dataset: Iterable[Any],
        batch: int,
        least: int,
        epochs: int,
        start: DataPosition,
        passed: int,
        data_steps: int | None,
        skipped: Callable[[int], bool],
        reading: Reading,
    ) -> None:
        self._dataset, self._batch, self._epochs, self._reading = dataset, batch, epochs, reading
        self._least = least
        self._start = start
        self._passed, self._data_steps, self._skipped = passed, data_steps, skipped

    def __iter__(self) -> Iterator[Fed]:
        step = self._passed
        for epoch in range(self._start.epoch, self._epochs):
            cursor = self._start.cursor if epoch == self._start.epoch else 0
            samples = _from(self._dataset, epoch, cursor)
            while len(records := list(itertools.islice(samples, self._batch))) >= self._least:
                if self._data_steps is not None and step >= self._data_steps:
                    return
                if not self._skipped(step):
                    yield self._page(epoch, cursor, records)
                step += 1
                cursor += len(records)

    def _page(self, epoch: int, cursor: int, records: list[Any]) -> Fed:
        ids = torch.arange(cursor, cursor + len(records))
        mine = self._reading.own(ids)
        samples = [
            self._reading.sample(epoch, number, lambda record=records[number - cursor]: record)  # type: ignore[misc]
            for number in mine.tolist()
        ]
        position = DataPosition(seed=self._reading.seed, epoch=epoch, cursor=cursor)
        return self._reading.fed(position, ids, ids, self._reading.collate(samples), content_of(records[0]))


def content_of(sample: Any) -> int:
    """A digest of the texts and whole numbers in a sample of any shape; not of pixels and of floats, which a stream may
    draw at random."""
    found = xxhash.xxh3_64()
    for part in _leaves(sample):
        found.update(part)
    return found.intdigest()


def _leaves(sample: Any) -> Iterator[bytes]:
    if isinstance(sample, Mapping):
        for key, part in sample.items():
            yield str(key).encode()
            yield from _leaves(part)
    elif isinstance(sample, list | tuple):
        for part in sample:
            yield from _leaves(part)
    elif isinstance(sample, Tensor):
        if sample.dtype in WHOLE:
            yield sample.numpy(force=True).tobytes()
    elif isinstance(sample, np.ndarray):
        if sample.dtype.kind in "iuSU" and sample.dtype != np.uint8:
            yield sample.tobytes()
    elif isinstance(sample, str | int | np.integer):
        yield f"{sample}\0".encode(errors="replace")
    elif isinstance(sample, bytes):
        yield sample


def _from(dataset: Iterable[Any], epoch: int, cursor: int) -> Iterator[Any]:
    """The samples of an epoch from a place on."""
    if start_at := getattr(dataset, "start_at", None):
        return iter(start_at(epoch, cursor))
    if set_epoch := getattr(dataset, "set_epoch", None):
        set_epoch(epoch)
    return itertools.islice(iter(dataset), cursor, None)


def _is_worker(number: int) -> None:
    """A loader worker begins: it ends with its rank, and the rank's way to take signals is not its own."""
    die_with_parent()
    signal.signal(signal.SIGTERM, signal.SIG_DFL)


def _as_it_is(fed: Fed) -> Fed:
    return fed


def moved(data: Any, device: torch.device) -> Any:
    """Data of any shape with its tensors on a device."""
    if isinstance(data, Tensor):
        return data.to(device, non_blocking=True)
    return _mapped(data, lambda part: moved(part, device))


def cut(data: Any, count: int, start: int, end: int, of_fields: bool = False) -> Any:
    """Some of the `count` samples of a batch. A batch is a field, or a dictionary, tuple or list of fields. A field is
    a tensor, an array, a list or a tuple. Its first dimension is that of the samples; a field of another length is left
    whole. Within a field nothing is cut: its items are samples, whatever their sizes are.

    Args:
        of_fields: lists and tuples hold fields at any depth, as in what `default_collate` makes.

    Raises:
        ValueError: no field has as many items as there are samples.
    """
    found = []

    def walk(part: Any, is_field: bool) -> Any:
        if isinstance(part, Tensor | np.ndarray):
            is_cut = bool(part.ndim) and len(part) == count
        elif isinstance(part, list | tuple) and not hasattr(part, "_fields") and len(part) == count:
            is_cut = (is_field and not of_fields) or not any(isinstance(one, CONTAINERS) for one in part)
        else:
            is_cut = False
        if is_cut:
            found.append(part)
            return part[start:end]
        return _mapped(part, lambda one: walk(one, is_field=True))

    if (start, end) == (0, count):
        return data
    result = walk(data, is_field=False)
    if not found:
        raise ValueError(
            f"batch.parts cannot cut the {type(data).__name__} that collate made: nothing in it has one item for each "
            f"of the {count} samples. Let collate return a dictionary or a tuple of fields, each a tensor or a list of "
            "such items"
        )
    return result


def _mapped(data: Any, change: Callable[[Any], Any]) -> Any:
    if isinstance(data, Mapping):
        return {key: change(part) for key, part in data.items()}
    if isinstance(data, tuple) and hasattr(data, "_fields"):
        return type(data)(*(change(part) for part in data))
    if isinstance(data, list | tuple):
        return type(data)(change(part) for part in data)
    return data


def padded(data: Any, count: int, size: int) -> Any:
    """The `count` samples of a batch of any shape, and the last one again until there are `size`."""
    if isinstance(data, Tensor):
        is_batch = data.ndim and len(data) == count < size
        return torch.cat([data, data[-1:].expand(size - count, *data.shape[1:])]) if is_batch else data
    if isinstance(data, list) and len(data) == count and not any(isinstance(part, CONTAINERS) for part in data):
        return [*data, *data[-1:] * (size - count)]
    return _mapped(data, lambda part: padded(part, count, size))
