"""Kueue Workloads of a job: the quota of its workers, asked for and given back in slices. Pure.

A queued job asks for its smallest group in one Workload, all or none, and for each further worker in one of its own:

    Workload NAME-queue-0    the first `minReplicas` workers       the priority P of the job
    Workload NAME-queue-1    the next worker                       P - 1
    Workload NAME-queue-2    the one after it                      P - 2

So Kueue shrinks a job instead of ending it. Preemption takes the Workloads of lowest priority first: those of the job
that has most workers over its minimum, the last ones first. Two jobs of one priority class share what there is:
their surplus differs by one worker at most. A job with room for its minimum alone starts with that (partial admission),
trains, and grows when quota is free. No step in this needs a feature gate, or more of Kueue than queues, priorities and
preemption.

    wanted ──► pending ──► admitted ──► evicted ──► pending       Kueue admits and evicts
                              │            └─ its pods leave; then the quota is given back (status, as Kueue's jobs do)
                              └────────► deleted                  the job ends, is suspended, scaled or requeued

- Pods exist for admitted Workloads alone, on the nodes of the flavors that were assigned. They carry nothing of
  Kueue's: the Workload holds the quota, and a replacement of a pod needs no new admission.
- A surplus Workload is created once the minimum is admitted, and goes with it: no job holds a part of what it needs to
  start while it waits for the rest.
- A worker whose Workload is evicted is deleted: its agent leaves the group, which goes on without it. The quota is
  given back once the pod has ended. Only then can the job be admitted again.
- A Workload whose content is no longer what the job asks for (another queue, other requests) is given back in the same
  way, and a new one is queued. So is a minimum that has changed, once the job does not train any more.

More than MAX_SLICES workers over the minimum are asked for in slices of several.

Rejected: one Workload whose size changes (Kueue's workload slices: a feature gate until 0.18, and only for kinds of
Kueue's own; partial admission by `minCount`: decided once, at the start); pod groups (all or none, and a group never
changes its size), which remain for clusters that do not let the operator create Workloads; deleting evicted Workloads
(Kueue's count of evictions, its back-off and its deactivation would begin anew each time).
"""

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Literal

from tandem.formatting import count_noun, parse_rfc3339, rfc3339
from tandem.job.resource import DistributedTrainingJob
from tandem.wire.queue_view import QueueView
from tandem.wire.reasons import Reason
from tandem_operator import kinds, names
from tandem_operator.observed import Pod, Workload
from tandem_operator.queue_usage import QueueUsage, WaitingWorkload, with_wait
from tandem_operator.reporting import JobProblem

Need = Literal["now", "later", "none"]
"""Whether a job needs workers: it trains; it would, but cannot start now; it does not."""
MAX_SLICES = names.MAX_WORKLOADS - 1
"""Maximum number of Workloads of a job over its minimum."""
LOWEST_PRIORITY = -(2**31)
_CONTAINER_FIELDS = ("name", "resources", "restartPolicy")
_POD_FIELDS = (
    *("nodeSelector", "affinity", "tolerations", "runtimeClassName", "overhead", "priorityClassName"),
    *("resources", "resourceClaims"),
)
"""Fields of a worker's pod that decide which quota it takes."""
IMAGE = "tandem"
"""Image of the containers in Workloads, from which admission checks may make pod templates."""
RESERVED_PREFIXES = ("tandem.dev/", "kueue.x-k8s.io/")
"""Prefixes of labels and annotations that no admission check may set."""


@dataclass(frozen=True)
class NodePlacement:
    """Changes of a pod by its flavors and admission checks."""

    node_selector: Mapping[str, str] = field(default_factory=dict)
    tolerations: tuple[Mapping[str, Any], ...] = ()
    labels: Mapping[str, str] = field(default_factory=dict)
    annotations: Mapping[str, str] = field(default_factory=dict)

    def __add__(self, other: "NodePlacement") -> "NodePlacement":
        return NodePlacement(
            {**self.node_selector, **other.node_selector},
            (*self.tolerations, *(entry for entry in other.tolerations if entry not in self.tolerations)),
            {**self.labels, **other.labels},
            {**self.annotations, **other.annotations},
        )


@dataclass(frozen=True)
class Queueing:
    """The flavors and priority classes of a cluster."""

    flavors: Mapping[str, NodePlacement] = field(default_factory=dict)
    """Nodes of each ResourceFlavor, by its name."""
    priorities: Mapping[str, int] = field(default_factory=dict)
    """Values of PriorityClasses by their names; the default class also under the empty name."""


@dataclass(frozen=True)
class NewWorkload:
    """A Workload to create."""

    name: str
    indices: range
    """Indices of its workers."""
    priority: int


@dataclass(frozen=True)
class WorkloadChange:
    """A change of a Workload's status."""

    workload: Workload
    conditions: tuple[Mapping[str, Any], ...]
    """All of its conditions."""
    releases: bool = False
    """Its quota is given back."""


@dataclass(frozen=True)
class WorkloadPlan:
    """Actions on a job's Workloads."""

    create: tuple[NewWorkload, ...] = ()
    delete: tuple[Workload, ...] = ()
    write: tuple[WorkloadChange, ...] = ()
    unchanged: tuple[str, ...] = ()
    """Names of those that stay as they are."""


@dataclass(frozen=True)
class JobQueue:
    """The Workloads of one job.

    Args:
        workloads: all that it owns.
        digest: hash of what they have to ask for.
        queueing: None: Kueue's API is away.
        running: indices of the workers that have a live pod.
    """

    job: DistributedTrainingJob
    workloads: Sequence[Workload]
    digest: str
    queueing: Queueing | None
    running: frozenset[int] = frozenset()

    @cached_property
    def current(self) -> list[Workload]:
        """Workloads that match the job as it is now, ordered by their first workers."""
        result: list[Workload] = []
        for workload in sorted(self.workloads, key=lambda workload: (workload.first, workload.name)):
            begins = result[-1].indices.stop if result else 0
            # One that has more workers than there still are keeps its quota: others of it train.
            fits = workload.count > 0 and begins <= workload.first < self._size
            if fits and workload.applied == self.digest and not workload.deleting:
                result.append(workload)
        # After a change of the minimum, the smallest group keeps its Workload for as long as the job trains.
        base = next((workload for workload in result if workload.first == 0), None)
        if base is not None and base.count != self._fewest and not self._trainable(result):
            result.remove(base)
        # After growth by many workers, there may be too many small slices: the last of them make room for larger ones.
        while len(result) + len([*self._gaps(result)]) > names.MAX_WORKLOADS:
            surplus = (workload for workload in result if workload.first > 0)
            result.remove(max(surplus, key=lambda workload: (-workload.count, workload.first)))
        return result

    @property
    def base(self) -> Workload | None:
        """The one for the smallest group."""
        return next((workload for workload in self.current if workload.first == 0), None)

    @cached_property
    def admitted(self) -> frozenset[int]:
        """Indices of the workers that may have a pod; none if they are too few to train."""
        return self.running if self.queueing is None else self._trainable(self.current)

    @property
    def waiting(self) -> list[Workload]:
        """Workloads that are not admitted, the one for the smallest group first."""
        return [workload for workload in self.current if not workload.admitted]

    def _trainable(self, workloads: Iterable[Workload]) -> frozenset[int]:
        """Indices of the workers that these Workloads admit; none if they are too few to train."""
        admitted = [workload for workload in workloads if workload.admitted]
        indices = frozenset(index for workload in admitted for index in workload.indices if index < self._size)
        return indices if 0 in indices and len(indices) >= self.job.spec.fewest_workers else frozenset()

    @property
    def _size(self) -> int:
        return self.job.spec.workers.replicas

    @property
    def _fewest(self) -> int:
        return min(self.job.spec.fewest_workers, self._size)

    def placement(self, index: int) -> NodePlacement | None:
        """The placement of an admitted worker's pod; None if one of its flavors does not exist."""
        workload = next((workload for workload in self.current if index in workload.indices), None)
        if workload is None or self.queueing is None or workload.has_topology:
            return None
        if not self.queueing.flavors.keys() >= {*workload.flavors}:
            return None
        parts = [self.queueing.flavors[flavor] for flavor in workload.flavors]
        return sum((*parts, *map(placement_of, workload.updates)), NodePlacement())

    def plan(self, need: Need, occupied: Collection[int], ready: Collection[int], priority: int) -> WorkloadPlan:
        """Compare the Workloads with what the job needs.

        Args:
            need: whether the job needs workers.
            occupied: indices of workers whose pods have not ended, or may exist without being known yet.
            ready: indices of workers whose pods are ready.
            priority: that of the job.
        """
        current, is_started = self.current if need != "none" else [], self.base is not None and bool(self.admitted)
        keep = [workload for workload in current if workload.first == 0 or is_started]
        if need == "later":
            # What it has would be held for nothing. What it waits for keeps its place.
            keep = [workload for workload in keep if not workload.reserved]
        # Quota is given back when nothing uses it any more.
        free = [workload for workload in self.workloads if not any(index in workload.indices for index in occupied)]
        delete = [workload for workload in free if workload not in keep and not workload.deleting]
        write = [
            WorkloadChange(workload, released(workload), releases=True)
            for workload in free
            if workload in keep and workload.reserved and workload.evicted
        ]
        # Kueue evicts what does not become ready in time, where it is configured to.
        write += [
            WorkloadChange(
                workload, with_condition(workload.conditions, "PodsReady", True, "Started", "all pods are ready")
            )
            for workload in keep
            if workload.admitted and not workload.ready and self._is_ready(workload, ready)
        ]
        missing = self._missing(keep, is_started) if need == "now" else ()
        create = [self._new(slot, part, priority) for slot, part in missing]
        changed = {change.workload.name for change in write}
        unchanged = tuple(workload.name for workload in keep if workload.name not in changed)
        return WorkloadPlan(tuple(create), tuple(delete), tuple(write), unchanged)

    def _is_ready(self, workload: Workload, ready: Collection[int]) -> bool:
        """Whether the pods of all its workers that there are to be are ready."""
        return all(index in ready for index in range(workload.first, min(workload.indices.stop, self._size)))

    def _missing(self, keep: Sequence[Workload], is_started: bool) -> Iterator[tuple[int, range]]:
        """Slots and indices of the Workloads to create."""
        used_names = {workload.name for workload in self.workloads}
        # An old Workload of the same workers is given back first: their new pods would seem to use it.
        occupied_indices = {index for workload in self.workloads if workload not in keep for index in workload.indices}
        slots = [
            slot
            for slot in range(names.MAX_WORKLOADS)
            if names.workload(self.job.metadata.name, slot) not in used_names
        ]
        if not any(workload.first == 0 for workload in keep):
            yield from (
                [(0, range(self._fewest))] if 0 in slots and occupied_indices.isdisjoint(range(self._fewest)) else []
            )
        elif is_started:
            free = iter([slot for slot in slots if slot > 0])
            yield from zip(free, (part for part in self._gaps(keep) if occupied_indices.isdisjoint(part)), strict=False)

    def _gaps(self, keep: Iterable[Workload]) -> Iterator[range]:
        """Indices of the workers over the minimum that have no Workload, in slices."""
        begins = {workload.first: workload.indices.stop for workload in keep}
        start, multiple = begins.get(0, self._fewest), self.job.spec.workers_apart
        size = multiple * max(1, -(-(self._size - start) // (MAX_SLICES * multiple)))
        while start < self._size:
            end = begins.get(start)
            if end is None:
                end = min(start + size, self._size, *(begin for begin in begins if begin > start))
                yield range(start, end)
            start = end

    def _new(self, slot: int, part: range, priority: int) -> NewWorkload:
        minimum = self._fewest if self.base is None else self.base.count
        surplus = part.stop - minimum if part.start else 0
        return NewWorkload(names.workload(self.job.metadata.name, slot), part, max(LOWEST_PRIORITY, priority - surplus))


def pod_set_template(spec: Mapping[str, Any]) -> dict[str, Any]:
    """The part of a pod's spec that Kueue counts."""
    result = {name: spec[name] for name in _POD_FIELDS if name in spec}
    for group in ("containers", "initContainers"):
        if spec.get(group):
            result[group] = [
                {"image": IMAGE, **{key: container[key] for key in _CONTAINER_FIELDS if key in container}}
                for container in spec[group]
            ]
    return result


def placement_of(body: Mapping[str, Any], labels: str = "nodeSelector") -> NodePlacement:
    """A placement, from a ResourceFlavor's spec or from the update of an admission check.

    Args:
        labels: name of the field with the labels of nodes.
    """

    def texts(name: str, reserved: tuple[str, ...] = ()) -> dict[str, str]:
        value = body.get(name)
        entries = value.items() if isinstance(value, dict) else ()
        return {str(key): str(text) for key, text in entries if not str(key).startswith(reserved)}

    tolerations = body.get("tolerations")
    entries = [entry for entry in tolerations if isinstance(entry, dict)] if isinstance(tolerations, list) else []
    metadata = (texts(name, RESERVED_PREFIXES) for name in ("labels", "annotations"))
    return NodePlacement(texts(labels), tuple(entries), *metadata)


def released(workload: Workload) -> tuple[Mapping[str, Any], ...]:
    """The conditions of a Workload that gives its quota back, as Kueue's own jobs write them."""
    reason, message = workload.reason or "Evicted", workload.message
    if reason.startswith("Deactivated"):
        # Kueue adds the cause, and queues what is activated again only if the reason is this very word.
        reason = "Deactivated"
    conditions = with_condition(workload.conditions, "QuotaReserved", False, "Pending", message)
    conditions = with_condition(conditions, "Admitted", False, "NoReservation", "The workload has no reservation")
    if workload.ready:
        # Else Kueue would not wait for the pods of the next admission.
        conditions = with_condition(conditions, "PodsReady", False, "WaitForStart", "the pods have left")
    # After another kind of eviction Kueue requeues it itself, when its back-off is over.
    return with_condition(conditions, "Requeued", reason in ("Preempted", "NodeFailures"), reason, message)


def with_condition(
    conditions: Iterable[Mapping[str, Any]], kind: str, holds: bool, reason: str, message: str
) -> tuple[Mapping[str, Any], ...]:
    """Conditions with one of them set. The transition time is filled in when they are written."""
    before = [entry for entry in conditions if entry.get("type") != kind]
    value = "True" if holds else "False"
    return (*before, {"type": kind, "status": value, "reason": reason, "message": message})


def stamped(conditions: Iterable[Mapping[str, Any]], now: float) -> list[dict[str, Any]]:
    """Conditions as they are written, with the time of those that are new."""
    return [{"lastTransitionTime": rfc3339(now), **entry} for entry in conditions]


def queue_problem(queue: JobQueue) -> JobProblem | None:
    """The reason for which the job has fewer workers than it asks for; None if it has all."""
    spec, name = queue.job.spec, queue.job.spec.run_policy.queue_name
    if queue.queueing is None:
        message = f"the Workloads of the queue {name} cannot be read; workers that run stay, and none is replaced"
        return JobProblem(Reason.QUEUED, message)
    unplaced = [workload for workload in queue.current if workload.admitted and queue.placement(workload.first) is None]
    if any(workload.has_topology for workload in unplaced):
        message = f"the queue {name} chooses nodes one by one (topology-aware scheduling), which is not supported"
        return JobProblem(Reason.QUEUED, message)
    if unplaced:
        flavors = ", ".join(unplaced[0].flavors)
        return JobProblem(
            Reason.QUEUED, f"the queue {name} has assigned {flavors}, and there is no such ResourceFlavor"
        )
    missing = spec.workers.replicas - len(queue.admitted)
    if missing == 0:
        return None
    waiting = queue.waiting
    cause = next((workload.message for workload in waiting if workload.message), "Kueue has not looked at it yet")
    if any(not workload.active for workload in waiting):
        cause = f"its Workload is deactivated ({cause})"
    if not queue.admitted:
        workers = count_noun(spec.fewest_workers, "worker")
        return JobProblem(Reason.QUEUED, f"waits in the queue {name} for {workers}: {cause}")
    text = f"trains with {len(queue.admitted)} of {count_noun(spec.workers.replicas, 'worker')}"
    wait = "1 more waits" if missing == 1 else f"{missing} more wait"
    return JobProblem(Reason.PARTLY_ADMITTED, f"{text}; {wait} in the queue {name}: {cause}")


def queue_view(
    job: DistributedTrainingJob, queue: JobQueue | None, trains: bool, now: float, usage: QueueUsage | None = None
) -> QueueView | None:
    """The queue as the job's status shows it.

    Args:
        queue: None: the job waits as a pod group, or not at all.
        trains: the job trains, or wants to.
        usage: what is known of the queue.
    """
    view = _admission_view(job, queue, trains, now)
    if view is None or queue is None or usage is None or not trains or not queue.waiting:
        return view
    first = queue.waiting[0]
    return with_wait(
        view,
        WaitingWorkload(job.metadata.namespace, (kinds.JOB.name, job.metadata.name), first.name, first.message),
        usage,
    )


def _admission_view(job: DistributedTrainingJob, queue: JobQueue | None, trains: bool, now: float) -> QueueView | None:
    name, old = job.spec.run_policy.queue_name, job.status.queue if job.status else None
    if name is None:
        return None
    if queue is None:
        return QueueView(name=name, integration="PodGroup")
    since = parse_rfc3339(old.waiting_since) if old else None
    waited = old.waited_seconds if old else 0.0
    if trains and not queue.admitted:
        # A status that an older CRD does not keep has to be the same each time.
        begin = queue.base.since if queue.base is not None else None
        stamp = old.waiting_since if old and since is not None else rfc3339(now if begin is None else begin)
        return QueueView(name=name, integration="Workload", admitted=0, waiting_since=stamp, waited_seconds=waited)
    waited += max(0.0, now - since) if since is not None else 0.0
    return QueueView(name=name, integration="Workload", admitted=len(queue.admitted), waited_seconds=round(waited, 1))


def occupied(workers: Iterable[Pod], unanswered: Collection[str]) -> frozenset[int]:
    """Indices of workers that may still use their quota. A pod on a lost node does not: nothing else is placed there.

    Args:
        unanswered: names of replicas whose pod may have been created (tandem_operator.job_memory).
    """
    created = {index for name in unanswered for role, _, index in [name.partition(" ")] if role == names.WORKER}
    return frozenset({pod.index for pod in workers if not pod.ended and not pod.silent} | {*map(int, created)})
