"""Problems in this rank that did not end it: counted here and reported to the agent through the pulse.

A full disk takes neither a checkpoint nor the line that says so; the heartbeat needs no disk.
"""

import logging
import threading
import time

from tandem.rundir import records
from tandem.rundir.log import LogWriter
from tandem.wire.protocol import Trouble
from tandem_trainer.checkpoint.saving import Outcome
from tandem_trainer.pulse import Pulse

log = logging.getLogger(__name__)


class TroubleCounts:
    """Counts since the start of the process. Any thread may count.

    Args:
        pulse: pulse that reports the counts; None outside of a job.
    """

    def __init__(self, pulse: Pulse | None) -> None:
        self._pulse, self._lock = pulse, threading.Lock()
        self.counts = Trouble()

    def save_failed(self, reason: str) -> None:
        """Count a checkpoint that could not be written."""
        with self._lock:
            failed, in_a_row = self.counts.saves_failed + 1, self.counts.saves_failed_in_a_row + 1
            self._tell(saves_failed=failed, saves_failed_in_a_row=in_a_row, why=reason)

    def save_succeeded(self) -> None:
        """Reset the failures in a row after a committed checkpoint."""
        with self._lock:
            if self.counts.saves_failed_in_a_row:
                self._tell(saves_failed_in_a_row=0)

    def lines_lost(self, count: int) -> None:
        """Count lines of the log that could not be written."""
        with self._lock:
            self._tell(lines_lost=self.counts.lines_lost + count)

    def _tell(self, **changes: object) -> None:
        self.counts = Trouble.model_validate(self.counts.model_dump(by_alias=False) | changes)
        if self._pulse is not None:
            self._pulse.report_trouble(self.counts)


def record_save(writer: LogWriter, troubles: TroubleCounts, outcome: Outcome) -> None:
    """Write the outcome of a save into the training log, and count one that failed."""
    name, step, stall = outcome["name"], outcome["step"], round(outcome["stallSeconds"], 6)
    if "committed" in outcome:
        writer.append(
            records.Saved(
                time=time.time(),
                name=name,
                step=step,
                stall_seconds=stall,
                commit_seconds=round(outcome["seconds"], 6),
                bytes=outcome["bytes"],
            )
        )
        troubles.save_succeeded()
    else:
        reason = outcome.get("failed") or outcome["superseded"]
        writer.append(records.NotSaved(time=time.time(), name=name, step=step, stall_seconds=stall, why=str(reason)))
        log.warning("checkpoint=%s not written: %s", outcome["name"], reason)
        if "failed" in outcome:
            troubles.save_failed(str(reason))
