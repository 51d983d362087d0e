"""Problems in this rank that did not end it: counted here and reported to the agent through the pulse.

A full disk takes neither a checkpoint nor the line that says so; the heartbeat needs no disk.
"""

import threading

from tandem.protocol import Trouble
from tandem_trainer.pulse import Pulse


class TroubleCounts:
    """Counts from the start of the process on. Any thread may count.

    Args:
        pulse: where it is told; None outside of a job.
    """

    def __init__(self, pulse: Pulse | None) -> None:
        self._pulse, self._lock = pulse, threading.Lock()
        self.now = Trouble()

    def save_failed(self, why: str) -> None:
        """A checkpoint could not be written."""
        with self._lock:
            failed, in_a_row = self.now.saves_failed + 1, self.now.saves_failed_in_a_row + 1
            self._tell(saves_failed=failed, saves_failed_in_a_row=in_a_row, why=why)

    def save_went_well(self) -> None:
        """A checkpoint was committed."""
        with self._lock:
            if self.now.saves_failed_in_a_row:
                self._tell(saves_failed_in_a_row=0)

    def lines_lost(self, count: int) -> None:
        """So many lines of the log could not be written."""
        with self._lock:
            self._tell(lines_lost=self.now.lines_lost + count)

    def _tell(self, **changes: object) -> None:
        self.now = Trouble.model_validate(self.now.model_dump(by_alias=False) | changes)
        if self._pulse is not None:
            self._pulse.tell(self.now)
