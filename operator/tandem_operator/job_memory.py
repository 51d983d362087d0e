"""What is kept of a job between two looks, only to save requests and work; all of it can be lost.

A thousand jobs are looked at two hundred times a second, and of most nothing has changed but a step: what follows from
a job's spec and little else, a dozen objects and their hashes, is computed once.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, TypeVar

from tandem.job import DistributedTrainingJob, Spec
from tandem_operator import observed
from tandem_operator.attempts import Attempts
from tandem_operator.observed import Object

T = TypeVar("T")
MOST_VALUES = 16
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
        self._found = [*self._found[1 - MOST_VALUES :], (key, made)]
        return made


@dataclass
class JobMemory:
    """Of one job."""

    uid: str
    written: float = 0.0
    """When the status was written last."""
    attempts: Attempts = field(default_factory=dict)
    """What was tried and has not come to rest."""
    told: dict[tuple[str, str], float] = field(default_factory=dict)
    """Reason and message of the last Events, and when each was posted."""
    memo: Memo = field(default_factory=Memo)
    _spec: Any = None
    _job: DistributedTrainingJob | None = None

    def parsed(self, body: Object) -> DistributedTrainingJob:
        """The job that an object says, with a spec that is the same object as long as the cache's is.

        Raises:
            tandem_operator.observed.InvalidSpec: it says none.
        """
        spec = body.get("spec")
        if self._job is None or spec is None or spec is not self._spec:
            self._job, self._spec = None, spec
            self._job = observed.parsed(body)
            return self._job
        return self._job.model_copy(update={"status": observed.status_of(body)})
