"""The replicas of a role: which pods to create and which to delete. A pure function of the existing pods and the time.

The replicas of a role are numbered by an index. A replica has at most one live pod; without one, the end of its last
pod decides when the next one is created:

    deleted, evicted, preempted, lost with its node          at once
    left out of the group                                    at once, on another node
    rejected by its node, so that no container ran           after the pauses of tandem_operator.job_memory
    failed after its group made steps, or after a minute     at once
    failed earlier, or exceeded a limit of its own           after a pause that grows
      (memory, storage) within ten minutes

After three of the last three kinds on one node, the next pod prefers other nodes. tandem_operator.pod_ends has the
table.

A replacement is created while the old pod still terminates or its node does not answer: the coordinator's generations
keep the two apart. In a queue it has to wait: Kueue counts a pod until it has ended, and deletes the surplus of a
group. The last pod that ended stays, for its logs and because it carries the count of failures; earlier ones are
deleted.

Rejected: a batch Job (its controller delays each replacement by 10, 20, 40, 80 s and in the end ten minutes, however
the pod ended), and a StatefulSet (it never creates a second pod of a name, so a node that does not answer blocks the
replica until somebody deletes the pod by force).
"""

from collections import Counter
from collections.abc import Callable, Collection, Container, Sequence
from dataclasses import dataclass, field

from tandem.processes.exitcode import ExitCode
from tandem_operator.observed import MAX_AVOIDED, Pod
from tandem_operator.pod_ends import CONSEQUENCES, PodEnd

FIRST_PAUSE, MAX_PAUSE = 2.0, 300.0
"""Seconds before the second replacement in a row, doubled for each further one; the first is immediate."""
RESULT_SECONDS = 10.0
"""Time for which a pod that ended well is not replaced: the coordinator may not have reported yet that training is
complete."""
MAX_NEW_PODS = 200
"""Maximum number of pods of a role that one reconcile creates; the next one continues. To serialize 10,000 takes two
seconds, in which no other job would be reconciled."""
MAX_FAILURES = 6
"""Consecutive failures soon after the start before a replica counts as unable to start."""
MAX_FAILURES_PER_NODE = 3
"""Consecutive failures on one node before the next pod prefers other nodes: the node may be the cause. It is a
preference, because a pod that fails on every node must not wait for another one for ever."""


@dataclass(frozen=True)
class NewPod:
    """A pod to create."""

    index: int
    failures: int
    avoids: tuple[str, ...] = ()
    """Nodes on which the replica was left out of the group."""
    failed_on: tuple[str, ...] = ()
    """Nodes of the replica's last consecutive pods that failed soon after their start, oldest first."""

    @property
    def shuns(self) -> tuple[str, ...]:
        """Nodes that the pod is kept off as long as any other node has room."""
        return tuple(node for node, times in Counter(self.failed_on).items() if times >= MAX_FAILURES_PER_NODE)


@dataclass(frozen=True)
class RolePlan:
    """Actions on the pods of a role."""

    create: tuple[NewPod, ...] = ()
    delete: tuple[Pod, ...] = ()
    requeue_after: float | None = None
    """Delay in seconds until a replacement is due, which no event announces."""
    stuck: tuple[Pod, ...] = ()
    """The last pods of replicas whose pods failed too often in a row."""
    running: tuple[int, ...] = ()
    """Indices of replicas whose container runs."""
    indices: Collection[int] = field(default=(), compare=False)
    """Indices of the replicas that it was planned for."""


@dataclass(frozen=True, kw_only=True)
class ReplicaPolicy:
    """Desired state of the pods of a role."""

    indices: Collection[int]
    """The replicas to have."""
    is_current: Callable[[Pod], bool]
    """Whether a pod was created from what it would be created from now; other pods are replaced."""
    proven: Container[str] = ()
    """Names of pods whose group has made steps: their failures are not failures to start."""
    completes: bool = False
    """A pod that ended well is done, and not replaced."""
    overlaps: bool = True
    """A replacement may start before the old pod has ended."""
    not_before: Callable[[int], float | None] = lambda index: None
    """Earliest time at which the pod of a replica is recreated, seconds since the epoch; None: at any time. Until then
    the replica keeps the pod that it has."""


def plan(pods: Sequence[Pod], policy: ReplicaPolicy, now: float) -> RolePlan:
    """Compute which pods to create and to delete, so that every replica has one live pod.

    Args:
        pods: all of the role, oldest first.
    """
    create: list[NewPod] = []
    delete: list[Pod] = []
    stuck: list[Pod] = []
    delays: list[float] = []
    running: list[int] = []
    # Pods of other replicas are surplus, whatever their state.
    pods_by_index: dict[int, list[Pod]] = {index: [] for index in policy.indices}
    for pod in pods:
        if pod.index in pods_by_index:
            pods_by_index[pod.index].append(pod)
        elif not pod.deleting:
            delete.append(pod)
    for index, candidates in pods_by_index.items():
        # Of several pods of one replica, only the one that has got furthest stays.
        current = [pod for pod in candidates if pod.live and policy.is_current(pod)]
        best = min(current, key=_merit, default=None)
        earliest = policy.not_before(index)
        # As long as no replacement can be created, an outdated pod is better than none.
        stays = [pod for pod in candidates if pod.live] if best is None and earliest is not None else [best]
        delete += [pod for pod in candidates if not pod.ended and not pod.deleting and pod not in stays]
        # The last pod that ended carries the count of failures, and its logs are worth reading.
        ended = [pod for pod in candidates if pod.ended and not pod.deleting]
        last = max(ended, key=lambda pod: (pod.finished or pod.created, pod.name), default=None)
        delete += [pod for pod in ended if pod is not last]
        if best is not None:
            running += [index] if best.started is not None else []
            continue
        unfinished = [pod for pod in candidates if not pod.ended]
        if unfinished and not policy.overlaps:
            continue
        # A pod that is deleted, or lost with its node, is newer than the last one that ended: it starts no pause.
        predecessor = None if unfinished else last
        due, failures = _next(predecessor, policy, now)
        if predecessor is not None and failures >= MAX_FAILURES:
            stuck.append(predecessor)
        if due is None:
            continue
        due = due if earliest is None else max(due, earliest)
        if due <= now:
            failed_on = _failed_on(predecessor, policy.proven)
            create.append(NewPod(index, failures, _avoided(candidates), failed_on))
        else:
            delays.append(due - now)
    if len(create) > MAX_NEW_PODS:
        del create[MAX_NEW_PODS:]
        delays.append(0.0)
    # The highest indices go first: ranks are assigned in the order of names, and the other workers keep theirs.
    delete.sort(key=lambda pod: -pod.index)
    return RolePlan(
        tuple(create), tuple(delete), min(delays, default=None), tuple(stuck), tuple(running), policy.indices
    )


def is_done(pods: Sequence[Pod], indices: Collection[int]) -> bool:
    """Whether the last pod of each of these replicas has ended well, and there is one."""
    return bool(indices) and finished_indices(pods).issuperset(indices)


def finished_indices(pods: Sequence[Pod]) -> set[int]:
    """Indices of the replicas whose last pod has ended well, and that have no other pod."""
    last = {pod.index: pod for pod in pods if pod.ended}
    finished = {index for index, pod in last.items() if pod.end is PodEnd.FINISHED}
    return finished - {pod.index for pod in pods if not pod.ended}


def pause(failures: int) -> float:
    """Seconds between the failure of a pod and its replacement."""
    return 0.0 if failures <= 1 else min(MAX_PAUSE, FIRST_PAUSE * 2.0 ** (failures - 2))


def failures_of(pod: Pod, proven: Container[str] = ()) -> int:
    """Consecutive failures of a replica up to this pod, which has ended, and including it."""
    consequence = CONSEQUENCES[_end(pod)]
    if not consequence.counts:
        return 0 if consequence.resets else pod.failures
    return 1 if _did_start(pod, proven) else pod.failures + 1


def _end(pod: Pod) -> PodEnd:
    assert pod.end is not None
    return pod.end


def _did_start(pod: Pod, proven: Container[str]) -> bool:
    """Whether a pod that has ended had started well, so that its failure begins a new row."""
    lifetime = 0.0 if pod.started is None or pod.finished is None else pod.finished - pod.started
    consequence = CONSEQUENCES[_end(pod)]
    return lifetime >= consequence.healthy_after or (consequence.is_proven_by_steps and pod.name in proven)


def _failed_on(last: Pod | None, proven: Container[str]) -> tuple[str, ...]:
    """Nodes of consecutive failed starts, oldest first; empty if the last pod was none."""
    if last is None or not last.node or CONSEQUENCES[_end(last)].resets or _did_start(last, proven):
        return ()
    return (*last.failed_on, last.node)[-MAX_AVOIDED:]


def _next(last: Pod | None, policy: ReplicaPolicy, now: float) -> tuple[float | None, int]:
    """Time at which a replica's next pod is due, None for never, and its count of failures.

    Args:
        last: the replica's last pod, which has ended; None: there is none, or it went without an end of its own.
    """
    if last is None:
        return now, 0
    # The clocks of a node and of the API server may be ahead of the operator's: then nobody knows when it ended.
    finished = next((time for time in (last.finished, last.created) if time is not None and time <= now), 0.0)
    if last.end is PodEnd.FINISHED:
        return (None if policy.completes else finished + RESULT_SECONDS), 0
    failures = failures_of(last, policy.proven)
    return finished + pause(failures), failures


def _avoided(candidates: Sequence[Pod]) -> tuple[str, ...]:
    """Nodes that a replica's next pod must not be placed on: its group would fail there again."""
    nodes: dict[str, None] = {}
    for pod in candidates:
        nodes |= dict.fromkeys(pod.avoids)
        if pod.code == ExitCode.LEFT_OUT and pod.node:
            nodes[pod.node] = None
    return tuple(nodes)[-MAX_AVOIDED:]


def _merit(pod: Pod) -> tuple[bool, bool, float, str]:
    """Sort key of several live pods of one replica, the one to keep first: ready, running, oldest."""
    return not pod.ready, pod.phase != "Running", pod.created, pod.name
