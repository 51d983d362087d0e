"""Goodput: assigns each moment of a job's life to one of the six phases of tandem.metrics.TIME.

What a group that steps does, its first rank writes down, late and in stretches (tandem_coordinator.log_followers); the
rest is this process's own clock. Between the two stands a balance: time in which a group stepped, less the time that
its rank has accounted for. What is left of it when the group ends was work that did not last (a hang, a step that was
never completed), and counts as idle; what its rank writes down later is taken from what the next group leaves.
"""

from collections.abc import Mapping

from tandem.metrics import DOINGS
from tandem_coordinator.log_followers import WORK

STEPPING, SILENT, OVER = "stepping", "silent", "over"
"""What a job can be about besides restore, rendezvous and idle. Silent: a script of the user's own that says nothing of
its steps, whose time is not told."""


class Goodput:
    """Counts seconds.

    Args:
        now: seconds of any steady clock, as everywhere here.
    """

    def __init__(self, now: float) -> None:
        self._since, self._about = now, "idle"
        self._spent: dict[str, float] = dict.fromkeys(DOINGS, 0.0)
        self._balance = 0.0

    def look(self, now: float, about: str, worked: Mapping[str, float]) -> None:
        """The job is about something from now on; what it was about until now is counted.

        Args:
            about: `restore`, `rendezvous`, `idle`, or one of the words above.
            worked: seconds by phase that first ranks have written down so far.
        """
        elapsed = max(0.0, now - self._since)
        if self._about == STEPPING:
            self._balance += elapsed
        elif self._about in DOINGS:
            self._spent[self._about] += elapsed
        for name in WORK:
            told = worked.get(name, 0.0)
            self._balance -= told - self._spent[name]
            self._spent[name] = told
        # A group that hangs may stay for long; who watches should see where the time went when it is replaced.
        if self._about == STEPPING and about != STEPPING and self._balance > 0:
            self._spent["idle"] += self._balance
            self._balance = 0.0
        self._since, self._about = now, about

    @property
    def seconds(self) -> dict[str, float]:
        """By phase, since this process began."""
        return dict(self._spent)
