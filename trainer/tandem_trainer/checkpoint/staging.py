"""The staging buffer: flat shared memory with a rank's part of a checkpoint, in the order of writing.

Training stalls only while tensors are copied here. The writer process maps the same memory and writes it out unchanged,
so nothing is pickled, copied or sent a second time. The buffer is reused for every save of the same state; one save is
in flight at a time.

Under data parallelism every rank holds the whole state. So each rank stages and writes a part of it, and the state is
divided before anything is copied: training stalls for 1/n of the time, and n disks or network cards share the work.
Parts are runs of whole chunks (tandem.rundir.checkpoint.CHUNK_BYTES), the unit of checksums. Few ranks, or one, write a
small
state: a part has to be worth a file's fsync.

Rejected: whole tensors to ranks (one embedding may outweigh the rest), a file per rank (the evaluators' file of weights
would have to be put together afterwards), torch.distributed.checkpoint (it stages everything before it removes
duplicates).

Before tensors are staged that are split over the ranks (FSDP, tensor parallelism), ranks send each other the elements
that they stage (tandem_trainer.checkpoint.exchange).
"""

import mmap
import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from tandem.model import Model, WholeNumber
from tandem.rundir.checkpoint import CHUNK_BYTES, chunks
from tandem_trainer.checkpoint.format import header, ordered
from tandem_trainer.checkpoint.sharding import is_sharded
from tandem_trainer.checkpoint.writer import BLOCK

MIN_PART = 2 * CHUNK_BYTES
"""Minimum size of a part, in bytes."""

Files = Mapping[str, Mapping[str, Tensor]]
"""Tensors of each file of the checkpoint, by path and name."""


@dataclass(frozen=True)
class Piece:
    """A run of bytes of one file."""

    path: str
    """The file's path inside the checkpoint."""
    start: int
    """First byte; a multiple of CHUNK."""
    size: int
    """Length in bytes."""


@dataclass(frozen=True)
class FileLayout:
    """The files of a checkpoint, and how their bytes are divided into parts."""

    headers: dict[str, bytes]
    """Bytes of each file that precede its tensors."""
    sizes: dict[str, int]
    """Size of each file in bytes."""
    parts: int
    """Number of ranks that write."""

    @classmethod
    def from_files(cls, files: Files, world_size: int) -> "FileLayout":
        """Compute the layout of files for a group of `world_size` ranks; it is the same on every rank."""
        headers = {path: header(tensors) for path, tensors in files.items()}
        sizes = {
            path: len(headers[path]) + sum(tensor.numel() * tensor.element_size() for tensor in tensors.values())
            for path, tensors in files.items()
        }
        return cls(headers, sizes, max(1, min(world_size, sum(sizes.values()) // MIN_PART)))

    def part_of(self, rank: int, world_size: int) -> int | None:
        """Return the part that a rank writes; None if it writes nothing. Parts are spread over the ranks, and so over
        the nodes."""
        writers = self.writers(world_size)
        return writers.index(rank) if rank in writers else None

    def writers(self, world_size: int) -> list[int]:
        """The rank that writes each part."""
        return [part * world_size // self.parts for part in range(self.parts)]

    def pieces(self, part: int) -> list[Piece]:
        """Return the pieces of a part, in order."""
        all_chunks = [
            Piece(path, number * CHUNK_BYTES, min(CHUNK_BYTES, size - number * CHUNK_BYTES))
            for path, size in self.sizes.items()
            for number in range(chunks(size))
        ]
        count = len(all_chunks)
        merged: list[Piece] = []
        # Chunks are divided evenly, and neighbours in the same file merge into one piece.
        for piece in all_chunks[part * count // self.parts : (part + 1) * count // self.parts]:
            if merged and merged[-1].path == piece.path:
                merged[-1] = Piece(piece.path, merged[-1].start, merged[-1].size + piece.size)
            else:
                merged.append(piece)
        return merged


class Elements(NamedTuple):
    """Consecutive elements of a tensor."""

    path: str
    """File that contains the tensor."""
    name: str
    first: int
    """Index of the first element in the tensor."""
    values: Tensor
    """Values, [elements]."""


class Region(Model):
    """Position of a piece of a file in the staging memory."""

    path: str
    """The file's path inside the checkpoint."""
    start: WholeNumber
    """First byte in the file."""
    size: WholeNumber
    """Bytes."""
    offset: WholeNumber
    """First byte in the memory."""


@dataclass(frozen=True)
class _Slice:
    """A run of elements of one tensor, and its destination in the memory."""

    path: str
    name: str
    first: int
    last: int
    place: Tensor


def shared_memory() -> int:
    """Create anonymous shared memory, empty as yet, and return its descriptor; child processes inherit it and see what
    is staged."""
    return os.memfd_create("tandem-checkpoint") if hasattr(os, "memfd_create") else _unlinked_file()


class Staging:
    """Preallocated memory for one rank's part of the state of one run."""

    def __init__(self, descriptor: int, files: Files, layout: FileLayout, part: int) -> None:
        """Lay out a part of the files in shared memory; `regions` lists where each piece lies.

        Args:
            files: only shapes and dtypes are used, so tensors may be on the meta device.
        """
        self.regions: list[Region] = []
        # Each piece starts at a block of its own: direct I/O needs aligned memory (writer.BLOCK).
        end = 0
        for piece in layout.pieces(part):
            self.regions.append(Region(path=piece.path, start=piece.start, size=piece.size, offset=end))
            end += -(-piece.size // BLOCK) * BLOCK
        os.ftruncate(descriptor, max(end, 1))
        self._memory = mmap.mmap(descriptor, max(end, 1))
        self._flat = torch.frombuffer(self._memory, dtype=torch.uint8)
        self._flat.zero_()  # touch every page now, not during the first save
        self._slices = [slice_ for region in self.regions for slice_ in self._lay_out(region, files, layout)]
        self._by_name = {(slice_.path, slice_.name): slice_ for slice_ in self._slices}

    def copy(self, files: Files, received: Iterable[Elements] = ()) -> None:
        """Copy the tensors' values into the memory, cast to the dtypes of the layout. Shapes must match the layout.

        Args:
            received: elements of the tensors that are split over the ranks; may include elements that this rank does
                not stage.
        """
        self._copy(
            [(slice_, live) for slice_ in self._slices if not is_sharded(live := files[slice_.path][slice_.name])]
        )
        for elements in received:
            slice_ = self._by_name.get((elements.path, elements.name))
            if slice_ is None:
                continue
            # The elements may cover only some of the slice, or more than it: copy the overlap.
            first, last = max(slice_.first, elements.first), min(slice_.last, elements.first + len(elements.values))
            if first < last:
                values = elements.values[first - elements.first : last - elements.first]
                slice_.place[first - slice_.first : last - slice_.first].copy_(values)

    def _copy(self, pairs: list[tuple[_Slice, Tensor]]) -> None:
        places, values = [], []
        for slice_, tensor in pairs:
            live = tensor.detach()
            if live.is_contiguous():
                places.append(slice_.place)
                values.append(live.reshape(-1)[slice_.first : slice_.last])
            elif slice_.last - slice_.first == live.numel():
                # Another memory format (channels_last): copied directly, without a contiguous copy first.
                slice_.place.view(live.shape).copy_(live)
            else:
                slice_.place.copy_(live.reshape(-1)[slice_.first : slice_.last])
        # One fused copy for all contiguous tensors; one call for each would dominate the stall with many small tensors.
        if places:
            torch._foreach_copy_(places, values)

    def _lay_out(self, region: Region, files: Files, layout: FileLayout) -> list[_Slice]:
        """Write the region's share of the file's header, and return the slices of tensors in the region."""
        head = layout.headers[region.path][region.start : region.start + region.size]
        self._memory[region.offset : region.offset + len(head)] = head
        slices = []
        begin = len(layout.headers[region.path])
        for name, tensor in ordered(files[region.path]).items():
            width, end = tensor.element_size(), begin + tensor.numel() * tensor.element_size()
            # Chunks begin at multiples of every element size, so an element never lies in two chunks.
            low, high = max(begin, region.start), min(end, region.start + region.size)
            if low < high:
                place = self._flat[region.offset + low - region.start : region.offset + high - region.start]
                first, last = (low - begin) // width, (high - begin) // width
                slices.append(_Slice(region.path, name, first, last, place.view(tensor.dtype)))
            begin = end
        return slices


def signature(files: Files) -> tuple[object, ...]:
    """Return a key that is equal for files that fit into the same memory."""
    return tuple(
        (path, name, tensor.dtype, tuple(tensor.shape))
        for path, tensors in files.items()
        for name, tensor in tensors.items()
    )


def _unlinked_file() -> int:
    """Create shared memory where there is no memfd: a temporary file that no other process can open."""
    import tempfile

    descriptor, name = tempfile.mkstemp(prefix="tandem-checkpoint-")
    Path(name).unlink()
    return descriptor
