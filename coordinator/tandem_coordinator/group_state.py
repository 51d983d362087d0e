"""The group of a job: the coordinator's state, events and actions.

Values and simple questions about them; what follows from what is decided in `membership`, `forming` and `closing`.
"""

import re
from collections.abc import Hashable, Iterable, Mapping
from dataclasses import dataclass, field, replace

from tandem.job import Spec
from tandem.protocol import Failure, Member, Membership, PreflightReport, Sync


@dataclass(frozen=True, slots=True)
class Rules:
    """What the job says about its group."""

    minimum: int
    """Fewest replicas to train with; a multiple of `apart`, as is `maximum`."""
    maximum: int
    """Most replicas there may be."""
    lost_after: float
    """Seconds of silence after which an agent is lost."""
    grow_cooldown: float
    """Seconds between two growths."""
    grow_after: float
    """Seconds that a newcomer waits for a moment at which growth loses nothing."""
    max_restarts: int
    """Failures that are forgiven."""
    restart_window: float
    """Seconds without a failure that restore the budget."""
    start_after: float = 3.0
    """Seconds after the last arrival after which the first group starts without those that are missing."""
    heartbeat: float = 1.0
    """Longest time in seconds between two signs of life."""
    ends_with_zero: bool = False
    """Whether the job is complete when all ranks of a generation have ended with exit code 0: a script of the user's
    own has no other way to say so."""
    preflight: bool = False
    """Whether members are tried out before ranks start."""
    apart: int = 1
    """A group has a multiple of so many replicas, because the ranks of a pipeline are spread over them."""

    def usable(self, replicas: int) -> int:
        """How many of so many replicas can train together."""
        return replicas - replicas % self.apart

    @classmethod
    def of(cls, spec: Spec) -> "Rules":
        """The rules of a job."""
        elasticity = spec.elasticity
        return cls(
            minimum=spec.fewest_workers,
            maximum=spec.most_workers,
            lost_after=elasticity.lost_after_seconds,
            grow_cooldown=elasticity.grow_cooldown_seconds,
            grow_after=elasticity.grow_after_seconds,
            max_restarts=elasticity.max_restarts,
            restart_window=elasticity.restart_window_seconds,
            start_after=elasticity.start_after_seconds,
            heartbeat=elasticity.heartbeat_seconds,
            ends_with_zero=spec.trainer.command is not None,
            preflight=elasticity.preflight,
            apart=spec.workers_apart,
        )


@dataclass(frozen=True, slots=True)
class Agent:
    """One replica's living agent."""

    member: Member
    """Its incarnation, and where it is reached."""
    waits: bool
    """Whether its ranks are stopped and it waits for a generation; otherwise it runs, or is stopping, `generation`."""
    generation: int
    """The last generation it says it was given, 0 before the first."""
    heard: float
    """When it last gave a sign of life."""
    since: float
    """When it began to wait or to run."""
    leaves: bool = False
    """Whether it runs, has to go, and wants its group to save first."""
    node: str = ""
    """The node it runs on, where that is known."""
    preflights: bool = False
    """Whether it knows how to do a pre-flight."""


@dataclass(frozen=True, slots=True)
class Preflight:
    """The members of the open generation are tried out; their ranks have not started."""

    since: float
    """When it was asked for."""
    reports: Mapping[str, PreflightReport] = field(default_factory=dict)
    """What it found, by replica, of those that have told."""
    broken_at: float | None = None
    """When somebody first told that it does not reach another one."""


@dataclass(frozen=True, slots=True)
class Strike:
    """A failure of the group, and the replica that it is due to."""

    replica: str
    node: str
    """The node of that replica, empty where it is not known."""
    why: str
    """What it did, in a sentence."""
    counted: bool
    """Whether it was taken off the restart budget."""


@dataclass(frozen=True, slots=True)
class Complaint:
    """What a replica says that its rank failed by."""

    failure: Failure
    at: float
    """When."""


@dataclass(frozen=True, slots=True)
class LeftOut:
    """A replica, or all replicas of a node, that the others go on without (see `blame`)."""

    replica: str
    """Empty: the whole node."""
    node: str
    why: str
    """The reason in a sentence."""
    at: float
    """When that was decided."""


@dataclass(frozen=True, slots=True)
class Cause:
    """Why a generation was closed, and so why the next one is formed."""

    reason: str
    """One CamelCase word."""
    detail: str
    """The reason in a sentence."""
    culprit: str = ""
    """The replica that it is due to, where one is known."""
    explained: bool = False
    """Of broken connections: whether it is settled what they count for."""

    @property
    def is_failure(self) -> bool:
        """Whether it counts against the restart budget."""
        return self.reason in ("WorkerFailed", "Hung")

    @property
    def is_consequence(self) -> bool:
        """Whether something else may be behind it that is not known yet."""
        return self.reason in ("PeerLost", "StoreUnreachable") and not self.explained

    @property
    def is_planned(self) -> bool:
        """Whether somebody wanted it so."""
        return self.reason in ("Preempted", "MemberJoined", "TargetChanged", "SettingsChanged")


@dataclass(frozen=True, slots=True)
class Saving:
    """The members of the open generation were asked to save and to stop by themselves."""

    cause: Cause
    """Why."""
    since: float
    """When they were asked; later by what they took for what takes as long as it takes."""
    leaving: frozenset[str] = frozenset()
    """Replicas that will not come back."""


@dataclass(frozen=True, slots=True)
class State:
    """Everything that decides about membership. Times are seconds of one monotonic clock."""

    rules: Rules
    target: int
    """How many replicas are wished for."""
    number: int = 0
    """The highest generation number that was ever given out."""
    first: int = 1
    """The lowest one of this run: those before are of what was in the run directory earlier."""
    latest: Membership | None = None
    """The generation with that number, where it is known."""
    inside: Mapping[tuple[str, str], Member] = field(default_factory=dict)
    """The members of `latest` by replica and incarnation."""
    open: bool = False
    """Whether `latest` is open."""
    cause: Cause = Cause("Started", "the job starts")
    """Why there is no open generation, or why the open one was formed."""
    grown: float = float("-inf")
    """When it was formed larger than before the last time."""
    largest: int = 0
    """Largest number of members so far, at most the current target."""
    changed: float = 0.0
    """When a generation was last opened or closed."""
    settings_changed: str = ""
    """What of the job has changed that the ranks of the open generation have read at their start, in a sentence."""
    adopting_until: float | None = None
    """After a restart: until then the members of `latest` may report that they still run it. It begins to count when
    the first agent is heard."""
    agents: Mapping[str, Agent] = field(default_factory=dict)
    """Agents that are alive, by replica."""
    finished: frozenset[str] = frozenset()
    """Replicas of the open generation, or of the one about to be adopted, whose ranks have all exited with code 0.
    Whether their agents are still there makes no difference any more."""
    cut_off: frozenset[str] = frozenset()
    """Replicas of the newest generation that could not reach the store of its first member."""
    complaints: Mapping[str, Complaint] = field(default_factory=dict)
    """What its members say that their ranks failed by, by replica (see `repetition`)."""
    opened: float = 0.0
    """When it was opened."""
    progress: str = ""
    """How far it had got when it was closed (see `repetition`)."""
    settled: bool = False
    """Whether it is settled what it failed by."""
    barren: int = 0
    """Generations in a row that failed without that."""
    signature: Hashable = None
    """What the last generation failed by, if another one would fail by it again."""
    before: str = ""
    """How far that one had got."""
    hung_step: int | None = None
    """The step at which a group hung last."""
    hung_times: int = 0
    """Groups in a row that hung at that step."""
    not_before: float = 0.0
    """When the next generation may be formed."""
    strikes: tuple[Strike, ...] = ()
    """The last failures that are due to one replica, oldest first."""
    left_out: tuple[LeftOut, ...] = ()
    """What the others go on without."""
    retired: tuple[tuple[str, str], ...] = ()
    """(replica, incarnation) of agents that were replaced: they must not come back."""
    failures: int = 0
    """Failures since the budget was last full."""
    failed_at: float = 0.0
    """When the last failure was counted."""
    ticked: float = 0.0
    """When the last tick was."""
    blind: bool = False
    """Whether no agent at all was heard of at the last tick."""
    saving: Saving | None = None
    """Whether the open generation is about to be closed, as soon as it has saved."""
    preflight: Preflight | None = None
    """The pre-flight of the open generation, while it goes on."""
    passed: frozenset[tuple[str, str]] = frozenset()
    """Agents that have passed one, by replica and incarnation."""
    training: bool = False
    """Whether the ranks of the open generation say that they make steps: they have something to lose."""
    can_save: bool = False
    """Whether they are known to save and leave when asked."""
    scripted: bool = False
    """Whether they are known not to: they are of a script of the user's own without a session."""
    step_seconds: float = 0.0
    """How long a step takes, lately."""
    checkpoint: Hashable = None
    """The newest checkpoint, of ours or of a kind that is recognised."""
    checkpoint_at: float | None = None
    """When that was first seen."""
    own_file: tuple[int, str] | None = None
    """The newest checkpoint that a script has written in a way of its own, whole or not: when, and which."""
    own_file_at: float = 0.0
    """When that was looked for."""
    own_file_before: tuple[int, str] | None = None
    """Which one it was when the newest generation was opened."""
    checkpoint_every: float | None = None
    """Seconds between it and the one before, if both are of the open generation."""
    completing: Cause | None = None
    """Why the job is complete: nothing is formed any more, and `Over` follows once the run directory says so."""
    failing: Cause | None = None
    """Why the job has failed: nothing is formed any more, and `Over` follows once the run directory says so."""
    end: Cause | None = None
    """Why the job is over, once it is."""


@dataclass(frozen=True, slots=True)
class Synced:
    """An agent has spoken."""

    sync: Sync
    preflights: bool = True
    """Whether it knows how to do a pre-flight: older agents start their ranks whatever they are told."""


@dataclass(frozen=True, slots=True)
class Disconnected:
    """The connection to an agent broke while it waited for an answer."""

    replica: str
    incarnation: str


@dataclass(frozen=True, slots=True)
class Retarget:
    """Another number of replicas is wished for."""

    replicas: int


@dataclass(frozen=True, slots=True)
class Tick:
    """Time has passed: the only event that loses agents and forms generations."""

    heard: Mapping[str, float] = field(default_factory=dict)
    """Replicas whose heartbeat said nothing new, and when (see `says_nothing_new`)."""
    checkpoint: Hashable = None
    """The newest checkpoint: anything that tells it from the one before."""
    saved_step: int | None = None
    """Its step, where that is known."""
    own_file: tuple[int, str] | None = None
    """The newest one that a script has written in a way of its own, whole or not."""
    own_file_at: float = float("inf")
    """When that was looked for."""
    training: bool = False
    """Whether the ranks of the open generation say that they make steps."""
    can_save: bool = False
    """Whether they are known to save and leave when asked."""
    scripted: bool = False
    """Whether they are known not to: they are of a script of the user's own without a session."""
    step_seconds: float = 0.0
    """How long a step takes, lately."""
    saving: bool = False
    """Whether one of them says that it takes no more steps, and writes its last checkpoint."""
    pausing: bool = False
    """Whether one of them says that it is at something that takes as long as it takes."""
    finishing: bool = False
    """Whether one of them says that all steps are taken, and the code after the loop runs."""


@dataclass(frozen=True, slots=True)
class Hung:
    """The ranks of a generation have not made a step for too long (see `hang`)."""

    generation: int
    detail: str
    """Which, where and for how long, in a sentence."""
    culprit: str = ""
    """The replica whose ranks alone seem to be stuck."""
    step: int | None = None
    """The step that the ranks have come to, where that is known."""


@dataclass(frozen=True, slots=True)
class Over:
    """The run directory says that the job is over."""

    cause: Cause


Event = Synced | Disconnected | Retarget | Tick | Hung | Over


@dataclass(frozen=True, slots=True)
class Open:
    """A generation was formed (or adopted). Make its number durable before anybody learns of it."""

    membership: Membership
    detail: str
    adopted: bool = False


@dataclass(frozen=True, slots=True)
class Close:
    """A generation was closed."""

    generation: int
    cause: Cause


@dataclass(frozen=True, slots=True)
class Say:
    """Something a person following the job wants to read."""

    text: str
    warning: bool = False


@dataclass(frozen=True, slots=True)
class FailJob:
    """The job has failed for good. Say so in the run directory, so that agents find it there, and then `Over`."""

    cause: Cause
    replica: str = ""
    """Whose rank failed first, where that is known."""
    complaint: Complaint | None = None
    """By what."""


@dataclass(frozen=True, slots=True)
class Complete:
    """Every rank of a generation has ended with exit code 0. Say so in the run directory, and then `Over`."""

    cause: Cause


Action = Open | Close | Say | FailJob | Complete

Next = tuple[State, tuple[Action, ...]]
"""What follows from an event."""


def is_inside(state: State, agent: Agent) -> bool:
    """Whether this very process is a member of the newest generation."""
    return (agent.member.replica, agent.member.incarnation) in state.inside


def waiting(state: State) -> list[Agent]:
    """Agents that wait and are not in the open generation."""
    return [agent for agent in state.agents.values() if agent.waits and not (state.open and is_inside(state, agent))]


def without(state: State, gone: Iterable[str]) -> State:
    """These replicas have no living agent any more."""
    names = set(gone)
    return replace(state, agents={name: agent for name, agent in state.agents.items() if name not in names})


def natural(name: str) -> list[tuple[int, str]]:
    """Sorts worker-2 before worker-10."""
    return [(int(part), "") if part.isdigit() else (0, part) for part in re.split(r"(\d+)", name)]


def listed(names: Iterable[str]) -> str:
    """Names for a sentence, the first five of many."""
    found = sorted(names, key=natural)
    return ", ".join(found[:5]) + (f" and {len(found) - 5} more" if len(found) > 5 else "")


def replicas(count: int) -> str:
    """1 replica, 2 replicas."""
    return f"{count} replica" if count == 1 else f"{count} replicas"
