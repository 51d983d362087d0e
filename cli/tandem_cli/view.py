"""A view of a job on any platform: its status, processes and events. tandem_cli.terminal.tables displays it."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

from tandem.wire.status import Status

State = Literal["waiting", "starting", "running", "not ready", "leaving", "done", "failed"]
ENDED = ("Succeeded", "Failed")


@dataclass(frozen=True, kw_only=True)
class PodView:
    """A process of a run, or a pod of a job."""

    name: str
    """Name within the job, for example `worker-0`, `evaluator-1`, `coordinator`."""
    pod: str
    """Name of the pod on the cluster; empty for a process."""
    uid: str
    role: str
    index: int
    """Index among the pods of its role; 0 for the coordinator."""
    node: str
    """Name of the node; empty while it has none."""
    state: State
    why: str
    """Reason why it does not run, or how it ended; empty if there is none."""
    restarts: int
    """Number of restarts of its container."""
    since: float | None
    """Start time of its state, in seconds since the epoch."""
    container: str
    """Container with Tandem's log."""
    has_logs: bool
    """Whether its container has a log: it has started; while it waits for a restart, the previous log counts."""
    busy: str = ""
    """CPU and GPU use of its ranks; empty if it is unknown."""


@dataclass(frozen=True, kw_only=True)
class JobEvent:
    """An event that occurred once or more."""

    at: float
    """Time of the last occurrence, in seconds since the epoch."""
    first: float
    """Time of the first occurrence."""
    who: str
    """Object of the event, for example `worker-0`, `coordinator`, `checkpoints`; empty: the job itself."""
    reason: str
    """Reason in CamelCase."""
    text: str
    """Message, a sentence."""
    count: int
    warning: bool
    revision: int = 0
    """Resource version, which sorts events within one second."""


@dataclass(frozen=True, kw_only=True)
class JobSummary:
    """A job without its processes and events."""

    name: str
    namespace: str
    uid: str
    made: float
    """Creation time, in seconds since the epoch."""
    status: Status
    taken_up: bool
    """Whether the operator has set a status."""
    leaving: bool
    """Whether it is being deleted."""
    missed: tuple[str, ...] = ()
    """Warnings about a local run that succeeded without all requested work, a sentence each."""

    @property
    def ended(self) -> bool:
        """Whether the job has succeeded or failed."""
        return self.status.phase in ENDED


@dataclass(frozen=True, kw_only=True)
class JobView:
    """A job with its processes and events."""

    job: JobSummary
    pods: tuple[PodView, ...] = ()
    job_events: tuple[JobEvent, ...] = ()


def new_events(before: Iterable[JobEvent], now: Iterable[JobEvent]) -> list[JobEvent]:
    """Return the events that occurred since, again or for the first time."""
    counts = {(event.who, event.reason, event.text): event.count for event in before}
    return [event for event in now if event.count > counts.get((event.who, event.reason, event.text), 0)]
