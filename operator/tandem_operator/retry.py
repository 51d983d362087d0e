"""Retries of a failed job in place: a user sets the annotation `tandem.dev/retry-at`, with a value that it did
not have before. Pure.

All its pods go, with the failures that they count. Then the job is Pending again, with one retry more, and its pods are
told another incarnation: by that the coordinator knows that what made the run fail is to be set aside, that the restart
budget is whole again, and that training goes on from the newest checkpoint.

The value that was seen last is kept in the status, as Flux keeps that of `reconcile.fluxcd.io/resetAt`. One that comes
while the job has not failed is seen, too, and has no effect: nobody is surprised by it weeks later.

Rejected: a field of the spec (a tool that applies Git again and again would take it back, and agents of a pinned image
would have to know it); making the job anew (its Events, its age and what waits for it are lost).
"""

from collections.abc import Mapping
from typing import Any

from tandem.formatting import rfc3339
from tandem.job import DistributedTrainingJob
from tandem.labels import RETRY_AT
from tandem.status import Condition, Status

REASON = "Retried"
MAX_VALUE = 64
"""Characters of the annotation that tell one from another."""


def asked(metadata: Mapping[str, Any]) -> str | None:
    """The annotation's value, as far as anybody needs it."""
    annotations = metadata.get("annotations")
    value = annotations.get(RETRY_AT) if isinstance(annotations, Mapping) else None
    return value[:MAX_VALUE] if isinstance(value, str) and value else None


def incarnation(job: DistributedTrainingJob, uid: str) -> str:
    """What tells the pods of one try from those of another, and from those of another job of that name."""
    retries = job.status.retries if job.status is not None else 0
    return f"{uid}.{retries}" if retries else uid


def begun_anew(old: Status, at: str, generation: int, now: float) -> Status:
    """The status with which a failed job is tried again.

    Args:
        at: the annotation's value.
        now: seconds since the epoch.
    """
    since, words = rfc3339(now), f"tried again, because {RETRY_AT} is {at}"

    def anew(one: Condition) -> Condition:
        changes = {"status": "False", "reason": REASON, "message": words, "last_transition_time": since}
        return one.model_copy(update={**changes, "observed_generation": generation})

    ended = {"Initialized", "Running", "Failed", "Ready", "Stalled"}
    return old.model_copy(
        update={
            "phase": "Pending",
            "conditions": [anew(one) if one.type in ended else one for one in old.conditions],
            "observed_generation": generation,
            "completion_time": None,
            "message": words,
            "retries": old.retries + 1,
            "retried_at": at,
        }
    )
