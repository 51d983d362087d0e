"""A job at one moment, on whatever platform: its status, its processes and what happened. Shown by terminal/tables."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

from tandem.status import Status

State = Literal["waiting", "starting", "running", "not ready", "leaving", "done", "failed"]
ENDED = ("Succeeded", "Failed")


@dataclass(frozen=True, kw_only=True)
class Pod:
    """One pod."""

    name: str
    """What it is in the job: worker-0, evaluator-1, coordinator."""
    pod: str
    """Its name on the cluster."""
    uid: str
    role: str
    index: int
    """Its place in the group; 0 for the coordinator."""
    node: str
    """Empty while it has none."""
    state: State
    why: str
    """What keeps it from running, or how it ended; empty where nothing needs to be said."""
    restarts: int
    """How often its container was started again in place."""
    since: float | None
    """When it came into its state, seconds since the epoch."""
    container: str
    """The container whose logs count."""
    has_logs: bool
    """Whether its container has been started; one that waits to be started again still has the log of the last time."""
    busy: str = ""
    """How much its ranks use of processors, where that is known."""


@dataclass(frozen=True, kw_only=True)
class JobEvent:
    """Something that happened, once or more."""

    at: float
    """When for the last time, seconds since the epoch."""
    first: float
    """When for the first time."""
    who: str
    """What it happened to: worker-0, coordinator, checkpoints; empty for the job itself."""
    reason: str
    """One CamelCase word."""
    text: str
    """A sentence."""
    count: int
    warning: bool
    revision: int = 0
    """The order of what happened within one second."""


@dataclass(frozen=True, kw_only=True)
class JobSummary:
    """One job."""

    name: str
    namespace: str
    uid: str
    made: float
    """Seconds since the epoch."""
    status: Status
    taken_up: bool
    """Whether the operator has written a status."""
    leaving: bool
    """Whether it is being deleted."""
    missed: tuple[str, ...] = ()
    """Warnings about a local run that ended well without doing all it promised, a sentence each."""

    @property
    def ended(self) -> bool:
        """Whether nothing will happen any more."""
        return self.status.phase in ENDED


@dataclass(frozen=True, kw_only=True)
class JobView:
    """One job and all that belongs to it."""

    job: JobSummary
    pods: tuple[Pod, ...] = ()
    job_events: tuple[JobEvent, ...] = ()


def news(before: Iterable[JobEvent], now: Iterable[JobEvent]) -> list[JobEvent]:
    """What has happened since, again or for the first time."""
    counts = {(one.who, one.reason, one.text): one.count for one in before}
    return [one for one in now if one.count > counts.get((one.who, one.reason, one.text), 0)]
