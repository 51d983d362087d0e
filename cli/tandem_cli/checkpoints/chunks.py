"""A file of a checkpoint, read piece by piece: nothing is used before its chunk's checksum was compared.

`tandem.rundir.checkpoint.verified_bytes` gives a whole file at once, which is what training needs. Here files may be
larger than the memory of the machine that looks at them, so at most a few chunks are held.
"""

import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import TracebackType

from tandem.rundir.checkpoint import CHUNK, READERS, Broken, FileEntry, checksum, open_file


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
