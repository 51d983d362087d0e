"""Protocol versions between agents, operator, CLI and coordinator (docs/decisions/0020-versions.md).

Each request and each answer carries a header with the protocol that its sender reads. Versions before the second send
none, and refuse a message with a field that they do not know; so they are sent the fields of the first alone. From the
second on, unknown fields are passed over, and everything is sent.

Everything is bounded, so that a broken or hostile client costs the coordinator a sentence and not its memory.
"""

from collections.abc import Mapping
from typing import Annotated, Any, Literal, Protocol, Self

from pydantic import Field, model_validator

from tandem import status
from tandem.model import Model, cut

MAX_BODY_BYTES = 64 * 2**10
"""A larger request is refused."""

BRIEF = "/v1/brief"
"""Where the operator asks: a snapshot without members, of MAX_BRIEF_BYTES at most."""
MAX_BRIEF_BYTES = 2**17
CODE = "/v1/code"
"""Followed by a digest: where the job's code is sent to (tandem.code)."""

Name = Annotated[str, Field(pattern=r"^[A-Za-z0-9]([A-Za-z0-9._-]*[A-Za-z0-9])?$", max_length=253)]
Address = Annotated[str, Field(pattern=r"^[A-Za-z0-9]([A-Za-z0-9.:%_-]*[A-Za-z0-9])?$|^::1?$", max_length=253)]
Port = Annotated[int, Field(ge=1, le=65_535)]
Generation = Annotated[int, Field(ge=1, le=2**53)]
Counter = Annotated[int, Field(ge=0, le=2**53)]
Amount = Annotated[float, Field(ge=0)]
Why = Annotated[str, Field(max_length=2_000)]

MAX_ERROR, MAX_WHERE, MAX_TRACEBACK = 500, 300, 2_400
"""Characters of what is said of a process that failed."""

STARTING, TRAIN, STOPPED, SCRIPT = "starting", "train", "stopped", "script"
SAVING, FINISHING, DEBUGGER = "saving", "finishing", "debugger"
"""Phases of a rank that mean something to the coordinator; see RankReport.phase. All others are for people to read."""
WORDLESS = {STARTING, STOPPED, SCRIPT}
"""Phases in which a rank says nothing about its step."""


class Member(Model):
    """One replica, as the others reach it."""

    replica: Name
    """Its name."""
    incarnation: Name
    """New for each agent process, so that a restarted agent is not taken for the one it replaces."""
    address: Address
    """Where the others reach it."""
    port: Port
    """Where it listens for a store, should it become the first member."""
    processes: Annotated[int, Field(ge=1, le=64)]
    """Ranks in it."""


class Membership(Model):
    """A generation: who is in the group, in rank order. It never changes; a change is a new generation."""

    generation: Generation
    """Its number."""
    members: Annotated[list[Member], Field(min_length=1, max_length=20_000)]
    """In rank order; the first one hosts the store."""
    reason: Name
    """Why it was formed, one CamelCase word."""

    @property
    def world_size(self) -> int:
        """Ranks in it."""
        return sum(member.processes for member in self.members)


class Trouble(Model):
    """What went wrong in a training process since its start, and did not end it."""

    saves_failed: Counter = 0
    """Checkpoints that could not be written."""
    saves_failed_in_a_row: Counter = 0
    """The same since the last one that could."""
    why: Annotated[str, cut(200)] = ""
    """Why the last one could not."""
    lines_lost: Counter = 0
    """Lines of the training log that the disk did not take."""


class RankReport(Model):
    """How one training process is doing."""

    rank: Annotated[int, Field(ge=0, le=1_000_000)]
    """Global rank."""
    step: Counter
    """Optimizer steps completed."""
    phase: Annotated[str, Field(max_length=16)] = TRAIN
    """What it is doing; `starting` as long as `step` says nothing yet, `stopped` if its process is (SIGSTOP), `script`
    if it runs a script of the user's own, of whose steps nothing is known."""
    pauses: bool = False
    """Whether it is at something that takes as long as it takes, such as a validation or the code after the loop: no
    step is due, and the group does not hang."""
    finishing: bool = False
    """Whether all steps are taken, and the code after the loop runs."""
    script: bool = False
    """Whether it runs a script of the user's own without a session, which obeys no orders. Once that logs steps
    (tandem.log), its phase is not `script` any more; it may leave them out in some ranks, and log rarely."""
    total_steps: Counter | None = None
    """Optimizer steps of the whole run."""
    epoch: Amount | None = None
    """Passes over the data, with its fraction."""
    loss: float | None = None
    """Training loss; absent also while it is not finite."""
    loss_is_finite: bool = True
    """False where `loss` is absent because it is NaN or infinite."""
    throughput: Amount | None = None
    """Samples a second over all ranks."""
    busy_seconds: Amount | None = None
    """Mean seconds of its own work in a step, without waiting for others: what makes a straggler."""
    saves: bool = False
    """Whether it is known to obey `save-and-leave`; the ranks of a built-in task always do."""
    cpu: Amount | None = None
    """Busy cores since the last report."""
    used_before: Amount | None = None
    """Seconds since `cpu` and `gpu` were measured, when this is sent."""
    gpu: Annotated[float, Field(ge=0, le=1)] | None = None
    """GPU utilization, 0 to 1."""
    gpu_memory_bytes: Counter | None = None
    """GPU memory in use."""
    trouble: Trouble | None = None
    """What went wrong and did not end it; absent while nothing did."""

    @property
    def has_stepped(self) -> bool:
        """Whether it has made a step since its start. A rank that pauses, or leaves its loop by an error, before its
        first one has another phase than `starting`, and no step."""
        return self.step > 0 or self.phase == TRAIN


class Failure(Model):
    """How a training process failed."""

    rank: Annotated[int, Field(ge=0, le=1_000_000)]
    """Global rank."""
    code: Annotated[int, Field(ge=-64, le=255)]
    """Its exit code, or minus the number of the signal that killed it."""
    announced: bool = True
    """Whether Tandem, in that process, said that it would end with this code: only then does the code mean what
    tandem.exitcode says. False: the program chose it. Earlier versions do not say."""
    seconds_ago: Amount = 0.0
    """When that was, by the agent's clock when it says so."""
    error: Annotated[str, Field(max_length=MAX_ERROR)] = ""
    """What was raised, such as `KeyError: 'image'`; empty where that is not known."""
    where: Annotated[str, Field(max_length=MAX_WHERE)] = ""
    """The innermost place of its traceback."""
    traceback: Annotated[str, Field(max_length=MAX_TRACEBACK)] = ""
    """The end of its traceback."""
    consequence: bool = False
    """Whether another rank's end is behind it: a collective or the store has failed."""
    passing: bool = False
    """Whether it is of a kind that may pass by itself: of a device, a network, a disk."""
    step: Counter | None = None
    """Optimizer steps completed, 0 before the first one since its start; absent where nobody knows."""


class Pair(Model):
    """What a member found between itself and another one."""

    replica: Name
    """The other one."""
    bytes_per_second: Amount | None = None
    """How fast data travelled there and back; null: it was not reached, or what came was not what it had sent."""


class PreflightReport(Model):
    """What a member found out before its ranks start."""

    generation: Generation
    """Of which generation."""
    wrong: Why = ""
    """What it did wrong by itself, such as a product that is not right or a process that died, in a sentence."""
    product_seconds: Amount | None = None
    """Seconds of one matrix product, on the slowest of its ranks."""
    pairs: Annotated[list[Pair], Field(max_length=64)] = []
    """What it found between itself and others, as far as it was asked to look."""
    all_reduce: Literal["right", "wrong", "failed"] | None = None
    """What came of the sum over all ranks; null: it was not tried, because a member was not reached."""


class Sync(Model):
    """An agent's heartbeat, wish and report."""

    replica: Name
    """The replica's name."""
    incarnation: Name
    """This agent process."""
    address: Address
    """Where the others reach it."""
    port: Port
    """Where it listens for the store of the generation it joins."""
    processes: Annotated[int, Field(ge=1, le=64)]
    """Ranks in it."""
    state: Literal["joining", "running", "leaving"]
    """`joining`: its workers are stopped and it waits for a generation. `running`: it runs `generation`. `leaving`:
    this is its last message."""
    reason: Literal["", "Started", "WorkerFailed", "MembershipChanged", "StoreUnreachable"] = ""
    """Why it joins. Said by a running agent, it asks for a new generation: a worker of its own failed, or lost its
    peers. `StoreUnreachable`: it was given a generation, and could not reach the store of its first member."""
    generation: Generation | None = None
    """The last generation it was given, null before the first."""
    membership: Membership | None = None
    """What it runs, told once on each new connection: the coordinator may have restarted."""
    leaving: bool = False
    """Said by a running agent that has to go (SIGTERM): it leaves once its group has saved."""
    finished: bool | None = None
    """Whether all of its ranks have ended with exit code 0. Sent by a running agent that stays because others use its
    store, and with the last message. An earlier version sends it with the last message only."""
    node: Name | None = None
    """The node it runs on, where it knows."""
    failure: Failure | None = None
    """Why it asks for a new generation, where that is because a training process of its own ended: the first one."""
    preflight: PreflightReport | None = None
    """What its pre-flight found, said by a running agent until it is told what follows from it."""
    ranks: Annotated[list[RankReport], Field(max_length=64)] = []
    """Its training processes."""
    age: Annotated[float, Field(ge=0, le=1e9)] | None = None
    """For how long this agent's process has existed, in seconds."""
    cpus: Annotated[float, Field(ge=0, le=100_000)] | None = None
    """CPUs that its ranks may use."""
    gpus: Annotated[int, Field(ge=0, le=1_024)] | None = None
    """GPUs that its ranks see, where it knows."""

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        if self.state == "running" and self.generation is None:
            raise ValueError("a running agent must say which generation it runs")
        if self.leaving and self.state != "running":
            raise ValueError("only a running agent has something to save before it leaves")
        if self.membership is not None and self.membership.generation != self.generation:
            raise ValueError("membership is of another generation than the one that the agent says it runs")
        return self

    @property
    def member(self) -> Member:
        """The agent as a member."""
        return Member(
            replica=self.replica,
            incarnation=self.incarnation,
            address=self.address,
            port=self.port,
            processes=self.processes,
        )


Order = Literal["wait", "run", "save", "rejoin", "end"]


class Answer(Model):
    """What the coordinator wants of an agent."""

    order: Order
    """`wait`: joining, no generation yet. `run`: the generation is open and you are in it. `save`: it is about to be
    closed; have your ranks save and leave at the next step boundary, then join, or leave if you wish to. `rejoin`: your
    generation is closed, stop and join. `end`: the job is over, or another process has taken your place."""
    membership: Membership | None = None
    """The generation, for an agent that was joining."""
    why: Why = ""
    """The reason in a sentence."""
    stacks: bool = False
    """Have every rank write its stacks into the run directory: with `rejoin`, because the group hangs, before it stops;
    with `run`, once, because its ranks do nothing."""
    left_out: bool | None = None
    """With `end`: the job goes on without this replica, because groups failed again and again because of it."""
    preflight: bool | None = None
    """With `run`: the ranks must not start yet. Do the pre-flight, tell what it found, and wait until this is not said
    any more, or for `rejoin`."""
    finished: bool | None = None
    """Acknowledges, with `run`, that the ranks of this agent have ended with exit code 0; `end` follows when all have.
    An earlier version does not send it."""


class Target(Model):
    """How many replicas are wished for from now on."""

    replicas: Annotated[int, Field(ge=1, le=10_000)]
    """Within the job's minReplicas and maxReplicas."""


HEADER = "Tandem-Protocol"
FIRST = 1
"""Of a peer that does not say: it refuses unknown fields."""
PROTOCOL = 2
"""What this version reads."""

FIRST_FIELDS: Mapping[type[Model], str] = {
    Member: "replica incarnation address port processes",
    Membership: "generation members reason",
    RankReport: "rank step phase total_steps epoch loss throughput busy_seconds saves cpu gpu gpu_memory_bytes",
    Sync: "replica incarnation address port processes state reason generation membership leaving ranks",
    Answer: "order membership why stacks",
    Target: "replicas",
    status.Condition: "type status reason message observed_generation last_transition_time",
    status.Members: "desired ready min max summary",
    status.Progress: "step total_steps epoch percent remaining_seconds",
    status.Utilization: "trainer_cpu evaluator_cpu gpu gpu_memory_bytes",
    status.Straggler: "rank replica ratio",
    status.CheckpointRef: "name step generation",
    status.Score: "name step metric value",
    status.Status: "phase conditions observed_generation workers evaluators world_size generation restarts progress"
    " loss throughput utilization stragglers latest_checkpoint latest_evaluation best_checkpoint evaluation_lag_steps"
    " start_time completion_time message",
    status.RankView: "rank step cpu gpu gpu_memory_bytes busy_seconds",
    status.MemberView: "replica address state silent_seconds ranks",
    status.GenerationView: "generation world_size members opened_at closed_at reason detail",
    status.EvaluatorView: "name state cpu silent_seconds",
    status.Event: "at kind text",
    status.Snapshot: "job time status members generations evaluators events",
}
"""The fields of the first protocol. They never change; nothing is added here."""

FIRST_WORDS: Mapping[str, str] = {"StoreUnreachable": "MembershipChanged"}
"""Reasons that the first protocol does not know, in its own words."""


class Headers(Protocol):
    """Of a request or an answer, whichever library holds them."""

    def get(self, name: str, default: str, /) -> str:
        """The value of one header."""


OURS = {HEADER: str(PROTOCOL)}
"""The header of this version."""


def spoken(headers: Headers) -> int:
    """The protocol that the sender of a message reads."""
    said = headers.get(HEADER, "")
    return int(said) if said.isascii() and said.isdecimal() and len(said) <= 9 else FIRST


def worded(message: Model, protocol: int) -> dict[str, Any]:
    """The JSON form of a message, for a peer that reads this protocol."""
    whole = message.dump()
    return whole if protocol > FIRST else _of_the_first(message, whole)


def _of_the_first(message: Model, whole: Mapping[str, Any]) -> dict[str, Any]:
    fields = type(message).model_fields
    names = {name: fields[name].alias or name for name in FIRST_FIELDS.get(type(message), " ".join(fields)).split()}
    return {alias: _pruned(getattr(message, name), whole[alias]) for name, alias in names.items() if alias in whole}


def _pruned(value: object, whole: Any) -> Any:
    if isinstance(value, Model):
        return _of_the_first(value, whole)
    if isinstance(value, str):
        return FIRST_WORDS.get(value, whole)
    if isinstance(value, list):
        return [_pruned(one, part) for one, part in zip(value, whole, strict=True)]
    return whole
