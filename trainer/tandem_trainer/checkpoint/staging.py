"""The staging buffer: flat shared memory with a rank's part of a checkpoint, in the order of writing.

Training stalls only while tensors are copied here; the writer process maps the same memory and writes it out as it is,
so nothing is pickled, copied or sent a second time. Reused for every save of the same state; one save is in flight at a
time.

Under data parallelism every rank holds the whole state. So each stages and writes a part of it, cut before anything is
copied: training stalls for 1/n of the time, and n disks or network cards share the work. Parts are runs of whole chunks
(tandem.rundir.checkpoint.CHUNK), which are what checksums are of. A small state is written by few ranks, or one: a part
has to be worth a file's fsync.

Rejected: whole tensors to ranks (one embedding may outweigh the rest), a file per rank (the evaluators' file of weights
would have to be put together afterwards), torch.distributed.checkpoint (it stages everything before it removes what is
there twice).

Of a tensor that is split over the ranks (FSDP, tensor parallelism), ranks first send each other what they stage
(tandem_trainer.checkpoint.exchange).
"""

import mmap
import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from tandem.rundir.checkpoint import CHUNK, chunks
from tandem_trainer.checkpoint.format import header, ordered
from tandem_trainer.checkpoint.sharding import is_sharded
from tandem_trainer.checkpoint.writer import BLOCK

MIN_PART = 2 * CHUNK
"""Bytes that are worth a rank of their own."""

Files = Mapping[str, Mapping[str, Tensor]]
"""For each file of the checkpoint its tensors by name."""


@dataclass(frozen=True)
class Piece:
    """A run of bytes of one file."""

    path: str
    """The file's path inside the checkpoint."""
    start: int
    """First byte; that of a chunk."""
    size: int
    """Bytes."""


@dataclass(frozen=True)
class Layout:
    """The files of a checkpoint, and how their bytes are divided."""

    headers: dict[str, bytes]
    """For each file what stands before its tensors."""
    sizes: dict[str, int]
    """For each file its bytes."""
    parts: int
    """How many ranks write."""

    @classmethod
    def of(cls, files: Files, world_size: int) -> "Layout":
        """The layout of such files in a group of `world_size` ranks; the same on every rank."""
        headers = {path: header(tensors) for path, tensors in files.items()}
        sizes = {
            path: len(headers[path]) + sum(tensor.numel() * tensor.element_size() for tensor in tensors.values())
            for path, tensors in files.items()
        }
        return cls(headers, sizes, max(1, min(world_size, sum(sizes.values()) // MIN_PART)))

    def part_of(self, rank: int, world_size: int) -> int | None:
        """Which part a rank writes; None if it writes nothing. Parts are spread over the ranks, so over the nodes."""
        writers = self.writers(world_size)
        return writers.index(rank) if rank in writers else None

    def writers(self, world_size: int) -> list[int]:
        """The rank that writes each part."""
        return [part * world_size // self.parts for part in range(self.parts)]

    def pieces(self, part: int) -> list[Piece]:
        """What belongs to a part, in order."""
        all_chunks = [
            Piece(path, number * CHUNK, min(CHUNK, size - number * CHUNK))
            for path, size in self.sizes.items()
            for number in range(chunks(size))
        ]
        count = len(all_chunks)
        merged: list[Piece] = []
        for piece in all_chunks[part * count // self.parts : (part + 1) * count // self.parts]:
            if merged and merged[-1].path == piece.path:
                merged[-1] = Piece(piece.path, merged[-1].start, merged[-1].size + piece.size)
            else:
                merged.append(piece)
        return merged


class Elements(NamedTuple):
    """Consecutive elements of a tensor."""

    path: str
    """The file that the tensor is in."""
    name: str
    first: int
    """Number of the first one."""
    values: Tensor
    """[elements]."""


@dataclass(frozen=True)
class Region:
    """Where a piece of a file lies in the memory."""

    path: str
    """The file's path inside the checkpoint."""
    start: int
    """First byte in the file."""
    size: int
    """Bytes."""
    offset: int
    """First byte in the memory."""


@dataclass(frozen=True)
class _Slice:
    """A run of elements of one tensor, and where they go."""

    path: str
    name: str
    first: int
    last: int
    place: Tensor


def shared_memory() -> int:
    """A descriptor of anonymous shared memory, empty as yet; a process that inherits it sees what is staged."""
    return os.memfd_create("tandem-checkpoint") if hasattr(os, "memfd_create") else _unlinked_file()


class Staging:
    """Preallocated memory for one rank's part of the state of one run."""

    def __init__(self, descriptor: int, files: Files, layout: Layout, part: int) -> None:
        """Lay out a part of such files in shared memory; `regions` then tells where each piece lies.

        Args:
            files: only shapes and types matter, so tensors on the meta device will do.
        """
        self.regions: list[Region] = []
        end = 0
        for piece in layout.pieces(part):
            self.regions.append(Region(piece.path, piece.start, piece.size, end))
            end += -(-piece.size // BLOCK) * BLOCK
        os.ftruncate(descriptor, max(end, 1))
        self._memory = mmap.mmap(descriptor, max(end, 1))
        self._flat = torch.frombuffer(self._memory, dtype=torch.uint8)
        self._flat.zero_()  # touch every page now, not during the first save
        self._slices = [slice_ for region in self.regions for slice_ in self._lay_out(region, files, layout)]
        self._by_name = {(one.path, one.name): one for one in self._slices}

    def copy(self, files: Files, brought: Iterable[Elements] = ()) -> None:
        """Copy the tensors' values in, in the types that were laid out; their shapes must be those.

        Args:
            brought: what belongs here of those that are split over the ranks, and maybe more.
        """
        self._copy([(one, live) for one in self._slices if not is_sharded(live := files[one.path][one.name])])
        for found in brought:
            one = self._by_name.get((found.path, found.name))
            if one is None:
                continue
            first, last = max(one.first, found.first), min(one.last, found.first + len(found.values))
            if first < last:
                values = found.values[first - found.first : last - found.first]
                one.place[first - one.first : last - one.first].copy_(values)

    def _copy(self, given: list[tuple[_Slice, Tensor]]) -> None:
        places, values = [], []
        for one, tensor in given:
            live = tensor.detach()
            if live.is_contiguous():
                places.append(one.place)
                values.append(live.reshape(-1)[one.first : one.last])
            elif one.last - one.first == live.numel():
                # In another order in memory (channels_last): copied where it goes, not put in order first.
                one.place.view(live.shape).copy_(live)
            else:
                one.place.copy_(live.reshape(-1)[one.first : one.last])
        if places:
            torch._foreach_copy_(places, values)

    def _lay_out(self, region: Region, files: Files, layout: Layout) -> list[_Slice]:
        """Write what belongs to the header, and find what of each tensor belongs to the region."""
        head = layout.headers[region.path][region.start : region.start + region.size]
        self._memory[region.offset : region.offset + len(head)] = head
        found = []
        begin = len(layout.headers[region.path])
        for name, tensor in ordered(files[region.path]).items():
            width, end = tensor.element_size(), begin + tensor.numel() * tensor.element_size()
            # Chunks begin at multiples of every width, so an element never lies in two.
            low, high = max(begin, region.start), min(end, region.start + region.size)
            if low < high:
                place = self._flat[region.offset + low - region.start : region.offset + high - region.start]
                first, last = (low - begin) // width, (high - begin) // width
                found.append(_Slice(region.path, name, first, last, place.view(tensor.dtype)))
            begin = end
        return found


def signature(files: Files) -> tuple[object, ...]:
    """What two sets of files must share to fit into the same memory."""
    return tuple(
        (path, name, tensor.dtype, tuple(tensor.shape))
        for path, tensors in files.items()
        for name, tensor in tensors.items()
    )


def _unlinked_file() -> int:
    """Shared memory where there is no memfd: a temporary file that nobody else can open."""
    import tempfile

    descriptor, name = tempfile.mkstemp(prefix="tandem-checkpoint-")
    Path(name).unlink()
    return descriptor
