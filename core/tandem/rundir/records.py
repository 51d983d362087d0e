"""The typed records of a run's logs: fields, units, and the writer of each (docs/architecture.md).

Three processes write logs, each its own: a rank of a generation, mostly rank 0 (`TrainingRecord`), the coordinator
(`CoordinatorRecord`) and each evaluator (`EvaluatorRecord`). They are for people and reports only.

A log may be damaged, of another version, or another program's. A line without its essential fields (its time, and for a
step its number) is no record. Any other invalid value counts as absent, so that one wrong number does not invalidate
the line. An unknown kind comes from a newer version, and is skipped.

Rejected: dictionaries (four readers validated each value by hand, each in its own way, and no type checker knew the
fields of a line); one union for all logs (`skipped` and `end` have different meanings in different logs).
"""

import json
from functools import cached_property
from typing import Annotated, Any, Generic, Literal, TypeVar

from pydantic import ConfigDict, Field, TypeAdapter, ValidationError
from pydantic_core import PydanticSerializationError

from tandem.model import (
    Amount,
    Amounts,
    AnyNumbers,
    Anything,
    Count,
    Model,
    Number,
    PlainName,
    Seconds,
    Text,
    Texts,
    Timestamp,
    WholeNumber,
)
from tandem.rundir.lineage import Rewind
from tandem.script import is_name
from tandem.wire.ledger import Ledger
from tandem.wire.status import Corruption, CorruptionKind, Troubles


class Record(Model):
    """One line of a log."""

    # Ranks start often, and each writes a few kinds: their validators are built when they are first used.
    model_config = ConfigDict(ser_json_inf_nan="constants", defer_build=True)

    kind: str
    time: Timestamp
    """Time of writing, or of the measurement."""

    def line(self) -> bytes:
        """The record as JSON, without a line end. Fields that are None are left out."""
        try:
            return self.model_dump_json(exclude_none=True).encode()
        except PydanticSerializationError:
            # An error message may name a file whose name is not UTF-8.
            body = json.dumps(self.model_dump(exclude_none=True), ensure_ascii=False, separators=(",", ":"))
            return body.encode("utf-8", "replace")


class LostLines(Record):
    """Lines before this one that the disk refused."""

    kind: Literal["lost"] = "lost"
    lines: Count = None
    """Number of lost lines."""


class CorruptionRecord(Record):
    """Numbers that are wrong."""

    kind: Literal["corruption"] = "corruption"
    reason: CorruptionKind
    """Kind of the comparison."""
    count: Count = None
    """Number of differences; absent: one."""
    message: Text = None
    """Description of the newest difference, with rank and replica, or evaluator."""

    @property
    def corruption(self) -> Corruption:
        """An entry of the status."""
        return Corruption(reason=self.reason, count=self.count or 1, message=self.message or "")


# Rank 0 of a generation


class Start(Record):
    """A generation starts training."""

    kind: Literal["start"] = "start"
    step: WholeNumber
    """The step after which it continues."""
    total_steps: Count = None
    """Steps of the whole run, where that has an end."""
    world_size: Count = None
    """Number of ranks in this generation."""
    resumed_from: Text = None
    """Name of the checkpoint it resumed from; absent if there was none."""
    flops_per_sample: Amount = None
    """Floating-point operations of a training step for one sample; absent where that is not well defined."""
    peak_flops: Amount = None
    """Peak floating-point operations a second of a rank's GPU, by its data sheet; absent as above."""
    tokens_per_sample: Amount = None
    """Mean number of tokens in a sample, without padding; absent where the task does not report it."""
    learned_per_sample: Amount = None
    """Mean number of these tokens that the loss is computed on, such as those of answers; absent likewise."""
    filtered_samples: Text = None
    """Description of the samples that nothing is learned from: how many, and why; absent if there are none."""
    process_at: Amount = None
    """Time at which the process of rank 0 started, in seconds since the epoch; before this generation if it survived a
    regroup."""
    joined_at: Amount = None
    """Time at which all ranks had joined their group, likewise; absent for a script without a session."""
    restore_at: Amount = None
    """Time at which model and data were ready and the restore began, likewise."""


class Step(Record):
    """An optimizer step, once the ranks have reduced its loss."""

    kind: Literal["step"] = "step"
    step: WholeNumber
    """Number of the step, from 1 over the whole run."""
    samples: Count = None
    """Samples in the global batch."""
    ids: Text = None
    """Digest of the ids of its samples."""
    lr: Number = None
    """Learning rate of the step."""
    loss: Anything = None
    """Mean loss over the global batch."""
    gradient_norm: Number = None
    """Norm of the gradients; measured at most twice a second."""


class Rate(Record):
    """Throughput, and the time by phase, since the previous rate. Sums over these lines are exact."""

    kind: Literal["rate"] = "rate"
    step: Count = None
    """The last step."""
    epoch: Number = None
    """Completed epochs, with the fraction of the current one; absent where data has no length."""
    throughput: Amount = None
    """Samples a second, over all ranks."""
    steps: Count = None
    """Steps since the previous rate."""
    samples: Count = None
    """Samples since the previous rate."""
    step_seconds: Amount = None
    """Mean duration of these steps."""
    world_size: Count = None
    """Number of ranks in this generation."""
    phases: Amounts = None
    """Seconds by phase of rank 0: data, compute, checkpoint, and pause where there was one."""
    lr: Number = None
    """The last learning rate."""
    loss: Number = None
    """Loss of the last step."""
    gradient_norm: Number = None
    """The last measured norm of the gradients."""


class Values(Record):
    """Values that a script has logged besides its loss (tandem.log)."""

    kind: Literal["values"] = "values"
    step: WholeNumber
    """Step as the script counts."""
    values: AnyNumbers = None
    """Values by name; a value may be NaN or infinite."""

    @property
    def known(self) -> dict[str, float]:
        """The values with a valid name. The reader limits their number."""
        values = self.values or {}
        return {name: value for name, value in values.items() if value is not None and is_name(name)}


class Saved(Record):
    """A checkpoint was committed."""

    kind: Literal["checkpoint"] = "checkpoint"
    name: PlainName
    """Name of its folder."""
    step: WholeNumber
    """Step after which it was saved."""
    stall_seconds: Seconds = None
    """Time for which training was blocked."""
    commit_seconds: Seconds = None
    """Time from then until it was durable."""
    bytes: Count = None
    """Size of the checkpoint."""


class NotSaved(Record):
    """A save that was due was skipped, or was started and failed."""

    kind: Literal["skipped"] = "skipped"
    step: Count = None
    """Step after which the checkpoint was due."""
    why: Text = None
    """Reason, in a sentence."""
    name: Text = None
    """Name of the checkpoint; only if the save was started."""
    stall_seconds: Seconds = None
    """Time for which training was blocked; only if the save was started."""


class CheckpointPassedOver(Record):
    """A checkpoint that this generation could not resume from."""

    kind: Literal["passed"] = "passed"
    checkpoint: Text = None
    """Name of the checkpoint."""
    why: Text = None
    """Reason, in a sentence."""


class Rewound(Record, Rewind):
    """The loss became useless: the rewind that later generations follow."""

    kind: Literal["rewind"] = "rewind"


class IntervalChosen(Record):
    """`checkpoint.every: Auto` has changed the interval between saves by a tenth or more, or begins a generation."""

    kind: Literal["interval"] = "interval"
    seconds: Seconds = None
    """The interval."""
    save_seconds: Seconds = None
    """Time for which a save blocks training: the median of the newest ones."""
    write_seconds: Seconds = None
    """Time from then until it was on the disk."""
    failures: Count = None
    """Failures of the run so far after which steps had to be repeated."""
    training_seconds: Seconds = None
    """Time in which they occurred."""


class Mirrored(Record):
    """Rank 0 has completed its part of a mirror (`elasticity.mirror`)."""

    kind: Literal["mirror"] = "mirror"
    step: Count = None
    """Step after which it was taken."""
    stall_seconds: Seconds = None
    """Time for which training was blocked."""
    copy_seconds: Seconds = None
    """Time from then until rank 0's part was complete, on the next worker, too."""
    interval_seconds: Seconds = None
    """Time until the next one is due."""
    bytes: Count = None
    """Size of rank 0's part."""


class TrainingEnd(Record):
    """The generation ends in an orderly way."""

    kind: Literal["end"] = "end"
    step: Count = None
    """The last step."""
    why: Text = None
    """Reason, in a sentence."""
    peak_memory: Amounts = None
    """Peak resident memory before the last save, in bytes by rank. It includes memory that processes share, such as
    torch itself."""
    peak_gpu_memory: Amounts = None
    """Peak GPU memory that torch has allocated, in bytes by rank; absent on CPUs."""


TrainingRecord = (
    Start
    | Step
    | Rate
    | Values
    | Saved
    | IntervalChosen
    | Mirrored
    | NotSaved
    | CheckpointPassedOver
    | Rewound
    | CorruptionRecord
    | TrainingEnd
    | LostLines
)


# The coordinator


class Sample(Record):
    """The state of the job, once a second."""

    kind: Literal["sample"] = "sample"
    generation: Count = None
    """The current generation, or the last one."""
    world_size: Count = None
    """Number of its ranks; 0 while none trains."""
    workers: Count = None
    """Workers that are ready."""
    step: Count = None
    """The last step."""
    loss: Number = None
    """Loss of that step."""
    throughput: Amount = None
    """Samples a second, over all ranks."""
    trainer_cpu: Amounts = None
    """Busy cores by rank."""
    used_before: Amounts = None
    """Age of the measurement of its CPU and GPU use, in seconds by process."""
    gpu: Amounts = None
    """GPU utilization by rank, 0 to 1."""
    busy_seconds: Amounts = None
    """A rank's own work in a step, in seconds by rank."""
    gpu_memory: Amounts = None
    """GPU memory in use, in bytes by rank."""
    evaluator_cpu: Amounts = None
    """Busy cores by evaluator."""


class Formed(Record):
    """A generation was formed."""

    kind: Literal["generation"] = "generation"
    generation: WholeNumber
    """Number of the generation."""
    world_size: Count = None
    """Number of its ranks."""
    members: Texts = None
    """Names of its replicas, in rank order."""
    reason: Text = None
    """Reason in one word, as in the job's status."""
    detail: Text = None
    """Reason in a sentence."""
    stopped_at: Amount = None
    """Time at which the last of its replicas that were members before had stopped its ranks, in seconds since the
    epoch; absent if there are none."""
    ready_at: Amount = None
    """Time at which the last of its replicas was ready to join, likewise."""
    failed_at: Amount = None
    """Time of the failure for which it was formed, likewise: it may be known only now."""


class Closed(Record):
    """A generation ended."""

    kind: Literal["closed"] = "closed"
    generation: WholeNumber
    """Number of the generation."""
    reason: Text = None
    """Reason in one word, as in the job's status."""
    detail: Text = None
    """Reason in a sentence."""
    failed_at: Amount = None
    """Time of the failure, in seconds since the epoch: the end of a process, the last sign of a lost member, or the
    last progress of a group that hangs; absent where it is not known, and for planned changes."""


class EventRecord(Record):
    """An event for people."""

    kind: Literal["event"] = "event"
    level: Text = None
    """info, warning or error."""
    text: Text = None
    """A sentence."""


class Uploaded(Record):
    """A checkpoint is in the bucket. Only of runs whose processes share a run directory."""

    kind: Literal["uploaded"] = "uploaded"
    checkpoint: PlainName
    """Name of the checkpoint."""
    seconds: Seconds = None
    """Time that the upload took."""
    bytes: Count = None
    """Size of the checkpoint."""


class TroublesRecord(Record, Troubles):
    """All problems so far, whenever there is a new one."""

    kind: Literal["troubles"] = "troubles"


class LedgerRecord(Record, Ledger):
    """The resource use of the run so far: every 10 s, when a worker has left, and at the end. Cumulative over
    restarts."""

    kind: Literal["ledger"] = "ledger"
    unsettled: Number = None
    """Worker-seconds of training groups that their first ranks have not logged yet; shown as compute. Negative where
    they have logged more."""
    worker_gpus: Amount = None
    """GPUs per worker."""
    worker_cpus: Amount = None
    """CPUs per worker."""
    reached: Count = None
    """The highest step so far."""
    offsets: Amounts = None
    """Bytes of the newest training logs that are included, by generation."""
    evaluators_until: Amount = None
    """Time up to which the logs of evaluators are included, in seconds since the epoch."""
    wall_unsettled: Number = None
    """Seconds of `wall.training` that first ranks have not logged yet. Negative where they have logged more than their
    groups were seen to step."""


class CoordinatorEnd(Record):
    """The coordinator ends in an orderly way."""

    kind: Literal["end"] = "end"


CoordinatorRecord = (
    Sample | Formed | Closed | EventRecord | Uploaded | TroublesRecord | LedgerRecord | CoordinatorEnd | LostLines
)


# An evaluator


class Usage(Record):
    """A sign of life: once a second during an evaluation, every 5 s otherwise."""

    kind: Literal["usage"] = "usage"
    cpu_seconds: Seconds = None
    """CPU time of this process and of all processes it has started, since its start."""
    age: Seconds = None
    """Age of this process, in seconds."""
    process: Text = None
    """Identity of this process: the same in all its records, and in no other process's."""
    state: Text = None
    """starting, idle or evaluating."""
    checkpoint: Text = None
    """Checkpoint that is being evaluated."""
    gpus: Seconds = None
    """GPUs of this process, or its share of one; absent on CPUs."""


class Evaluated(Record):
    """A shard of a checkpoint was evaluated."""

    kind: Literal["evaluated"] = "evaluated"
    checkpoint: Annotated[str, Field(min_length=1)]
    """Name of the checkpoint."""
    step: Count = None
    """Step of the checkpoint."""
    generation: Count = None
    """Generation that wrote the checkpoint."""
    shard: Count = None
    """Shard of the test data, from 0."""
    seconds: Seconds = None
    """Duration of the evaluation."""


class NotEvaluated(Record):
    """A checkpoint is skipped, as the policy says."""

    kind: Literal["skipped"] = "skipped"
    checkpoint: Annotated[str, Field(min_length=1)]
    """Name of the checkpoint."""
    step: Count = None
    """Step of the checkpoint."""


class CheckpointUnusable(Record):
    """A checkpoint cannot be evaluated."""

    kind: Literal["bad"] = "bad"
    checkpoint: Annotated[str, Field(min_length=1)]
    """Name of the checkpoint."""
    why: Text = None
    """Reason, in a sentence."""


class EvaluatorEnd(Record):
    """The evaluator ends in an orderly way."""

    kind: Literal["end"] = "end"


EvaluatorRecord = Usage | Evaluated | NotEvaluated | CheckpointUnusable | CorruptionRecord | EvaluatorEnd | LostLines


AnyRecord = TypeVar("AnyRecord", bound=Record)


class Kinds(Generic[AnyRecord]):
    """The kinds of records in one log."""

    def __init__(self, records: Any) -> None:
        self._records = records

    @cached_property
    def _adapter(self) -> TypeAdapter[AnyRecord]:
        """Validator of the union; built when a line is read, for processes that only write do not need it."""
        union: Any = Annotated[self._records, Field(discriminator="kind")]
        return TypeAdapter(union)

    def parse(self, line: bytes) -> AnyRecord | None:
        """Parse one line; None for an unknown kind.

        Raises:
            ValueError: the line is no record.
        """
        try:
            return self._adapter.validate_json(line, by_alias=True, by_name=False, extra="ignore")
        except ValidationError as error:
            if error.errors(include_url=False, include_input=False, include_context=False)[0]["type"] == UNKNOWN_KIND:
                return None
            raise ValueError("not a record") from error


UNKNOWN_KIND = "union_tag_invalid"
TRAINING = Kinds[TrainingRecord](TrainingRecord)
COORDINATOR = Kinds[CoordinatorRecord](CoordinatorRecord)
EVALUATOR = Kinds[EvaluatorRecord](EvaluatorRecord)
