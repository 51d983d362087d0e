"""What one evaluator process is doing, from the log it writes into the run directory."""

import os
import re
from pathlib import Path
from typing import Any

from tandem.numbers import finite, whole
from tandem.rundir.durable import read_lines
from tandem.snapshot import EvaluatorView

_NAME = re.compile(r"^evaluator-(.+)\.jsonl$")
MOST_BYTES = 2**20
"""Of a log, at one look."""
MOST_FAILED, MOST_WORDS = 10_000, 200
SILENT_SECONDS = 3_600.0
"""After so long without a line the evaluator is hardly there any more."""
_TAIL_BYTES = 64 * 2**10
"""A coordinator that finds a long log begins so far before its end."""


def evaluator_name(path: Path) -> str | None:
    """The evaluator whose log this is; None if it is another file."""
    match = _NAME.match(path.name)
    return match[1] if match else None


class EvaluatorLog:
    """Follows one evaluator's log."""

    def __init__(self, path: Path) -> None:
        self._path = path
        # Beginning inside a line is harmless: what is left of it is no JSON object and is passed over.
        status = os.stat(path)  # noqa: PTH116 - one system call
        self._offset = max(0, status.st_size - _TAIL_BYTES)
        self._grown_at = status.st_mtime
        self._is_read = False
        self._before: dict[str, Any] | None = None
        self._newest: dict[str, Any] | None = None
        self._ended = False
        self.failed: dict[str, str] = {}
        """Checkpoints that it could not evaluate, since it is followed, and why."""
        self.lines_lost = 0
        """Lines that it could not write, since it is followed."""

    def is_quiet(self, now: float) -> bool:
        """Whether its evaluator has ended, or is silent for long. Another process may write on under the same name."""
        return self._ended or now - self._grown_at > SILENT_SECONDS

    def follow(self, now: float) -> None:
        """Read what was appended since the last time."""
        before = self._offset
        records, self._offset = read_lines(self._path, self._offset, most=MOST_BYTES)
        if self._is_read and self._offset != before:
            self._grown_at = now
        self._is_read = True
        for record in records:
            if record.get("kind") == "usage" and (at := finite(record.get("time"))) is not None:
                self._before, self._newest = self._newest, {**record, "time": at}
            if record.get("kind") == "bad" and len(self.failed) < MOST_FAILED:
                self.failed[str(record.get("checkpoint"))[:MOST_WORDS]] = str(record.get("why", ""))[:MOST_WORDS]
            if record.get("kind") == "lost":
                self.lines_lost += whole(record.get("lines")) or 0
            self._ended = record.get("kind") == "end"

    def view(self, now: float) -> EvaluatorView | None:
        """The evaluator as it is at `now`, seconds since the epoch; None before its first sign of life and after its
        end."""
        newest = self._newest
        if newest is None or self._ended:
            return None
        name = evaluator_name(self._path)
        assert name is not None
        checkpoint = newest.get("checkpoint")
        state = str(checkpoint or newest.get("state") or "idle")[:MOST_WORDS]
        return EvaluatorView(name=name, state=state, cpu=self._cpu(), silent_seconds=max(0.0, now - newest["time"]))

    def _cpu(self) -> float | None:
        if self._before is None or self._newest is None:
            return None
        used, previously = (finite(record.get("cpuSeconds")) for record in (self._newest, self._before))
        seconds = self._newest["time"] - self._before["time"]
        # Processor time that falls is that of a new process under the same name.
        if used is None or previously is None or used < previously or seconds <= 0:
            return None
        return float((used - previously) / seconds)
