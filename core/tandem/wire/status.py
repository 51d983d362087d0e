"""The status of a running job: produced by the coordinator, shown by the CLI, copied into the resource's status.

A number that is not known yet is absent, never 0.
"""

import errno
import os
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Annotated, Any, Final, Literal, get_args

from pydantic import Field

from tandem.formatting import count_noun, number
from tandem.model import MessageText, Model, PlainName, WholeNumber, truncated_to
from tandem.wire.ledger import Ledger
from tandem.wire.measures import Generation
from tandem.wire.queue_view import QueueView

Phase = Literal["Pending", "Starting", "Running", "Restarting", "Draining", "Suspended", "Succeeded", "Failed"]

Word = Annotated[str, truncated_to(316)]
"""A name, a reason, a time."""

RESTART_DELAY_PREFIX = "starts again in "
"""Start of the part of a message that gives the delay until the next group, after consecutive failures."""

STOPPED_EARLY = "stopped early"
"""Start of the message of a run that is complete with fewer steps than announced; the reason follows."""
LEFT_LOOP = "the script left its loop"
"""Reason of an early end for which the script gives none."""

KSTATUS = ("Ready", "Reconciling", "Stalled")
"""Condition types that kstatus, and with it Flux, evaluates: Stalled is failed, Reconciling or not Ready is in
progress, Ready is current. They repeat the other conditions, so views for people omit them."""


class Condition(Model):
    """One condition of the job, as in other Kubernetes resources."""

    type: Annotated[str, Field(min_length=1, max_length=316)]
    """Type of the condition: Initialized, Running, Restarting, Suspended, Complete, Failed, Degraded; for kstatus
    Ready, Reconciling and Stalled; or another writer's."""
    status: Literal["True", "False", "Unknown"]
    """Status of the condition."""
    reason: Word = ""
    """One CamelCase word."""
    message: MessageText = ""
    """A sentence for people."""
    observed_generation: WholeNumber | None = None
    """The metadata.generation that the condition describes."""
    last_transition_time: Word | None = None
    """Time of the last change of `status`, RFC 3339."""


def _summary(members: dict[str, Any]) -> str:
    return f"{members.get('ready')}/{members.get('desired')}"


class Members(Model):
    """Replicas of one kind."""

    desired: WholeNumber
    """Desired number."""
    ready: WholeNumber
    """Number that are ready."""
    min: WholeNumber | None = None
    """Minimum number to train with."""
    max: WholeNumber | None = None
    """Maximum number."""
    summary: Word = Field(default_factory=_summary)
    """ready/desired in one word, for `kubectl get`; filled in automatically."""


class Progress(Model):
    """Progress of training."""

    step: WholeNumber
    """Optimizer steps completed."""
    total_steps: WholeNumber | None = None
    """Optimizer steps of the whole run."""
    epoch: float | None = None
    """Passes over the data, with the fraction of the current one."""
    percent: float | None = None
    """0 to 100."""
    remaining_seconds: float | None = None
    """Estimate from the recent throughput."""


class Utilization(Model):
    """Busy share of what the processes could use, 0 to 1 for each core or GPU."""

    trainer_cpu: float | None = None
    """Busy cores of all training processes together."""
    evaluator_cpu: float | None = None
    """Busy cores of all evaluator processes together."""
    gpu: float | None = None
    """Mean GPU utilization, 0 to 1."""
    gpu_memory_bytes: WholeNumber | None = None
    """GPU memory in use over all ranks."""


class Straggler(Model):
    """A rank that is slower than the others, which all wait for it."""

    rank: WholeNumber
    """Global rank."""
    replica: Word
    """Its replica."""
    ratio: float
    """Its own work time in a step over the median of all ranks."""


CorruptionKind = Literal["RanksDiffer", "SamplesDiffer", "OptimizerDiffers", "GradientsDiffer", "ScoresDiffer"]
"""Kind of a comparison that finds wrong numbers."""


class Corruption(Model):
    """Numbers of the run that are wrong, found by a comparison."""

    reason: Word
    """Kind of the comparison, one of CORRUPTIONS."""
    count: WholeNumber = 1
    """Number of times that it found a difference."""
    message: Annotated[str, truncated_to(600)] = ""
    """Description of the newest difference, with rank and replica, or evaluator."""


class Troubles(Model):
    """Problems that did not end the job, counted since its coordinator started."""

    saves_failed: WholeNumber = 0
    """Checkpoints that could not be written."""
    saves_failed_in_a_row: WholeNumber = 0
    """Checkpoints that could not be written since the last successful save."""
    save_message: Annotated[str, truncated_to(300)] = ""
    """Reason for the last failure, while saves fail."""
    evaluations_failed: WholeNumber = 0
    """Checkpoints that an evaluator could not evaluate."""
    evaluation_message: Annotated[str, truncated_to(300)] = ""
    """Reason for the last failure, while no newer checkpoint has been evaluated."""
    evaluations_skipped: WholeNumber = 0
    """Checkpoints that evaluators skipped, over the whole run."""
    lines_lost: WholeNumber = 0
    """Log lines that could not be written."""
    rewinds: WholeNumber = 0
    """Times the loss became useless and training went back, over the whole run."""
    batches_left_out: WholeNumber = 0
    """Batches that are skipped because of rewinds."""
    micro_batches_halved: WholeNumber = 0
    """Times a micro-batch did not fit into memory and was halved, since the job's memory settings last changed."""
    micro_batch: WholeNumber | None = None
    """Maximum number of samples in a forward pass, once it was halved."""
    samples_message: Annotated[str, truncated_to(300)] = ""
    """Description of the samples of the training data that nothing is learned from, if there are any."""
    exclusion_message: Annotated[str, truncated_to(300)] = ""
    """Description of the workers and nodes that the group goes on without, since it failed because of them."""
    worse_than_base: WholeNumber = 0
    """Number of newest evaluated checkpoints, if all are worse than the base model; 0 unless they are enough to
    decide."""
    base_message: Annotated[str, truncated_to(300)] = ""
    """Description of how they are worse."""
    weights_unchanged: WholeNumber = 0
    """Number of newest checkpoints whose weights are those of the one before, although steps were taken."""
    weights_message: Annotated[str, truncated_to(300)] = ""
    """Description of them."""
    corruptions: Annotated[list[Corruption], truncated_to(8)] = []
    """Numbers that are wrong, one entry for each kind."""
    tracking_message: Annotated[str, truncated_to(300)] = ""
    """Reason for which the tracking server lacks data, while it does."""
    upload_message: Annotated[str, truncated_to(300)] = ""
    """Reason for which the bucket lacks data, while it does."""


class CheckpointRef(Model):
    """A committed checkpoint."""

    name: PlainName
    """Its folder's name, for instance step-000000500."""
    step: WholeNumber
    """Step after which it was saved."""
    generation: WholeNumber
    """The generation that wrote it."""

    @property
    def age(self) -> tuple[int, int]:
        """Sort key by age, the oldest first. Among checkpoints on the lineage, those of the newest generation are the
        newest."""
        return self.generation, self.step


class Score(Model):
    """The merged evaluation of one checkpoint."""

    name: Word
    """The checkpoint's name."""
    step: WholeNumber
    """The checkpoint's step."""
    metric: Word
    """The metric of `value`."""
    value: float
    """The score."""
    low: float | None = None
    """Lower end of its 95 % confidence interval; absent if that is not known."""
    high: float | None = None
    """Upper end of its 95 % confidence interval; absent if that is not known."""
    tied: WholeNumber | None = None
    """Number of other checkpoints whose score does not differ from that of the best by more than chance; absent if
    that is not known, and for other checkpoints."""


class Compared(Model):
    """A metric of the base model and of a checkpoint."""

    metric: Word
    """The metric."""
    base: float
    """Value of the model that training began with."""
    value: float | None = None
    """Value of the best checkpoint; absent while there is none."""


class ProvenanceHead(Model):
    """The end of a run's hash chain (tandem.rundir.provenance), as seen outside of the run directory."""

    entries: WholeNumber
    """Number of entries."""
    head: Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]
    """SHA-256 of the last entry, which stands for all of them."""


class Status(Model):
    """The state of a DistributedTrainingJob."""

    phase: Phase = "Pending"
    """Phase of the job."""
    conditions: Annotated[
        list[Condition],
        truncated_to(64),
        Field(json_schema_extra={"x-kubernetes-list-type": "map", "x-kubernetes-list-map-keys": ["type"]}),
    ] = []
    """Conditions, each with its reason."""
    observed_generation: WholeNumber | None = None
    """The metadata.generation that this status describes."""
    selector: str | None = None
    """Label selector of the worker pods, for autoscalers."""
    workers: Members | None = None
    """The training group."""
    evaluators: Members | None = None
    """The evaluator processes."""
    queue: QueueView | None = None
    """The queue that admits the workers."""
    world_size: WholeNumber | None = None
    """Number of ranks in the current generation."""
    generation: WholeNumber | None = None
    """Number of the current membership."""
    restarts: WholeNumber = 0
    """Number of generations that were formed after a failure or a loss."""
    retries: int = 0
    """Number of times that the failed job was retried."""
    retried_at: str | None = None
    """Last observed value of the annotation `tandem.dev/retry-at`; another value retries a failed job."""
    progress: Progress | None = None
    """Progress of training."""
    loss: float | None = None
    """Training loss of the last step that has one."""
    throughput: float | None = None
    """Samples a second over all ranks."""
    utilization: Utilization | None = None
    """Processor use."""
    stragglers: Annotated[list[Straggler], truncated_to(20)] = []
    """Ranks that have been much slower than the others for a while."""
    latest_checkpoint: CheckpointRef | None = None
    """The newest committed checkpoint."""
    latest_evaluation: Score | None = None
    """The evaluation of the newest evaluated checkpoint."""
    best_checkpoint: Score | None = None
    """The checkpoint with the best score."""
    against_base: Annotated[list[Compared], truncated_to(16)] = []
    """Fine-tuning: the metrics of the base model and of the best checkpoint, the deciding one first."""
    evaluation_lag_steps: WholeNumber | None = None
    """Steps between the newest checkpoint and the newest evaluated one."""
    evaluated_at: Word | None = None
    """Time of the last published evaluation, RFC 3339."""
    troubles: Troubles | None = None
    """Problems that did not end the job; absent while there are none."""
    ledger: Ledger | None = None
    """GPU time, CPU time and cost so far, by purpose."""
    provenance: ProvenanceHead | None = None
    """The end of the run's record of what it used and produced, which `tandem prove` verifies."""
    start_time: Word | None = None
    """Start of the first generation, RFC 3339."""
    completion_time: Word | None = None
    """End of the job, RFC 3339."""
    message: MessageText | None = None
    """Explanation of the phase, if it needs one."""


def phase_word(phase: str, message: str | None) -> str:
    """The phase as shown to people: a complete run that took fewer steps than announced has stopped early.

    Args:
        message: the status's message.
    """
    early = phase == "Succeeded" and (message or "").startswith(STOPPED_EARLY)
    return STOPPED_EARLY.capitalize() if early else phase


def early_end_summary(step: int, total_steps: int | None, reason: str) -> str:
    """Summarize a run that ended before its last step; empty if it took all steps, or their number is not known and no
    reason was given.

    Args:
        step: steps taken.
        total_steps: steps of the whole run; None if only the end of the data tells.
        reason: reason of the script; empty if it gave none.
    """
    if total_steps is None:
        return f"{STOPPED_EARLY} after step {number(step)}: {reason}" if reason else ""
    if step >= total_steps:
        return ""
    return f"{STOPPED_EARLY} after step {number(step)} of {number(total_steps)}: {reason or LEFT_LOOP}"


Name = Annotated[str, Field(max_length=316)]
MAX_MEMBERS = 20_000


class RankView(Model):
    """One training process."""

    rank: WholeNumber
    """Global rank."""
    step: WholeNumber
    """Optimizer steps completed."""
    cpu: float | None = None
    """Busy cores over the last second or so."""
    gpu: float | None = None
    """GPU utilization, 0 to 1."""
    gpu_memory_bytes: WholeNumber | None = None
    """GPU memory in use."""
    busy_seconds: float | None = None
    """Mean seconds of its own work in a step, without waiting for others."""


class MemberView(Model):
    """One replica, as the coordinator sees it."""

    replica: Name
    """Its name."""
    address: Name
    """Address at which its processes listen."""
    node: Name | None = None
    """The node it runs on, where known."""
    state: Literal["joining", "running", "leaving"]
    """State of its agent."""
    silent_seconds: float
    """Time since its last sign of life."""
    ranks: Annotated[list[RankView], Field(max_length=64)] = []
    """Its training processes."""


class GenerationView(Model):
    """One membership, running or past."""

    generation: WholeNumber
    """Its number."""
    world_size: WholeNumber
    """Ranks in it."""
    members: Annotated[list[Name], Field(max_length=MAX_MEMBERS)]
    """Replicas in rank order; in a brief response, those that no newer generation lists."""
    replicas: WholeNumber | None = None
    """Number of replicas, where not all are listed."""
    opened_at: float
    """Start of the generation, in seconds since the epoch."""
    closed_at: float | None = None
    """End of the generation, in seconds since the epoch; None while it runs."""
    reason: MessageText
    """Reason for which it was formed: Started, WorkerFailed, Hung, MemberLost, MemberLeft, Preempted, MemberJoined,
    …"""
    detail: MessageText = ""
    """The reason in a sentence."""
    progressed: bool | None = None
    """Whether its ranks have completed a step or saved anything; None where the coordinator does not report it."""

    def seen(self) -> Generation:
        """The generation in the common form for views."""
        return Generation(
            number=self.generation,
            opened_at=self.opened_at,
            closed_at=self.closed_at,
            world_size=self.world_size,
            members=tuple(self.members),
            reason=self.reason,
            detail=self.detail,
        )


class EvaluatorView(Model):
    """One evaluator process."""

    name: Name
    """Its name."""
    state: MessageText
    """`idle`, or the evaluation it works on."""
    cpu: float | None = None
    """Busy cores over the last second or so."""
    silent_seconds: float
    """Time since its last sign of life."""


class Event(Model):
    """An event for a person who follows the job."""

    at: float
    """Time of the event, in seconds since the epoch."""
    kind: Literal["info", "warning", "error"]
    """Severity of the event."""
    text: MessageText
    """One sentence."""


class Snapshot(Model):
    """The complete state of the job as the coordinator knows it."""

    job: Name
    """The job's name."""
    time: float
    """Time of the coordinator's clock, in seconds since the epoch."""
    status: Status
    """The status as the resource shows it."""
    members: Annotated[list[MemberView], Field(max_length=MAX_MEMBERS)] = []
    """Known replicas."""
    finished: WholeNumber | None = None
    """A script of the user's own: number of replicas that left the group because all of their ranks exited with code
    0."""
    reason: Annotated[str, Field(max_length=64)] | None = None
    """Reason for which the job has failed, or that it stopped early, in one CamelCase word (tandem.wire.reasons)."""
    generations: Annotated[list[GenerationView], Field(max_length=100)] = []
    """The last memberships, oldest first; at most 100."""
    evaluators: Annotated[list[EvaluatorView], truncated_to(4_096)] = []
    """Evaluator processes with a recent sign of life."""
    events: Annotated[list[Event], truncated_to(200)] = []
    """The last events, oldest first; at most 200."""


SAVES_FAIL, EVALUATION_FAILED, LINES_LOST, REWOUND, HALVED = (
    *("SavesFail", "EvaluationFailed", "LogLinesLost", "Rewound", "MicroBatchHalved"),
)
SAMPLES_FILTERED, EXCLUDED, SKIPPED, WORSE_THAN_BASE, WEIGHTS_UNCHANGED, NOT_TRACKED, NOT_UPLOADED = (
    *("SamplesFiltered", "WorkerExcluded", "EvaluationsSkipped", "WorseThanBase", "WeightsUnchanged"),
    *("NotTracked", "NotUploaded"),
)
"""The kinds of trouble, as reasons of conditions and Events."""
RANKS_DIFFER: Final = "RanksDiffer"
SAMPLES_DIFFER: Final = "SamplesDiffer"
OPTIMIZER_DIFFERS: Final = "OptimizerDiffers"
GRADIENTS_DIFFER: Final = "GradientsDiffer"
SCORES_DIFFER: Final = "ScoresDiffer"
CORRUPTIONS: tuple[CorruptionKind, ...] = get_args(CorruptionKind)
DISK_FULL_ERRORS = tuple(os.strerror(code) for code in (errno.ENOSPC, errno.EDQUOT))
"""The system's error messages for a full disk or quota."""


@dataclass(frozen=True)
class TroubleMessage:
    """A message about one kind of problem."""

    reason: str
    """Reason of conditions and Events, one CamelCase word."""
    level: Literal["info", "warning", "error"]
    text: str
    """The message, a sentence."""
    lasts: bool = False
    """Whether the problem persists, and is not only in the past."""


def trouble_messages(troubles: Troubles | None) -> Iterator[TroubleMessage]:
    """One message for each kind of problem, the most severe first."""
    if troubles is None:
        return
    if failed := troubles.saves_failed_in_a_row:
        saves = "the last save has failed" if failed == 1 else f"the last {number(failed)} saves have failed"
        yield TroubleMessage(SAVES_FAIL, "error", with_cause(saves, troubles.save_message), lasts=True)
    elif troubles.saves_failed:
        yield TroubleMessage(SAVES_FAIL, "warning", _counted_problem(troubles.saves_failed, "save", "failed"))
    if troubles.evaluations_failed:
        text = f"{count_noun(troubles.evaluations_failed, 'checkpoint')} could not be evaluated"
        lasts = bool(troubles.evaluation_message)
        yield TroubleMessage(EVALUATION_FAILED, "error", with_cause(text, troubles.evaluation_message), lasts)
    if troubles.lines_lost:
        yield TroubleMessage(
            LINES_LOST, "error", _counted_problem(troubles.lines_lost, "log line", "been lost: the disk refused them")
        )
    if troubles.rewinds:
        skipped = count_noun(troubles.batches_left_out, "batch", "batches")
        count = _times(troubles.rewinds)
        text = f"the loss became useless: training went back {count} and left out {skipped}"
        yield TroubleMessage(REWOUND, "warning", text)
    if troubles.micro_batches_halved:
        limit = count_noun(troubles.micro_batch or 1, "sample")
        times = _times(troubles.micro_batches_halved)
        yield TroubleMessage(
            HALVED, "warning", f"out of memory: the micro-batch was halved {times}, to {limit} at the most"
        )
    for corruption in troubles.corruptions:
        times = f" ({_times(corruption.count)})" if corruption.count > 1 else ""
        yield TroubleMessage(corruption.reason, "error", corruption.message + times)
    if troubles.weights_unchanged:
        yield TroubleMessage(WEIGHTS_UNCHANGED, "warning", troubles.weights_message, lasts=True)
    if troubles.samples_message:
        text = f"samples are left out of training: {troubles.samples_message}"
        yield TroubleMessage(SAMPLES_FILTERED, "warning", text)
    if troubles.exclusion_message:
        yield TroubleMessage(EXCLUDED, "warning", troubles.exclusion_message)
    if troubles.worse_than_base:
        yield TroubleMessage(WORSE_THAN_BASE, "warning", troubles.base_message, lasts=True)
    if troubles.tracking_message:
        text = f"tracking: {troubles.tracking_message}; training goes on, and what is missing is sent later"
        yield TroubleMessage(NOT_TRACKED, "warning", text, lasts=True)
    if troubles.upload_message:
        text = f"bucket: {troubles.upload_message}; what is missing is uploaded later"
        yield TroubleMessage(NOT_UPLOADED, "warning", text, lasts=True)
    if troubles.evaluations_skipped:
        yield TroubleMessage(
            SKIPPED, "info", _counted_problem(troubles.evaluations_skipped, "checkpoint", "been skipped by evaluators")
        )


def joined(corruptions: Iterable[Corruption]) -> list[Corruption]:
    """One entry for each kind, in the order of CORRUPTIONS: the counts of all, and the message of the last."""
    by_reason: dict[str, Corruption] = {}
    for corruption in corruptions:
        count = corruption.count + (by_reason[corruption.reason].count if corruption.reason in by_reason else 0)
        by_reason[corruption.reason] = Corruption(reason=corruption.reason, count=count, message=corruption.message)
    return [by_reason[reason] for reason in CORRUPTIONS if reason in by_reason]


def persistent_trouble(troubles: Troubles | None) -> TroubleMessage | None:
    """The most severe problem that persists."""
    return next((message for message in trouble_messages(troubles) if message.lasts), None)


def with_cause(text: str, cause: str) -> str:
    """A problem with its cause. A full disk is named first: lines are truncated at their end, and users can fix it."""
    if not cause:
        return text
    return ("the disk is full: " if any(error in cause for error in DISK_FULL_ERRORS) else "") + f"{text}: {cause}"


def _times(count: int) -> str:
    return "once" if count == 1 else f"{number(count)} times"


def _counted_problem(count: int, noun: str, predicate: str) -> str:
    return f"{count_noun(count, noun)} {'has' if count == 1 else 'have'} {predicate}"
