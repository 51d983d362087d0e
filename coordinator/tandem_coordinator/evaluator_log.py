"""What one evaluator process is doing, from the log it writes into the run directory."""

import os
from pathlib import Path

from tandem.rundir.layout import evaluator_of_log
from tandem.rundir.log import LogReader
from tandem.rundir.records import EVALUATOR, EvaluatorEnd, Lost, Unusable, Usage
from tandem.snapshot import EvaluatorView

MOST_FAILED, MOST_WORDS = 10_000, 200
SILENT_SECONDS = 3_600.0
"""After so long without a line the evaluator is hardly there any more."""
_TAIL_BYTES = 64 * 2**10
"""A coordinator that finds a long log begins so far before its end."""


class EvaluatorLog:
    """Follows one evaluator's log."""

    def __init__(self, path: Path) -> None:
        self._path = path
        status = os.stat(path)  # noqa: PTH116 - one system call
        # Beginning inside a line is harmless: what is left of it is no record and is passed over.
        self._log = LogReader(path, EVALUATOR, max(0, status.st_size - _TAIL_BYTES))
        self._grown_at = status.st_mtime
        self._is_read = False
        self._before: Usage | None = None
        self._newest: Usage | None = None
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
        before = self._log.offset
        records = self._log.read() or ()
        if self._is_read and self._log.offset != before:
            self._grown_at = now
        self._is_read = True
        for record in records:
            match record:
                case Usage():
                    self._before, self._newest = self._newest, record
                case Unusable() if len(self.failed) < MOST_FAILED:
                    self.failed[record.checkpoint[:MOST_WORDS]] = (record.why or "")[:MOST_WORDS]
                case Lost():
                    self.lines_lost += record.lines or 0
            self._ended = isinstance(record, EvaluatorEnd)

    def view(self, now: float) -> EvaluatorView | None:
        """The evaluator as it is at `now`, seconds since the epoch; None before its first sign of life and after its
        end."""
        newest = self._newest
        if newest is None or self._ended:
            return None
        name = evaluator_of_log(self._path)
        assert name is not None
        state = (newest.checkpoint or newest.state or "idle")[:MOST_WORDS]
        return EvaluatorView(name=name, state=state, cpu=self._cpu(), silent_seconds=max(0.0, now - newest.time))

    def _cpu(self) -> float | None:
        if self._before is None or self._newest is None:
            return None
        used, previously = self._newest.cpu_seconds, self._before.cpu_seconds
        seconds = self._newest.time - self._before.time
        # Processor time that falls is that of a new process under the same name.
        if used is None or previously is None or used < previously or seconds <= 0:
            return None
        return (used - previously) / seconds
