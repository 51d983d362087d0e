"""The output of a local run's processes, as one stream of lines in order of time.

Agents, coordinator and evaluators stamp their lines with the time. A line of a script has the time of the line before.
"""

import heapq
import os
import re
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import BinaryIO

from tandem.errors import UserError
from tandem_cli.log_lines import MAX_LINE_BYTES, MAX_READ_BYTES, Line, printable_line
from tandem_launcher.printed_log import earlier_part, partial_copy, read_part

POLL_SECONDS = 0.2
_START = re.compile(r"^--- (\d{4}-\d\d-\d\d \d\d:\d\d:\d\d) ")
_STAMP = re.compile(r"^(\d{4}-\d\d-\d\d \d\d:\d\d:\d\d)(?:[,.](\d{1,6}))?\b")
_SECOND = 10**9
CUT = f" … (this line is longer than {MAX_READ_BYTES // 2**20} MiB; the rest is not shown)"
HIDDEN = ("guardian", "run")
"""Processes whose logs are left out: the guardian, and a background `tandem run`, which repeats what others print."""


def log_names(path: Path) -> list[str]:
    """Return the processes of a run that have a log."""
    with suppress(OSError):
        return [file.stem for file in sorted((path / "log").glob("*.txt")) if file.stem not in HIDDEN]
    return []


def selected(path: Path, names: Sequence[str], role: str) -> list[Path]:
    """Return the selected logs of a run; all unless names are given.

    Raises:
        UserError: a named log does not exist.
    """
    with suppress(OSError):
        files = {file.stem: file for file in sorted((path / "log").glob("*.txt")) if file.stem not in HIDDEN}
        for name in names:
            if name not in files:
                existing = ", ".join(files) or "none yet"
                raise UserError(f"{path} has no log of {name}; it has logs of: {existing}")
        return [file for name, file in files.items() if (not names or name in names) and name.startswith(role)]
    return []


class Logs:
    """Reads the logs of a run, and follows them."""

    def __init__(self, path: Path, names: Sequence[str], role: str, tail: int | None) -> None:
        self._path, self._names, self._role, self._tail = path, names, role, tail
        self._read: dict[Path, int] = {}
        """Bytes read of each file."""
        self._timestamps: dict[Path, int] = {}
        """Timestamp of the last line of each file."""
        self._parts: dict[Path, int] = {}
        """Number of the part of each log that is read."""
        self._copies: dict[Path, tuple[int, int] | None] = {}
        """Identity of the copy of the part before; another one appears with each part."""
        self._cut: set[Path] = set()
        """Files that stopped in the middle of an overlong line; the rest of that line is skipped."""

    def lines(self) -> Iterator[Line]:
        """Yield the lines printed since the last call; the first call starts at the beginning or at `tail`."""
        streams = []
        for file in selected(self._path, self._names if not self._read else (), self._role):
            if self._names and file.stem not in self._names:
                continue
            is_first = file not in self._read
            lines = self._new_lines(file)
            streams.append(deque(lines, self._tail) if is_first and self._tail is not None else list(lines))
        # A merge, not a sort: the order within a file stays, whatever its timestamps say.
        yield from heapq.merge(*streams, key=lambda line: line.timestamp)

    def follow(self, is_over: Callable[[], bool]) -> Iterator[Line]:
        """Yield new lines until the run is over and everything is read."""
        while True:
            # Ask first: lines that are written after the question are then read by the last round.
            ended = is_over()
            yield from self.lines()
            if ended:
                return
            time.sleep(POLL_SECONDS)

    def _new_lines(self, file: Path) -> Iterator[Line]:
        with suppress(OSError), file.open("rb") as content:
            place, copy = self._read.get(file), None
            with suppress(OSError):
                copy = _identity(earlier_part(file).stat())
            if place is None or copy not in (None, self._copies[file]):
                yield from self._end_of_earlier_part(file, content, place)
            elif os.fstat(content.fileno()).st_size < place and not partial_copy(file).exists():
                # Emptied without a copy, because the disk is full.
                self._begin(file, read_part(content).number, copy)
                yield self._missing(file)
            yield from self._lines_of(file, content)

    def _end_of_earlier_part(self, file: Path, content: BinaryIO, place: int | None) -> Iterator[Line]:
        """Yield what the copy of the part before has after this place, and begin a new part there."""
        part, copy = read_part(content), None
        with suppress(OSError), earlier_part(file).open("rb") as earlier:
            copy = _identity(os.fstat(earlier.fileno()))
            self._read[file] = 0
            if place is not None and part.number == self._parts[file] + 1 and place >= part.omitted:
                self._read[file] = place - part.omitted
            elif place is not None:
                self._cut.discard(file)
                yield self._missing(file)
            yield from self._lines_of(file, earlier, is_over=True)
        self._begin(file, part.number, copy)

    def _begin(self, file: Path, number: int, copy: tuple[int, int] | None) -> None:
        self._read[file], self._parts[file], self._copies[file] = 0, number, copy
        self._cut.discard(file)

    def _missing(self, file: Path) -> Line:
        text = f"--- lines are missing here: {file.stem} prints faster than its log is read"
        return Line(self._timestamps.get(file, 0), file.stem, text)

    def _lines_of(self, file: Path, content: BinaryIO, is_over: bool = False) -> Iterator[Line]:
        content.seek(self._read.get(file, 0))
        while raw := content.readline(MAX_READ_BYTES):
            if hole := len(raw) - len(raw.lstrip(b"\0")):
                self._read[file] = self._read.get(file, 0) + hole
                content.seek(self._read[file])
                continue
            is_whole, was_cut = raw.endswith(b"\n") or (is_over and len(raw) < MAX_READ_BYTES), file in self._cut
            if not is_whole and len(raw) < MAX_READ_BYTES:
                # The rest of the line is not written yet.
                break
            self._read[file] = self._read.get(file, 0) + len(raw)
            if is_whole:
                self._cut.discard(file)
            else:
                self._cut.add(file)
            if was_cut:
                continue
            text = raw[:MAX_LINE_BYTES].decode(errors="replace")
            timestamp = self._timestamps[file] = max(_time(text) or 0, self._timestamps.get(file, 0))
            yield Line(timestamp, file.stem, printable_line(text) + ("" if is_whole else CUT))


def _identity(status: os.stat_result) -> tuple[int, int]:
    """Return what tells a file from earlier and later ones of its name."""
    return status.st_ino, status.st_mtime_ns


def _time(text: str) -> int | None:
    """Parse the time at the start of a line, in nanoseconds since the epoch; None if there is none."""
    match = _START.match(text) or _STAMP.match(text)
    if match is None:
        return None
    try:
        seconds = time.mktime(time.strptime(match[1], "%Y-%m-%d %H:%M:%S"))
    except (ValueError, OverflowError):
        return None
    fraction = (match[2] or "0").ljust(9, "0") if match.re is _STAMP else "0"
    return int(seconds) * _SECOND + int(fraction)
