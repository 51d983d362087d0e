"""What the numbers mean that several views show of one run: each is computed here and nowhere else. Pure.

`docs/numbers.md` defines them for people, `tandem.formatting` writes them, and `tandem.troubles` words what went wrong.
"""

from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol

PACE_SECONDS = 60.0
"""Throughput and remaining time are those of the last minute: calm, and quick enough to follow a change."""

PLANNED = frozenset({"Started", "MemberJoined", "TargetChanged", "Preempted"})
"""Why a generation is formed that nobody needs to hear of: the job starts or goes on, or its group was changed after
it had saved."""


def is_restart(reason: str) -> bool:
    """Whether a generation with this reason was formed because something had failed or was lost."""
    return reason not in PLANNED


class Span(Protocol):
    """A generation, as far as logs tell. Times are seconds since the epoch."""

    @property
    def reason(self) -> str:
        """Why it was formed."""

    @property
    def opened_at(self) -> float | None:
        """When it was formed."""

    @property
    def closed_at(self) -> float | None:
        """When it was closed."""

    @property
    def first_step_at(self) -> float | None:
        """When its first step was logged."""

    @property
    def last_step_at(self) -> float | None:
        """When its last step was logged."""


def restarts(spans: Sequence[Span]) -> int:
    """How many generations after the first were formed because something had failed or was lost."""
    return sum(is_restart(span.reason) for span in spans[1:])


@dataclass(frozen=True)
class Outage:
    """A time without a step around a change of the group."""

    reason: str
    """Why the group was changed, one CamelCase word."""
    begin: float
    """The last step before it, seconds since the epoch."""
    end: float
    """The first step after it."""

    @property
    def seconds(self) -> float:
        """How long it was."""
        return self.end - self.begin


def outages(spans: Iterable[Span]) -> list[Outage]:
    """The time without a step around each change of the group.

    A generation that made no step lies within the outage around it. Where none logs steps, as with a script of the
    user's own, an outage is the time between two generations.

    Args:
        spans: oldest first.
    """
    spans = list(spans)
    stepless = all(span.first_step_at is None for span in spans)
    found: list[Outage] = []
    stopped: float | None = None
    reason = ""
    for index, span in enumerate(spans):
        if stopped is not None:
            reason = reason or span.reason
            last = index == len(spans) - 1
            went_on = span.first_step_at if span.first_step_at is not None or not (stepless or last) else span.opened_at
            if went_on is None:
                continue
            begin = stopped if span.opened_at is None else min(stopped, span.opened_at)
            found.append(Outage(reason, begin, max(begin, went_on)))
            reason = ""
        ended = span.closed_at if stepless else span.last_step_at
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
