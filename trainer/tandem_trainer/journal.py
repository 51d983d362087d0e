"""The training log of one generation: written by rank 0, read by people, reports and the live view.

Lines are handed to a thread, so that a slow disk never holds up a step. What a full disk does not take is lost, and
counted; training goes on, and so does the log when there is room again.
"""

import logging
import queue
import threading
import time
from collections.abc import Callable
from typing import Any

from tandem.rundir.durable import Lines
from tandem.rundir.layout import RunDir

log = logging.getLogger(__name__)

Record = dict[str, Any]


class Journal:
    """Appends records to `log/train-g000007.jsonl`."""

    def __init__(self, rundir: RunDir, generation: int, lost: Callable[[int], None] = lambda count: None) -> None:
        """
        Args:
            lost: told of lines that the disk did not take.
        """
        self._lines = Lines(rundir.log / f"train-g{generation:06d}.jsonl")
        self._queue: queue.SimpleQueue[list[Record] | threading.Event | None] = queue.SimpleQueue()
        self._lost, self._tell_lost = 0, lost
        self._thread = threading.Thread(target=self._write, name="tandem-journal", daemon=True)
        self._thread.start()

    def write(self, kind: str, **facts: Any) -> None:
        """Append one record with the time of now."""
        self._queue.put([{"kind": kind, "time": time.time(), **facts}])

    def write_all(self, records: list[Record]) -> None:
        """Append records that have kind and time already."""
        self._queue.put(records)

    def settle(self) -> None:
        """Wait until everything that was handed over so far is written, or lost."""
        settled = threading.Event()
        self._queue.put(settled)
        settled.wait()

    def close(self) -> None:
        """Write what is queued and close the file."""
        self._queue.put(None)
        self._thread.join()
        self._lines.close()

    def _write(self) -> None:
        while (entry := self._queue.get()) is not None:
            if isinstance(entry, threading.Event):
                entry.set()
            else:
                self._append(entry)

    def _append(self, records: list[Record]) -> None:
        try:
            self._lines.append(*records)
        except OSError as error:
            if self._lost == 0:
                log.warning("the training log cannot be written: %s", error)
            self._lost += len(records)
            self._tell_lost(len(records))
        else:
            if self._lost:
                log.warning("the training log can be written again; %d lines are lost", self._lost)
                lost, self._lost = self._lost, 0
                self._append([{"kind": "lost", "time": time.time(), "lines": lost}])
