"""Verifies every byte of a checkpoint. Changes nothing: training sets damaged checkpoints aside.

`tandem.rundir.checkpoint.verified_bytes` reads a whole file at once, which is what training needs. Here files may be
larger than the memory of the machine, so at most a few chunks are in memory.
"""

import os
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Literal

from tandem.rundir.checkpoint import CHUNK_BYTES, READERS, Broken, FileEntry, Manifest, checksum, open_file
from tandem.rundir.layout import RunDir


class ChunkedFile:
    """An open file of a checkpoint. Not thread-safe."""

    def __init__(self, folder: Path, entry: FileEntry) -> None:
        """Open the file.

        Raises:
            FileNotFoundError: the whole checkpoint is gone.
            Broken: the file is missing, has another size, or is not a regular file.
        """
        self.entry, self._path = entry, f"{folder.name}/{entry.path}"
        self._descriptor = open_file(folder, entry)
        self._cached: tuple[int, bytes] = (-1, b"")

    def soundness(self) -> Iterator[tuple[int, bool]]:
        """Check all chunks, with several threads: yields the size of each chunk in turn, and whether its checksum
        matches.

        Raises:
            OSError: the disk cannot read them.
        """
        numbers = range(len(self.entry.xxh3))
        # Several reads at the same time keep a network file system busy.
        readers = ThreadPoolExecutor(min(READERS, len(numbers)) or 1)
        try:
            yield from readers.map(self._is_sound, numbers)
        finally:
            readers.shutdown(cancel_futures=True)

    def read(self, start: int, size: int) -> bytes:
        """Read bytes of the file, verified. Sequential reads read each chunk once.

        Raises:
            Broken: a checksum does not match.
        """
        if start + size > self.entry.size:
            raise Broken(f"{self._path} ends before byte {start + size}")
        parts = []
        while size > 0:
            number, offset = divmod(start, CHUNK_BYTES)
            part = self._chunk(number)[offset : offset + size]
            parts.append(part)
            start, size = start + len(part), size - len(part)
        return parts[0] if len(parts) == 1 else b"".join(parts)

    def close(self) -> None:
        """Close the file."""
        os.close(self._descriptor)

    def __enter__(self) -> "ChunkedFile":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _chunk(self, number: int) -> bytes:
        # Sequential reads come back to the same chunk many times.
        if self._cached[0] != number:
            content = self._content(number)
            if checksum(content) != self.entry.xxh3[number]:
                raise Broken(f"{self._path} does not match its checksum at byte {number * CHUNK_BYTES}")
            self._cached = (number, content)
        return self._cached[1]

    def _is_sound(self, number: int) -> tuple[int, bool]:
        content = self._content(number)
        return len(content), checksum(content) == self.entry.xxh3[number]

    def _content(self, number: int) -> bytes:
        parts, start = [], number * CHUNK_BYTES
        end = min(start + CHUNK_BYTES, self.entry.size)
        # A read may be short; a file that ends early gives fewer bytes, and its checksum differs.
        while start < end and (part := os.pread(self._descriptor, end - start, start)):
            parts.append(part)
            start += len(part)
        return parts[0] if len(parts) == 1 else b"".join(parts)


@dataclass(frozen=True)
class Verification:
    """Result of verifying one checkpoint."""

    name: str
    """Name of the checkpoint."""
    outcome: Literal["sound", "damaged", "unreadable", "vanished"]
    """`vanished`: it was deleted meanwhile, as retention does."""
    faults: tuple[str, ...] = ()
    """Problems found, a sentence for each file."""
    files: int = 0
    """Files read."""
    size: int = 0
    """Bytes read."""

    @property
    def is_good(self) -> bool:
        """Whether no action is needed."""
        return self.outcome in ("sound", "vanished")


def verify(rundir: RunDir, name: str, tick: Callable[[int], None] = lambda count: None) -> Verification:
    """Read a whole checkpoint, chunk by chunk.

    Args:
        tick: called with the size of each chunk that was read.
    """
    read, faults = 0, []
    try:
        manifest = rundir.manifest(name)
        for entry in manifest.files:
            size, fault = _check(rundir, manifest, entry, tick)
            read += size
            faults += [fault] if fault else []
    except FileNotFoundError:
        return Verification(name, "vanished", size=read)
    except Broken as error:
        return Verification(name, "damaged", (str(error),))
    except OSError as error:
        return Verification(name, "unreadable", (f"{name} cannot be read: {error.strerror or error}",), size=read)
    if not faults:
        return Verification(name, "sound", files=len(manifest.files), size=read)
    # Faults in files that retention is deleting, or that another checkpoint has replaced, are no damage.
    if not _is_still(rundir, manifest):
        return Verification(name, "vanished", size=read)
    return Verification(name, "damaged", tuple(faults), len(manifest.files), read)


def _check(rundir: RunDir, manifest: Manifest, entry: FileEntry, tick: Callable[[int], None]) -> tuple[int, str]:
    """Read one file. Return the bytes read, and its fault."""
    altered, read = [], 0
    try:
        with ChunkedFile(rundir.checkpoint(manifest.name), entry) as file:
            for number, (size, is_sound) in enumerate(file.soundness()):
                read += size
                tick(size)
                if not is_sound:
                    altered.append(number)
    except Broken as error:
        return read, str(error)
    if not altered:
        return read, ""
    extent = f"{len(altered)} of {len(entry.xxh3)} chunks altered, the first" if len(entry.xxh3) > 1 else "altered"
    last = min(entry.size, (altered[0] + 1) * CHUNK_BYTES)
    return read, f"{entry.path}: {extent} in bytes {altered[0] * CHUNK_BYTES:,} to {last - 1:,}"


def _is_still(rundir: RunDir, manifest: Manifest) -> bool:
    """Whether the name still belongs to the same checkpoint: retention deletes, and a newer generation may reuse a
    name."""
    try:
        return rundir.manifest(manifest.name).digest == manifest.digest
    except FileNotFoundError:
        return False
    except (Broken, OSError):
        return True
