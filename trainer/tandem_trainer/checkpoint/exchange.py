"""Brings each rank what it writes of the tensors that are split over the ranks. Collective.

A part of a checkpoint is a run of bytes of its files (tandem_trainer.checkpoint.staging), and a rank holds rows of each
tensor. Under `fsdp` the rows of a rank are consecutive elements of the whole tensor, and in a pipeline one rank has all
of them. So every rank knows which elements go from whom to whom, and each is sent once, to the rank that writes it.
Each of n ranks receives 1/n of the state, where putting it together on all of them would bring everything to each. Some
tensors are sent together, because many are small.

What is split in other ways (on two dimensions of a mesh, or by columns) is put together on every rank, one tensor at a
time. Either way no rank ever holds more of the state than its own share, and one tensor or a batch.

Rejected: each rank writes its own rows, with no collective at all, because checksums are of whole chunks of a file, and
rows of two ranks may share one.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from tandem_trainer.checkpoint.format import ordered
from tandem_trainer.checkpoint.sharding import Rows, is_sharded, rows_of, whole
from tandem_trainer.checkpoint.staging import Elements, Files, Layout

BATCH = 2**26
"""Bytes of tensors that are sent together, unless one alone is larger."""


class Run(NamedTuple):
    """Consecutive elements of a tensor that one rank writes."""

    rank: int
    first: int
    """Number of the first element."""
    end: int
    """Number of the one after the last."""


@dataclass(frozen=True)
class _Split:
    """A tensor whose rows ranks hold."""

    path: str
    name: str
    dtype: torch.dtype
    rows: Rows
    runs: Sequence[Run]


class Exchange:
    """Who sends what to whom, for a state of such shapes."""

    def __init__(self, files: Files, layout: Layout, rank: int, world_size: int) -> None:
        """
        Args:
            files: only shapes and types matter; types are those that are written.
            rank: this one.
        """
        self._rank = rank
        self._runs = runs(files, layout, world_size)

    def bring(self, files: Files) -> Iterator[Elements]:
        """At least what this rank writes of each tensor that is split, some at a time. Collective: to be gone through
        by every rank, also by one that writes nothing."""
        batch: list[_Split] = []
        others: list[tuple[str, str, Tensor]] = []
        size = 0
        for path, tensors in files.items():
            for name, tensor in ordered(tensors).items():
                if not is_sharded(tensor):
                    continue
                rows = rows_of(tensor)
                if rows is None:
                    others.append((path, name, tensor))
                    continue
                one = _Split(path, name, tensor.dtype, rows, self._runs[path, name])
                if batch and (not _go_together(batch[0], one) or size + tensor.nbytes > BATCH):
                    yield from self._brought(batch)
                    batch, size = [], 0
                batch.append(one)
                size += tensor.nbytes
        if batch:
            yield from self._brought(batch)
        for path, name, tensor in others:
            yield Elements(path, name, 0, whole(tensor).reshape(-1))

    def _brought(self, batch: Sequence[_Split]) -> Iterator[Elements]:
        """What this rank writes of some tensors of one type, which ranks of one group hold. Collective."""
        group = batch[0].rows.group
        ranks = dist.get_process_group_ranks(group)
        mine = ranks.index(self._rank)
        # By rank of the group: what goes there, and what comes from there.
        sent: list[list[Tensor]] = [[] for _ in ranks]
        expected: list[list[tuple[_Split, int, int]]] = [[] for _ in ranks]
        for one in batch:
            begins, local = one.rows.begins, one.rows.local
            for run in one.runs:
                if run.rank == self._rank:
                    for source in range(len(ranks)):
                        first, end = max(run.first, begins[source]), min(run.end, begins[source + 1])
                        if first < end:
                            expected[source].append((one, first, end))
                elif run.rank in ranks:
                    first, end = max(run.first, begins[mine]), min(run.end, begins[mine + 1])
                    if first < end:
                        sent[ranks.index(run.rank)].append(local[first - begins[mine] : end - begins[mine]])
        for one, first, end in expected[mine]:
            begin = one.rows.begins[mine]
            yield Elements(one.path, one.name, first, one.rows.local[first - begin : end - begin])
        expected[mine] = []
        device, dtype = batch[0].rows.local.device, batch[0].dtype
        counts_in = [sum(end - first for _, first, end in found) for found in expected]
        counts_out = [sum(len(found) for found in to) for to in sent]
        received = torch.empty(sum(counts_in), dtype=dtype, device=device)
        given = torch.cat([part for to in sent for part in to]) if any(sent) else received[:0].clone()
        width = dtype.itemsize
        dist.all_to_all_single(
            received.view(torch.uint8),
            given.view(torch.uint8),
            [count * width for count in counts_in],
            [count * width for count in counts_out],
            group=group,
        )
        place = 0
        for found in expected:
            for one, first, end in found:
                yield Elements(one.path, one.name, first, received[place : place + end - first])
                place += end - first


def runs(files: Files, layout: Layout, world_size: int) -> dict[tuple[str, str], list[Run]]:
    """For each tensor, by file and name, which rank writes which of its elements, in order.

    Args:
        files: with the types that are written.
    """
    pieces: Mapping[str, list[tuple[int, int, int]]] = {path: [] for path in files}
    writers = layout.writers(world_size)
    for part, rank in enumerate(writers):
        for piece in layout.pieces(part):
            pieces[piece.path].append((piece.start, piece.start + piece.size, rank))
    found: dict[tuple[str, str], list[Run]] = {}
    for path, tensors in files.items():
        begin, number = len(layout.headers[path]), 0
        for name, tensor in ordered(tensors).items():
            width, end = tensor.element_size(), begin + tensor.numel() * tensor.element_size()
            mine = found[path, name] = []
            # Pieces are in the order of their bytes, and the last one of this tensor may have some of the next one.
            while begin < end and number < len(pieces[path]):
                start, stop, rank = pieces[path][number]
                low, high = max(begin, start), min(end, stop)
                if low < high:
                    mine.append(Run(rank, (low - begin) // width, (high - begin) // width))
                if stop >= end:
                    break
                number += 1
            begin = end
    return found


def _go_together(one: _Split, other: _Split) -> bool:
    return one.rows.group == other.rows.group and one.dtype == other.dtype
