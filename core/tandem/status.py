"""The status of a running job: produced by the coordinator, shown by the CLI, copied into the resource's status.

Every number that is not known yet is absent, never 0.
"""

import errno
import os
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from pydantic import Field

from tandem.formatting import number, several
from tandem.ledger import Ledger
from tandem.measures import Generation
from tandem.model import Model, PlainName, Whole, Words, cut

Phase = Literal["Pending", "Starting", "Running", "Restarting", "Draining", "Suspended", "Succeeded", "Failed"]

Word = Annotated[str, cut(316)]
"""A name, a reason, a time."""

AGAIN = "starts again in "
"""How a message tells when the next group starts, after failures that came one after the other."""

STOPPED_EARLY = "stopped early"
"""How the message of a run begins that is complete with fewer steps than were announced; the reason follows."""

KSTATUS = ("Ready", "Reconciling", "Stalled")
"""Types of conditions by which kstatus, and with it Flux, judges: Stalled is failed, Reconciling or not Ready is in
progress, Ready is current. To people they say nothing that the others do not."""


class Condition(Model):
    """One aspect of the state, in the manner of Kubernetes conditions."""

    type: Annotated[str, Field(min_length=1, max_length=316)]
    """Which aspect: Initialized, Running, Restarting, Suspended, Complete, Failed, Degraded; for kstatus Ready,
    Reconciling and Stalled; or another writer's."""
    status: Literal["True", "False", "Unknown"]
    """Whether it holds."""
    reason: Word = ""
    """One CamelCase word."""
    message: Words = ""
    """A sentence for people."""
    observed_generation: Whole | None = None
    """metadata.generation that this speaks of."""
    last_transition_time: Word | None = None
    """When `status` last changed, RFC 3339."""


def _of_desired(members: dict[str, Any]) -> str:
    return f"{members.get('ready')}/{members.get('desired')}"


class Members(Model):
    """Replicas of one kind."""

    desired: Whole
    """Desired number."""
    ready: Whole
    """Number that are ready."""
    min: Whole | None = None
    """Minimum number to train with."""
    max: Whole | None = None
    """Maximum number."""
    summary: Word = Field(default_factory=_of_desired)
    """ready/desired in one word, for `kubectl get`; filled in by itself."""


class Progress(Model):
    """Progress of training."""

    step: Whole
    """Optimizer steps completed."""
    total_steps: Whole | None = None
    """Optimizer steps of the whole run."""
    epoch: float | None = None
    """Passes over the data, with its fraction."""
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
    gpu_memory_bytes: Whole | None = None
    """GPU memory in use over all ranks."""


class Straggler(Model):
    """A rank that is slower than the others, which all wait for it."""

    rank: Whole
    """Global rank."""
    replica: Word
    """Its replica."""
    ratio: float
    """Its own time of a step over the median of all ranks."""


class Troubles(Model):
    """What went wrong and did not end the job, counted since its coordinator began."""

    saves_failed: Whole = 0
    """Checkpoints that could not be written."""
    saves_failed_in_a_row: Whole = 0
    """The same, since the last successful save."""
    save_message: Annotated[str, cut(300)] = ""
    """Why the last one failed, while saves fail."""
    evaluations_failed: Whole = 0
    """Checkpoints that an evaluator could not evaluate."""
    evaluation_message: Annotated[str, cut(300)] = ""
    """Why, while no newer checkpoint has been evaluated."""
    evaluations_skipped: Whole = 0
    """Checkpoints that evaluators passed over, over the whole run."""
    lines_lost: Whole = 0
    """Log lines that could not be written."""
    rewinds: Whole = 0
    """Times the loss became useless and training went back, over the whole run."""
    batches_left_out: Whole = 0
    """Batches that are left out because of that."""
    micro_batches_halved: Whole = 0
    """Times a micro-batch did not fit into memory and was halved, since the job asks for what it asks for now."""
    micro_batch: Whole | None = None
    """Maximum number of samples in a forward pass, once it was halved."""
    worse_than_base: Whole = 0
    """Checkpoints that were evaluated last and are all worse than the base model; 0 unless they are enough to tell."""
    base_message: Annotated[str, cut(300)] = ""
    """In what they are worse."""
    tracking_message: Annotated[str, cut(300)] = ""
    """Why the tracking server has not got everything, while it has not."""


class CheckpointRef(Model):
    """A committed checkpoint."""

    name: PlainName
    """Its folder's name, for instance step-000000500."""
    step: Whole
    """The step after which it was taken."""
    generation: Whole
    """The generation that wrote it."""


class Score(Model):
    """The merged evaluation of one checkpoint."""

    name: Word
    """The checkpoint's name."""
    step: Whole
    """The checkpoint's step."""
    metric: Word
    """The metric of `value`."""
    value: float
    """The score."""


class Compared(Model):
    """A metric of the base model, beside that of a checkpoint."""

    metric: Word
    """The metric."""
    base: float
    """Of the model that training began with."""
    value: float | None = None
    """Of the best checkpoint; absent while there is none."""


class Status(Model):
    """The state of a DistributedTrainingJob."""

    phase: Phase = "Pending"
    """Phase of the job."""
    conditions: Annotated[
        list[Condition],
        cut(64),
        Field(json_schema_extra={"x-kubernetes-list-type": "map", "x-kubernetes-list-map-keys": ["type"]}),
    ] = []
    """Conditions, each with its reason."""
    observed_generation: Whole | None = None
    """The metadata.generation that this status describes."""
    selector: str | None = None
    """Label selector of the worker pods, for autoscalers."""
    workers: Members | None = None
    """The training group."""
    evaluators: Members | None = None
    """The evaluator processes."""
    world_size: Whole | None = None
    """Ranks in the current generation."""
    generation: Whole | None = None
    """Number of the current membership."""
    restarts: Whole = 0
    """Generations that were formed because something had failed or was lost."""
    retries: int = 0
    """How often the job had failed and was tried again."""
    retried_at: str | None = None
    """The annotation `tandem.dev/retry-at` as it was seen last; another value has a failed job tried again."""
    progress: Progress | None = None
    """Progress of training."""
    loss: float | None = None
    """Training loss of the last step that has one."""
    throughput: float | None = None
    """Samples a second over all ranks."""
    utilization: Utilization | None = None
    """Processor use."""
    stragglers: Annotated[list[Straggler], cut(20)] = []
    """Ranks that have been much slower than the others for a while."""
    latest_checkpoint: CheckpointRef | None = None
    """The newest committed checkpoint."""
    latest_evaluation: Score | None = None
    """The evaluation of the newest evaluated checkpoint."""
    best_checkpoint: Score | None = None
    """The checkpoint with the best score."""
    against_base: Annotated[list[Compared], cut(16)] = []
    """Fine-tuning: the metrics of the base model beside those of the best checkpoint, the one that decides first."""
    evaluation_lag_steps: Whole | None = None
    """Steps between the newest checkpoint and the newest evaluated one."""
    evaluated_at: Word | None = None
    """When an evaluator last published a result, RFC 3339."""
    troubles: Troubles | None = None
    """What went wrong and did not end the job; absent while nothing did."""
    ledger: Ledger | None = None
    """GPU time, CPU time and cost so far, by what they were for."""
    start_time: Word | None = None
    """When the first generation opened, RFC 3339."""
    completion_time: Word | None = None
    """When the job ended, RFC 3339."""
    message: Words | None = None
    """Why the job is in this phase, if that needs an explanation."""


def phase_word(phase: str, message: str | None) -> str:
    """The phase as people read it: of a run that is complete, and was to take more steps, that it stopped early.

    Args:
        message: that of the status.
    """
    early = phase == "Succeeded" and (message or "").startswith(STOPPED_EARLY)
    return STOPPED_EARLY.capitalize() if early else phase


Name = Annotated[str, Field(max_length=316)]
MAX_MEMBERS = 20_000


class RankView(Model):
    """One training process."""

    rank: Whole
    """Global rank."""
    step: Whole
    """Optimizer steps completed."""
    cpu: float | None = None
    """Busy cores over the last second or so."""
    gpu: float | None = None
    """GPU utilization, 0 to 1."""
    gpu_memory_bytes: Whole | None = None
    """GPU memory in use."""
    busy_seconds: float | None = None
    """Mean seconds of its own work in a step, without waiting for others."""


class MemberView(Model):
    """One replica, as the coordinator sees it."""

    replica: Name
    """Its name."""
    address: Name
    """Where its processes listen."""
    node: Name | None = None
    """The node it runs on, where it knows."""
    state: Literal["joining", "running", "leaving"]
    """What it is about."""
    silent_seconds: float
    """Time since its last sign of life."""
    ranks: Annotated[list[RankView], Field(max_length=64)] = []
    """Its training processes."""


class GenerationView(Model):
    """One membership, running or past."""

    generation: Whole
    """Its number."""
    world_size: Whole
    """Ranks in it."""
    members: Annotated[list[Name], Field(max_length=MAX_MEMBERS)]
    """Replicas in rank order; in a brief answer, those that no newer generation has named."""
    replicas: Whole | None = None
    """How many there are, where not all are named."""
    opened_at: float
    """Seconds since the epoch."""
    closed_at: float | None = None
    """Seconds since the epoch; None while it runs."""
    reason: Words
    """Why it was formed: Started, WorkerFailed, Hung, MemberLost, MemberLeft, Preempted, MemberJoined, …"""
    detail: Words = ""
    """The reason in a sentence."""
    progressed: bool | None = None
    """Whether its ranks have made a step or saved anything; None where the coordinator does not say."""

    def seen(self) -> Generation:
        """The generation as views work with it."""
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
    state: Words
    """`idle`, or what it is evaluating."""
    cpu: float | None = None
    """Busy cores over the last second or so."""
    silent_seconds: float
    """Time since its last sign of life."""


class Event(Model):
    """Something a person following the job wants to read."""

    at: float
    """Seconds since the epoch."""
    kind: Literal["info", "warning", "error"]
    """How much it matters."""
    text: Words
    """One sentence."""


class Snapshot(Model):
    """Everything the coordinator knows of the job now."""

    job: Name
    """The job's name."""
    time: float
    """Seconds since the epoch, of the coordinator's clock."""
    status: Status
    """The status as the resource shows it."""
    members: Annotated[list[MemberView], Field(max_length=MAX_MEMBERS)] = []
    """Replicas that are known."""
    finished: Whole | None = None
    """Of a script of the user's own: replicas of the group that have gone because all of their ranks ended with exit
    code 0."""
    reason: Annotated[str, Field(max_length=64)] | None = None
    """Why the job has failed, or that it stopped early, in one CamelCase word (tandem.reasons)."""
    generations: Annotated[list[GenerationView], Field(max_length=100)] = []
    """The last memberships, oldest first; at most 100."""
    evaluators: Annotated[list[EvaluatorView], cut(4_096)] = []
    """Evaluator processes that gave a sign of life lately."""
    events: Annotated[list[Event], cut(200)] = []
    """The last events, oldest first; at most 200."""


SAVES_FAIL, EVALUATION_FAILED, LINES_LOST, REWOUND, HALVED, SKIPPED, WORSE_THAN_BASE, NOT_TRACKED = (
    *("SavesFail", "EvaluationFailed", "LogLinesLost", "Rewound", "MicroBatchHalved"),
    *("EvaluationsSkipped", "WorseThanBase", "NotTracked"),
)
"""The kinds of trouble, as reasons of conditions and Events."""
FULL = tuple(os.strerror(code) for code in (errno.ENOSPC, errno.EDQUOT))
"""What the system says of a disk, or of a user's part of it, that is full."""


@dataclass(frozen=True)
class Sentence:
    """One kind of trouble."""

    reason: str
    """One CamelCase word."""
    level: Literal["info", "warning", "error"]
    text: str
    """A sentence."""
    lasts: bool = False
    """Whether it is so now, and not only in the past."""


def told(troubles: Troubles | None) -> Iterator[Sentence]:
    """Each kind of trouble there was, the gravest first."""
    if troubles is None:
        return
    if row := troubles.saves_failed_in_a_row:
        saves = "the last save has failed" if row == 1 else f"the last {number(row)} saves have failed"
        yield Sentence(SAVES_FAIL, "error", explained(saves, troubles.save_message), lasts=True)
    elif troubles.saves_failed:
        yield Sentence(SAVES_FAIL, "warning", _have(troubles.saves_failed, "save", "failed"))
    if troubles.evaluations_failed:
        text = f"{several(troubles.evaluations_failed, 'checkpoint')} could not be evaluated"
        lasts = bool(troubles.evaluation_message)
        yield Sentence(EVALUATION_FAILED, "error", explained(text, troubles.evaluation_message), lasts)
    if troubles.lines_lost:
        yield Sentence(LINES_LOST, "error", _have(troubles.lines_lost, "log line", "been lost: the disk refused them"))
    if troubles.rewinds:
        left = several(troubles.batches_left_out, "batch", "batches")
        went = f"went back {_times(troubles.rewinds)}"
        yield Sentence(REWOUND, "warning", f"the loss became useless: training {went} and left out {left}")
    if troubles.micro_batches_halved:
        now = several(troubles.micro_batch or 1, "sample")
        times = _times(troubles.micro_batches_halved)
        yield Sentence(HALVED, "warning", f"out of memory: the micro-batch was halved {times}, to {now} at the most")
    if troubles.worse_than_base:
        yield Sentence(WORSE_THAN_BASE, "warning", troubles.base_message, lasts=True)
    if troubles.tracking_message:
        text = f"tracking: {troubles.tracking_message}; training goes on, and what is missing is sent later"
        yield Sentence(NOT_TRACKED, "warning", text, lasts=True)
    if troubles.evaluations_skipped:
        yield Sentence(SKIPPED, "info", _have(troubles.evaluations_skipped, "checkpoint", "been skipped by evaluators"))


def lasting(troubles: Troubles | None) -> Sentence | None:
    """The gravest trouble that the job is in now."""
    return next((one for one in told(troubles) if one.lasts), None)


def explained(text: str, why: str) -> str:
    """What went wrong and its cause. A full disk comes first: lines are cut at their end, and it can be helped."""
    if not why:
        return text
    return ("the disk is full: " if any(words in why for words in FULL) else "") + f"{text}: {why}"


def _times(count: int) -> str:
    return "once" if count == 1 else f"{number(count)} times"


def _have(count: int, noun: str, what: str) -> str:
    return f"{several(count, noun)} {'has' if count == 1 else 'have'} {what}"
