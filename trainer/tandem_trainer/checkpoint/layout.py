"""Which bytes of a checkpoint's files each rank writes.

Under data parallelism every rank holds the whole state. So each stages and writes a part of it, cut before anything is
copied: training stalls for 1/n of the time, and n disks or network cards share the work. Parts are runs of whole chunks
(tandem.rundir.checkpoint.CHUNK), which are what checksums are of. A small state is written by few ranks, or one: a part
has to be worth a file's fsync.

Rejected: whole tensors to ranks (one embedding may outweigh the rest), a file per rank (the evaluators' file of weights
would have to be put together afterwards), torch.distributed.checkpoint (it stages everything before it removes what is
there twice).
"""

from collections.abc import Mapping
from dataclasses import dataclass

from torch import Tensor

from tandem.rundir.checkpoint import CHUNK, chunks
from tandem_trainer.checkpoint.format import header

LEAST_PART = 2 * CHUNK
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
        """The layout of such files in a group of so many ranks; the same on every rank."""
        headers = {path: header(tensors) for path, tensors in files.items()}
        sizes = {
            path: len(headers[path]) + sum(tensor.numel() * tensor.element_size() for tensor in tensors.values())
            for path, tensors in files.items()
        }
        return cls(headers, sizes, max(1, min(world_size, sum(sizes.values()) // LEAST_PART)))

    def part_of(self, rank: int, world_size: int) -> int | None:
        """Which part a rank writes; None if it writes nothing. Parts are spread over the ranks, so over the nodes."""
        writers = [part * world_size // self.parts for part in range(self.parts)]
        return writers.index(rank) if rank in writers else None

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
