"""The inputs and the result of `reconcile`."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from tandem.job import DistributedTrainingJob
from tandem.status import Snapshot, Status
from tandem_operator.gang_deadlock import PATIENCE_SECONDS, Claimant
from tandem_operator.job_memory import Attempts, Memo, place
from tandem_operator.lifecycle import Idle
from tandem_operator.objects import Manifest, Peers
from tandem_operator.observed import Children, Pod, Thing
from tandem_operator.reporting import Notice, Want


@dataclass(frozen=True, kw_only=True)
class Situation:
    """All that decisions depend on."""

    job: DistributedTrainingJob
    """With its status as it was written last."""
    uid: str
    generation: int = 1
    """metadata.generation."""
    children: Children = field(default_factory=Children)
    created: float = 0.0
    """When the job was made, seconds since the epoch."""
    others: Sequence[Claimant] = ()
    """Other jobs that are starved or have given way (tandem_operator.gang_deadlock)."""
    patience: float = PATIENCE_SECONDS
    """How long a starved job keeps what it has, seconds."""
    heard: Snapshot | None = None
    """What the coordinator said just now, None if it did not answer."""
    idle: Idle | None = None
    """Since when the coordinator has said that nobody trains."""
    fallen: str | None = None
    """The UID of the coordinator's pod if that has stopped answering (tandem_operator.liveness)."""
    in_doubt: bool = False
    """It answered before, is silent, and is to be asked again at once."""
    answering: int = 0
    """How many coordinators the operator asks, over all jobs."""
    peers: Peers | None = None
    """Who reaches its pods besides those, None where that is nobody's business."""
    token_digest: str = ""
    """By which coordinators know the operator (tandem.launch.TOKEN_DIGEST)."""
    now: float
    """Seconds since the epoch."""
    entropy: str
    """Makes the names of new pods unique."""
    starts: Mapping[str, Want] = field(default_factory=dict)
    """Why nothing of a pod has begun, by its UID, where that was asked (tandem_operator.pod_starts)."""
    attempts: Attempts = field(default_factory=dict)
    """What has been tried lately and has not come to rest."""
    unanswered: Mapping[str, str] = field(default_factory=dict)
    """Entropy of pods whose creation was not answered, by place (tandem_operator.job_memory)."""
    memo: Memo = field(default_factory=Memo)
    """What was computed at earlier looks; decides nothing."""

    @property
    def nobody_trains(self) -> bool:
        """Whether the coordinator has said so for long enough to act on."""
        return self.idle is not None and self.idle.lasts(self.now)

    def entropy_of(self, role: str, index: int) -> str:
        """Makes the name of a new pod unique, unless that pod may be there already."""
        return self.unanswered.get(place(role, index), self.entropy)

    def pods(self, role: str) -> list[Pod]:
        """The job's own pods of a role, oldest first."""
        return self.children.pods(role, self.uid)


@dataclass(frozen=True, kw_only=True)
class Plan:
    """What to do now. The order of the fields is the order of doing."""

    needs_token: bool = False
    """Make the Secret."""
    create: tuple[Manifest, ...] = ()
    """Objects other than pods that are not there."""
    update: tuple[Manifest, ...] = ()
    """Objects that are there and should be different."""
    make: tuple[Manifest, ...] = ()
    """Pods that are not there. They read all of the former as they start."""
    remove: tuple[Thing, ...] = ()
    """Pods to delete, and a NetworkPolicy that is not wanted any more."""
    end: tuple[Pod, ...] = ()
    """Pods to end, but to keep, because of their logs: what still runs in them holds what the pod has asked for."""
    target: int | None = None
    """Tell the coordinator how many replicas are wished for."""
    status: Status = field(default_factory=Status)
    notices: tuple[Notice, ...] = ()
    expired: bool = False
    """Delete the job: its time after the end is over."""
    settled: frozenset[str] = frozenset()
    """What has come to rest, of all that was tried (tandem_operator.job_memory)."""
    again_in: float | None = None
    """Seconds until something may be due that no event announces."""
