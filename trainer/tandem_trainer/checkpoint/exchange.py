"""Exchange of tensors that are split over ranks: each rank receives the elements that it writes. Collective.

A part of a checkpoint is a run of bytes of its files (tandem_trainer.checkpoint.staging), and a rank holds rows of each
tensor. Under `fsdp` the rows of a rank are consecutive elements of the full tensor, and in a pipeline one rank holds
all of them. So every rank can compute which elements go from which rank to which, and each element is sent once, to the
rank that writes it. Each of n ranks receives 1/n of the state; gathering the tensors on all ranks would send everything
to each. Tensors are sent in batches, because many are small.

Tensors that are split in other ways (on two dimensions of a mesh, or by columns) are gathered on every rank, one tensor
at a time. Either way no rank ever holds more of the state than its own share, and one tensor or a batch.

Rejected: each rank writes its own rows, without a collective, because checksums cover whole chunks of a file, and rows
of two ranks may share one.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from tandem_trainer.checkpoint.format import ordered
from tandem_trainer.checkpoint.sharding import RowShards, full_tensor, is_sharded, rows_of
from tandem_trainer.checkpoint.staging import Elements, FileLayout, Files

BATCH = 2**26
"""Bytes of the tensors that one collective sends; a larger tensor is sent alone."""


class ElementRange(NamedTuple):
    """Consecutive elements of a tensor that one rank writes."""

    rank: int
    first: int
    """Index of the first element."""
    end: int
    """Index after the last element."""


@dataclass(frozen=True)
class _Split:
    """A tensor whose rows are distributed over ranks."""

    path: str
    name: str
    dtype: torch.dtype
    rows: RowShards
    ranges: Sequence[ElementRange]


class Exchange:
    """Plan of which rank sends which elements to which other rank, for states of one layout."""

    def __init__(self, files: Files, layout: FileLayout, rank: int, world_size: int) -> None:
        """
        Args:
            files: only shapes and dtypes are used; dtypes are those that are written.
            rank: this rank.
        """
        self._rank = rank
        self._ranges = element_ranges(files, layout, world_size)

    def receive(self, files: Files) -> Iterator[Elements]:
        """Yield at least the elements of split tensors that this rank writes, batch by batch. Collective: every rank
        must exhaust the iterator, also one that writes nothing."""
        batch: list[_Split] = []
        gathered: list[tuple[str, str, Tensor]] = []
        size = 0
        # Every rank walks the tensors in the same order and cuts batches by the same rule, so that all enter the same
        # collectives.
        for path, tensors in files.items():
            for name, tensor in ordered(tensors).items():
                if not is_sharded(tensor):
                    continue
                rows = rows_of(tensor)
                if rows is None:
                    gathered.append((path, name, tensor))
                    continue
                split = _Split(path, name, tensor.dtype, rows, self._ranges[path, name])
                if batch and (not _can_batch(batch[0], split) or size + tensor.nbytes > BATCH):
                    yield from self._exchange_batch(batch)
                    batch, size = [], 0
                batch.append(split)
                size += tensor.nbytes
        if batch:
            yield from self._exchange_batch(batch)
        for path, name, tensor in gathered:
            yield Elements(path, name, 0, full_tensor(tensor).reshape(-1))

    def _exchange_batch(self, batch: Sequence[_Split]) -> Iterator[Elements]:
        """Exchange a batch of tensors of one dtype that the ranks of one group hold, and yield the elements that this
        rank writes. Collective."""
        group = batch[0].rows.group
        ranks = dist.get_process_group_ranks(group)
        own_index = ranks.index(self._rank)
        # Indexed by rank in the group: tensors to send there, and ranges of elements expected from there.
        sent: list[list[Tensor]] = [[] for _ in ranks]
        expected: list[list[tuple[_Split, int, int]]] = [[] for _ in ranks]
        for split in batch:
            begins, local = split.rows.begins, split.rows.local
            for run in split.ranges:
                if run.rank == self._rank:
                    for source in range(len(ranks)):
                        first, end = max(run.first, begins[source]), min(run.end, begins[source + 1])
                        if first < end:
                            expected[source].append((split, first, end))
                elif run.rank in ranks:
                    first, end = max(run.first, begins[own_index]), min(run.end, begins[own_index + 1])
                    if first < end:
                        sent[ranks.index(run.rank)].append(local[first - begins[own_index] : end - begins[own_index]])
        # This rank's own elements need no communication; their values alias the live tensor.
        for split, first, end in expected[own_index]:
            begin = split.rows.begins[own_index]
            yield Elements(split.path, split.name, first, split.rows.local[first - begin : end - begin])
        expected[own_index] = []
        device, dtype = batch[0].rows.local.device, batch[0].dtype
        # Both sides compute the counts from the same plan, so they need not be exchanged.
        counts_in = [sum(end - first for _, first, end in ranges) for ranges in expected]
        counts_out = [sum(len(tensor) for tensor in tensors) for tensors in sent]
        received = torch.empty(sum(counts_in), dtype=dtype, device=device)
        outgoing = torch.cat([part for tensors in sent for part in tensors]) if any(sent) else received[:0].clone()
        width = dtype.itemsize
        # Sent as bytes, because backends do not support every dtype.
        dist.all_to_all_single(
            received.view(torch.uint8),
            outgoing.view(torch.uint8),
            [count * width for count in counts_in],
            [count * width for count in counts_out],
            group=group,
        )
        place = 0
        # The elements arrive by sending rank, each rank's in the order of its `sent`.
        for ranges in expected:
            for split, first, end in ranges:
                yield Elements(split.path, split.name, first, received[place : place + end - first])
                place += end - first


def element_ranges(files: Files, layout: FileLayout, world_size: int) -> dict[tuple[str, str], list[ElementRange]]:
    """Return the ranges of elements that each rank writes of each tensor, by file and name, in order.

    Args:
        files: tensors with the dtypes that are written.
    """
    pieces: Mapping[str, list[tuple[int, int, int]]] = {path: [] for path in files}
    writers = layout.writers(world_size)
    for part, rank in enumerate(writers):
        for piece in layout.pieces(part):
            pieces[piece.path].append((piece.start, piece.start + piece.size, rank))
    by_tensor: dict[tuple[str, str], list[ElementRange]] = {}
    for path, tensors in files.items():
        begin, number = len(layout.headers[path]), 0
        for name, tensor in ordered(tensors).items():
            width, end = tensor.element_size(), begin + tensor.numel() * tensor.element_size()
            tensor_ranges = by_tensor[path, name] = []
            # Pieces are in byte order. The last piece of this tensor may also cover the start of the next one.
            while begin < end and number < len(pieces[path]):
                start, stop, rank = pieces[path][number]
                low, high = max(begin, start), min(end, stop)
                if low < high:
                    tensor_ranges.append(ElementRange(rank, (low - begin) // width, (high - begin) // width))
                if stop >= end:
                    break
                number += 1
            begin = end
    return by_tensor


def _can_batch(first: _Split, other: _Split) -> bool:
    return first.rows.group == other.rows.group and first.dtype == other.dtype
