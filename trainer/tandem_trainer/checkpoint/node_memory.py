"""The files of a checkpoint, read and verified once for all ranks of a node, in shared memory.

Were each rank to read for itself, eight ranks on a node would read, hash and hold the files eight times. So the ranks
of a node divide the chunks of all files among themselves, and each reads and checks its part, with several threads,
into one anonymous file in memory (memfd) that all of them map. The first rank of the node makes it; the others open it
by way of /proc, which works within one container and for one user. Where that cannot be done (no memfd, no /proc), each
reads everything for itself.

What is copied out is given back as all ranks go on: each notes how far it has come in each file, and pages that all
have passed are returned to the kernel. So while the state grows, the memory shrinks: the peak of a node is the state of
its ranks and little more.

Rejected: mapping the files themselves (what was checked could be another thing a moment later, and a page that fails to
come is a signal, not an error), /dev/shm (64 MB in a container), every rank's own copy from one reader through pipes
(copies everything twice), reading the files once to check and once to use (twice the time of the disk).
"""

import mmap
import os
import secrets
import struct
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from tandem.rundir.checkpoint import CHUNK, READERS, FileEntry, open_file, read_chunk
from tandem_trainer.checkpoint.staging import shared_memory
from tandem_trainer.process_group import Group

PAGE = mmap.PAGESIZE
TOKEN_BYTES = 16
RETURNED_AT_ONCE = 32 * 2**20
"""Bytes; less is not worth a call of the kernel."""
_COUNTER = struct.Struct("<q")


@dataclass(frozen=True)
class Damage:
    """A chunk that is not what was written."""

    path: str
    """The file's path inside the checkpoint."""
    chunk: int
    """Its number in the file."""

    def __str__(self) -> str:
        return f"{self.path} does not match its checksum at byte {self.chunk * CHUNK}"


@dataclass(frozen=True)
class _Room:
    """A file's place in the memory."""

    entry: FileEntry
    start: int
    number: int


class FileMemory:
    """Room for the files of one checkpoint.

    Args:
        descriptor: of the memory; this object closes it.
        files: of the checkpoint.
        sharers: ranks that use the memory.
        place: this one's among them, from 0.
    """

    def __init__(self, descriptor: int, files: Iterable[FileEntry], sharers: int = 1, place: int = 0) -> None:
        self._descriptor, self._sharers, self._place = descriptor, sharers, place
        self._rooms: dict[str, _Room] = {}
        files = list(files)
        end = self._head(len(files))
        for number, entry in enumerate(files):
            self._rooms[entry.path] = _Room(entry, end, number)
            end += _whole_pages(entry.size)
        if os.fstat(descriptor).st_size < end:
            os.ftruncate(descriptor, end)
        self._map = mmap.mmap(descriptor, end)
        self._content = memoryview(self._map)
        self._base = torch.frombuffer(self._map, dtype=torch.uint8).data_ptr()
        self._returned = dict.fromkeys(self._rooms, 0)
        self._passed = dict.fromkeys(self._rooms, 0)

    @classmethod
    def alone(cls, files: Iterable[FileEntry]) -> "FileMemory":
        """Memory that nobody else uses."""
        return cls(shared_memory(), files)

    @property
    def token(self) -> bytes:
        """What tells this memory from every other."""
        return bytes(self._content[:TOKEN_BYTES])

    def sign(self) -> bytes:
        """Give it a token."""
        self._content[:TOKEN_BYTES] = secrets.token_bytes(TOKEN_BYTES)
        return self.token

    def file(self, path: str) -> memoryview:
        """The content of a file; its bytes are nobody's to change."""
        room = self._rooms[path]
        return self._content[room.start : room.start + room.entry.size]

    def fill(self, folder: Path) -> Damage | None:
        """Read and check this rank's part of the chunks; the first that is damaged, None if all are sound.

        A chunk that is wrong is read once more, past what the kernel remembers of it.

        Raises:
            FileNotFoundError, OSError: the checkpoint is gone, or the disk does not give what it holds.
            Broken: a file is missing or of another size.
        """
        chunks = [(room.entry, number) for room in self._rooms.values() for number in range(len(room.entry.xxh3))]
        first, last = (len(chunks) * end // self._sharers for end in (self._place, self._place + 1))
        mine = chunks[first:last]
        descriptors: dict[str, int] = {}
        try:
            # All files, not only those of which something is ours: each must be there, and of its size.
            for room in self._rooms.values():
                descriptors[room.entry.path] = open_file(folder, room.entry)

            def is_sound(which: tuple[FileEntry, int]) -> bool:
                entry, number = which
                place = self.file(entry.path)[number * CHUNK : (number + 1) * CHUNK]
                return read_chunk(descriptors[entry.path], entry, number, place)

            with ThreadPoolExecutor(max(1, READERS // self._sharers)) as readers:
                sound = list(readers.map(is_sound, mine))
        finally:
            for descriptor in descriptors.values():
                os.close(descriptor)
        wrong = next((which for which, is_right in zip(mine, sound, strict=True) if not is_right), None)
        return None if wrong is None else Damage(wrong[0].path, wrong[1])

    def let_go(self, tensor: Tensor) -> None:
        """This rank needs nothing any more of the file that a tensor lies in, up to the tensor's end."""
        at = tensor.data_ptr() - self._base
        for path, room in self._rooms.items():
            if room.start <= at < room.start + room.entry.size:
                self._passed[path] = max(self._passed[path], at + tensor.nbytes - room.start)
                is_whole = self._passed[path] == room.entry.size
                if is_whole or self._passed[path] - self._noted(room, self._place) >= RETURNED_AT_ONCE:
                    self._note(room)
                return

    def close(self) -> None:
        """Let go of everything. Tensors that were read must not be used any more."""
        os.close(self._descriptor)
        self._content = memoryview(b"")

    def _note(self, room: _Room) -> None:
        """Say how far we are, and return what all have passed."""
        passed = self._passed[room.entry.path]
        _COUNTER.pack_into(self._map, self._counter(room, self._place), passed)
        by_all = min(self._noted(room, place) for place in range(self._sharers))
        end = _whole_pages(by_all) if by_all == room.entry.size else by_all // PAGE * PAGE
        start = self._returned[room.entry.path]
        if end > start and hasattr(mmap, "MADV_REMOVE"):
            self._map.madvise(mmap.MADV_REMOVE, room.start + start, end - start)
            self._returned[room.entry.path] = end

    def _noted(self, room: _Room, place: int) -> int:
        noted: int = _COUNTER.unpack_from(self._map, self._counter(room, place))[0]
        return noted

    def _counter(self, room: _Room, place: int) -> int:
        return TOKEN_BYTES + _COUNTER.size * (room.number * self._sharers + place)

    def _head(self, files: int) -> int:
        return _whole_pages(TOKEN_BYTES + _COUNTER.size * files * self._sharers)


def shared_memory_of(group: Group, files: list[FileEntry]) -> FileMemory:
    """Memory that the ranks of each node share. Collective."""
    node = node_of_this_process()
    views = group.gather({"node": node, "pid": os.getpid()})
    same = [rank for rank, view in enumerate(views) if view["node"] == node]
    leader, sharers = same[0], len(same)
    memory = FileMemory(shared_memory(), files, sharers) if group.rank == leader and node else None
    made = {} if memory is None else {"descriptor": memory._descriptor, "token": memory.sign().hex()}
    offer = group.gather(made)[leader]
    if memory is None and offer:
        memory = _opened(views[leader]["pid"], offer, files, sharers, same.index(group.rank))
    # One that could not open it reads alone; then so do all of its node, for the parts are divided among all.
    able = group.gather({"able": memory is not None})
    if memory is None or not all(able[rank]["able"] for rank in same):
        if memory is not None:
            memory.close()
        return FileMemory.alone(files)
    return memory


def _opened(pid: int, offer: dict[str, object], files: list[FileEntry], sharers: int, place: int) -> FileMemory | None:
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
    """What processes share that see each other's descriptors; empty where nothing is known of that."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot} {os.readlink('/proc/self/ns/pid')} {os.getuid()}"  # noqa: PTH115 - no path, but a name in brackets
    except OSError:
        return ""


def _whole_pages(size: int) -> int:
    return -(-size // PAGE) * PAGE
