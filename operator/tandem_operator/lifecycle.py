"""The lifecycle of a job: whether it trains, drains, is suspended, or ends. Pure.

    train      every place in the group is filled again and again
    drain      training is complete: workers go by themselves, evaluators finish what is left, within limits
    suspend    workers save and leave, then the coordinator goes; the volume stays
    end        nothing more is made; what still runs is ended: workers, then evaluators, then the coordinator

Where it has ended, `status.phase` remembers: Succeeded and Failed are never left again. A job drains once the
coordinator has said so, or `status.phase` remembers that it did.

What ends a job is what somebody said, and never that nobody answered: a failure that a rank or the coordinator has
recorded, as the coordinator tells it; a deadline; or pods that cannot start, if fewer than `minReplicas` other places
remain, and only while the coordinator says over several looks that nobody trains. The exit code of one pod
alone ends nothing: the rest may train on without it.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

from tandem.exitcode import ExitCode
from tandem.formatting import seconds
from tandem.job import DistributedTrainingJob
from tandem.reasons import RECORDED, Reason
from tandem.status import STOPPED_EARLY, Condition, Phase, Snapshot, Status
from tandem_operator import replicas
from tandem_operator.observed import Pod

LAST_WORDS_SECONDS = 30.0
"""How long to wait for the coordinator's last word once the evaluators are done."""
IDLE_SECONDS, IDLE_ANSWERS = 30.0, 3
"""How long, and how often, a coordinator has to say that nobody trains. A group that has lost a member is another one
within a few seconds, and one whose coordinator has restarted is adopted in as many."""

FINISHING = "; evaluators finish what is left"
"""What follows in the message after the words of training that is over."""

_TOLD_TO_NOBODY = (Reason.DEADLINE_EXCEEDED, Reason.DOES_NOT_START)
"""Reasons of ends that are decided here."""

Stage = Literal["train", "drain", "suspend", "end"]

_REASONS = {
    ExitCode.DIVERGED: Reason.DIVERGED,
    ExitCode.HUNG: Reason.HUNG,
    ExitCode.CONFIGURATION: Reason.INVALID_CONFIGURATION,
}
"""Reasons by exit code, used when a coordinator of the previous version gives no reason."""


@dataclass(frozen=True)
class Lifecycle:
    """What is to become of a job."""

    stage: Stage
    phase: Phase | None = None
    """None: whatever the coordinator says."""
    reason: str = ""
    """One CamelCase word."""
    message: str = ""
    at_once: bool = False
    """Workers need no time to end by themselves: nobody has told them that it is over."""


@dataclass(frozen=True)
class Idle:
    """That nobody trains, as the coordinator has said since then."""

    generation: int
    """The last one there was; 0 before the first."""
    since: float
    """Seconds since the epoch."""
    answers: int = 1

    def lasts(self, now: float) -> bool:
        """Whether it was said often enough, and for long enough, to act on."""
        return self.answers >= IDLE_ANSWERS and now - self.since >= IDLE_SECONDS


def idle(before: Idle | None, heard: Snapshot | None, now: float) -> Idle | None:
    """What is known of it after one more question. Silence adds nothing and takes nothing away: a group that was there
    meanwhile has left its number."""
    if heard is None:
        return before
    if heard.status.world_size is not None:
        return None
    generation = heard.status.generation or 0
    if before is None or before.generation != generation:
        return Idle(generation, now)
    return replace(before, answers=before.answers + 1)


def lifecycle_of(
    job: DistributedTrainingJob,
    heard: Snapshot | None,
    nobody_trains: bool,
    workers: Sequence[Pod],
    stuck: Sequence[Pod],
    evaluators: Sequence[Pod],
    now: float,
) -> Lifecycle:
    """What is to become of the job.

    Args:
        heard: what the coordinator said just now, None if it did not answer.
        nobody_trains: so it has said for a while.
        stuck: the last pods of places that cannot be filled.
        evaluators: all of their pods, oldest first.
    """
    old = job.status or Status()
    if old.phase in ("Succeeded", "Failed"):
        return _remembered(old)
    complete = old.phase == "Draining" or (heard is not None and heard.status.phase in ("Draining", "Succeeded"))
    if not complete and (failure := _failure(job, heard, nobody_trains, workers, stuck, now)) is not None:
        return failure
    if complete:
        return _drain(job, old, heard, evaluators, now)
    if _is_through(job, workers):
        return Lifecycle("end", "Succeeded", "Completed", "every worker has ended with exit code 0")
    if job.spec.run_policy.suspend:
        # One that is lost with its node does neither.
        saving = [pod for pod in workers if not (pod.ended or pod.silent)]
        if saving:
            return Lifecycle("suspend", "Suspended", "Saving", f"{len(saving)} workers save and leave")
        return Lifecycle("suspend", "Suspended", "Suspended", "suspended by runPolicy.suspend")
    return Lifecycle("train")


def drained(job: DistributedTrainingJob, heard: Snapshot | None, ended: float) -> float:
    """Until when evaluators are waited for after training, if they do not get on: a job whose evaluators find no place
    must still end.

    Args:
        ended: when training did.
    """
    said = [status.evaluated_at for status in (job.status, heard.status if heard is not None else None) if status]
    return max(ended, *(seconds(stamp) or 0.0 for stamp in said), 0.0) + job.spec.evaluation.drain_seconds


def begins_again(heard: Snapshot | None) -> bool:
    """Whether the script of the user's own that has ended well in some places is to do so again: the group in which it
    did was not complete, and another one is there, or waits for replicas that have gone."""
    return heard is not None and heard.finished == 0


def deadline(job: DistributedTrainingJob) -> float | None:
    """When the job is to end as failed, seconds since the epoch. Its time begins when its coordinator has answered for
    the first time, with a queue when its first group has started, and again after a suspension."""
    limit = job.spec.run_policy.active_deadline_seconds
    began = condition(job.status, "Initialized")
    if limit is None or began is None or not is_initialized(job.status) or job.spec.run_policy.suspend:
        return None
    resumed = condition(job.status, "Suspended")
    stamps = [began.last_transition_time, resumed.last_transition_time if resumed is not None else None]
    if job.spec.run_policy.queue_name is not None:
        if job.status is None or job.status.start_time is None:
            return None
        # Of an earlier job on the same volume it may be, and then older than this one.
        stamps.append(job.status.start_time)
    return max(seconds(stamp) or 0.0 for stamp in stamps) + limit


def condition(status: Status | None, kind: str) -> Condition | None:
    """One condition of a status."""
    return next((one for one in (status.conditions if status else []) if one.type == kind), None)


def is_initialized(status: Status | None) -> bool:
    """Whether the job's coordinator has ever answered."""
    state = condition(status, "Initialized")
    return state is not None and state.status == "True"


def _remembered(old: Status) -> Lifecycle:
    kind = "Failed" if old.phase == "Failed" else "Complete"
    why = condition(old, kind)
    reason, message = (why.reason, why.message) if why is not None else ("", "")
    return Lifecycle("end", old.phase, reason, message, at_once=reason in _TOLD_TO_NOBODY)


def _failure(
    job: DistributedTrainingJob,
    heard: Snapshot | None,
    nobody_trains: bool,
    workers: Sequence[Pod],
    stuck: Sequence[Pod],
    now: float,
) -> Lifecycle | None:
    if heard is not None and heard.status.phase == "Failed":
        codes = {pod.code for pod in workers if pod.ended}
        reasons = (reason for code, reason in _REASONS.items() if heard.reason is None and code in codes)
        # What a coordinator says is a tenant's to write.
        known = RECORDED.get(heard.reason or "") or next(reasons, Reason.TRAINING_FAILED)
        return Lifecycle("end", "Failed", known, heard.status.message or "the coordinator says no more")
    limit = deadline(job)
    if limit is not None and now >= limit:
        words = f"its {job.spec.run_policy.active_deadline_seconds} s (activeDeadlineSeconds) have passed"
        return Lifecycle("end", "Failed", Reason.DEADLINE_EXCEEDED, words, at_once=True)
    others = job.spec.workers.replicas - len(stuck)
    if stuck and nobody_trains and others < job.spec.fewest_workers:
        pod = stuck[0]
        words = f"{pod.name} ended soon after its start like {pod.failures} before it{_ending(pod)}"
        return Lifecycle("end", "Failed", Reason.DOES_NOT_START, words, at_once=True)
    return None


def _ending(pod: Pod) -> str:
    code = f", with exit code {pod.code}" if pod.code is not None else ""
    return f"{code}: {pod.words}" if pod.words else code


def _drain(
    job: DistributedTrainingJob, old: Status, heard: Snapshot | None, evaluators: Sequence[Pod], now: float
) -> Lifecycle:
    ended = seconds(old.completion_time or (heard.status.completion_time if heard is not None else None)) or now
    said = heard is not None and heard.status.phase == "Succeeded"
    reason, trained = _completion(old, heard)
    if job.spec.evaluation.processes == 0:
        return Lifecycle("end", "Succeeded", reason, trained)
    if replicas.is_done(evaluators, job.spec.evaluation.replicas) and (said or now - ended > LAST_WORDS_SECONDS):
        return Lifecycle("end", "Succeeded", reason, f"{trained}, and its checkpoints are evaluated")
    if now > drained(job, heard, ended):
        words = f"{trained}; for {job.spec.evaluation.drain_seconds:g} s its evaluators have not got on"
        return Lifecycle("end", "Succeeded", "EvaluationUnfinished", words, at_once=True)
    reason = "Draining" if reason == "Completed" else reason
    return Lifecycle("drain", "Draining", reason, trained + FINISHING)


def _completion(old: Status, heard: Snapshot | None) -> tuple[str, str]:
    """The reason and the words of training that is over, also once its coordinator is gone."""
    if heard is not None and heard.reason == Reason.STOPPED_EARLY:
        return Reason.STOPPED_EARLY, heard.status.message or STOPPED_EARLY
    if heard is None and (old.message or "").startswith(STOPPED_EARLY):
        return Reason.STOPPED_EARLY, (old.message or "").removesuffix(FINISHING)
    return "Completed", "training is complete"


def _is_through(job: DistributedTrainingJob, workers: Sequence[Pod]) -> bool:
    """Whether a script of the user's own has ended well in every place: nobody else knows when it is complete."""
    return job.spec.trainer.command is not None and replicas.is_done(workers, job.spec.workers.replicas)
