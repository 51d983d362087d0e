"""The numbers that several views show of one run. Each is computed only here. Pure.

`docs/numbers.md` defines them for people, `tandem.formatting` formats them, and `tandem.wire.status` describes
problems.
"""

from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

PACE_SECONDS = 60.0
"""Time over which throughput and remaining time are averaged, in seconds: stable, and quick enough to follow a
change."""

PAUSE_SECONDS = 120.0
"""Time without a line of any log that is cut out of time axes, in seconds: the coordinator logs every second and
evaluators every five, so after two minutes nothing is running."""
SAME_SECONDS = 0.1
"""Interval within which two measurements of a value are the same one, reported twice, in seconds."""
TIME_UNITS = (("s", 1.0, 240.0), ("min", 60.0, 4 * 3600.0), ("h", 3600.0, 4 * 86400.0), ("days", 86400.0, float("inf")))
"""Name, seconds, and the length of a time axis below which the unit is used."""

PLANNED = frozenset({"Started", "MemberJoined", "TargetChanged", "SettingsChanged", "Preempted"})
"""Reasons for a generation that are not a failure: the job starts or continues, or its group was changed after it had
saved."""


def time_unit(seconds: float) -> tuple[str, float]:
    """Name and seconds of the unit for a time axis of this length."""
    return next((name, length) for name, length, longest in TIME_UNITS if seconds < longest)


def is_restart(reason: str) -> bool:
    """Whether a generation with this reason was formed after a failure or a loss."""
    return reason not in PLANNED


@dataclass(frozen=True)
class Generation:
    """One membership of the training group, as far as it is known: the common form for views. Times are seconds since
    the epoch.

    Its sources are `tandem.rundir.lineage.GenerationRecord` in the run directory, which decides what counts, the
    coordinator's log, where it was formed and closed, and `tandem.wire.status.GenerationView` in its responses.
    """

    number: int
    """Its number."""
    opened_at: float | None = None
    """Time at which it was formed."""
    closed_at: float | None = None
    """Time at which it was closed; None while it runs, or if no process survived to record it."""
    world_size: int | None = None
    """Number of ranks."""
    members: tuple[str, ...] = ()
    """Replicas in rank order."""
    reason: str = ""
    """Reason for which it was formed, one CamelCase word."""
    detail: str = ""
    """Reason for which it was formed, in a sentence."""
    resumed_step: int | None = None
    """Step from which it resumed."""
    first_step_at: float | None = None
    """Time of its first logged step."""
    last_step: int | None = None
    """Its last logged step."""
    last_step_at: float | None = None
    """Time of its last logged step."""
    last_line_at: float | None = None
    """Time of the last log line of its first rank."""
    ended: str = ""
    """Reason for which its training ended, from its own log or the coordinator's."""
    end_reason: str = ""
    """Reason for which it was closed, one CamelCase word; empty while it runs."""
    failed_at: float | None = None
    """Time of the failure that ended it."""
    stopped_at: float | None = None
    """Time at which the last member of the generation before had stopped its ranks."""
    ready_at: float | None = None
    """Time at which its last member was ready to join."""
    process_at: float | None = None
    """Time at which the process of its first rank started; that of another generation, if it survived a regroup."""
    joined_at: float | None = None
    """Time at which its ranks had joined their group."""
    restore_at: float | None = None
    """Time at which the restore began."""
    restored_at: float | None = None
    """Time at which the first rank was ready for its first step."""
    is_continued: bool = False
    """Whether ranks kept the state of an earlier generation, so that nothing was read from a checkpoint."""


def restarts(generations: Sequence[Generation]) -> int:
    """Number of generations after the first that were formed after a failure or a loss."""
    return sum(is_restart(generation.reason) for generation in generations[1:])


@dataclass(frozen=True)
class Outage:
    """A time without a step around a change of the group."""

    reason: str
    """Reason for the change, one CamelCase word."""
    begin: float
    """Time of the last step before it, in seconds since the epoch."""
    end: float
    """Time of the first step after it."""
    without: str = "step"
    """The missing activity: a step, or the whole group, where no steps are logged. Then `begin` is the end of one
    generation, and `end` the start of the next: the start-up time of its script is not known."""
    previous: int = field(default=0, compare=False)
    """Number of the generation that made the last step before it."""
    generation: int = field(default=0, compare=False)
    """Number of the generation that made the first step after it."""

    @property
    def seconds(self) -> float:
        """Duration of the outage."""
        return self.end - self.begin


def outages(generations: Iterable[Generation]) -> list[Outage]:
    """The outages around the changes of the group.

    A generation without a step is part of the outage around it. Where none logs steps, as with a script of the user's
    own, an outage is the time between two generations.

    Args:
        generations: oldest first.
    """
    generations = list(generations)
    # Scripts that log no steps have no first and last step: use the generations themselves.
    stepless = all(generation.first_step_at is None for generation in generations)
    outages: list[Outage] = []
    stopped: float | None = None
    reason, previous = "", 0
    for index, generation in enumerate(generations):
        if stopped is not None:
            # The first reason since training stopped: later generations failed as a consequence.
            reason = reason or generation.reason
            last = index == len(generations) - 1
            resumed_at = (
                generation.first_step_at
                if generation.first_step_at is not None or not (stepless or last)
                else generation.opened_at
            )
            # No step yet: the outage continues into the next generation.
            if resumed_at is None:
                continue
            begin = stopped if generation.opened_at is None else min(stopped, generation.opened_at)
            without = "group" if stepless else "step"
            outages.append(Outage(reason, begin, max(begin, resumed_at), without, previous, generation.number))
            reason = ""
        ended = generation.closed_at if stepless else generation.last_step_at
        if ended is not None:
            stopped, previous = ended, generation.number
    return outages


class Pace:
    """Step rate of one generation, from the reports of its first rank."""

    def __init__(self) -> None:
        self._samples: deque[tuple[float, int]] = deque()

    def clear(self) -> None:
        """Discard the samples, for another generation begins."""
        self._samples.clear()

    def add(self, now: float, step: int) -> None:
        """Add a report that `step` steps are complete; `now` is in seconds of any monotonic clock."""
        if not self._samples or step > self._samples[-1][1]:
            self._samples.append((now, step))
        while self._samples[-1][0] - self._samples[0][0] > PACE_SECONDS:
            self._samples.popleft()

    @property
    def steps_per_second(self) -> float | None:
        """Step rate over the last minute; None before two steps were reported."""
        if len(self._samples) < 2:
            return None
        (started_at, first), (ended_at, last) = self._samples[0], self._samples[-1]
        return (last - first) / (ended_at - started_at) if ended_at > started_at else None

    def throughput(self, samples_per_step: float | None) -> float | None:
        """Samples a second."""
        pace = self.steps_per_second
        return None if pace is None or samples_per_step is None else pace * samples_per_step

    def remaining_seconds(self, step: int, total: int | None) -> float | None:
        """Time until the last step at this rate."""
        if total is None:
            return None
        if step >= total:
            return 0.0
        pace = self.steps_per_second
        return (total - step) / pace if pace else None
