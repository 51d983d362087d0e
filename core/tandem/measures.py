"""The numbers that several views show of one run. Each is computed only here. Pure.

`docs/numbers.md` defines them for people, `tandem.formatting` writes them, and `tandem.status` words what went wrong.
"""

from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

PACE_SECONDS = 60.0
"""Throughput and remaining time are those of the last minute: calm, and quick enough to follow a change."""

PLANNED = frozenset({"Started", "MemberJoined", "TargetChanged", "SettingsChanged", "Preempted"})
"""Why a generation is formed that nobody needs to hear of: the job starts or goes on, or its group was changed after
it had saved."""


def is_restart(reason: str) -> bool:
    """Whether a generation with this reason was formed because something had failed or was lost."""
    return reason not in PLANNED


@dataclass(frozen=True)
class Generation:
    """One membership of the training group, as far as anybody knows it: the one shape that views work with. Times are
    seconds since the epoch.

    On the disk stands `tandem.rundir.lineage.GenerationRecord`, which says what counts; in the coordinator's log that
    one was formed and closed; in its answers `tandem.status.GenerationView`.
    """

    number: int
    """Its number."""
    opened_at: float | None = None
    """When it was formed."""
    closed_at: float | None = None
    """When it was closed; None while it runs, or when nobody lived to say so."""
    world_size: int | None = None
    """Ranks."""
    members: tuple[str, ...] = ()
    """Replicas in rank order."""
    reason: str = ""
    """Why it was formed, one CamelCase word."""
    detail: str = ""
    """Why it was formed, a sentence."""
    resumed_step: int | None = None
    """The step it went on from."""
    first_step_at: float | None = None
    """When its first step was logged."""
    last_step: int | None = None
    """The last step it logged."""
    last_step_at: float | None = None
    """When that was."""
    last_line_at: float | None = None
    """When its first rank wrote for the last time."""
    ended: str = ""
    """Why its training ended, in the words of its own log or of the coordinator."""


def restarts(generations: Sequence[Generation]) -> int:
    """How many generations after the first were formed because something had failed or was lost."""
    return sum(is_restart(one.reason) for one in generations[1:])


@dataclass(frozen=True)
class Outage:
    """A time without a step around a change of the group."""

    reason: str
    """Why the group was changed, one CamelCase word."""
    begin: float
    """The last step before it, seconds since the epoch."""
    end: float
    """The first step after it."""
    without: str = "step"
    """What is missing meanwhile: a step, or the whole group, where no steps are logged. Then `begin` is when one
    generation was closed, and `end` when the next one was formed: how long its script takes to start is not known."""

    @property
    def seconds(self) -> float:
        """How long it was."""
        return self.end - self.begin


def outages(generations: Iterable[Generation]) -> list[Outage]:
    """The time without a step around each change of the group.

    A generation that made no step lies within the outage around it. Where none logs steps, as with a script of the
    user's own, an outage is the time between two generations.

    Args:
        generations: oldest first.
    """
    generations = list(generations)
    stepless = all(one.first_step_at is None for one in generations)
    found: list[Outage] = []
    stopped: float | None = None
    reason = ""
    for index, one in enumerate(generations):
        if stopped is not None:
            reason = reason or one.reason
            last = index == len(generations) - 1
            went_on = one.first_step_at if one.first_step_at is not None or not (stepless or last) else one.opened_at
            if went_on is None:
                continue
            begin = stopped if one.opened_at is None else min(stopped, one.opened_at)
            found.append(Outage(reason, begin, max(begin, went_on), "group" if stepless else "step"))
            reason = ""
        ended = one.closed_at if stepless else one.last_step_at
        stopped = ended if ended is not None else stopped
    return found


class Pace:
    """How fast the group of one generation steps, from what its first rank says of itself."""

    def __init__(self) -> None:
        self._heard: deque[tuple[float, int]] = deque()

    def clear(self) -> None:
        """Another generation begins."""
        self._heard.clear()

    def add(self, now: float, step: int) -> None:
        """Note that `step` steps are complete; `now` is in seconds of any monotonic clock."""
        if not self._heard or step > self._heard[-1][1]:
            self._heard.append((now, step))
        while self._heard[-1][0] - self._heard[0][0] > PACE_SECONDS:
            self._heard.popleft()

    @property
    def steps_per_second(self) -> float | None:
        """Over the last minute; None before two steps were heard of."""
        if len(self._heard) < 2:
            return None
        (began, first), (ended, last) = self._heard[0], self._heard[-1]
        return (last - first) / (ended - began) if ended > began else None

    def throughput(self, samples_per_step: float | None) -> float | None:
        """Samples a second."""
        pace = self.steps_per_second
        return None if pace is None or samples_per_step is None else pace * samples_per_step

    def remaining_seconds(self, step: int, total: int | None) -> float | None:
        """Until the last step, at this pace."""
        if total is None:
            return None
        if step >= total:
            return 0.0
        pace = self.steps_per_second
        return (total - step) / pace if pace else None
