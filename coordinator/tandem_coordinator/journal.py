"""`log/coordinator.jsonl`: what happened, for people and reports. Written on a thread of its own, as disks may hang."""

import logging
import queue
import threading
from pathlib import Path
from typing import Any

from tandem.rundir.durable import Lines

log = logging.getLogger("tandem.coordinator")

MOST_WAITING = 10_000
"""Lines that wait for a disk that hangs; what comes then is dropped, because memory matters more than a log."""


class Journal:
    """The coordinator's log."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self.lost = 0
        """Lines that the disk did not take."""
        self._waiting: queue.Queue[dict[str, Any] | None] = queue.Queue(MOST_WAITING)
        self._thread = threading.Thread(target=self._write, name="journal", daemon=True)
        self._thread.start()

    def append(self, record: dict[str, Any]) -> None:
        """Add a line. Never blocks."""
        try:
            self._waiting.put_nowait(record)
        except queue.Full:
            self.lost += 1
            log.warning("event=journal-full path=%s", self._path)

    def close(self, seconds: float = 2.0) -> None:
        """Write what waits, for at most so long."""
        try:
            self._waiting.put(None, timeout=seconds)
        except queue.Full:
            return
        self._thread.join(seconds)

    def _write(self) -> None:
        lines: Lines | None = None
        while (record := self._waiting.get()) is not None:
            try:
                lines = lines or Lines(self._path)
                lines.append(record)
            except OSError as error:
                self.lost += 1
                log.warning("event=journal-failed path=%s error=%s", self._path, error)
        if lines is not None:
            lines.close()
