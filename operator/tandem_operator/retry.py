"""Retries of a failed job in place: a user sets the annotation `tandem.dev/retry-at` to a value that it did not have
before. Pure.

All pods of the job are deleted, and with them the failures that they count. Then the job is Pending again, its retry
count is one higher, and its pods get a new incarnation. From that the coordinator knows that the failed run's cause is
to be set aside, that the restart budget is full again, and that training resumes from the newest checkpoint.

The status keeps the last value seen, as Flux keeps that of `reconcile.fluxcd.io/resetAt`. A value that is set while the
job has not failed is recorded, too, and has no effect, so it cannot surprise anybody weeks later.

Rejected: a field of the spec (a tool that applies Git again and again would revert it, and agents of a pinned image
would have to know it); recreating the job (its Events, its age and everything that waits for it are lost).
"""

from collections.abc import Mapping
from typing import Any

from tandem.formatting import rfc3339
from tandem.job.labels import RETRY_AT
from tandem.job.resource import DistributedTrainingJob
from tandem.wire.reasons import Reason
from tandem.wire.status import Condition, Status

MAX_VALUE_LENGTH = 64
"""Maximum length of the annotation's value that is compared, in characters."""


def requested_retry(metadata: Mapping[str, Any]) -> str | None:
    """The value of the retry annotation, cut to the compared length; None if it is not set."""
    annotations = metadata.get("annotations")
    value = annotations.get(RETRY_AT) if isinstance(annotations, Mapping) else None
    return value[:MAX_VALUE_LENGTH] if isinstance(value, str) and value else None


def incarnation(job: DistributedTrainingJob, uid: str) -> str:
    """Identifier that distinguishes the pods of one retry from those of another, and from those of an earlier job of
    the same name."""
    retries = job.status.retries if job.status is not None else 0
    return f"{uid}.{retries}" if retries else uid


def restarted_status(old: Status, value: str, generation: int, now: float) -> Status:
    """The status with which a failed job starts again.

    Args:
        value: the annotation's value.
        now: seconds since the epoch.
    """
    since, message = rfc3339(now), f"tried again, because {RETRY_AT} is {value}"

    def cleared(condition: Condition) -> Condition:
        changes = {"status": "False", "reason": Reason.RETRIED, "message": message, "last_transition_time": since}
        return condition.model_copy(update={**changes, "observed_generation": generation})

    # Conditions that describe the failed attempt; all others stay as they are.
    reset_types = {"Initialized", "Running", "Failed", "Ready", "Stalled"}
    # The higher count changes the incarnation, so no pod of the failed attempt is taken for one of the new one.
    return old.model_copy(
        update={
            "phase": "Pending",
            "conditions": [
                cleared(condition) if condition.type in reset_types else condition for condition in old.conditions
            ],
            "observed_generation": generation,
            "completion_time": None,
            "message": message,
            "retries": old.retries + 1,
            "retried_at": value,
        }
    )
