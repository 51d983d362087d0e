"""A log of the run directory: one JSON line a record, one writer for each file, any number of readers.

Logs are for people. A disk that is full, slow or gone must delay neither a step nor a heartbeat nor an evaluation:
records are handed to a thread, lines that cannot be written are dropped, counted and reported, and writing resumes when
there is room again. A reader reads appended data in chunks of fixed size, so that its memory does not depend on the
log's size; a line that is no record is skipped and counted, and an incomplete last line, which is the normal state of a
log that is being written, is read once it is complete.
"""

import logging
import queue
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Generic, TypeVar

from tandem.rundir.durable import Lines, open_regular
from tandem.rundir.records import AnyRecord, Kinds, LostLines, Record

log = logging.getLogger(__name__)

MAX_QUEUED_APPENDS = 10_000
"""Appends that wait for a disk that hangs. Further ones are dropped, because memory matters more than a log."""
CLOSED_POLL_SECONDS = 1.0
"""Interval at which a thread that waits for a log looks whether it was closed, in seconds."""
READ_BYTES = 2**20
"""Bytes to read at a time."""
MAX_LINE_LENGTH = 4 * 2**20
"""Maximum length of a line in bytes. The processor use of ten thousand ranks is a line of some 200 kB; a longer line
than this is not a record."""

TAIL_BYTES = 4 * 2**20
"""Bytes in which the last record of a kind is searched: the last hours of a coordinator, whatever the size of the
job."""
_Kind = TypeVar("_Kind", bound=Record)


class LogWriter:
    """The writer of one log."""

    def __init__(self, path: Path, lost: Callable[[int], None] = lambda lines: None) -> None:
        """
        Args:
            lost: callback with the number of lines that could not be written; called on any thread.
        """
        self._path, self._on_lost = path, lost
        self._lines: Lines | None = None
        self.lost = 0
        """Lines that could not be written."""
        self._unreported = 0
        """Lost lines that the log itself does not mention yet."""
        self._counts_lock = threading.Lock()
        self._queue: queue.Queue[tuple[Record, ...] | threading.Event | None] = queue.Queue(MAX_QUEUED_APPENDS)
        self._thread = threading.Thread(target=self._write, name=f"log {path.stem}", daemon=True)
        self._thread.start()

    def open(self) -> None:
        """Open the file now, and not with the first record. Call it before the first `append`.

        Raises:
            OSError: it cannot be opened.
        """
        self._lines = Lines(self._path)

    def append(self, *records: Record) -> None:
        """Append records. Never blocks."""
        try:
            self._queue.put_nowait(records)
        except queue.Full:
            self._lose(len(records), "the disk hangs")

    def settle(self) -> None:
        """Wait until all records that were appended so far are written, or lost."""
        written = threading.Event()
        self._queue.put(written)
        # A log that was closed meanwhile writes nothing more.
        while not written.wait(CLOSED_POLL_SECONDS) and self._thread.is_alive():
            pass

    def close(self, seconds: float | None = None) -> None:
        """Write the queued records and close the file.

        Args:
            seconds: timeout; None waits as long as it takes.
        """
        with suppress(queue.Full):
            self._queue.put(None, timeout=seconds)
            self._thread.join(seconds)

    def _write(self) -> None:
        while (entry := self._queue.get()) is not None:
            # A marker of `settle`: everything before it is written or lost.
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
            # The disk takes lines again: report the gap, in the log as well.
            with self._counts_lock:
                lost, self._unreported = self._unreported, 0
            if lost:
                log.warning("event=log-written-again path=%s lost=%d", self._path, lost)
                self._append((LostLines(time=time.time(), lines=lost),))

    def _lose(self, lines: int, reason: str) -> None:
        """Count lost lines. Called by the writing thread and by callers of `append`."""
        with self._counts_lock:
            if not self._unreported:
                log.warning("event=log-not-written path=%s error=%s", self._path, reason)
            self.lost += lines
            self._unreported += lines
        self._on_lost(lines)


class LogReader(Generic[AnyRecord]):
    """A reader of one log, from an offset to its end and beyond. A missing file, or a path that is no file, has no
    records."""

    def __init__(
        self,
        path: Path,
        kinds: Kinds[AnyRecord],
        offset: int = 0,
        *,
        skip: type[Record] | None = None,
        bite: int = READ_BYTES,
    ) -> None:
        """
        Args:
            offset: first byte to read; the rest of a line that begins before it is skipped.
            skip: a kind of record whose lines are skipped without parsing.
            bite: bytes to read and parse at a time.
        """
        self._path, self._kinds, self._bite = path, kinds, bite
        self._skipped_prefixes = () if skip is None else _line_prefixes(skip)
        self.offset = offset
        """Bytes that were read, or skipped."""
        self.damaged = 0
        """Number of lines that are no records."""
        self._skips_to_line_end = False

    def read(self) -> list[AnyRecord] | None:
        """The records in the next chunk; None at the current end of the log.

        Raises:
            OSError: the log cannot be read.
        """
        size = self._bite
        data = self._read(size)
        # A line longer than the chunk: read more, up to the longest possible record.
        while b"\n" not in data and len(data) == size < MAX_LINE_LENGTH:
            size = min(MAX_LINE_LENGTH, 4 * size)
            data = self._read(size)
        end = data.rfind(b"\n") + 1
        if not end:
            # An incomplete last line; its rest comes later.
            if len(data) < MAX_LINE_LENGTH and not (self._skips_to_line_end and data):
                return None
            # Too long for a record: skip to the line's end, in chunks.
            self._skips_to_line_end = True
            self.offset += len(data)
            return []
        lines = data[: end - 1].split(b"\n")
        self.offset += end
        # The first piece is the end of a line that was skipped.
        if self._skips_to_line_end:
            self._skips_to_line_end, self.damaged = False, self.damaged + 1
            lines = lines[1:]
        return [record for line in lines if (record := self._parsed(line)) is not None]

    def __iter__(self) -> Iterator[AnyRecord]:
        """All records to the current end of the log.

        Raises:
            OSError: the log cannot be read.
        """
        while (records := self.read()) is not None:
            yield from records

    @property
    def left(self) -> int:
        """Bytes that remain to be read."""
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
        if not line or line.startswith(self._skipped_prefixes):
            return None
        try:
            return self._kinds.parse(line)
        except ValueError:
            self.damaged += 1
            return None


def last_record(path: Path, kinds: Kinds[AnyRecord], kind: type[_Kind], skip: type[Record]) -> _Kind | None:
    """The last record of a kind near the end of a log; None if there is none that can be read.

    Args:
        skip: a kind of record whose lines are skipped without parsing.
    """
    newest = None
    with suppress(OSError, ValueError):
        for record in LogReader(path, kinds, max(0, path.stat().st_size - TAIL_BYTES), skip=skip):
            newest = record if isinstance(record, kind) else newest
    return newest


def _line_prefixes(record: type[Record]) -> tuple[bytes, bytes]:
    """First bytes of lines of a kind: as they are written, and as versions before 2026-11-24 wrote them."""
    kind = record.model_fields["kind"].default
    return f'{{"kind":"{kind}"'.encode(), f'{{"kind": "{kind}"'.encode()
