"""The lifecycle of a job: whether it trains, drains, is suspended, or ends. Pure.

    train      every replica of the group is replaced whenever it is lost
    drain      training is complete: workers end by themselves, evaluators finish the rest, within limits
    suspend    workers save and leave, then the coordinator is deleted; the volume stays
    end        nothing more is created; what still runs is deleted: workers, then evaluators, then the coordinator

`status.phase` records the end: Succeeded and Failed are final. A job drains once the coordinator has reported that
training is complete, or `status.phase` records that it did.

A job ends because of a statement, and never because of silence: a failure that a rank or the coordinator has recorded,
as the coordinator reports it; a deadline; or pods that cannot start, if fewer than `minReplicas` other replicas remain,
and only while the coordinator reports over several polls that nobody trains. The exit code of one pod alone ends
nothing: the others may train on without it.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

from tandem.formatting import count_noun, parse_rfc3339
from tandem.job.resource import DistributedTrainingJob
from tandem.model import MAX_TIMESTAMP
from tandem.wire.reasons import RECORDED_REASONS, Reason
from tandem.wire.status import STOPPED_EARLY, Condition, Phase, Snapshot, Status
from tandem_operator import replicas
from tandem_operator.observed import Pod
from tandem_operator.replicas import RolePlan
from tandem_operator.stand_ins import have_evaluated

LAST_ANSWER_SECONDS = 30.0
"""Time to wait for the coordinator's last answer once the evaluators are done."""
IDLE_SECONDS, IDLE_ANSWERS = 30.0, 3
"""Time for which, and number of answers in which, a coordinator has to report an idle group. A group that has lost a
member is replaced within a few seconds, and a restarted coordinator adopts its group in as many."""

FINISHING = "; evaluators finish what is left"
"""Suffix of the message while evaluators finish after training."""

_DECIDED_HERE = (Reason.DEADLINE_EXCEEDED, Reason.DOES_NOT_START)
"""Reasons of ends that the operator decides, of which workers do not know."""

Stage = Literal["train", "drain", "suspend", "end"]


@dataclass(frozen=True)
class Lifecycle:
    """The stage of a job, and the phase and reason to report."""

    stage: Stage
    phase: Phase | None = None
    """None: the phase that the coordinator reports."""
    reason: str = ""
    """One CamelCase word."""
    message: str = ""
    immediate: bool = False
    """Workers get no grace period, because nobody has told them that the job is over."""


@dataclass(frozen=True)
class Idle:
    """The period for which the coordinator has reported that nobody trains."""

    generation: int
    """The last generation before it; 0 before the first."""
    since: float
    """Time of the first such answer, seconds since the epoch."""
    answers: int = 1

    def lasts(self, now: float) -> bool:
        """Whether it was reported often enough, and for long enough, to act on."""
        return self.answers >= IDLE_ANSWERS and now - self.since >= IDLE_SECONDS


def idle(before: Idle | None, snapshot: Snapshot | None, now: float) -> Idle | None:
    """The idle period after one more poll. An unanswered poll changes nothing: a group that existed meanwhile has left
    a new generation number."""
    if snapshot is None:
        return before
    if snapshot.status.world_size is not None:
        return None
    generation = snapshot.status.generation or 0
    if before is None or before.generation != generation:
        return Idle(generation, now)
    return replace(before, answers=before.answers + 1)


def lifecycle_of(
    job: DistributedTrainingJob,
    snapshot: Snapshot | None,
    nobody_trains: bool,
    workers: Sequence[Pod],
    plan: RolePlan,
    evaluators: Sequence[Pod],
    now: float,
) -> Lifecycle:
    """Decide the stage of a job.

    Args:
        snapshot: the coordinator's answer to the last poll; None if it did not answer.
        nobody_trains: the coordinator has reported an idle group for a while.
        plan: what to do about the workers.
        evaluators: all evaluator pods, oldest first.
    """
    old = job.status or Status()
    # Final phases are never left, whatever a coordinator reports later.
    if old.phase in ("Succeeded", "Failed"):
        return _remembered(old)
    complete = old.phase == "Draining" or (snapshot is not None and snapshot.status.phase in ("Draining", "Succeeded"))
    if not complete and (failure := _failure(job, snapshot, nobody_trains, workers, plan, now)) is not None:
        return failure
    # Completed training outlasts suspension: there is nothing left to suspend.
    if complete:
        return _drain(job, old, snapshot, evaluators, now)
    if _is_finished(job, workers, plan):
        return Lifecycle("end", "Succeeded", Reason.COMPLETED, "every worker has ended with exit code 0")
    if job.spec.run_policy.suspend:
        # A worker that is lost with its node does neither.
        saving = [pod for pod in workers if not (pod.ended or pod.silent)]
        if saving:
            return Lifecycle(
                "suspend",
                "Suspended",
                Reason.SAVING,
                f"waiting for {count_noun(len(saving), 'worker')} to save and leave",
            )
        return Lifecycle("suspend", "Suspended", "Suspended", "suspended by runPolicy.suspend")
    return Lifecycle("train")


def drain_deadline(job: DistributedTrainingJob, snapshot: Snapshot | None, ended: float) -> float:
    """Time until which the job waits for evaluators that make no progress after training, seconds since the epoch: a
    job whose evaluators find no node must still end.

    Args:
        ended: end of training, seconds since the epoch.
    """
    statuses = [
        status.evaluated_at for status in (job.status, snapshot.status if snapshot is not None else None) if status
    ]
    return max(ended, *(parse_rfc3339(stamp) or 0.0 for stamp in statuses), 0.0) + job.spec.evaluation.drain_seconds


def script_restarts(snapshot: Snapshot | None) -> bool:
    """Whether a user's own script that has ended well in some replicas has to run again: its group was not complete,
    and another one is formed, or waits for replicas that have gone."""
    return snapshot is not None and snapshot.finished == 0


def deadline(job: DistributedTrainingJob) -> float | None:
    """Time at which the job fails because of activeDeadlineSeconds, seconds since the epoch. It is counted from the
    coordinator's first answer, in a queue from the start of the first group, and again after a suspension."""
    limit = job.spec.run_policy.active_deadline_seconds
    initialized = find_condition(job.status, "Initialized")
    if limit is None or initialized is None or not is_initialized(job.status) or job.spec.run_policy.suspend:
        return None
    resumed = find_condition(job.status, "Suspended")
    stamps = [initialized.last_transition_time, resumed.last_transition_time if resumed is not None else None]
    if job.spec.run_policy.queue_name is not None:
        if job.status is None or job.status.start_time is None:
            return None
        # The start time may be that of an earlier job on the same volume, and then it is older than the other stamps.
        stamps.append(job.status.start_time)
    # A whole number may be too large for a time.
    return max(parse_rfc3339(stamp) or 0.0 for stamp in stamps) + min(limit, MAX_TIMESTAMP)


def find_condition(status: Status | None, kind: str) -> Condition | None:
    """One condition of a status, None if it is not there."""
    return next((candidate for candidate in (status.conditions if status else []) if candidate.type == kind), None)


def is_initialized(status: Status | None) -> bool:
    """Whether the job's coordinator has ever answered."""
    state = find_condition(status, "Initialized")
    return state is not None and state.status == "True"


def _remembered(old: Status) -> Lifecycle:
    kind = "Failed" if old.phase == "Failed" else "Complete"
    last = find_condition(old, kind)
    reason, message = (last.reason, last.message) if last is not None else ("", "")
    return Lifecycle("end", old.phase, reason, message, immediate=reason in _DECIDED_HERE)


def _failure(
    job: DistributedTrainingJob,
    snapshot: Snapshot | None,
    nobody_trains: bool,
    workers: Sequence[Pod],
    plan: RolePlan,
    now: float,
) -> Lifecycle | None:
    # The coordinator's own report comes first, because it knows the cause.
    if snapshot is not None and snapshot.status.phase == "Failed":
        # A tenant controls what a coordinator reports, so only known reasons are taken over.
        reason = RECORDED_REASONS.get(snapshot.reason or "", Reason.TRAINING_FAILED)
        return Lifecycle("end", "Failed", reason, snapshot.status.message or "the coordinator gives no further reason")
    limit = deadline(job)
    if limit is not None and now >= limit:
        message = f"it has run for longer than activeDeadlineSeconds ({job.spec.run_policy.active_deadline_seconds} s)"
        return Lifecycle("end", "Failed", Reason.DEADLINE_EXCEEDED, message, immediate=True)
    # Replicas that cannot start end the job only if the others are too few, and while nobody trains: a group that
    # trains is never ended from outside.
    startable = len(plan.indices) - len(plan.stuck)
    if plan.stuck and nobody_trains and startable < job.spec.fewest_workers:
        pod = plan.stuck[0]
        message = (
            f"{pod.name} ended soon after its start, as did {count_noun(pod.failures, 'pod')} before it{_ending(pod)}"
        )
        return Lifecycle("end", "Failed", Reason.DOES_NOT_START, message, immediate=True)
    return None


def _ending(pod: Pod) -> str:
    code = f", with exit code {pod.code}" if pod.code is not None else ""
    return f"{code}: {pod.message}" if pod.message else code


def _drain(
    job: DistributedTrainingJob, old: Status, snapshot: Snapshot | None, evaluators: Sequence[Pod], now: float
) -> Lifecycle:
    ended = (
        parse_rfc3339(old.completion_time or (snapshot.status.completion_time if snapshot is not None else None)) or now
    )
    is_final = snapshot is not None and snapshot.status.phase == "Succeeded"
    reason, trained = _completion(old, snapshot)
    # Without evaluators there is nothing to wait for.
    if job.spec.evaluation.processes == 0:
        return Lifecycle("end", "Succeeded", reason, trained)
    # The coordinator gets a moment to report the last evaluations, so that the final status has them.
    evaluated = max(ended, *(pod.finished or 0.0 for pod in evaluators), 0.0)
    if have_evaluated(evaluators, job.spec.evaluation) and (is_final or now - evaluated > LAST_ANSWER_SECONDS):
        return Lifecycle("end", "Succeeded", reason, f"{trained}, and its checkpoints are evaluated")
    if now > drain_deadline(job, snapshot, ended):
        message = f"{trained}; its evaluators made no progress for {job.spec.evaluation.drain_seconds:g} s"
        return Lifecycle("end", "Succeeded", Reason.EVALUATION_UNFINISHED, message, immediate=True)
    reason = "Draining" if reason == Reason.COMPLETED else reason
    return Lifecycle("drain", "Draining", reason, trained + FINISHING)


def _completion(old: Status, snapshot: Snapshot | None) -> tuple[str, str]:
    """Reason and message of completed training, also once its coordinator is gone."""
    if snapshot is not None and snapshot.reason == Reason.STOPPED_EARLY:
        return Reason.STOPPED_EARLY, snapshot.status.message or STOPPED_EARLY
    if snapshot is None and (old.message or "").startswith(STOPPED_EARLY):
        return Reason.STOPPED_EARLY, (old.message or "").removesuffix(FINISHING)
    return Reason.COMPLETED, "training is complete"


def _is_finished(job: DistributedTrainingJob, workers: Sequence[Pod], plan: RolePlan) -> bool:
    """Whether a user's own script has ended well in every replica, and none is left that its queue has taken back:
    nothing else knows when it is complete."""
    if any(not pod.ended and pod.index not in plan.indices for pod in workers):
        return False
    return job.spec.trainer.command is not None and replicas.is_done(workers, plan.indices)
