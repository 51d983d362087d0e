"""The reasons of a job's conditions and Events, one word each. docs/operator.md explains them.

Kubernetes' own reasons (`ImagePullBackOff`, …) and those of problems (tandem.wire.status) occur as well.
"""

from enum import StrEnum


class Reason(StrEnum):
    """A reason of Tandem's own."""

    # The operator does nothing about the job.
    INVALID_SPEC = "InvalidSpec"
    PROCESSES_CHANGED = "ProcessesChanged"
    TEMPLATE_REFUSED = "TemplateRefused"
    NO_ROOM = "NoRoom"
    INTERNAL_ERROR = "InternalError"
    # The job does not get what it needs.
    QUOTA_EXCEEDED = "QuotaExceeded"
    REFUSED = "Refused"
    NAME_TAKEN = "NameTaken"
    NOT_QUEUED = "NotQueued"
    QUEUED = "Queued"
    PARTLY_ADMITTED = "PartlyAdmitted"
    GAVE_WAY = "GaveWay"
    POD_REJECTED = "PodRejected"
    LIMIT_EXCEEDED = "LimitExceeded"
    NOT_BEGUN = "NotBegun"
    EVALUATOR_FAILED = "EvaluatorFailed"
    # The job gets on.
    COORDINATOR_STARTS = "CoordinatorStarts"
    COORDINATOR_ANSWERED = "CoordinatorAnswered"
    SAVING = "Saving"
    RESUMED = "Resumed"
    WELL = "Well"
    RETRIED = "Retried"
    # Training is complete: with all steps, with fewer than were announced, or with checkpoints that have no scores.
    COMPLETED = "Completed"
    STOPPED_EARLY = "StoppedEarly"
    EVALUATION_UNFINISHED = "EvaluationUnfinished"
    # The job has failed.
    DOES_NOT_START = "DoesNotStart"
    DEADLINE_EXCEEDED = "DeadlineExceeded"
    REPEATED_FAILURE = "RepeatedFailure"
    RESTARTS_EXHAUSTED = "RestartsExhausted"
    INVALID_CONFIGURATION = "InvalidConfiguration"
    CHECKPOINT_DOES_NOT_FIT = "CheckpointDoesNotFit"
    CHECKPOINTS_DAMAGED = "CheckpointsDamaged"
    DIVERGED = "Diverged"
    HUNG = "Hung"
    NUMBERS_WRONG = "NumbersWrong"
    TRAINING_FAILED = "TrainingFailed"


CONFIGURATION_ERROR = "ConfigurationError"
"""Reason in FAILED.json of a job whose configuration is wrong."""

RECORDED_REASONS = {
    CONFIGURATION_ERROR: Reason.INVALID_CONFIGURATION,
    **{
        str(reason): reason
        for reason in (
            *(Reason.REPEATED_FAILURE, Reason.RESTARTS_EXHAUSTED, Reason.INVALID_CONFIGURATION, Reason.DOES_NOT_START),
            *(Reason.CHECKPOINT_DOES_NOT_FIT, Reason.CHECKPOINTS_DAMAGED, Reason.DIVERGED, Reason.HUNG),
            Reason.NUMBERS_WRONG,
        )
    },
}
"""Reasons of a failure, by the reason in FAILED.json."""
