"""A JSON-lines log that is followed in small bites, by a thread that shares the interpreter with heartbeats."""

import json
from contextlib import suppress
from pathlib import Path
from typing import Any

from tandem.numbers import finite
from tandem.rundir.durable import open_regular

BITE = 32 * 2**10
"""Bytes that are read and parsed in one go: a millisecond or so."""
LONGEST_LINE = 4 * 2**20
"""Bytes. The processor use of ten thousand ranks is a line of some 200 kB; a longer one than this is none of ours."""


class Tail:
    """One log, from its beginning to its end and on."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._offset = 0
        self._passing = False

    def bite(self) -> list[dict[str, Any]] | None:
        """The records of the next bite; None at the end of what there is. What is damaged is passed over.

        Raises:
            OSError: the log cannot be read.
        """
        data = self._read(BITE)
        size = BITE
        while b"\n" not in data and len(data) == size < LONGEST_LINE:
            size = min(LONGEST_LINE, 4 * size)
            data = self._read(size)
        end = data.rfind(b"\n") + 1
        if not end:
            # Go past a line that is too long; one that is not complete yet is left for later.
            self._passing = self._passing or len(data) >= LONGEST_LINE
            self._offset += len(data) if self._passing else 0
            return [] if self._passing and data else None
        lines = data[:end].splitlines()
        self._offset += end
        if self._passing:
            self._passing, lines = False, lines[1:]
        return [record for line in lines if (record := _parsed(line)) is not None]

    def _read(self, size: int) -> bytes:
        try:
            with open_regular(self._path) as file:
                file.seek(self._offset)
                return file.read(size)
        except (FileNotFoundError, IsADirectoryError, ValueError):
            return b""

    @property
    def left(self) -> int:
        """Bytes that are still to be read."""
        with suppress(OSError):
            return max(0, self._path.stat().st_size - self._offset)
        return 0

    @property
    def done(self) -> int:
        """Bytes that were read."""
        return self._offset


def _parsed(line: bytes) -> dict[str, Any] | None:
    try:
        record = json.loads(line)
    except (ValueError, RecursionError):
        return None
    if not isinstance(record, dict):
        return None
    return record if finite(record.get("time")) is not None else None
