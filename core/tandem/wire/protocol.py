"""Protocol versions between agents, operator, CLI and coordinator (docs/decisions/0020-versions.md).

Each request and each response carries a header with the protocol that its sender reads. Unknown fields are ignored.

Every field is bounded, so that a broken or hostile client costs the coordinator an error message and not its memory.
"""

from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from tandem.model import Model, truncated_to

MAX_BODY_BYTES = 64 * 2**10
"""Maximum size of a request body in bytes."""

BRIEF_PATH = "/v1/brief"
"""Path of the operator's request: a snapshot without members, of at most MAX_BRIEF_BYTES."""
MAX_BRIEF_BYTES = 2**17
QUEUE_PATH = "/v1/queue"
"""Path to which the operator sends the queue of the job (tandem.wire.queue_view), for the live page."""
CODE_PATH = "/v1/code"
"""Path to which the job's code is sent, followed by its digest (tandem.rundir.code)."""

Name = Annotated[str, Field(pattern=r"^[A-Za-z0-9]([A-Za-z0-9._-]*[A-Za-z0-9])?$", max_length=253)]
Address = Annotated[str, Field(pattern=r"^[A-Za-z0-9]([A-Za-z0-9.:%_-]*[A-Za-z0-9])?$|^::1?$", max_length=253)]
Port = Annotated[int, Field(ge=1, le=65_535)]
Generation = Annotated[int, Field(ge=1, le=2**53)]
Counter = Annotated[int, Field(ge=0, le=2**53)]
Amount = Annotated[float, Field(ge=0)]
ReasonText = Annotated[str, Field(max_length=2_000)]

MAX_ERROR_LENGTH, MAX_LOCATION_LENGTH, MAX_TRACEBACK_LENGTH = 500, 300, 2_400
"""Maximum lengths of the error, its location and its traceback of a failed process, in characters."""

STARTING, TRAIN, STOPPED, SCRIPT = "starting", "train", "stopped", "script"
SAVING, FINISHING, DEBUGGER = "saving", "finishing", "debugger"
"""Phases of a rank that the coordinator interprets; see RankReport.phase. All others are for people."""
PHASES_WITHOUT_STEP = {STARTING, STOPPED, SCRIPT}
"""Phases in which a rank does not report its step."""


class Member(Model):
    """One replica, as its peers reach it."""

    replica: Name
    """Name of the replica."""
    incarnation: Name
    """Identity of the agent process, so that a restarted agent is not mistaken for the one it replaces."""
    address: Address
    """Address at which peers reach it."""
    port: Port
    """Port of the rendezvous store that it hosts if it becomes the first member."""
    processes: Annotated[int, Field(ge=1, le=64)]
    """Number of its ranks."""


class Membership(Model):
    """A generation: the members of the group, in rank order. It never changes; a change is a new generation."""

    generation: Generation
    """Number of the generation."""
    members: Annotated[list[Member], Field(min_length=1, max_length=20_000)]
    """Members in rank order; the first one hosts the store."""
    reason: Name
    """Reason for which it was formed, one CamelCase word."""

    @property
    def world_size(self) -> int:
        """Number of ranks."""
        return self.first_rank(len(self.members))

    def first_rank(self, index: int) -> int:
        """First global rank of the member with this index."""
        return sum(member.processes for member in self.members[:index])

    def if_small(self) -> "Membership | None":
        """Itself for repetition, None if it is too large: the coordinator has it in its state store."""
        return None if len(self.model_dump_json()) > MAX_BODY_BYTES // 2 else self


class Trouble(Model):
    """Problems of a training process since its start that did not end it."""

    saves_failed: Counter = 0
    """Checkpoints that could not be written."""
    saves_failed_in_a_row: Counter = 0
    """Checkpoints that could not be written since the last successful save."""
    why: Annotated[str, truncated_to(200)] = ""
    """Reason for which the last one could not be written."""
    lines_lost: Counter = 0
    """Lines of the training log that the disk refused."""


class RankReport(Model):
    """State of one training process."""

    rank: Annotated[int, Field(ge=0, le=1_000_000)]
    """Global rank."""
    step: Counter
    """Optimizer steps completed."""
    phase: Annotated[str, Field(max_length=16)] = TRAIN
    """Current phase: `starting` while `step` is not meaningful yet, `stopped` if its process is (SIGSTOP), `script` if
    it runs a script of the user's own that reports no steps."""
    pauses: bool = False
    """Whether it is in a pause of unknown length (`Session.pausing()`), such as a validation or the code after the
    loop: no step is due, and the group does not hang."""
    finishing: bool = False
    """Whether all steps are taken, and the code after the loop runs."""
    script: bool = False
    """Whether it runs a script of the user's own without a session, which does not follow orders. Once that logs steps
    (tandem.log), its phase is no longer `script`; some ranks may not log them, and logging may be rare."""
    total_steps: Counter | None = None
    """Optimizer steps of the whole run."""
    epoch: Amount | None = None
    """Passes over the data, with the fraction of the current one."""
    loss: float | None = None
    """Training loss; also absent while it is not finite."""
    loss_is_finite: bool = True
    """Whether the loss is finite. False where `loss` is absent because it is NaN or infinite."""
    throughput: Amount | None = None
    """Samples a second over all ranks."""
    busy_seconds: Amount | None = None
    """Mean time of its own work in a step, in seconds, without waiting for others: a straggler has more than its
    peers."""
    saves: bool = False
    """Whether it is known to follow `save-and-leave`; the ranks of a built-in task always do."""
    survives: bool = False
    """Whether it goes on in the next generation, with its process and its state (tandem_trainer.regroup)."""
    cpu: Amount | None = None
    """Busy cores since the last report."""
    used_before: Amount | None = None
    """Age of the measurement of `cpu` and `gpu` when this is sent, in seconds."""
    gpu: Annotated[float, Field(ge=0, le=1)] | None = None
    """GPU utilization, 0 to 1."""
    gpu_memory_bytes: Counter | None = None
    """GPU memory in use."""
    trouble: Trouble | None = None
    """Problems that did not end it; absent while there are none."""

    @property
    def has_stepped(self) -> bool:
        """Whether it has completed a step since its start. A rank that pauses, or leaves its loop by an error, before
        its first step has another phase than `starting`, and no step."""
        return self.step > 0 or self.phase == TRAIN


class Failure(Model):
    """The failure of a training process."""

    rank: Annotated[int, Field(ge=0, le=1_000_000)]
    """Global rank."""
    code: Annotated[int, Field(ge=-64, le=255)]
    """Its exit code, or minus the number of the signal that killed it."""
    announced: bool = True
    """Whether Tandem, in that process, announced that it would exit with this code: only then does the code have its
    meaning in tandem.processes.exitcode. False if the program chose it. Earlier versions do not send it."""
    seconds_ago: Amount = 0.0
    """Time since the failure by the agent's clock, in seconds, when this is sent."""
    error: Annotated[str, Field(max_length=MAX_ERROR_LENGTH)] = ""
    """The exception, such as `KeyError: 'image'`; empty where it is not known."""
    where: Annotated[str, Field(max_length=MAX_LOCATION_LENGTH)] = ""
    """The innermost location in its traceback."""
    traceback: Annotated[str, Field(max_length=MAX_TRACEBACK_LENGTH)] = ""
    """The end of its traceback."""
    consequence: bool = False
    """Whether it follows from the end of another rank: a collective or the store has failed."""
    passing: bool = False
    """Whether the error may be transient: an error of a device, a network or a disk."""
    step: Counter | None = None
    """Optimizer steps completed, 0 before the first one since its start; absent where not known."""


class Pair(Model):
    """Result of a member's exchange with another member."""

    replica: Name
    """The other member."""
    bytes_per_second: Amount | None = None
    """Round-trip data rate; null: the member was not reached, or returned other data than was sent."""


class PreflightReport(Model):
    """Results of a member's pre-flight, before its ranks start."""

    generation: Generation
    """Generation that the pre-flight belongs to."""
    wrong: ReasonText = ""
    """Problem of this member alone, such as a wrong product or a process that died, in a sentence."""
    product_seconds: Amount | None = None
    """Duration of one matrix product on the slowest of its ranks, in seconds."""
    pairs: Annotated[list[Pair], Field(max_length=64)] = []
    """Results of the exchanges that it was asked to do."""
    all_reduce: Literal["right", "wrong", "failed"] | None = None
    """Result of the sum over all ranks; null: it was not tried, because a member was not reached."""


class Sync(Model):
    """An agent's heartbeat and report."""

    replica: Name
    """Name of the replica."""
    incarnation: Name
    """Identity of this agent process."""
    address: Address
    """Address at which peers reach it."""
    port: Port
    """Port of its rendezvous store for the next generation."""
    processes: Annotated[int, Field(ge=1, le=64)]
    """Number of its ranks."""
    state: Literal["joining", "running", "leaving"]
    """`joining`: its workers are stopped and it waits for a generation. `running`: it runs `generation`. `leaving`:
    this is its last message."""
    reason: Literal["", "Started", "WorkerFailed", "MembershipChanged", "StoreUnreachable"] = ""
    """Reason for which it joins. From a running agent it requests a new generation: a worker of its own failed, or lost
    its peers. `StoreUnreachable`: it has a generation, and could not reach the store of its first member."""
    generation: Generation | None = None
    """The last generation that it received; null before the first."""
    membership: Membership | None = None
    """The membership that it runs, sent once on each new connection: the coordinator may have restarted."""
    leaving: bool = False
    """Sent by a running agent that received SIGTERM: it leaves once its group has saved."""
    standby: Literal["", "preparing", "new"] = ""
    """Sent by a joining agent whose ranks can keep their state, but hold none. `preparing`: they are not
    ready for a group yet. `new`: they are, or start with it."""
    finished: bool | None = None
    """Whether all of its ranks have exited with code 0. Sent by a running agent that stays because others use its
    store, and with the last message."""
    node: Name | None = None
    """The node it runs on, where known."""
    failure: Failure | None = None
    """The first failure of its own training processes, where that is the reason for a new generation."""
    preflight: PreflightReport | None = None
    """Results of its pre-flight, sent by a running agent until the coordinator has decided."""
    ranks: Annotated[list[RankReport], Field(max_length=64)] = []
    """Its training processes."""
    age: Annotated[float, Field(ge=0, le=1e9)] | None = None
    """Age of this agent's process, in seconds."""
    cpus: Annotated[float, Field(ge=0, le=100_000)] | None = None
    """CPUs that its ranks may use."""
    gpus: Annotated[int, Field(ge=0, le=1_024)] | None = None
    """GPUs that its ranks see, where known."""

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        if self.state == "running" and self.generation is None:
            raise ValueError("a running agent must name the generation it runs")
        if self.leaving and self.state != "running":
            raise ValueError("only a running agent has something to save before it leaves")
        if self.standby and self.state != "joining":
            raise ValueError("only a joining agent has ranks in standby")
        if self.membership is not None and self.membership.generation != self.generation:
            raise ValueError("membership and generation must name the same generation")
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
    """The coordinator's response to a heartbeat: an order for the agent."""

    order: Order
    """`wait`: joining, no generation yet. `run`: the generation is open and you are in it. `save`: it is about to be
    closed; have your ranks save and leave at the next step boundary, then join, or leave if you must. `rejoin`: your
    generation is closed, stop and join. `end`: the job is over, or another process has replaced you."""
    membership: Membership | None = None
    """The generation, for an agent that was joining."""
    why: ReasonText = ""
    """Reason for the order, in a sentence."""
    stacks: bool = False
    """Have every rank write its stacks into the run directory: with `rejoin`, because the group hangs, before it stops;
    with `run`, once, because its ranks do nothing."""
    left_out: bool | None = None
    """Sent with `end`: the job continues without this replica, because groups failed repeatedly because of it."""
    preflight: bool | None = None
    """Sent with `run`: the ranks must not start yet. Do the pre-flight, report its results, and wait until this is no
    longer set, or for `rejoin`."""
    finished: bool | None = None
    """Acknowledges, with `run`, that the ranks of this agent have exited with code 0; `end` follows when all have."""


class Target(Model):
    """The desired number of replicas from now on."""

    replicas: Annotated[int, Field(ge=1, le=10_000)]
    """Number of replicas, from the job's minReplicas to its maxReplicas."""


PROTOCOL_HEADERS = {"Tandem-Protocol": "3"}
"""The header of every request and response. Peers of the version before withhold what they take for unknown without
it."""
