"""The group of a job: the coordinator's state, events and actions.

Values, and simple questions about them. The decisions are made in `membership`, `forming` and `closing`.
"""

import re
from collections.abc import Hashable, Iterable, Mapping
from dataclasses import dataclass, field, replace

from tandem.job.resource import Spec
from tandem.rundir.layout import FinishedMember
from tandem.wire.protocol import Failure, Member, Membership, PreflightReport, Sync

WAITS_FOR_BUCKET = "the next generation waits for the bucket"
"""Beginning of the reason why no generation is formed although its members are there."""


@dataclass(frozen=True, slots=True)
class Rules:
    """The job's settings that govern its group."""

    minimum: int
    """Minimum number of replicas to train with; like `maximum`, a multiple of `multiple`."""
    maximum: int
    """Maximum number of replicas."""
    lost_after: float
    """Silence after which an agent is lost, in seconds."""
    grow_cooldown: float
    """Minimum time between two growths of the group, in seconds."""
    grow_after: float
    """Maximum time that a newcomer waits for a checkpoint after which growth loses nothing, in seconds."""
    max_restarts: int
    """Number of failures after which the job still restarts."""
    restart_window: float
    """Time without a failure that restores the restart budget, in seconds."""
    start_after: float = 3.0
    """Time after the last arrival after which the first group starts without missing replicas, in seconds."""
    heartbeat: float = 1.0
    """Maximum time between two heartbeats of an agent, in seconds."""
    completes_on_exit: bool = False
    """Whether the job is complete once all ranks of a generation have exited with code 0. A user's own script has no
    other way to report it."""
    preflight: bool = False
    """Whether members pass a pre-flight before their ranks start."""
    multiple: int = 1
    """The size of a group is a multiple of this, because the ranks of a pipeline are spread over that many replicas."""

    def largest_usable(self, replicas: int) -> int:
        """The largest number of these replicas that can train together."""
        return replicas - replicas % self.multiple

    @classmethod
    def from_spec(cls, spec: Spec) -> "Rules":
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
            completes_on_exit=spec.trainer.command is not None,
            preflight=elasticity.preflight,
            multiple=spec.workers_apart,
        )


@dataclass(frozen=True, slots=True)
class AgentState:
    """One replica's living agent."""

    member: Member
    """Its incarnation and its address."""
    is_waiting: bool
    """Whether its ranks are stopped and it waits for a generation. Otherwise it runs `generation`, or is stopping
    it."""
    generation: int
    """The last generation that it reports having received; 0 before the first."""
    last_seen: float
    """Time of its last heartbeat."""
    since: float
    """Time at which it began to wait or to run."""
    leaving_since: float | None = None
    """Time at which it said that it received SIGTERM while running, so that its group should save first."""
    node: str = ""
    """The node it runs on; empty if unknown."""
    standby: str = ""
    """State of new ranks that hold no state of the run (tandem.wire.protocol.Sync)."""
    disconnected_at: float | None = None
    """Time at which its connection broke; None if it has not, or it has sent a message since."""

    @property
    def is_leaving(self) -> bool:
        """Whether it has to go."""
        return self.leaving_since is not None

    @property
    def is_preparing(self) -> bool:
        """Whether its ranks are stopped, and new ones are not ready for a group yet."""
        return self.standby == "preparing"

    @property
    def starts_anew(self) -> bool:
        """Whether its ranks are new ones, which hold no state."""
        return bool(self.standby)

    @property
    def has_stopped(self) -> bool:
        """Whether the ranks of its last generation are stopped."""
        return self.is_waiting or self.is_preparing


@dataclass(frozen=True, slots=True)
class Preflight:
    """A pre-flight in progress: the members of the open generation are tested, and their ranks have not started."""

    since: float
    """Time at which it was requested."""
    reports: Mapping[str, PreflightReport] = field(default_factory=dict)
    """The reports received so far, by replica."""
    broken_at: float | None = None
    """Time of the first report that a member cannot reach another one."""


@dataclass(frozen=True, slots=True)
class Strike:
    """A failure of the group, held against the replica that caused it."""

    replica: str
    node: str
    """The node of that replica; empty if unknown."""
    reason: str
    """The failure, as a sentence."""
    charged: bool
    """Whether it was charged to the restart budget."""


@dataclass(frozen=True, slots=True)
class FailureReport:
    """The failure of a rank, as its replica reported it."""

    failure: Failure
    failed_at: float
    """Time of the failure."""


@dataclass(frozen=True, slots=True)
class Exclusion:
    """A replica, or a whole node, that the group goes on without (see `failures`)."""

    replica: str
    """The excluded replica; empty if the whole node is excluded."""
    node: str
    reason: str
    """Reason, as a sentence."""
    since: float
    """Time of the decision."""


@dataclass(frozen=True, slots=True)
class Cause:
    """The reason why a generation was closed, and so why the next one is formed."""

    reason: str
    """Reason, one CamelCase word."""
    detail: str
    """Reason, as a sentence."""
    culprit: str = ""
    """The replica that caused it; empty if unknown."""
    is_explained: bool = False
    """Whether broken connections have been attributed to a cause (see `closing.explain_consequence`)."""

    @property
    def is_failure(self) -> bool:
        """Whether it counts against the restart budget."""
        return self.reason in ("WorkerFailed", "Hung")

    @property
    def is_consequence(self) -> bool:
        """Whether it may be the consequence of another failure that is not known yet."""
        return self.reason in ("PeerLost", "StoreUnreachable") and not self.is_explained

    @property
    def is_planned(self) -> bool:
        """Whether it was a requested change, and no failure."""
        return self.reason in ("Preempted", "MemberJoined", "TargetChanged", "SettingsChanged")


@dataclass(frozen=True, slots=True)
class Saving:
    """A pending close: the members of the open generation were asked to save and to stop by themselves."""

    cause: Cause
    """Reason of the close."""
    since: float
    """Time of the request. It moves on while a rank writes its checkpoint or is in `Session.pausing()`."""
    leaving: frozenset[str] = frozenset()
    """Replicas that will not come back afterwards."""


@dataclass(frozen=True, slots=True)
class State:
    """The complete state that membership decisions depend on. Times are seconds of one monotonic clock."""

    rules: Rules
    target: int
    """Target number of replicas."""
    number: int = 0
    """The highest generation number handed out so far."""
    first: int = 1
    """The first generation number of this run; lower ones belong to earlier contents of the run directory."""
    latest: Membership | None = None
    """The generation with that number; None if unknown."""
    members: Mapping[tuple[str, str], Member] = field(default_factory=dict)
    """The members of `latest` by replica and incarnation."""
    open: bool = False
    """Whether `latest` is open."""
    cause: Cause = Cause("Started", "the job starts")
    """The reason why no generation is open, or why the open one was formed."""
    last_growth: float = float("-inf")
    """Time of the last growth."""
    largest: int = 0
    """Largest number of members so far, at most the current target."""
    last_change: float = 0.0
    """Time at which a generation was last opened or closed."""
    settings_changed: str = ""
    """Job settings that have changed since the ranks of the open generation read them, as a sentence; empty if none."""
    adopting_until: float | None = None
    """Deadline, after a restart, for the members of `latest` to report that they still run it. The wait begins when the
    first agent is heard."""
    agents: Mapping[str, AgentState] = field(default_factory=dict)
    """Agents that are alive, by replica."""
    finished: frozenset[str] = frozenset()
    """Replicas of the open generation, or of the one about to be adopted, whose ranks have all exited with code 0. It
    does not matter whether their agents are still alive."""
    store_unreachable: frozenset[str] = frozenset()
    """Replicas of the newest generation that could not reach the store of its first member."""
    failure_reports: Mapping[str, FailureReport] = field(default_factory=dict)
    """Failures that its members reported, by replica (see `failures`)."""
    opened_at: float = 0.0
    """Time at which it was opened."""
    progress: str = ""
    """Its progress when it was closed: `failures.STEPS`, `failures.SAVED`, or empty."""
    is_classified: bool = False
    """Whether its failure has been classified (see `failures.classify`)."""
    fruitless_generations: int = 0
    """Number of generations in a row that failed without progress."""
    signature: Hashable = None
    """Signature of the last generation's failure; None if the failure may pass by itself."""
    progress_before: str = ""
    """Progress of the generation that failed with this signature."""
    hung_step: int | None = None
    """The step at which the last hang occurred."""
    hung_times: int = 0
    """Number of generations in a row that hung at that step."""
    not_before: float = 0.0
    """Earliest time at which the next generation may be formed."""
    bucket_problem: str = ""
    """The reason why no generation can be recorded in the bucket; empty if one can."""
    waits_for_bucket: bool = False
    """Whether the next generation is formed as soon as it can be recorded."""
    strikes: tuple[Strike, ...] = ()
    """The last failures that were held against one replica, oldest first."""
    exclusions: tuple[Exclusion, ...] = ()
    """Replicas and nodes that the group goes on without, oldest first."""
    retired: tuple[tuple[str, str], ...] = ()
    """(replica, incarnation) of agents that were replaced; they must not come back."""
    failures: int = 0
    """Number of failures since the restart budget was last full."""
    failed_at: float = 0.0
    """Time at which the last failure was counted."""
    last_tick: float = 0.0
    """Time of the last tick."""
    blind: bool = False
    """Whether all agents were silent at the last tick."""
    saving: Saving | None = None
    """The pending close of the open generation; None if none is requested."""
    preflight: Preflight | None = None
    """The pre-flight of the open generation; None if none is in progress."""
    preflight_passed: frozenset[tuple[str, str]] = frozenset()
    """Agents that have passed a pre-flight, by replica and incarnation."""
    training: bool = False
    """Whether the ranks of the open generation report steps, and so have work to lose."""
    can_save: bool = False
    """Whether the ranks are known to save and leave when asked."""
    survive: bool = False
    """Whether the ranks keep their state when the group changes, so that those that stay need no checkpoint."""
    survived: bool = False
    """Whether they did when the newest generation was closed."""
    scripted: bool = False
    """Whether the ranks are known not to save when asked, because a user's own script runs without a session."""
    step_seconds: float = 0.0
    """Recent duration of a step, in seconds."""
    checkpoint: Hashable = None
    """The newest checkpoint, Tandem's or of another recognised kind."""
    checkpoint_at: float | None = None
    """Time at which that checkpoint was first seen."""
    script_checkpoint: tuple[int, str] | None = None
    """The newest checkpoint file that a user's own script wrote, complete or not: its modification time in nanoseconds,
    and its path."""
    script_checkpoint_polled: float = 0.0
    """Time at which the run directory was last searched for such a file."""
    script_checkpoint_before: tuple[int, str] | None = None
    """The newest such file when the newest generation was opened."""
    checkpoint_every: float | None = None
    """Seconds between the newest checkpoint and the one before, if both are of the open generation."""
    completing: Cause | None = None
    """The reason why the job is complete. No generation is formed any more, and `RunEnded` follows once the run
    directory records it."""
    failing: Cause | None = None
    """The reason why the job has failed. No generation is formed any more, and `RunEnded` follows once the run
    directory records it."""
    end: Cause | None = None
    """The reason why the job has ended; None while it has not."""


@dataclass(frozen=True, slots=True)
class Synced:
    """A message of an agent: a heartbeat, a request to join, or a notice that it leaves."""

    sync: Sync


@dataclass(frozen=True, slots=True)
class Disconnected:
    """The connection to an agent broke while it waited for an answer."""

    replica: str
    incarnation: str
    heartbeat_at: float | None = None
    """Time of a heartbeat before that, of which no tick has told yet."""


@dataclass(frozen=True, slots=True)
class Retarget:
    """A request for another target number of replicas."""

    replicas: int


@dataclass(frozen=True, slots=True)
class Tick:
    """The passage of time: the only event that removes silent agents and forms generations."""

    heartbeats: Mapping[str, float] = field(default_factory=dict)
    """Times of heartbeats with no new content, by replica (see `membership.is_redundant`)."""
    checkpoint: Hashable = None
    """The newest checkpoint, as any value that differs from that of the one before."""
    saved_step: int | None = None
    """Its step; None if unknown."""
    script_checkpoint: tuple[int, str] | None = None
    """The newest checkpoint file of a user's own script, complete or not."""
    script_checkpoint_polled: float = float("inf")
    """Time at which the run directory was last searched for such a file."""
    training: bool = False
    """Whether the ranks of the open generation report steps."""
    can_save: bool = False
    """Whether the ranks are known to save and leave when asked."""
    survive: bool = False
    """Whether the ranks keep their state when the group changes, so that those that stay need no checkpoint."""
    scripted: bool = False
    """Whether the ranks are known not to save when asked, because a user's own script runs without a session."""
    step_seconds: float = 0.0
    """Recent duration of a step, in seconds."""
    saving: bool = False
    """Whether a rank reports that it takes no more steps and writes its last checkpoint."""
    pausing: bool = False
    """Whether a rank reports that it is in `Session.pausing()`."""
    finishing: bool = False
    """Whether a rank reports that all steps are taken and the code after the loop runs."""
    bucket_problem: str = ""
    """The reason why no generation can be recorded in the bucket, where pods share nothing else; empty if one can."""


@dataclass(frozen=True, slots=True)
class Hung:
    """A hang: the ranks of a generation have not made a step for too long (see `hang`)."""

    generation: int
    detail: str
    """The ranks that hang, their step, and for how long, as a sentence."""
    culprit: str = ""
    """The replica whose ranks alone seem to be stuck; empty if unknown."""
    step: int | None = None
    """The step that the ranks have reached; None if unknown."""


@dataclass(frozen=True, slots=True)
class RunEnded:
    """The end of the job, as recorded in the run directory."""

    cause: Cause


@dataclass(frozen=True, slots=True)
class NumbersFound:
    """Numbers that are wrong were found, and the job says that it fails at that."""

    cause: Cause


@dataclass(frozen=True, slots=True)
class MemberFinished:
    """All ranks of a member have exited with code 0, as its agent has recorded in the run directory."""

    member: FinishedMember


Event = Synced | Disconnected | Retarget | Tick | Hung | MemberFinished | NumbersFound | RunEnded


@dataclass(frozen=True, slots=True)
class Open:
    """A generation was formed (or adopted). Its number must be durable before anybody learns of it."""

    membership: Membership
    detail: str
    adopted: bool = False


@dataclass(frozen=True, slots=True)
class Close:
    """A generation was closed."""

    generation: int
    cause: Cause


@dataclass(frozen=True, slots=True)
class Announce:
    """A message for people who follow the job."""

    text: str
    warning: bool = False


@dataclass(frozen=True, slots=True)
class FailJob:
    """The job has failed for good. Record it in the run directory, where agents find it, and then send `RunEnded`."""

    cause: Cause
    replica: str = ""
    """The replica whose rank failed first; empty if unknown."""
    report: FailureReport | None = None
    """Its failure; None if unknown."""


@dataclass(frozen=True, slots=True)
class Complete:
    """Every rank of a generation has exited with code 0. Record it in the run directory, and then send `RunEnded`."""

    cause: Cause


Action = Open | Close | Announce | FailJob | Complete

Transition = tuple[State, tuple[Action, ...]]
"""The new state, and the actions to carry out."""


def is_member(state: State, agent: AgentState) -> bool:
    """Whether this incarnation of the agent is a member of the newest generation."""
    return (agent.member.replica, agent.member.incarnation) in state.members


def waiting_agents(state: State) -> list[AgentState]:
    """Agents that wait for a generation and are not in the open one."""
    return [
        agent for agent in state.agents.values() if agent.is_waiting and not (state.open and is_member(state, agent))
    ]


def without_agents(state: State, removed: Iterable[str]) -> State:
    """Remove the agents of these replicas."""
    removed_names = set(removed)
    return replace(state, agents={name: agent for name, agent in state.agents.items() if name not in removed_names})


def natural_sort_key(name: str) -> list[tuple[int, str]]:
    """Sort key that puts worker-2 before worker-10."""
    return [(int(part), "") if part.isdigit() else (0, part) for part in re.split(r"(\d+)", name)]


def join_names(names: Iterable[str]) -> str:
    """Join names for a sentence; of many, the first five are named."""
    ordered = sorted(names, key=natural_sort_key)
    return ", ".join(ordered[:5]) + (f" and {len(ordered) - 5} more" if len(ordered) > 5 else "")


def replicas_text(count: int) -> str:
    """Format a number of replicas: "1 replica", "2 replicas"."""
    return f"{count} replica" if count == 1 else f"{count} replicas"
