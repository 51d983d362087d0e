"""Inputs and result of `reconcile`."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from tandem.job.resource import DistributedTrainingJob
from tandem.wire.status import Snapshot, Status
from tandem_operator.gang_deadlock import PATIENCE_SECONDS, Claimant
from tandem_operator.job_memory import Attempts, Memo, replica_key
from tandem_operator.lifecycle import Idle
from tandem_operator.objects import Manifest, Peers
from tandem_operator.observed import Children, KubeObject, Pod
from tandem_operator.queue_usage import QueueUsage
from tandem_operator.reporting import JobProblem, KubeEvent
from tandem_operator.workloads import Queueing, WorkloadChange


@dataclass(frozen=True, kw_only=True)
class ReconcileInputs:
    """Everything that a decision about one job depends on."""

    job: DistributedTrainingJob
    """The job, with its status as it was last written."""
    uid: str
    generation: int = 1
    """metadata.generation."""
    children: Children = field(default_factory=Children)
    created: float = 0.0
    """Creation time of the job, seconds since the epoch."""
    claimants: Sequence[Claimant] = ()
    """Other jobs that are starved or have backed off (tandem_operator.gang_deadlock)."""
    patience: float = PATIENCE_SECONDS
    """Time for which a starved job keeps its workers, in seconds."""
    snapshot: Snapshot | None = None
    """The coordinator's answer to this reconcile's poll; None if it did not answer."""
    idle: Idle | None = None
    """Period for which the coordinator has reported that no rank trains."""
    unresponsive_coordinator: str | None = None
    """UID of the coordinator's pod if it has stopped answering (tandem_operator.liveness)."""
    in_doubt: bool = False
    """The coordinator answered before, does not answer now, and is polled again at once."""
    answering: int = 0
    """Number of coordinators that the operator polls, over all jobs."""
    peers: Peers | None = None
    """Peers, besides the job's own pods, that may reach its pods; None if the operator makes no NetworkPolicies."""
    token_digest: str = ""
    """Digest by which coordinators recognize the operator (tandem.processes.launch.TOKEN_DIGEST)."""
    queueing: Queueing | None = None
    """Flavors and priority classes of the cluster; None: they, or the Workloads of Kueue, cannot be read."""
    queue_usage: QueueUsage | None = None
    """Order of what waits in the queues, and who has their quota; None: it was not read."""
    has_pod_groups: bool = True
    """Whether that is so for good: queued jobs are pod groups then."""
    now: float
    """Seconds since the epoch."""
    entropy: str
    """Random text that makes the names of new pods unique."""
    starts: Mapping[str, JobProblem] = field(default_factory=dict)
    """Reasons why no container of a pod has started, by the pod's UID, where its Events were read
    (tandem_operator.pod_starts)."""
    attempts: Attempts = field(default_factory=dict)
    """Recent writes that have not succeeded, or whose pods do not run yet (tandem_operator.job_memory)."""
    unanswered: Mapping[str, str] = field(default_factory=dict)
    """Entropy of pods whose creation was not answered, by replica key (tandem_operator.job_memory)."""
    memo: Memo = field(default_factory=Memo)
    """Cache of computed templates and manifests; it decides nothing."""

    @property
    def nobody_trains(self) -> bool:
        """Whether the coordinator has reported an idle group for long enough to act on."""
        return self.idle is not None and self.idle.lasts(self.now)

    def entropy_of(self, role: str, index: int) -> str:
        """Entropy for the name of a new pod: the last one if that pod may exist already, else a fresh one."""
        return self.unanswered.get(replica_key(role, index), self.entropy)

    def pods(self, role: str) -> list[Pod]:
        """The job's own pods of a role, oldest first."""
        return self.children.pods(role, self.uid)


@dataclass(frozen=True, kw_only=True)
class ReconcilePlan:
    """Actions of one reconcile, in the order in which the controller carries them out."""

    needs_token: bool = False
    """Create the Secret with the token."""
    create: tuple[Manifest, ...] = ()
    """Missing objects other than pods."""
    update: tuple[Manifest, ...] = ()
    """Existing objects that differ from what they should be."""
    create_pods: tuple[Manifest, ...] = ()
    """Missing pods. Created after the objects above, which they read as they start."""
    create_workloads: tuple[Manifest, ...] = ()
    """Missing Workloads of a queued job. Pods that exist do not depend on them."""
    write_workloads: tuple[WorkloadChange, ...] = ()
    """Conditions of Workloads to write."""
    delete: tuple[KubeObject, ...] = ()
    """Pods and Workloads to delete, and a NetworkPolicy that is no longer wanted."""
    terminate: tuple[Pod, ...] = ()
    """Pods to terminate without deleting them, so that their logs stay: what still runs in them holds the pod's
    resources."""
    waits_in: str = ""
    """LocalQueue in which some of its workers wait; empty if none does."""
    target: int | None = None
    """Replica target to send to the coordinator; None leaves it unchanged."""
    status: Status = field(default_factory=Status)
    events: tuple[KubeEvent, ...] = ()
    expired: bool = False
    """Delete the job, because its ttlSecondsAfterFinished has passed."""
    resolved: frozenset[str] = frozenset()
    """Keys of attempts that succeeded or are obsolete (tandem_operator.job_memory)."""
    requeue_after: float | None = None
    """Delay until the next reconcile in seconds, if something is due that no watch event announces."""
