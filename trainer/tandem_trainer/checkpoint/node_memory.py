"""Files of a checkpoint, read and verified once for all ranks of a node, in shared memory.

If each rank read for itself, eight ranks on a node would read, hash and hold the files eight times. So the ranks of a
node divide the chunks of all files among themselves, and each reads and checks its part, with several threads, into one
anonymous file in memory (memfd) that all of them map. The first rank of the node creates it; the others open it through
/proc, which works within one container and for one user. Where that is not possible (no memfd, no /proc), each rank
reads everything for itself.

Memory is freed while the ranks copy from it: each rank records how far it has come in each file, and pages that all
ranks have passed are returned to the kernel. So the memory shrinks while the state grows: the peak of a node is the
state of its ranks and little more.

Rejected: mapping the files themselves (the content could change after it was checked, and a page that fails to load is
a signal, not an error), /dev/shm (64 MB in a container), every rank's own copy from one reader through pipes (copies
everything twice), reading the files once to check and once to use (twice the disk time).
"""

import mmap
import os
import secrets
import struct
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from tandem.rundir.checkpoint import CHUNK_BYTES, READERS, FileEntry, checksum, open_file, read_chunk
from tandem_trainer.checkpoint.staging import shared_memory
from tandem_trainer.process_group import Group

PAGE = mmap.PAGESIZE
TOKEN_BYTES = 16
MIN_FREED_BYTES = 32 * 2**20
"""Minimum number of bytes to free at once; less is not worth a system call."""
_COUNTER = struct.Struct("<q")


@dataclass(frozen=True)
class Damage:
    """A chunk that does not match its checksum."""

    path: str
    """The file's path inside the checkpoint."""
    chunk: int
    """Number of the chunk in the file."""

    def __str__(self) -> str:
        return f"{self.path} does not match its checksum at byte {self.chunk * CHUNK_BYTES}"


@dataclass(frozen=True)
class _FileRange:
    """Position of a file in the memory."""

    entry: FileEntry
    start: int
    number: int


class FileMemory:
    """Memory for the files of one checkpoint.

    Args:
        descriptor: descriptor of the memory; this object closes it.
        files: files of the checkpoint.
        sharers: number of ranks that use the memory.
        place: index of this rank among them.
    """

    def __init__(self, descriptor: int, files: Iterable[FileEntry], sharers: int = 1, place: int = 0) -> None:
        self._descriptor, self._sharers, self._place = descriptor, sharers, place
        self._ranges: dict[str, _FileRange] = {}
        files = list(files)
        # Layout: a token and the ranks' progress counters, then the files, each from a page of its own.
        end = _whole_pages(TOKEN_BYTES + _COUNTER.size * len(files) * self._sharers)
        for number, entry in enumerate(files):
            self._ranges[entry.path] = _FileRange(entry, end, number)
            end += _whole_pages(entry.size)
        if os.fstat(descriptor).st_size < end:
            os.ftruncate(descriptor, end)
        self._map = mmap.mmap(descriptor, end)
        self._content = memoryview(self._map)
        self._base = torch.frombuffer(self._map, dtype=torch.uint8).data_ptr()
        self._freed_to = dict.fromkeys(self._ranges, 0)
        self._released_to = dict.fromkeys(self._ranges, 0)

    @property
    def sharers(self) -> int:
        """Number of ranks that use the memory."""
        return self._sharers

    @classmethod
    def alone(cls, files: Iterable[FileEntry]) -> "FileMemory":
        """Create memory that no other rank uses."""
        return cls(shared_memory(), files)

    @property
    def token(self) -> bytes:
        """Token that distinguishes this memory from every other."""
        return bytes(self._content[:TOKEN_BYTES])

    def sign(self) -> bytes:
        """Write a new token into the memory."""
        self._content[:TOKEN_BYTES] = secrets.token_bytes(TOKEN_BYTES)
        return self.token

    def file(self, path: str) -> memoryview:
        """Return the content of a file; it must not be changed."""
        file = self._ranges[path]
        return self._content[file.start : file.start + file.entry.size]

    def fill(self, folder: Path) -> Damage | None:
        """Read and check this rank's part of the chunks; returns the first that is damaged, None if all are intact.

        A chunk with a wrong checksum is read once more, bypassing the page cache.

        Raises:
            FileNotFoundError, OSError: the checkpoint is gone, or the disk does not return what it holds.
            Broken: a file is missing or of another size.
        """
        own_chunks = self._own_chunks()
        descriptors: dict[str, int] = {}
        try:
            # All files, not only those with chunks of this rank: each must exist and have the right size.
            for file in self._ranges.values():
                descriptors[file.entry.path] = open_file(folder, file.entry)

            def is_sound(which: tuple[FileEntry, int]) -> bool:
                entry, number = which
                return read_chunk(descriptors[entry.path], entry, number, self._chunk(entry, number))

            damage = self._first_damage(own_chunks, is_sound)
        finally:
            for descriptor in descriptors.values():
                os.close(descriptor)
        return damage

    def verify(self) -> Damage | None:
        """Check this rank's part of the chunks, which are in memory already; returns the first that is damaged."""

        def is_sound(which: tuple[FileEntry, int]) -> bool:
            entry, number = which
            return checksum(self._chunk(entry, number)) == entry.xxh3[number]

        return self._first_damage(self._own_chunks(), is_sound)

    def _own_chunks(self) -> list[tuple[FileEntry, int]]:
        chunks = [(file.entry, number) for file in self._ranges.values() for number in range(len(file.entry.xxh3))]
        first, last = (len(chunks) * end // self._sharers for end in (self._place, self._place + 1))
        return chunks[first:last]

    def _chunk(self, entry: FileEntry, number: int) -> memoryview:
        return self.file(entry.path)[number * CHUNK_BYTES : (number + 1) * CHUNK_BYTES]

    def _first_damage(
        self, own_chunks: Sequence[tuple[FileEntry, int]], is_sound: Callable[[tuple[FileEntry, int]], bool]
    ) -> Damage | None:
        with ThreadPoolExecutor(max(1, READERS // self._sharers)) as readers:
            sound = list(readers.map(is_sound, own_chunks))
        wrong = next((which for which, is_right in zip(own_chunks, sound, strict=True) if not is_right), None)
        return None if wrong is None else Damage(wrong[0].path, wrong[1])

    def release(self, tensor: Tensor) -> None:
        """Record that this rank does not need a tensor's file any more, up to the tensor's end."""
        offset = tensor.data_ptr() - self._base
        for path, file in self._ranges.items():
            if file.start <= offset < file.start + file.entry.size:
                self._released_to[path] = max(self._released_to[path], offset + tensor.nbytes - file.start)
                is_whole = self._released_to[path] == file.entry.size
                if is_whole or self._released_to[path] - self._progress(file, self._place) >= MIN_FREED_BYTES:
                    self._record_progress(file)
                return

    def close(self) -> None:
        """Release the memory. Tensors that were read must not be used afterwards."""
        os.close(self._descriptor)
        self._content = memoryview(b"")

    def _record_progress(self, file: _FileRange) -> None:
        """Record this rank's progress in a file, and free the pages that all ranks have passed."""
        passed = self._released_to[file.entry.path]
        _COUNTER.pack_into(self._map, self._counter_offset(file, self._place), passed)
        # Only whole pages that every rank has passed; the last page of a file goes with its end.
        by_all = min(self._progress(file, place) for place in range(self._sharers))
        end = _whole_pages(by_all) if by_all == file.entry.size else by_all // PAGE * PAGE
        start = self._freed_to[file.entry.path]
        if end > start and hasattr(mmap, "MADV_REMOVE"):
            self._map.madvise(mmap.MADV_REMOVE, file.start + start, end - start)
            self._freed_to[file.entry.path] = end

    def _progress(self, file: _FileRange, place: int) -> int:
        progress: int = _COUNTER.unpack_from(self._map, self._counter_offset(file, place))[0]
        return progress

    def _counter_offset(self, file: _FileRange, place: int) -> int:
        return TOKEN_BYTES + _COUNTER.size * (file.number * self._sharers + place)


def shared_memory_of(group: Group, files: list[FileEntry]) -> FileMemory:
    """Create memory that the ranks of each node share. Collective."""
    node = node_of_this_process()
    views = group.gather({"node": node, "pid": os.getpid()})
    same = [rank for rank, view in enumerate(views) if view["node"] == node]
    leader, sharers = same[0], len(same)
    memory = FileMemory(shared_memory(), files, sharers) if group.rank == leader and node else None
    own_offer = {} if memory is None else {"descriptor": memory._descriptor, "token": memory.sign().hex()}
    # The token tells the leader's memory from another process's with a recycled process id.
    offer = group.gather(own_offer)[leader]
    if memory is None and offer:
        memory = _open_peer_memory(views[leader]["pid"], offer, files, sharers, same.index(group.rank))
    # If one rank could not open the memory, all ranks of its node read alone: the parts are divided among all of them.
    able = group.gather({"able": memory is not None})
    if memory is None or not all(able[rank]["able"] for rank in same):
        if memory is not None:
            memory.close()
        return FileMemory.alone(files)
    return memory


def _open_peer_memory(
    pid: int, offer: dict[str, object], files: list[FileEntry], sharers: int, place: int
) -> FileMemory | None:
    try:
        descriptor = os.open(f"/proc/{pid}/fd/{offer['descriptor']}", os.O_RDWR | os.O_CLOEXEC)
    except OSError:
        return None
    memory = FileMemory(descriptor, files, sharers, place)
    if memory.token.hex() == offer["token"]:
        return memory
    memory.close()
    return None


def node_of_this_process() -> str:
    """Return a key that is equal for processes that can open each other's descriptors; empty where that is unknown."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot} {os.readlink('/proc/self/ns/pid')} {os.getuid()}"  # noqa: PTH115 - no path, but a name in brackets
    except OSError:
        return ""


def _whole_pages(size: int) -> int:
    return -(-size // PAGE) * PAGE
