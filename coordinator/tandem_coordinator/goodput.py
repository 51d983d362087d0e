"""Goodput: assigns each moment of a job's life to a cause of tandem.wire.wall_time, and to one of the six phases of
tandem.wire.metrics.TIME (docs/decisions/0059-ettr.md).

The first rank logs what a group that steps does, late and in stretches (tandem_coordinator.log_followers); the rest is
measured by this process's own clock. A balance reconciles the two: time in which a group stepped, less the time that
its rank has accounted for. What remains of it a little after the group's end was work that did not last (the detection
of a failure, a hang, a step that was never completed). Where the rank has logged more than its group was seen to step,
because the coordinator sees a first step late, the balance is negative until the next group ends. So all causes and the
balance add up to the time that has passed, whatever events come.
"""

from collections import defaultdict
from collections.abc import Mapping

from tandem.wire.metrics import TIME_PHASES, TimePhase
from tandem.wire.wall_time import CAUSES, Cause, WallTime

STEPPING, SILENT, ENDED = "stepping", "silent", "ended"
"""Activities of a job besides restore, rendezvous and idle. SILENT is that of a user's own script that does not report
its steps, whose time is not broken down."""
FINAL_SAVE, AFTER_LOOP = "final save", "after the loop"
"""Activities after the last step: the last checkpoint is written; the script's code after the loop runs."""
SETTLE_SECONDS = 3.0
"""Time after the end of a group at which its balance is settled, in seconds: its last lines are read within a second on
a disk that answers."""
MAX_START_SECONDS = 60.0
"""Maximum age of a worker at its first report, in seconds. So much of the time without a worker is not settled."""
MAX_ABSENCE_SECONDS = 120.0
"""Absence of a coordinator after which the run counts as stopped, unless its training log shows steps, in seconds; as
in the axes of reports."""

Cell = tuple[Cause, TimePhase | None]
LOGGED_PHASES: dict[Cause, TimePhase | None] = {
    "training": "compute",
    "stragglers": "compute",
    "recomputed": "compute",
    "data": "data",
    "checkpoint": "checkpoint",
    "script": None,
}
"""Causes that the first rank's log divides time into, and their phases."""
ENDS: dict[str, Cell] = {
    # It is no time of a save that another interval would spare.
    FINAL_SAVE: ("other", "checkpoint"),
    AFTER_LOOP: ("script", None),
    ENDED: ("other", "idle"),
}
"""The cell of what remains of a group's balance, by the activity that follows it; otherwise it is lost work."""
LOST: Cell = ("restart", "idle")


class Goodput:
    """A counter of seconds by cause and by phase.

    Args:
        now: seconds of any steady clock, as everywhere here.
        before: the last record of an earlier coordinator.
        unsettled: its balance then.
        absence: seconds since that record; without one, since the submission of the job.
        is_stepping: a group may have stepped meanwhile.
    """

    def __init__(
        self,
        now: float,
        before: WallTime | None = None,
        unsettled: float = 0.0,
        absence: float = 0.0,
        is_stepping: bool = False,
    ) -> None:
        self._since, self._activity = now, STEPPING if is_stepping else "idle"
        self._cells: defaultdict[Cell, float] = defaultdict(float)
        self._earlier: dict[Cause, float] = dict.fromkeys(CAUSES, 0.0)
        self._logged: dict[Cause, float] = {}
        self._balance = unsettled
        self._left_at: float | None = None
        self._left_for = ""
        self._without_worker = 0.0
        """Time without a worker that is not divided into `queue` and `start` yet."""
        self._seen_at = now
        """Time of the first report of a worker after that."""
        self._silent = 0.0
        """Time of a script that has reported no step. If it reports some later, the time was its start."""
        self._not_counted = 0.0
        """Absence that counts only as far as the log shows steps in it."""
        if before is None:
            self._count(0.0 if is_stepping else absence)
        else:
            self._earlier |= {cause: getattr(before, cause) for cause in CAUSES}
            # The record shows the balance in the causes that `wall_time` puts it into.
            if unsettled > 0:
                self._earlier["training"] = max(0.0, self._earlier["training"] - unsettled)
            else:
                self._earlier["restart" if self._earlier["restart"] > 0 else "start"] -= unsettled
            if absence >= MAX_ABSENCE_SECONDS:
                self._not_counted = absence
            elif is_stepping:
                self._balance += absence
            else:
                self._cells["other", "idle"] += absence
        if self._balance > 0 and not is_stepping:
            self._left_at = now
        self._has_stepped = self._earlier["training"] + self._earlier["recomputed"] + self._earlier["unreported"] > 0

    def update(
        self, now: float, activity: str, logged_work: Mapping[Cause, float], straggler_share: float = 0.0
    ) -> None:
        """Set the job's activity from now on; the time until now counts for the previous one.

        Args:
            activity: `restore`, `rendezvous`, `idle`, or one of the words above.
            logged_work: seconds by cause that first ranks have written down so far.
            straggler_share: share of a step's time that all ranks wait for a straggler now.
        """
        self._pass(now)
        for cause, total in logged_work.items():
            seconds = total - self._logged.get(cause, 0.0)
            self._logged[cause] = total
            waited = seconds * min(1.0, max(0.0, straggler_share)) if cause == "training" else 0.0
            self._cells["stragglers", "compute"] += waited
            self._cells[cause, LOGGED_PHASES[cause]] += seconds - waited
            self._balance -= seconds
        if self._balance < 0 < self._not_counted:
            covered = min(-self._balance, self._not_counted)
            self._balance += covered
            self._not_counted -= covered
        if self._activity == STEPPING and activity != STEPPING:
            self._left_at, self._left_for = now, activity
        if self._left_at is not None and (activity == STEPPING or now - self._left_at >= SETTLE_SECONDS):
            self._settle()
        if activity == STEPPING:
            self._divide_queue(0.0)
            self._cells[self._before_steps, "restore"] += self._silent
            self._silent = 0.0
        elif activity != SILENT and self._silent > 0:
            self._cells["unreported", None] += self._silent
            self._silent, self._has_stepped = 0.0, True
        self._has_stepped = self._has_stepped or activity == STEPPING
        self._activity = activity

    def add_worker(self, now: float, age: float | None) -> None:
        """Note that there is a worker.

        Args:
            age: its age in seconds; None if it has not reported it yet.
        """
        if self._activity == "idle":
            self._pass(now)
            self._activity, self._seen_at = "rendezvous", now
        if age is not None and self._without_worker > 0:
            self._divide_queue(age - (now - self._seen_at))

    def close(self, now: float) -> None:
        """Count until now, and settle what is over. All last lines were read."""
        self._pass(now)
        self._settle()

    def _settle(self) -> None:
        """Settle what remains of the balance of a group that is over."""
        if self._left_at is not None and self._balance > 0:
            self._cells[ENDS.get(self._left_for, LOST)] += self._balance
            self._balance = 0.0
        self._left_at = None

    @property
    def seconds(self) -> dict[str, float]:
        """Seconds by phase, since this process started. They only grow."""
        seconds: dict[str, float] = dict.fromkeys(TIME_PHASES, 0.0)
        for (_, phase), amount in self._cells.items():
            if phase is not None:
                seconds[phase] += amount
        return seconds

    @property
    def settled_seconds(self) -> dict[Cause, float]:
        """Settled seconds by cause, over the whole run. They only grow."""
        seconds = dict(self._earlier)
        for (cause, _), amount in self._cells.items():
            seconds[cause] += amount
        return seconds

    @property
    def unsettled(self) -> float:
        """The balance."""
        return self._balance

    @property
    def wall_time(self) -> dict[Cause, float]:
        """Seconds by cause, over the whole run; their sum is the time that has passed.

        The balance counts as training for the time being. Where it is negative, it was counted before as the start of
        its group, or as the coordinator's absence.
        """
        amounts = self.settled_seconds
        amounts["queue"] += self._without_worker
        amounts["unreported"] += self._silent
        amounts["training"] += max(0.0, self._balance)
        missing = max(0.0, -self._balance)
        for cause in ("other", "restart", "start", *CAUSES):
            deducted = min(missing, amounts[cause])
            amounts[cause] -= deducted
            missing -= deducted
        return amounts

    def _pass(self, now: float) -> None:
        elapsed = max(0.0, now - self._since)
        self._since = max(now, self._since)
        self._count(elapsed)

    def _count(self, elapsed: float) -> None:
        """Count time for the present activity."""
        if self._activity == STEPPING:
            self._balance += elapsed
        elif self._activity == SILENT:
            self._silent += elapsed
        elif self._activity == "rendezvous":
            self._cells[self._before_steps, "rendezvous"] += elapsed
        elif self._activity == "restore":
            self._cells[self._before_steps, "restore"] += elapsed
        elif self._activity == "idle":
            self._without_worker += elapsed
            old = max(0.0, self._without_worker - MAX_START_SECONDS)
            self._cells["queue", "idle"] += old
            self._without_worker -= old
        elif self._activity != ENDED:
            self._cells[ENDS[self._activity]] += elapsed

    @property
    def _before_steps(self) -> Cause:
        """The cause of time before the first step of a group."""
        return "restart" if self._has_stepped else "start"

    def _divide_queue(self, age: float) -> None:
        """Divide the time without a worker: in the newest part of it a worker existed that had not reported yet.

        Args:
            age: its age at its first report.
        """
        started = min(max(0.0, age), self._without_worker)
        self._cells["queue", "idle"] += self._without_worker - started
        self._cells[self._before_steps, "idle"] += started
        self._without_worker = 0.0
