"""Batches from any torch data set, with each sample exactly once in an epoch, whatever the number of ranks, loader
workers and restarts.

The samples of a step are a function of the step (tandem_trainer.data.order), never of how far a process has read ahead:
loader workers get the steps' own lists of ids, in order, and a start in the middle of an epoch begins with the next
list. Random numbers that are drawn while a sample is read (an augmentation) follow from seed, epoch and sample.

An id refers to the same sample on every rank only if all ranks have listed the samples in the same order, and a folder
may be listed in another order on another node. So at a start every rank reads COMMON samples of the first batch,
whether or not they are in its share, and the ranks compare a digest of them: of texts and integers, in which two reads
agree.

A *stream*, a data set without indices, is read by every rank from the position in the checkpoint; each rank takes its
share of each global batch and skips the rest, so a stream must yield the same samples on every rank. A digest of the
first sample of each batch shows whether it does: of its texts and integers, such as labels and tokens, for a stream may
augment pictures at random. A stream with a method `start_at(epoch, cursor)` is asked to begin there; any other is read
from the beginning of the epoch up to there.

Rejected: DistributedSampler and a stream's own division by rank (both depend on the number of ranks, and a resumed
epoch would repeat and lose samples), the state of a loader in the checkpoint (valid for one world size and one number
of workers).
"""

import copy
import functools
import itertools
import logging
import signal
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple, Protocol, Self

import numpy as np
import torch
import xxhash
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, IterableDataset, default_collate

from tandem.rundir.checkpoint import DataPosition
from tandem_trainer.data.keyed import mixed, random_state_restored, seed_everything
from tandem_trainer.data.order import Batches, Order, share
from tandem_trainer.data.sharded import Sharded
from tandem_trainer.failure import ConfigurationError
from tandem_trainer.pulse import die_with_parent

log = logging.getLogger(__name__)

Collate = Callable[[list[Any]], Any]
CPU = torch.device("cpu")
CONTAINERS = (Tensor, np.ndarray, Mapping, list, tuple)
INTEGER_DTYPES = {torch.int64, torch.int32, torch.int16}
"""Types of labels and tokens. Bytes are pixels."""
COMMON = 2
"""Number of samples that every rank reads at a start."""
PROBES = 3
"""Number of batches that are examined before their lists are taken for lists of fields. A function that leaves broken
samples out shows only with a batch without one what its lists are."""


class UncutCollate:
    """Base class of collate functions whose batches nobody cuts."""


@dataclass(frozen=True)
class Layout:
    """Meaning of the lists in a collated batch."""

    of_fields: bool = False
    """Lists hold fields at any depth, because torch's own `default_collate` made them."""
    of_samples: bool = False
    """The batch is a list with one item for each sample."""
    parts: Mapping[tuple[Any, ...], bool | None] = field(default_factory=dict)
    """Whether a list or tensor within the batch has one item for each sample, by the keys and indices that lead to it;
    of those that a probe has compared. None: only the length of a tensor tells."""
    is_guessed: bool = False
    """Whether no probe could compare, so that only lengths tell what has one item for each sample."""

    def after(self, earlier: "Layout") -> "Layout":
        """Return what this probe and earlier ones have shown together: one that could not compare shows nothing, and a
        tensor that was unclear once stays so."""
        if self.is_guessed:
            return earlier
        unclear = {path: None for path, has_items in earlier.parts.items() if has_items is None}
        return replace(self, parts={**self.parts, **unclear})


@dataclass(frozen=True)
class RankBatch:
    """One rank's share of a global batch, read and collated."""

    position: DataPosition
    """Data position before this batch."""
    ids: Tensor
    """Sample ids of all ranks together, [global batch], int64; the id of a stream's sample is its position in the
    epoch."""
    mine: Tensor
    """Ids of this rank, [at least 1], int64, or their keys where ids repeat (`Planned.keys`). A rank without a share
    gets the first sample, with the weight 0."""
    data: Any
    """Result of the collate function."""
    weight: float
    """Weight of the data: 1, or 0 where the rank has no share of so small a batch and one sample stands in."""
    content: int = 0
    """Digest of what the ids refer to, where they do not determine it; the same on every rank."""
    common: int = 0
    """Digest of samples that every rank has read; 0 except in the first batch after a start."""
    layout: Layout = Layout()
    """Meaning of the lists in the data."""


class Indexed(Protocol):
    """A data set with a length whose samples are read by index."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: int, /) -> Any: ...


@dataclass(frozen=True)
class Reading:
    """Settings for reading samples."""

    rank: int
    """This rank."""
    world_size: int
    """Number of ranks."""
    seed: int
    """Seed of random numbers that are drawn while a sample is read."""
    workers: int = 0
    """Number of processes that read ahead; 0 to read on demand."""
    collate: Collate = default_collate
    """Function that makes a batch of a list of samples."""
    transform: Callable[[Any], Any] | None = None
    """Function that is applied to each of this rank's samples."""
    pin: bool = False
    """Whether batches are put into pinned memory, from which a GPU copies asynchronously."""
    _layouts: list[Layout] = field(default_factory=list, init=False, repr=False, compare=False)
    """The layouts that the first batches have shown, each with those before it."""

    def own(self, ids: Tensor) -> Tensor:
        """Return this rank's share of a global batch, or, if that is empty, its first sample."""
        own_ids = share(ids, self.rank, self.world_size)
        return own_ids if len(own_ids) else ids[:1]

    def collated(self, samples: list[Any]) -> tuple[Any, Layout]:
        """Collate samples; returns the batch and its layout, which batches of two samples or more show."""
        if self.collate is default_collate:
            return self.collate(samples), Layout(of_fields=True)
        if isinstance(self.collate, UncutCollate):
            return self.collate(samples), Layout()
        if len(samples) > 1 and not self._is_layout_known():
            probe = _Probe(self.collate, samples)
            data = self.collate(samples)
            layout = probe.layout(data)
            self._layouts.append(layout.after(self._layouts[-1]) if self._layouts else layout)
        else:
            data = self.collate(samples)
        return data, self._layouts[-1] if self._layouts else Layout()

    def _is_layout_known(self) -> bool:
        return len(self._layouts) >= PROBES or any(layout.of_samples for layout in self._layouts)

    def as_batch(
        self,
        position: DataPosition,
        ids: Tensor,
        keys: Tensor,
        collated: tuple[Any, Layout],
        content: int,
        common: int = 0,
    ) -> RankBatch:
        """Build this rank's batch after its samples were read."""
        weight = 1.0 if len(share(ids, self.rank, self.world_size)) else 0.0
        return RankBatch(position, ids, self.own(keys), collated[0], weight, content, common, collated[1])

    def sample(self, epoch: int, key: int, read: Callable[[], Any]) -> Any:
        """Read a sample with random numbers that follow from its key, and transform it."""
        sample = self.untransformed(epoch, key, read)
        return sample if self.transform is None else self.transform(sample)

    def untransformed(self, epoch: int, key: int, read: Callable[[], Any]) -> Any:
        """Read a sample with random numbers that follow from its key, without the transform."""
        seed_everything(mixed(self.seed, epoch, key), CPU)
        return read()

    def loader(self, source: Any, **options: Any) -> DataLoader[Any]:
        """Create a loader over a source, with torch's own options for what a batch is."""
        return DataLoader(source, num_workers=self.workers, worker_init_fn=_is_worker, pin_memory=self.pin, **options)


def feed(dataset: Indexed, order: Order, steps: Iterable[int], reading: Reading) -> Iterator[RankBatch]:
    """Yield this rank's batches of data steps, from a data set with indices."""
    batches = Batches(order)

    def planned() -> Iterator[Planned]:
        for step in steps:
            position, ids = order.position(step), batches.ids(step)
            if isinstance(dataset, Sharded) and order.shards is not None:
                dataset.announce(order.seed_of(position.epoch), position.cursor)
            yield Planned(position, ids, ids)

    return read(dataset, planned(), reading)


@dataclass(frozen=True)
class Planned:
    """A global batch that is to be read."""

    position: DataPosition
    """Data position before the batch."""
    ids: Tensor
    """Sample ids, [global batch], int64."""
    keys: Tensor
    """Keys of the random numbers for each sample, [global batch], int64; equal to the ids where none repeats."""
    content: int = 0
    """Digest of the epoch, where a user's function determines it."""


def read(dataset: Indexed, planned: Iterable[Planned], reading: Reading) -> Iterator[RankBatch]:
    """Yield this rank's shares of planned global batches."""
    in_flight: deque[Planned] = deque()

    def lists() -> Iterator[list[_SampleRequest]]:
        """Yield the samples that loader workers read next, some steps ahead of the loop."""
        for place, plan in enumerate(planned):
            in_flight.append(plan)
            requests = _requests(plan.position.epoch, reading.own(plan.ids), reading.own(plan.keys))
            if place:
                yield requests
                continue
            # The first batch of a start also has samples that every rank reads, spread over the global batch.
            spread = slice(None, None, -(-len(plan.ids) // COMMON))
            yield [*_requests(plan.position.epoch, plan.ids[spread], plan.keys[spread], of_all=True), *requests]

    rows = _Rows(dataset, reading)
    # Loaders yield batches in the order of the lists, so the oldest plan in flight belongs to the next batch.
    for collated, common in reading.loader(rows, batch_sampler=lists(), collate_fn=_Collate(reading)):
        plan = in_flight.popleft()
        yield reading.as_batch(plan.position, plan.ids, plan.keys, collated, plan.content, common)


class _SampleRequest(NamedTuple):
    """A request to read a sample."""

    epoch: int
    number: int
    key: int
    of_all: bool
    """Whether every rank reads it, for a digest only."""


def _requests(epoch: int, ids: Tensor, keys: Tensor, of_all: bool = False) -> list[_SampleRequest]:
    return [_SampleRequest(epoch, *pair, of_all) for pair in zip(ids.tolist(), keys.tolist(), strict=True)]


READINGS = 8
"""Number of times that a sample is read which every rank reads. A sample with a random choice, such as one of two
captions, comes out the same each time on one rank alone by a chance of 1 in 100."""


@dataclass(frozen=True)
class _Common:
    """A sample that every rank reads."""

    content: int
    """Digest of the sample; 0 if it differs from one read to the next."""


@dataclass(frozen=True)
class _Collate:
    """Collates this rank's samples, and computes a digest of those that every rank reads, which come first."""

    reading: Reading

    def __call__(self, samples: list[Any]) -> tuple[tuple[Any, Layout], int]:
        common = [sample.content for sample in samples if isinstance(sample, _Common)]
        digest = xxhash.xxh3_64_intdigest(repr(common).encode()) if common else 0
        return self.reading.collated(samples[len(common) :]), digest


class _Probe:
    """Finds out which lists and tensors of a collate function have one item for each sample. Create it before the
    samples are collated: the function may change them, so it is called again with copies."""

    def __init__(self, collate: Collate, samples: list[Any]) -> None:
        self._collate, self._samples = collate, list(samples)
        self._copies: list[Any] | None = None
        # Samples that cannot be copied are collated only once.
        with suppress(Exception):
            self._copies = copy.deepcopy(samples[:-1])

    def layout(self, data: Any) -> Layout:
        """Return the layout of a batch. To distinguish a list of samples from a list of fields, a batch of one sample
        fewer is collated: a list of samples becomes shorter, a list of fields does not. So does a tensor with a row for
        each sample, and one of class weights does not, however many samples there are."""
        if _is_list(data) and [id(item) for item in data] == [id(sample) for sample in self._samples]:
            return Layout(of_samples=True)
        if self._copies is None:
            return Layout(is_guessed=True)
        with random_state_restored():
            try:
                parts = dict(_compared_parts(data, self._collate(self._copies), len(self._samples), ()))
            except Exception:
                # It takes no other number of samples.
                return Layout(is_guessed=True)
        return Layout(of_samples=_is_list(data) and bool(parts.pop((), False)), parts=parts)


def _is_list(data: Any) -> bool:
    return isinstance(data, list | tuple) and not hasattr(data, "_fields")


def _compared_parts(
    data: Any, smaller: Any, count: int, path: tuple[Any, ...]
) -> Iterator[tuple[tuple[Any, ...], bool | None]]:
    """Yield the lists and tensors that are in a batch of `count` samples and in one of one fewer, and whether they are
    shorter there; of tensors, whether they have a row for each sample in both, or None if that is unclear."""
    if isinstance(data, Mapping) and isinstance(smaller, Mapping):
        for key in data.keys() & smaller.keys():
            yield from _compared_parts(data[key], smaller[key], count, (*path, key))
    elif isinstance(data, list | tuple) and isinstance(smaller, list | tuple):
        if _is_list(data):
            yield path, len(smaller) < len(data)
        if len(smaller) == len(data):
            for index, parts in enumerate(zip(data, smaller, strict=True)):
                yield from _compared_parts(*parts, count, (*path, index))
    elif _has_rows(data) and _has_rows(smaller):
        sizes = [*zip(data.shape, smaller.shape, strict=False)]
        if sizes[0][0] != sizes[0][1] or (count, count - 1) in sizes or _has_equal_content(data, smaller):
            yield path, sizes[0] == (count, count - 1)
        else:
            # The rows may be those of samples, padded to a fixed number.
            yield path, None


def _has_equal_content(data: Any, other: Any) -> bool:
    if isinstance(data, Tensor) and isinstance(other, Tensor):
        return torch.equal(data, other)
    return isinstance(data, np.ndarray) and isinstance(other, np.ndarray) and np.array_equal(data, other)


def _has_rows(data: Any) -> bool:
    return isinstance(data, Tensor | np.ndarray) and bool(data.ndim)


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
            drop_last: whether a partial last batch of an epoch is dropped.

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
        """Return the data position before the next batch."""
        return self._next

    def feed(self, start: DataPosition | None, passed: int, skipped: Callable[[int], bool]) -> "Lookahead":
        """Return the batches from a position on.

        Args:
            start: the position; None for the beginning.
            passed: number of data steps before it.
            skipped: returns whether a data step is left out.
        """
        self._next = start = start or DataPosition(seed=self._reading.seed, epoch=0, cursor=0)
        min_batch = self._batch if self._drop_last else 1
        pages = _Pages(
            self._dataset, self._batch, min_batch, self._epochs, start, passed, self.data_steps, skipped, self._reading
        )
        batches = iter(self._reading.loader(pages, batch_size=None, collate_fn=_as_it_is))
        return Lookahead(batches, self._set_next, self._advance)

    def _set_next(self, batch: RankBatch | None) -> None:
        self._next = self._end if batch is None else batch.position

    def _advance(self, batch: RankBatch) -> None:
        # After the last of `data_steps` no further batch is read, so the position is computed from this one.
        self._next = batch.position.model_copy(update={"cursor": batch.position.cursor + len(batch.ids)})


class Lookahead:
    """Iterator over batches that can tell, before the next one is used, whether there is one and where it begins."""

    def __init__(
        self,
        batches: Iterator[RankBatch],
        on_next: Callable[[RankBatch | None], None],
        on_used: Callable[[RankBatch], None],
    ) -> None:
        """
        Args:
            on_next: called with the next batch once it is read; None at the end.
            on_used: called with a batch when the iterator yields it.
        """
        self._batches, self._on_next, self._on_used = batches, on_next, on_used
        self._ahead: RankBatch | None = None
        self._is_used = True

    def more(self) -> bool:
        """Read the next batch, if that has not been done, and return whether there is one."""
        if self._is_used:
            self._ahead = next(self._batches, None)
            self._on_next(self._ahead)
            self._is_used = False
        return self._ahead is not None

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> RankBatch:
        if not self.more():
            raise StopIteration
        self._is_used = True
        assert self._ahead is not None
        self._on_used(self._ahead)
        return self._ahead


def read_sample(dataset: Indexed, number: int) -> Any:
    """Read a sample. An error gets a note with its number: a library that cannot decode a file does not know which one
    it is."""
    try:
        return dataset[number]
    except Exception as error:
        error.add_note(f"sample {number} cannot be read: {type(error).__name__}: {error}")
        raise


class _Rows(Dataset[Any]):
    """Data set that loader workers index with requests."""

    def __init__(self, dataset: Indexed, reading: Reading) -> None:
        self._dataset, self._reading = dataset, reading

    def __getitem__(self, request: _SampleRequest) -> Any:
        def read() -> Any:
            return read_sample(self._dataset, request.number)

        if not request.of_all:
            return self._reading.sample(request.epoch, request.key, read)
        readings = (content_of(self._reading.untransformed(request.epoch, request.key, read)) for _ in range(READINGS))
        first = next(readings)
        return _Common(first if all(content == first for content in readings) else 0)


class _Pages(IterableDataset[Any]):
    """Reads a stream and collates this rank's batches."""

    def __init__(
        self,
        dataset: Iterable[Any],
        batch: int,
        min_batch: int,
        epochs: int,
        start: DataPosition,
        passed: int,
        data_steps: int | None,
        skipped: Callable[[int], bool],
        reading: Reading,
    ) -> None:
        self._dataset, self._batch, self._epochs, self._reading = dataset, batch, epochs, reading
        self._min_batch = min_batch
        self._start = start
        self._passed, self._data_steps, self._skipped = passed, data_steps, skipped

    def __iter__(self) -> Iterator[RankBatch]:
        step = self._passed
        for epoch in range(self._start.epoch, self._epochs):
            cursor = self._start.cursor if epoch == self._start.epoch else 0
            samples = _from(self._dataset, epoch, cursor)
            while len(records := list(itertools.islice(samples, self._batch))) >= self._min_batch:
                if self._data_steps is not None and step >= self._data_steps:
                    return
                if not self._skipped(step):
                    yield self._page(epoch, cursor, records)
                step += 1
                cursor += len(records)

    def _page(self, epoch: int, cursor: int, records: list[Any]) -> RankBatch:
        ids = torch.arange(cursor, cursor + len(records))
        own_ids = self._reading.own(ids)
        samples = [
            self._reading.sample(epoch, number, lambda record=records[number - cursor]: record)  # type: ignore[misc]
            for number in own_ids.tolist()
        ]
        position = DataPosition(seed=self._reading.seed, epoch=epoch, cursor=cursor)
        return self._reading.as_batch(position, ids, ids, self._reading.collated(samples), content_of(records[0]))


def content_of(sample: Any) -> int:
    """Compute a digest of the texts and integers in a sample of any shape, not of pixels and floats, which may be
    random."""
    digest = xxhash.xxh3_64()
    for part in _leaves(sample):
        digest.update(part)
    return digest.intdigest()


def _leaves(sample: Any) -> Iterator[bytes]:
    if isinstance(sample, Mapping):
        for key, part in sample.items():
            yield str(key).encode()
            yield from _leaves(part)
    elif isinstance(sample, list | tuple):
        for part in sample:
            yield from _leaves(part)
    elif isinstance(sample, Tensor):
        if sample.dtype in INTEGER_DTYPES:
            yield sample.numpy(force=True).tobytes()
    elif isinstance(sample, np.ndarray):
        if sample.dtype.kind in "iuSU" and sample.dtype != np.uint8:
            yield sample.tobytes()
    elif isinstance(sample, str | int | np.integer):
        yield f"{sample}\0".encode(errors="replace")
    elif isinstance(sample, bytes):
        yield sample


def _from(dataset: Iterable[Any], epoch: int, cursor: int) -> Iterator[Any]:
    """Return the samples of an epoch from a position on."""
    if start_at := getattr(dataset, "start_at", None):
        return iter(start_at(epoch, cursor))
    if set_epoch := getattr(dataset, "set_epoch", None):
        set_epoch(epoch)
    return itertools.islice(iter(dataset), cursor, None)


def _is_worker(number: int) -> None:
    """Set up a loader worker: it ends with its rank, and has the default handler of SIGTERM instead of the rank's."""
    die_with_parent()
    signal.signal(signal.SIGTERM, signal.SIG_DFL)


def _as_it_is(batch: RankBatch) -> RankBatch:
    return batch


def to_device(data: Any, device: torch.device) -> Any:
    """Move the tensors in data of any shape to a device."""
    if isinstance(data, Tensor):
        return data.to(device, non_blocking=True)
    return _mapped(data, lambda part: to_device(part, device))


def cut(data: Any, count: int, start: int, end: int, layout: Layout = Layout()) -> Any:
    """Cut some of the `count` samples out of a batch.

    A batch is a list of samples, a field, or a dictionary, tuple or list of fields. A field is a tensor, an array, a
    list or a tuple. Its first dimension is that of the samples; a tensor or a list of texts or numbers of another
    length stays whole, and so does a tensor that has not a row for each sample according to the layout. A list of
    tensors within a field has one item for each sample, whatever their sizes are, unless the layout says otherwise, or
    each of them has one row for each sample.

    Args:
        layout: meaning of lists and tuples.

    Raises:
        ValueError: no field has as many items as there are samples, or a list of samples or tensors has another number.
    """
    cut_fields = []

    def walk(part: Any, path: tuple[Any, ...]) -> Any:
        is_cut = False
        if isinstance(part, Tensor | np.ndarray):
            has_items = layout.parts.get(path, True)
            is_cut = _has_rows(part) and len(part) == count and has_items is not False
            if is_cut and has_items is None:
                _warn_of_guess()
        elif _is_list(part):
            holds_tensors = any(isinstance(item, CONTAINERS) for item in part)
            is_cut = len(part) == count and not holds_tensors
            if holds_tensors and path and not layout.of_fields:
                is_list_of_samples = bool(layout.parts.get(path, len(part) == count))
                is_cut = len(part) == count and is_list_of_samples
                if not is_cut and (is_list_of_samples or not _are_fields(part, count)):
                    raise ValueError(
                        f"batch.parts cannot cut a {type(part).__name__} of {len(part)} items for {count} samples: a "
                        "list of tensors within a field has one item for each sample, or each tensor has one row for "
                        "each. Let collate return a dictionary, in which each tensor has a name of its own"
                    )
        if is_cut:
            cut_fields.append(part)
            return part[start:end]
        return _mapped_by_key(part, lambda key, item: walk(item, (*path, key)))

    if (start, end) == (0, count):
        return data
    if layout.is_guessed:
        _warn_of_guess()
    if layout.of_samples and isinstance(data, list | tuple):
        if len(data) != count:
            raise ValueError(
                f"batch.parts cannot cut the {type(data).__name__} of {len(data)} samples that collate made of "
                f"{count}: let collate make an item of each sample"
            )
        return data[start:end]
    result = walk(data, ())
    if not cut_fields:
        raise ValueError(
            f"batch.parts cannot cut the {type(data).__name__} that collate made: nothing in it has one item for each "
            f"of the {count} samples. Let collate return a dictionary or a tuple of fields, each a tensor or a list of "
            "such items"
        )
    return result


@functools.cache
def _warn_of_guess() -> None:
    """Warn, once in a process, that only the lengths of fields tell what is cut."""
    log.warning(
        "collate takes no batch of one sample fewer, or makes other tensors of as many rows of it, or its samples "
        "cannot be copied: batch.parts cuts each tensor whose first dimension is as long as there are samples"
    )


def _are_fields(parts: list[Any] | tuple[Any, ...], count: int) -> bool:
    """Whether each part is a tensor with one row for each sample."""
    return all(_has_rows(part) and len(part) == count for part in parts)


def _mapped(data: Any, change: Callable[[Any], Any]) -> Any:
    return _mapped_by_key(data, lambda _, part: change(part))


def _mapped_by_key(data: Any, change: Callable[[Any, Any], Any]) -> Any:
    if isinstance(data, Mapping):
        return {key: change(key, part) for key, part in data.items()}
    if isinstance(data, tuple) and hasattr(data, "_fields"):
        return type(data)(*(change(index, part) for index, part in enumerate(data)))
    if isinstance(data, list | tuple):
        return type(data)(change(index, part) for index, part in enumerate(data))
    return data


def padded(data: Any, count: int, size: int) -> Any:
    """Pad a batch of `count` samples of any shape to `size` by repeating the last one."""
    if isinstance(data, Tensor):
        is_batch = _has_rows(data) and len(data) == count < size
        return torch.cat([data, data[-1:].expand(size - count, *data.shape[1:])]) if is_batch else data
    if isinstance(data, list) and len(data) == count and not any(isinstance(part, CONTAINERS) for part in data):
        return [*data, *data[-1:] * (size - count)]
    return _mapped(data, lambda part: padded(part, count, size))
