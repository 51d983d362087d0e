"""The training log of one generation: written by rank 0, read by people, reports and the live view.

Lines are handed to a thread, so that a slow disk never holds up a step.
"""

import queue
import threading
import time
from typing import Any

from tandem.durable import Lines
from tandem.rundir import RunDir

Record = dict[str, Any]


class Journal:
    """Appends records to `log/train-g000007.jsonl`."""

    def __init__(self, rundir: RunDir, generation: int) -> None:
        self._lines = Lines(rundir.log / f"train-g{generation:06d}.jsonl")
        self._queue: queue.SimpleQueue[list[Record] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._write, name="tandem-journal", daemon=True)
        self._thread.start()

    def write(self, kind: str, **facts: Any) -> None:
        """Append one record with the time of now."""
        self._queue.put([{"kind": kind, "time": time.time(), **facts}])

    def write_all(self, records: list[Record]) -> None:
        """Append records that have kind and time already."""
        self._queue.put(records)

    def close(self) -> None:
        """Write what is queued and close the file."""
        self._queue.put(None)
        self._thread.join()
        self._lines.close()

    def _write(self) -> None:
        while (records := self._queue.get()) is not None:
            self._lines.append(*records)
