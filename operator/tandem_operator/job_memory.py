"""Per-job memory between two reconciles. It only saves requests and work; losing it is safe.

A thousand jobs are looked at two hundred times a second, and of most nothing has changed but a step: what follows from
a job's spec and little else, a dozen objects and their hashes, is computed once.

Each object has a pause of its own, so that what is refused for long (by a quota, by a webhook) holds up neither the
looks at its job nor the job's other objects. The same pause slows down pods that are made again and again without
getting to work: somebody deletes them at once, or changes them so that they are never what was asked for.

    the first two tries          at once
    the others                   2, 4, 8, … seconds after the one before, a minute at most

A place or an object comes to rest when it is there as it should be, a pod of it at work; then its tries are forgotten.
They are kept in memory alone: an operator that starts again begins with short pauses.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

from tandem.job import DistributedTrainingJob, Spec
from tandem_operator import kinds, names, observed, replicas
from tandem_operator.kinds import Kind
from tandem_operator.observed import Children, Object
from tandem_operator.pod_starts import Start
from tandem_operator.reporting import Want

MANY = 8
"""Pods of a job that are made side by side. Where a quota or a webhook refuses this many of a role, it would refuse the
rest as well, which may be thousands: no other one of that role is tried until one of these may be tried again."""
MAX_SECONDS = 60.0
"""Who makes room in a quota sees the job go on within a minute."""


@dataclass(frozen=True)
class Attempt:
    """The tries of one thing."""

    count: int
    at: float
    """The last one, seconds since the epoch."""
    trouble: Want | None = None
    """What was answered, if that was a refusal."""

    @property
    def due(self) -> float:
        """When it may be tried again, seconds since the epoch."""
        return self.at + min(MAX_SECONDS, replicas.pause(self.count))


Attempts = Mapping[str, Attempt]
"""By the names that `place`, `writing` and `removing` give."""


def place(role: str, index: int) -> str:
    """That a place has its pod, as people are told of it."""
    return role if role == names.COORDINATOR else f"{role} {index}"


def writing(kind: Kind, name: str) -> str:
    """That an object is as it should be."""
    return f"{kind.name} {name}"


def removing(pod: str) -> str:
    """That a pod is deleted."""
    return f"without {pod}"


def ending(pod: str) -> str:
    """That a pod has ended."""
    return f"end of {pod}"


def later(attempts: Attempts, what: str, now: float) -> float | None:
    """When it may be tried again if that is not yet, seconds since the epoch."""
    known = attempts.get(what)
    # After a step of our clock back, the last try is in the future.
    return None if known is None or known.due <= now or known.at > now else known.due


def role_waits(attempts: Attempts, role: str, now: float) -> float | None:
    """Until when no pod of a role is tried, seconds since the epoch; None: they may be."""
    refused = [
        due
        for what, one in attempts.items()
        if one.trouble is not None
        and what.partition(" ")[0] == role
        and (due := later(attempts, what, now)) is not None
    ]
    return min(refused) if len(refused) >= MANY else None


def tried(before: Attempt | None, now: float, trouble: Want | None = None) -> Attempt:
    """After one more try."""
    return Attempt(1 if before is None else before.count + 1, now, trouble)


T = TypeVar("T")
MAX_VALUES = 16
"""Of one job: there are three, and as many more whenever images or addresses change."""


class Memo:
    """Values that follow from one job's spec. Who gets one does not change it."""

    def __init__(self) -> None:
        self._spec: Spec | None = None
        self._found: list[tuple[Any, Any]] = []

    def once(self, spec: Spec, key: Any, compute: Callable[[], T]) -> T:
        """What `compute` returns, or returned before for the same spec and key.

        Args:
            spec: the same object as long as nobody has changed it.
            key: all else that the value follows from.
        """
        if spec is not self._spec:
            self._spec, self._found = spec, []
        for known, value in self._found:
            if known == key:
                found: T = value
                return found
        made = compute()
        self._found = [*self._found[1 - MAX_VALUES :], (key, made)]
        return made


@dataclass
class Budget:
    """So many at once, and then one in a while, as client-go limits Events by source and object (a token bucket)."""

    burst: int
    every: float
    """Seconds in which one more is saved up."""
    left: float = field(init=False)
    at: float = 0.0

    def __post_init__(self) -> None:
        self.left = self.burst

    def allows(self, now: float) -> bool:
        """Whether there may be one more now, which is spent then.

        Args:
            now: seconds of a monotonic clock.
        """
        self.left = min(self.burst, self.left + (now - self.at) / self.every) if self.at else self.left
        self.at = now
        if self.left < 1:
            return False
        self.left -= 1
        return True


EVENTS = 25, 300.0
"""Events about one job at once, and seconds for each further one: client-go's own limits."""
WRITES = 60, 5.0
"""The same of writes of its status: what a coordinator says is a tenant's to write, and may be new at each look."""


@dataclass
class JobMemory:
    """Of one job."""

    uid: str
    written: float = 0.0
    """When the status was written last."""
    pruned: Sequence[tuple[str, Any]] = ()
    """Fields of that status, with their values, which the API server did not take: its CRD is older."""
    attempts: Attempts = field(default_factory=dict)
    """What was tried and has not come to rest."""
    unanswered: dict[str, tuple[str, str]] = field(default_factory=dict)
    """Pods whose creation was not answered (an overloaded API server, a lost connection), by place: the name of each
    and its entropy. They may exist, or be created later."""
    starts: dict[str, Start] = field(default_factory=dict)
    """What is known of pods of which nothing has begun, by UID."""
    told: dict[tuple[str, str], float] = field(default_factory=dict)
    """Reason and message of the last Events, and when each was posted."""
    events: Budget = field(default_factory=lambda: Budget(*EVENTS))
    writes: Budget = field(default_factory=lambda: Budget(*WRITES))
    memo: Memo = field(default_factory=Memo)
    _spec: Any = None
    _job: DistributedTrainingJob | None = None

    def still_unanswered(self, children: Children) -> dict[str, str]:
        """Entropy of pods that may exist unseen, by place. The next pod of such a place gets the same name, so that
        there are never two."""
        known = {name for kind, name in children.things if kind is kinds.POD}
        self.unanswered = {what: one for what, one in self.unanswered.items() if one[0] not in known}
        return {what: entropy for what, (_, entropy) in self.unanswered.items()}

    def forget_spec(self) -> None:
        """Hold nothing of the job's spec."""
        self._job, self._spec, self.memo = None, None, Memo()

    def parsed(self, body: Object) -> DistributedTrainingJob:
        """The job that an object says, with a spec that is the same object as long as the cache's is.

        Raises:
            tandem_operator.observed.InvalidSpec: it says none.
        """
        spec = body.get("spec")
        if self._job is None or spec is None or spec is not self._spec:
            self._job, self._spec = None, None
            self._job, self._spec = observed.parsed(body), spec
            return self._job
        return self._job.model_copy(update={"status": observed.status_of(body)})
