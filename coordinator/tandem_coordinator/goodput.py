"""Goodput: assigns each moment of a job's life to one of the six phases of tandem.wire.metrics.TIME.

The first rank logs what a group that steps does, late and in stretches (tandem_coordinator.log_followers); the rest is
measured by this process's own clock. A balance reconciles the two: time in which a group stepped, less the time that
its rank has accounted for. What remains of it when the group ends was work that did not last (a hang, a step that was
never completed), and counts as idle; what its rank logs later is taken from the remainder of the next group.
"""

from collections.abc import Mapping

from tandem.wire.metrics import TIME_PHASES
from tandem_coordinator.log_followers import WORK

STEPPING, SILENT, ENDED = "stepping", "silent", "ended"
"""Activities of a job besides restore, rendezvous and idle. SILENT is that of a user's own script that does not report
its steps, whose time is not broken down."""


class Goodput:
    """A counter of seconds by phase.

    Args:
        now: seconds of any steady clock, as everywhere here.
    """

    def __init__(self, now: float) -> None:
        self._since, self._about = now, "idle"
        self._seconds: dict[str, float] = dict.fromkeys(TIME_PHASES, 0.0)
        self._balance = 0.0

    def update(self, now: float, activity: str, logged_work: Mapping[str, float]) -> None:
        """Set the job's activity from now on; the time until now counts for the previous one.

        Args:
            activity: `restore`, `rendezvous`, `idle`, or one of the words above.
            logged_work: seconds by phase that first ranks have written down so far.
        """
        elapsed = max(0.0, now - self._since)
        if self._about == STEPPING:
            self._balance += elapsed
        elif self._about in TIME_PHASES:
            self._seconds[self._about] += elapsed
        for name in WORK:
            logged = logged_work.get(name, 0.0)
            self._balance -= logged - self._seconds[name]
            self._seconds[name] = logged
        # The rest of a group's balance can belong to no step any more.
        # A group that hangs may stay for long; who watches should see where the time went when it is replaced.
        if self._about == STEPPING and activity != STEPPING and self._balance > 0:
            self._seconds["idle"] += self._balance
            self._balance = 0.0
        self._since, self._about = now, activity

    @property
    def seconds(self) -> dict[str, float]:
        """Seconds by phase, since this process started."""
        return dict(self._seconds)
