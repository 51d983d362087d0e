"""Verifies every byte of a checkpoint. Changes nothing: training sets damaged checkpoints aside.

`tandem.rundir.checkpoint.verified_bytes` gives a whole file at once, which is what training needs. Here files may be
larger than the memory of the machine that looks at them, so at most a few chunks are held.
"""

import os
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Literal

from tandem.rundir.checkpoint import CHUNK, READERS, Broken, FileEntry, Manifest, checksum, open_file
from tandem.rundir.layout import RunDir


class ChunkedFile:
    """An open file of a checkpoint. Not thread-safe."""

    def __init__(self, folder: Path, entry: FileEntry) -> None:
        """
        Raises:
            FileNotFoundError: the whole checkpoint is gone.
            Broken: the file is missing, of another size, or no file.
        """
        self.entry, self._where = entry, f"{folder.name}/{entry.path}"
        self._descriptor = open_file(folder, entry)
        self._held: tuple[int, bytes] = (-1, b"")

    def soundness(self) -> Iterator[tuple[int, bool]]:
        """Check all chunks, with several threads: of each in turn its bytes, and whether it is what was written.

        Raises:
            OSError: the disk does not give them.
        """
        numbers = range(len(self.entry.xxh3))
        readers = ThreadPoolExecutor(min(READERS, len(numbers)) or 1)
        try:
            yield from readers.map(self._is_sound, numbers)
        finally:
            readers.shutdown(cancel_futures=True)

    def read(self, start: int, size: int) -> bytes:
        """Bytes of the file, verified. Reading onwards reads each chunk once.

        Raises:
            Broken: they are not what was written.
        """
        if start + size > self.entry.size:
            raise Broken(f"{self._where} ends before byte {start + size}")
        parts = []
        while size > 0:
            number, offset = divmod(start, CHUNK)
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
        if self._held[0] != number:
            content = self._content(number)
            if checksum(content) != self.entry.xxh3[number]:
                raise Broken(f"{self._where} does not match its checksum at byte {number * CHUNK}")
            self._held = (number, content)
        return self._held[1]

    def _is_sound(self, number: int) -> tuple[int, bool]:
        content = self._content(number)
        return len(content), checksum(content) == self.entry.xxh3[number]

    def _content(self, number: int) -> bytes:
        parts, start = [], number * CHUNK
        end = min(start + CHUNK, self.entry.size)
        while start < end and (part := os.pread(self._descriptor, end - start, start)):
            parts.append(part)
            start += len(part)
        return parts[0] if len(parts) == 1 else b"".join(parts)


@dataclass(frozen=True)
class Verification:
    """What became of one checkpoint."""

    name: str
    """Its name."""
    outcome: Literal["sound", "damaged", "unreadable", "vanished"]
    """`vanished`: it was deleted meanwhile, as retention does."""
    faults: tuple[str, ...] = ()
    """What is wrong, a sentence for each file."""
    files: int = 0
    """Files read."""
    size: int = 0
    """Bytes read."""

    @property
    def is_good(self) -> bool:
        """Whether nobody needs to worry."""
        return self.outcome in ("sound", "vanished")


def verify(rundir: RunDir, name: str, tick: Callable[[int], None] = lambda count: None) -> Verification:
    """Read a whole checkpoint, chunk by chunk.

    Args:
        tick: called with the bytes of each chunk that was read.
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
    if not _is_still(rundir, manifest):
        return Verification(name, "vanished", size=read)
    return Verification(name, "damaged", tuple(faults), len(manifest.files), read)


def _check(rundir: RunDir, manifest: Manifest, entry: FileEntry, tick: Callable[[int], None]) -> tuple[int, str]:
    """Bytes read of one file, and what is wrong with it."""
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
    of = f"{len(altered)} of {len(entry.xxh3)} chunks altered, the first" if len(entry.xxh3) > 1 else "altered"
    last = min(entry.size, (altered[0] + 1) * CHUNK)
    return read, f"{entry.path}: {of} in bytes {altered[0] * CHUNK:,} to {last - 1:,}"


def _is_still(rundir: RunDir, manifest: Manifest) -> bool:
    """Whether the name still belongs to what we read: retention deletes, and a newer generation may reuse a name."""
    try:
        return rundir.manifest(manifest.name).digest == manifest.digest
    except FileNotFoundError:
        return False
    except (Broken, OSError):
        return True
