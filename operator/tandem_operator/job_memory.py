"""Per-job memory between two reconciles. It only saves requests and work; losing it is safe.

A thousand jobs are reconciled two hundred times a second, and for most of them nothing has changed but a step. What
depends on a job's spec and little else, a dozen objects and their hashes, is computed once.

Each object has a back-off of its own, so that a refusal that lasts (by a quota, by a webhook) delays neither the
reconciles of its job nor the job's other objects. The same back-off slows down pods that are created again and again
without ever running: somebody deletes them at once, or changes them so that they never match their template.

    the first two attempts       at once
    the others                   2, 4, 8, … seconds after the one before, a minute at most

The attempts of a replica or an object are forgotten once it is as it should be, with a pod that runs. They are kept in
memory alone: a restarted operator begins with short pauses.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

from tandem.job.resource import DistributedTrainingJob, Spec
from tandem_operator import job_objects, kinds, names, replicas
from tandem_operator.job_objects import Object
from tandem_operator.kinds import Kind
from tandem_operator.observed import Children
from tandem_operator.pod_starts import PodStart
from tandem_operator.reporting import JobProblem

BATCH_SIZE = 8
"""Number of a job's pods that are created concurrently. If a quota or a webhook refuses this many of a role, it would
refuse the rest as well, which may be thousands: no other pod of that role is tried before the next retry of one of
these."""
MAX_PAUSE_SECONDS = 60.0
"""Longest pause, so that a job continues within a minute after somebody has made room in a quota."""


@dataclass(frozen=True)
class Attempt:
    """The attempts at one write."""

    count: int
    last: float
    """Time of the last one, seconds since the epoch."""
    trouble: JobProblem | None = None
    """The refusal that answered the last one, if it was refused."""

    @property
    def due(self) -> float:
        """Earliest time of the next one, seconds since the epoch."""
        return self.last + min(MAX_PAUSE_SECONDS, replicas.pause(self.count))


Attempts = Mapping[str, Attempt]
"""Attempts by the keys of `replica_key`, `write_key`, `delete_key` and `terminate_key`."""


def replica_key(role: str, index: int) -> str:
    """Key of the attempts to create a replica's pod; also the replica's name in messages."""
    return role if role == names.COORDINATOR else f"{role} {index}"


def write_key(kind: Kind, name: str) -> str:
    """Key of the attempts to create or update an object."""
    return f"{kind.name} {name}"


def delete_key(pod: str) -> str:
    """Key of the attempts to delete a pod."""
    return f"without {pod}"


def terminate_key(pod: str) -> str:
    """Key of the attempts to terminate a pod."""
    return f"end of {pod}"


def retry_time(attempts: Attempts, key: str, now: float) -> float | None:
    """Time of the next attempt, seconds since the epoch; None if it is due now."""
    attempt = attempts.get(key)
    # After the clock was set back, the last attempt lies in the future and must not delay the next one.
    return None if attempt is None or attempt.due <= now or attempt.last > now else attempt.due


def role_retry_time(attempts: Attempts, role: str, now: float) -> float | None:
    """Time before which no pod of a role is created, seconds since the epoch; None: it may be now."""
    # One pod may be refused for reasons of its own, but not a whole batch.
    retry_times = [
        due
        for key, attempt in attempts.items()
        if attempt.trouble is not None
        and key.partition(" ")[0] == role
        and (due := retry_time(attempts, key, now)) is not None
    ]
    return min(retry_times) if len(retry_times) >= BATCH_SIZE else None


def next_attempt(previous: Attempt | None, now: float, trouble: JobProblem | None = None) -> Attempt:
    """Record one more attempt."""
    return Attempt(1 if previous is None else previous.count + 1, now, trouble)


T = TypeVar("T")
MAX_VALUES = 16
"""Maximum number of values of one job: there are three, and as many more whenever images or addresses change."""


class Memo:
    """Values that depend on one job's spec. Callers must not change them."""

    def __init__(self) -> None:
        self._spec: Spec | None = None
        self._values: list[tuple[Any, Any]] = []

    def once(self, spec: Spec, key: Any, compute: Callable[[], T]) -> T:
        """The result of `compute`, from the cache if spec and key are the same as before.

        Args:
            spec: identified by the object; a changed spec is another one.
            key: everything else that the value depends on.
        """
        if spec is not self._spec:
            self._spec, self._values = spec, []
        for known_key, value in self._values:
            if known_key == key:
                cached: T = value
                return cached
        value = compute()
        self._values = [*self._values[1 - MAX_VALUES :], (key, value)]
        return value


@dataclass
class Budget:
    """Token bucket: a burst, then one token at a time, as client-go limits Events by source and object."""

    burst: int
    every: float
    """Seconds until one more token is added."""
    tokens: float = field(init=False)
    updated_at: float = 0.0

    def __post_init__(self) -> None:
        self.tokens = self.burst

    def allows(self, now: float) -> bool:
        """Take a token, if there is one; returns whether there was.

        Args:
            now: seconds of a monotonic clock.
        """
        self.tokens = (
            min(self.burst, self.tokens + (now - self.updated_at) / self.every) if self.updated_at else self.tokens
        )
        self.updated_at = now
        if self.tokens < 1:
            return False
        self.tokens -= 1
        return True


EVENTS = 25, 300.0
"""Burst of Events about one job, and seconds for each further one: client-go's own limits."""
WRITES = 60, 5.0
"""Burst of status writes of one job, and seconds for each further one: what a coordinator reports is under a tenant's
control, and may differ at every poll."""


@dataclass
class JobMemory:
    """The operator's memory of one job."""

    uid: str
    written: float = 0.0
    """Time of the last write of the status, by the monotonic clock."""
    pruned: Sequence[tuple[str, Any]] = ()
    """Fields of that status, with their values, that the API server dropped because its CRD is older."""
    attempts: Attempts = field(default_factory=dict)
    """Recent attempts that have not succeeded."""
    unanswered: dict[str, tuple[str, str]] = field(default_factory=dict)
    """Pods whose creation was not answered (an overloaded API server, a lost connection), by replica key: the name of
    each and its entropy. They may exist, or be created later."""
    starts: dict[str, PodStart] = field(default_factory=dict)
    """Last known states of pods without a started container, by their UIDs."""
    posted_events: dict[tuple[str, str], float] = field(default_factory=dict)
    """Reason and message of recent Events, each with the time at which it was posted."""
    events: Budget = field(default_factory=lambda: Budget(*EVENTS))
    writes: Budget = field(default_factory=lambda: Budget(*WRITES))
    memo: Memo = field(default_factory=Memo)
    _spec: Any = None
    _job: DistributedTrainingJob | None = None

    def still_unanswered(self, children: Children) -> dict[str, str]:
        """Entropy of pods that may exist without being in the cache, by replica key. The next pod of such a replica
        gets the same name, so that there are never two."""
        pod_names = {name for kind, name in children.objects if kind is kinds.POD}
        self.unanswered = {key: pod for key, pod in self.unanswered.items() if pod[0] not in pod_names}
        return {key: entropy for key, (_, entropy) in self.unanswered.items()}

    def forget_spec(self) -> None:
        """Drop everything that was computed from the job's spec."""
        self._job, self._spec, self.memo = None, None, Memo()

    def parsed(self, body: Object) -> DistributedTrainingJob:
        """The job that an object describes. Its spec is the same object as long as the cache's is.

        Raises:
            tandem_operator.job_objects.InvalidSpec: it is not a valid job.
        """
        spec = body.get("spec")
        if self._job is None or spec is None or spec is not self._spec:
            self._job, self._spec = None, None
            self._job, self._spec = job_objects.parsed(body), spec
            return self._job
        return self._job.model_copy(update={"status": job_objects.status_of(body)})
