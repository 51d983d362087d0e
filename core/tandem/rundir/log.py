"""A log of the run directory: one JSON line a record, one writer for each file, any number of readers.

Logs are for looking at. A disk that is full, slow or gone must hold up neither a step nor a heartbeat nor an
evaluation: records are handed to a thread, what the disk does not take is lost, counted and told, and writing goes on
when there is room again. A reader takes what was appended since it last looked, in bites, so that the memory that it
needs does not depend on the log; a line that is no record is passed over and counted, and an incomplete last line,
which is the normal state of a log that is being written, waits for its rest.
"""

import logging
import queue
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Generic

from tandem.rundir.durable import Lines, open_regular
from tandem.rundir.records import AnyRecord, Kinds, Lost, Record

log = logging.getLogger(__name__)

MAX_WAITING = 10_000
"""Hand-overs that wait for a disk that hangs; what comes then is lost, because memory matters more than a log."""
BITE = 2**20
"""Bytes that are read at a time."""
MAX_LINE_LENGTH = 4 * 2**20
"""Bytes. The processor use of ten thousand ranks is a line of some 200 kB; a longer one than this is none of ours."""


class LogWriter:
    """The writer of one log."""

    def __init__(self, path: Path, lost: Callable[[int], None] = lambda lines: None) -> None:
        """
        Args:
            lost: told of lines that the disk did not take, on any thread.
        """
        self._path, self._tell_lost = path, lost
        self._lines: Lines | None = None
        self.lost = 0
        """Lines that the disk did not take."""
        self._untold = 0
        self._counting = threading.Lock()
        self._waiting: queue.Queue[tuple[Record, ...] | threading.Event | None] = queue.Queue(MAX_WAITING)
        self._thread = threading.Thread(target=self._write, name=f"log {path.stem}", daemon=True)
        self._thread.start()

    def open(self) -> None:
        """Open the file now, and not with the first record. Before the first record alone.

        Raises:
            OSError: it cannot be opened.
        """
        self._lines = Lines(self._path)

    def append(self, *records: Record) -> None:
        """Add lines. Never blocks."""
        try:
            self._waiting.put_nowait(records)
        except queue.Full:
            self._lose(len(records), "the disk hangs")

    def settle(self) -> None:
        """Wait until everything that was handed over so far is written, or lost."""
        settled = threading.Event()
        self._waiting.put(settled)
        settled.wait()

    def close(self, seconds: float | None = None) -> None:
        """Write what waits and close the file.

        Args:
            seconds: for at most so long; None for as long as it takes.
        """
        with suppress(queue.Full):
            self._waiting.put(None, timeout=seconds)
            self._thread.join(seconds)

    def _write(self) -> None:
        while (entry := self._waiting.get()) is not None:
            if isinstance(entry, threading.Event):
                entry.set()
            else:
                self._append(entry)
        if self._lines is not None:
            self._lines.close()

    def _append(self, records: tuple[Record, ...]) -> None:
        try:
            self._lines = self._lines or Lines(self._path)
            self._lines.append(*(record.line() for record in records))
        except OSError as error:
            self._lose(len(records), str(error))
        else:
            with self._counting:
                lost, self._untold = self._untold, 0
            if lost:
                log.warning("event=log-written-again path=%s lost=%d", self._path, lost)
                self._append((Lost(time=time.time(), lines=lost),))

    def _lose(self, lines: int, why: str) -> None:
        """Count lost lines. Called by the writing thread and by callers of `append`."""
        with self._counting:
            if not self._untold:
                log.warning("event=log-not-written path=%s error=%s", self._path, why)
            self.lost += lines
            self._untold += lines
        self._tell_lost(lines)


class LogReader(Generic[AnyRecord]):
    """A reader of one log, from an offset to its end and on. What is missing, or no file, has no records."""

    def __init__(
        self,
        path: Path,
        kinds: Kinds[AnyRecord],
        offset: int = 0,
        *,
        skip: type[Record] | None = None,
        bite: int = BITE,
    ) -> None:
        """
        Args:
            offset: bytes; within a line, what is left of that is passed over.
            skip: lines of this kind are passed over unread.
            bite: bytes that are read and parsed at a time.
        """
        self._path, self._kinds, self._bite = path, kinds, bite
        self._skip = () if skip is None else _beginnings(skip)
        self.offset = offset
        """Bytes that were read, or passed over."""
        self.damaged = 0
        """Lines that were no records."""
        self._within_a_line = False

    def read(self) -> list[AnyRecord] | None:
        """The records of the next bite; None at the end of what there is.

        Raises:
            OSError: the log cannot be read.
        """
        size = self._bite
        data = self._read(size)
        while b"\n" not in data and len(data) == size < MAX_LINE_LENGTH:
            size = min(MAX_LINE_LENGTH, 4 * size)
            data = self._read(size)
        end = data.rfind(b"\n") + 1
        if not end:
            if len(data) < MAX_LINE_LENGTH and not (self._within_a_line and data):
                return None
            self._within_a_line = True
            self.offset += len(data)
            return []
        lines = data[: end - 1].split(b"\n")
        self.offset += end
        if self._within_a_line:
            self._within_a_line, self.damaged = False, self.damaged + 1
            lines = lines[1:]
        return [record for line in lines if (record := self._parsed(line)) is not None]

    def __iter__(self) -> Iterator[AnyRecord]:
        """All records to the end of what there is now.

        Raises:
            OSError: the log cannot be read.
        """
        while (records := self.read()) is not None:
            yield from records

    @property
    def left(self) -> int:
        """Bytes that are still to be read."""
        with suppress(OSError):
            return max(0, self._path.stat().st_size - self.offset)
        return 0

    def _read(self, size: int) -> bytes:
        try:
            with open_regular(self._path) as file:
                file.seek(self.offset)
                return file.read(size)
        except (FileNotFoundError, IsADirectoryError, ValueError):
            return b""

    def _parsed(self, line: bytes) -> AnyRecord | None:
        if not line or line.startswith(self._skip):
            return None
        try:
            return self._kinds.parse(line)
        except ValueError:
            self.damaged += 1
            return None


def _beginnings(record: type[Record]) -> tuple[bytes, bytes]:
    """What lines of a kind begin with: as they are written, and as versions before 2026-11-24 wrote them."""
    kind = record.model_fields["kind"].default
    return f'{{"kind":"{kind}"'.encode(), f'{{"kind": "{kind}"'.encode()
