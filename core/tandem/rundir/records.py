"""The typed records of a run's logs: fields, units, and the writer of each (docs/architecture.md).

Three processes write logs, each its own: a rank of a generation, mostly rank 0 (`TrainingRecord`), the coordinator
(`CoordinatorRecord`) and each evaluator (`EvaluatorRecord`). They are for people and reports alone.

A reader meets logs that are damaged, of another version, or somebody else's. Without what makes a line what it is (its
time, and for a step its number) it is no record. Any other value that is not what it should be counts as not there, so
that one wrong number does not take a line with it. A kind that is unknown is of a newer version, and passed over.

Rejected: dictionaries (four readers tested each value by hand, each in its own way, and no type checker knew what a
line holds); one union for all logs (`skipped` and `end` say different things in different logs).
"""

import json
from functools import cached_property
from typing import Annotated, Any, Generic, Literal, TypeVar

from pydantic import ConfigDict, Field, TypeAdapter, ValidationError
from pydantic_core import PydanticSerializationError

from tandem.ledger import Ledger
from tandem.model import (
    Amount,
    Amounts,
    AnyNumbers,
    Anything,
    Count,
    Model,
    Moment,
    Number,
    PlainName,
    Seconds,
    Text,
    Texts,
    Whole,
)
from tandem.rundir.lineage import Rewind
from tandem.script import is_name
from tandem.status import Troubles


class Record(Model):
    """One line."""

    # Ranks start often, and each writes a few kinds: those are built when they are first used. What is written below a
    # field is for people, and for the page that is made of it.
    model_config = ConfigDict(ser_json_inf_nan="constants", defer_build=True, use_attribute_docstrings=False)

    kind: str
    time: Moment
    """When it was written, or measured."""

    def line(self) -> bytes:
        """The record as JSON, without a line end. Fields that are None are left out."""
        try:
            return self.model_dump_json(exclude_none=True).encode()
        except PydanticSerializationError:
            # An error message may name a file whose name is not UTF-8.
            body = json.dumps(self.model_dump(exclude_none=True), ensure_ascii=False, separators=(",", ":"))
            return body.encode("utf-8", "replace")


class Lost(Record):
    """Lines before this one that the disk did not take."""

    kind: Literal["lost"] = "lost"
    lines: Count = None
    """How many."""


# Rank 0 of a generation


class Start(Record):
    """A generation begins to train."""

    kind: Literal["start"] = "start"
    step: Whole
    """The step that it goes on after."""
    total_steps: Count = None
    """Of the whole run, where that has an end."""
    world_size: Count = None
    """Ranks of this generation."""
    resumed_from: Text = None
    """A checkpoint's name; absent where there was none."""
    flops_per_sample: Amount = None
    """Floating-point operations of a training step for one sample; absent where that is not well defined."""
    peak_flops: Amount = None
    """Floating-point operations a second that the data sheet of a rank's GPU names; absent as above."""
    tokens_per_sample: Amount = None
    """Tokens that a sample has on average, without padding; absent where the task does not say."""
    learned_per_sample: Amount = None
    """Tokens of these that the loss is over, such as those of answers; absent likewise."""


class Step(Record):
    """A step, once the ranks have agreed on its loss."""

    kind: Literal["step"] = "step"
    step: Whole
    """Its number, from 1 over the whole run."""
    samples: Count = None
    """Of the global batch."""
    ids: Text = None
    """A digest of the ids of its samples."""
    lr: Number = None
    """The learning rate that it was taken with."""
    loss: Anything = None
    """The mean over the global batch."""
    gradient_norm: Number = None
    """Measured twice a second at most."""


class Rate(Record):
    """What the time since the rate before went into. Sums over these lines are exact."""

    kind: Literal["rate"] = "rate"
    step: Count = None
    """The last one."""
    epoch: Number = None
    """Epochs that are complete, with the part of the present one; absent where data has no length."""
    throughput: Amount = None
    """Samples a second, over all ranks."""
    steps: Count = None
    """Since the rate before."""
    samples: Count = None
    """Since the rate before."""
    step_seconds: Amount = None
    """The mean of these steps."""
    world_size: Count = None
    """Ranks of this generation."""
    phases: Amounts = None
    """Seconds by what rank 0 did: data, compute, checkpoint, and pause where there was one."""
    lr: Number = None
    """The last one."""
    loss: Number = None
    """Of the last step."""
    gradient_norm: Number = None
    """The last one that was measured."""


class Values(Record):
    """What a script has logged beside its loss (tandem.log)."""

    kind: Literal["values"] = "values"
    step: Whole
    """As the script counts."""
    values: AnyNumbers = None
    """By name; a value may be NaN or infinite."""

    @property
    def known(self) -> dict[str, float]:
        """The values that may be called so. How many names there are is up to the reader."""
        found = self.values or {}
        return {name: value for name, value in found.items() if value is not None and is_name(name)}


class Saved(Record):
    """A checkpoint was committed."""

    kind: Literal["checkpoint"] = "checkpoint"
    name: PlainName
    """Its folder's name."""
    step: Whole
    """After which it was taken."""
    stall_seconds: Seconds = None
    """For which training stood still."""
    commit_seconds: Seconds = None
    """From then until it was durable."""
    bytes: Count = None
    """Its size."""


class NotSaved(Record):
    """A save that was due was not made, or was begun and failed."""

    kind: Literal["skipped"] = "skipped"
    step: Count = None
    """After which it would have been taken."""
    why: Text = None
    """A sentence."""
    name: Text = None
    """Of the checkpoint; only where it was begun."""
    stall_seconds: Seconds = None
    """For which training stood still; only where it was begun."""


class PassedOver(Record):
    """A checkpoint that this generation could not resume from."""

    kind: Literal["passed"] = "passed"
    checkpoint: Text = None
    """Its name."""
    why: Text = None
    """A sentence."""


class Rewound(Record, Rewind):
    """The loss became useless: the decision that later generations obey."""

    kind: Literal["rewind"] = "rewind"


class TrainingEnd(Record):
    """The generation stops to train, in good order."""

    kind: Literal["end"] = "end"
    step: Count = None
    """The last one."""
    why: Text = None
    """A sentence."""
    peak_memory: Amounts = None
    """The most resident memory that a rank has had before its last save, in bytes by rank. Resident is also what
    processes share, such as torch itself."""
    peak_gpu_memory: Amounts = None
    """The most that torch has had allocated on a GPU, in bytes by rank; absent on CPUs."""


TrainingRecord = Start | Step | Rate | Values | Saved | NotSaved | PassedOver | Rewound | TrainingEnd | Lost


# The coordinator


class Sample(Record):
    """The job as it is, once a second."""

    kind: Literal["sample"] = "sample"
    generation: Count = None
    """The one that trains, or trained last."""
    world_size: Count = None
    """Its ranks; 0 while none trains."""
    workers: Count = None
    """That are ready."""
    step: Count = None
    """The last one."""
    loss: Number = None
    """Of that step."""
    throughput: Amount = None
    """Samples a second, over all ranks."""
    trainer_cpu: Amounts = None
    """Busy cores by rank."""
    used_before: Amounts = None
    """Seconds by process: how long before this line its use was measured."""
    gpu: Amounts = None
    """The busy share of a GPU by rank, 0 to 1."""
    busy_seconds: Amounts = None
    """A rank's own work in a step."""
    gpu_memory: Amounts = None
    """Bytes in use by rank."""
    evaluator_cpu: Amounts = None
    """Busy cores by evaluator."""


class Formed(Record):
    """A generation was formed."""

    kind: Literal["generation"] = "generation"
    generation: Whole
    """Its number."""
    world_size: Count = None
    """Its ranks."""
    members: Texts = None
    """Names of its replicas, in the order of their ranks."""
    reason: Text = None
    """A word, as in the job's status."""
    detail: Text = None
    """The same as a sentence."""


class Closed(Record):
    """A generation is over."""

    kind: Literal["closed"] = "closed"
    generation: Whole
    """Its number."""
    reason: Text = None
    """A word, as in the job's status."""
    detail: Text = None
    """The same as a sentence."""


class Told(Record):
    """What people are told."""

    kind: Literal["event"] = "event"
    level: Text = None
    """info, warning or error."""
    text: Text = None
    """A sentence."""


class Troubled(Record, Troubles):
    """All that went wrong so far, whenever something new did."""

    kind: Literal["troubles"] = "troubles"


class Accounted(Record, Ledger):
    """What the run has taken so far: every 10 s, when a worker has gone, and at the end. Cumulative over restarts."""

    kind: Literal["ledger"] = "ledger"
    unsettled: Number = None
    """Worker-seconds of groups that step that their first ranks have yet to write down; shown as compute. Negative
    where they have written down more."""
    worker_gpus: Amount = None
    """GPUs of a worker."""
    worker_cpus: Amount = None
    """CPUs of a worker."""
    reached: Count = None
    """The highest step that was taken."""
    offsets: Amounts = None
    """Bytes of the newest training logs that are counted, by generation."""
    evaluators_until: Amount = None
    """Seconds since the epoch: up to then the logs of evaluators are counted."""


class CoordinatorEnd(Record):
    """The coordinator leaves in good order."""

    kind: Literal["end"] = "end"


CoordinatorRecord = Sample | Formed | Closed | Told | Troubled | Accounted | CoordinatorEnd | Lost


# An evaluator


class Usage(Record):
    """A sign of life: once a second while it evaluates, every 5 s otherwise."""

    kind: Literal["usage"] = "usage"
    cpu_seconds: Seconds = None
    """Of this process and of all that it has started, since it began."""
    age: Seconds = None
    """For how long this process has existed."""
    process: Text = None
    """Which process this is: the same in all its signs of life, and in no other's."""
    state: Text = None
    """starting, idle or evaluating."""
    checkpoint: Text = None
    """That is being evaluated."""


class Evaluated(Record):
    """A shard of a checkpoint was evaluated."""

    kind: Literal["evaluated"] = "evaluated"
    checkpoint: Annotated[str, Field(min_length=1)]
    """Its name."""
    step: Count = None
    """After which it was taken."""
    generation: Count = None
    """That wrote it."""
    shard: Count = None
    """The part of the test data, from 0."""
    seconds: Seconds = None
    """What that took."""


class NotEvaluated(Record):
    """A checkpoint is left out, as the policy says."""

    kind: Literal["skipped"] = "skipped"
    checkpoint: Annotated[str, Field(min_length=1)]
    """Its name."""
    step: Count = None
    """After which it was taken."""


class Unusable(Record):
    """A checkpoint cannot be evaluated."""

    kind: Literal["bad"] = "bad"
    checkpoint: Annotated[str, Field(min_length=1)]
    """Its name."""
    why: Text = None
    """A sentence."""


class EvaluatorEnd(Record):
    """The evaluator leaves in good order."""

    kind: Literal["end"] = "end"


EvaluatorRecord = Usage | Evaluated | NotEvaluated | Unusable | EvaluatorEnd | Lost


AnyRecord = TypeVar("AnyRecord", bound=Record)


class Kinds(Generic[AnyRecord]):
    """The kinds of record of one log."""

    def __init__(self, records: Any) -> None:
        self._records = records

    @cached_property
    def _adapter(self) -> TypeAdapter[AnyRecord]:
        """Made when a line is read: processes that only write have no use for it."""
        union: Any = Annotated[self._records, Field(discriminator="kind")]
        return TypeAdapter(union)

    def parse(self, line: bytes) -> AnyRecord | None:
        """The record of a line; None for a kind that is not known here.

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
