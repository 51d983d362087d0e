"""The observed state of a job: the few facts of each API object that decisions depend on.

The rest of an object is dropped: a thousand jobs have several thousand objects of ten kilobytes each.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from tandem.formatting import parse_rfc3339
from tandem.model import JsonLimits, exceeded_limit
from tandem.processes.exitcode import ExitCode
from tandem_operator import kinds, names
from tandem_operator.kinds import Kind
from tandem_operator.pod_ends import OUT_OF_MEMORY, PodEnd, ended_by

INITIALIZING = "PodInitializing"
"""Reason of a container that waits for the init containers of its pod."""
NO_CONFIGURATION = "CreateContainerConfigError"
"""Reason of a waiting container whose Secret or ConfigMap does not exist."""
BROKEN_WAITING = {
    "ErrImagePull",
    "ImagePullBackOff",
    "InvalidImageName",
    "ErrImageNeverPull",
    NO_CONFIGURATION,
    "CreateContainerError",
    "RunContainerError",
    "CrashLoopBackOff",
}
"""Reasons of a waiting container that do not resolve themselves within moments."""

MAX_MESSAGE_LENGTH = 500
"""Maximum length of a container's last line, and of any other sentence, in characters."""
MAX_WORD_LENGTH = 256
"""Maximum length of a word, an address or a hash, in characters. None of Tandem's is longer."""
MAX_IMAGE_LENGTH = 1024
"""Maximum length of an image's name, in characters, as in the schema of the job."""
MAX_AVOIDED = 8
"""Maximum number of nodes in an annotation of a pod."""
MAX_CONDITIONS = 32
"""Maximum number of conditions of a Workload."""
MAX_WORKERS = 20_000
"""Maximum number of workers of a Workload."""
MAX_UPDATES = JsonLimits(depth=8, values=500, characters=2**14)
"""Bounds of what admission checks change of the pods of a Workload."""
MAX_DIGITS, MAX_VERSION_DIGITS = 9, 20
"""Maximum number of digits of a number in a label or an annotation, and of a resource version. Python refuses thousands
of digits."""


@dataclass(frozen=True, kw_only=True)
class KubeObject:
    """The facts of one object."""

    kind: Kind
    name: str
    uid: str = ""
    version: int = 0
    """Its resource version."""
    owner: str = ""
    """UID of the job that owns it; empty for a volume that outlives its job."""
    applied: str = ""
    """Hash of the manifest that the operator last wrote it from."""
    job: str = ""
    """Name of the job that its label names."""
    deleting: bool = False
    """Its deletion has been requested."""


@dataclass(frozen=True)
class PodGroup:
    """Pods that are queued and start together."""

    queue: str
    name: str
    size: int


@dataclass(frozen=True, kw_only=True)
class Pod(KubeObject):
    """A pod."""

    kind: Kind = kinds.POD
    role: str = ""
    index: int = 0
    failures: int = 0
    """Number of its predecessors in a row that failed soon after their start."""
    node: str = ""
    avoids: tuple[str, ...] = ()
    """Nodes on which its replica was left out of the group."""
    failed_on: tuple[str, ...] = ()
    """Nodes of its last predecessors in a row that failed soon after their start, oldest first."""
    endpoint: str = ""
    """The coordinator's address that it was created with, if it is a worker."""
    group: PodGroup | None = None
    """The queued group that it belongs to."""
    unqueued: bool = False
    """Whether it names a queue although no queue controller manages it."""
    abandoned: bool = False
    """Whether it waits at the gate of a queue that has finished its group: nothing will start it."""
    template: str = ""
    """Hash of its template, if it is a coordinator or an evaluator."""
    image: str = ""
    """The image of its container, as in its spec."""
    created: float = 0.0
    """Seconds since the epoch, as all times here."""
    placed: float | None = None
    """Time of its placement on a node."""
    has_run: bool = False
    """Whether any of its containers has run, init containers included."""
    started: float | None = None
    """Start of its container."""
    finished: float | None = None
    """End of its container, None while it may still run."""
    phase: str = "Pending"
    code: int | None = None
    """Its container's exit code."""
    restarts: int = 0
    """Number of restarts of its container and its init containers by the kubelet."""
    ready: bool = False
    silent: bool = False
    """Its containers are ready and it is not: its node does not answer any more."""
    container_ended: bool = False
    """Its container has ended for good, whether its phase reports that already or not."""
    lingers: bool = False
    """Its container has ended, and others of the user's own in it still run."""
    ended_by: PodEnd | None = None
    """Disruption by the cluster that has ended the pod, or is about to (its node, its limits); None: there is none."""
    address: str = ""
    waiting: str = ""
    """Reason why it does not start, one word, where it is known."""
    message: str = ""
    """Message for that reason, or the last message before it ended."""

    @property
    def ended(self) -> bool:
        """Whether it has ended: the end of our container is the end, whatever a sidecar does."""
        return self.phase in ("Succeeded", "Failed") or self.container_ended

    @property
    def end(self) -> PodEnd | None:
        """The way in which it has ended, None if it has not."""
        if not self.ended:
            return None
        by_itself = {int(ExitCode.DONE): PodEnd.FINISHED, int(ExitCode.LEFT_OUT): PodEnd.LEFT_OUT}
        return self.ended_by or by_itself.get(-1 if self.code is None else self.code, PodEnd.FAILED)

    @property
    def live(self) -> bool:
        """Whether it runs, or will run."""
        return not (self.ended or self.deleting or self.silent)


@dataclass(frozen=True, kw_only=True)
class Service(KubeObject):
    """The coordinator's Service."""

    kind: Kind = kinds.SERVICE
    address: str = ""
    """Its cluster IP."""


@dataclass(frozen=True, kw_only=True)
class VolumeClaim(KubeObject):
    """A claim on a volume."""

    kind: Kind = kinds.CLAIM
    phase: str = "Pending"
    adoptable: bool = False
    """Its annotation lets the job whose name it has adopt it."""


@dataclass(frozen=True, kw_only=True)
class JobFile(KubeObject):
    """The ConfigMap with the job."""

    kind: Kind = kinds.CONFIG_MAP
    processes: int = 0
    """Number of processes of each replica, 0 if it is not known."""


@dataclass(frozen=True, kw_only=True)
class Workload(KubeObject):
    """A Workload of Kueue: the quota of some workers (tandem_operator.workloads)."""

    kind: Kind = kinds.WORKLOAD
    first: int = 0
    """Index of the first of its workers."""
    count: int = 0
    """Number of its workers."""
    active: bool = True
    """Kueue may admit it."""
    reserved: bool = False
    """Quota is reserved for it."""
    admitted: bool = False
    """Quota is reserved, all admission checks have passed, and it is not evicted."""
    evicted: bool = False
    """Kueue has taken its quota back; it is released when its pods have ended."""
    ready: bool = False
    """Kueue has heard that its pods are ready."""
    since: float | None = None
    """Time at which it got or lost its quota, or was queued."""
    reason: str = ""
    """Reason of its state, one word."""
    message: str = ""
    """Message of its state."""
    flavors: tuple[str, ...] = ()
    """Names of the flavors that it got."""
    has_topology: bool = False
    """Kueue has chosen its nodes one by one."""
    updates: tuple[Mapping[str, Any], ...] = ()
    """Changes of its pods by admission checks."""
    conditions: tuple[Mapping[str, Any], ...] = ()

    @property
    def indices(self) -> range:
        """Indices of its workers."""
        return range(self.first, self.first + self.count)


@dataclass(frozen=True)
class Children:
    """All objects of one job."""

    objects: Mapping[tuple[Kind, str], KubeObject] = field(default_factory=dict)
    """Objects by kind and name."""

    def get(self, kind: Kind, name: str) -> KubeObject | None:
        """One object."""
        return self.objects.get((kind, name))

    def pods(self, role: str, owner: str) -> list[Pod]:
        """All pods of a role that a job owns, oldest first. Anybody can set labels, and the pods of an earlier job of
        the same name exist until garbage collection has removed them: neither is touched or counted.

        Args:
            owner: the job's UID.
        """
        return list(self._pods.get((role, owner), ()))

    def workloads(self, owner: str) -> list[Workload]:
        """All Kueue Workloads of the job with this UID."""
        return [child for child in self.objects.values() if isinstance(child, Workload) and child.owner == owner]

    @cached_property
    def _pods(self) -> Mapping[tuple[str, str], Sequence[Pod]]:
        """Pods by role and owner. A reconcile asks for them two dozen times, and a job may have thousands."""
        pods_by_role: dict[tuple[str, str], list[Pod]] = {}
        pods = (child for child in self.objects.values() if isinstance(child, Pod))
        for pod in sorted(pods, key=lambda pod: (pod.created, pod.name)):
            pods_by_role.setdefault((pod.role, pod.owner), []).append(pod)
        return pods_by_role


def children(objects: Iterable[KubeObject]) -> Children:
    """The children of a job, from its objects."""
    return Children({(child.kind, child.name): child for child in objects})


def observe(kind: Kind, body: Mapping[str, Any]) -> KubeObject:
    """Extract the facts of one object."""
    metadata = body.get("metadata", {})
    annotations = metadata.get("annotations") or {}
    common: dict[str, Any] = {
        "name": metadata.get("name", ""),
        "uid": metadata.get("uid", ""),
        "version": version(metadata),
        "owner": _owner(metadata),
        "applied": _limited(annotations.get(names.APPLIED)),
        "job": _limited((metadata.get("labels") or {}).get(names.JOB)),
        "deleting": "deletionTimestamp" in metadata,
    }
    status = body.get("status") or {}
    if kind is kinds.POD:
        return _pod(common, metadata, annotations, body.get("spec") or {}, status)
    if kind is kinds.SERVICE:
        return Service(**common, address=_limited((body.get("spec") or {}).get("clusterIP")))
    if kind is kinds.CLAIM:
        adoptable = annotations.get(names.ADOPT) == "true"
        return VolumeClaim(**common, phase=_limited(status.get("phase")) or "Pending", adoptable=adoptable)
    if kind is kinds.CONFIG_MAP:
        return JobFile(**common, processes=_number(annotations.get(names.PROCESSES)))
    if kind is kinds.WORKLOAD:
        return _workload(common, metadata, annotations, body.get("spec") or {}, status)
    return KubeObject(kind=kind, **common)


def _condition(entry: Mapping[str, Any]) -> dict[str, Any]:
    """A condition of a Workload, with the fields and the length that are kept."""
    texts = {name: _limited(entry.get(name)) for name in ("type", "status", "reason", "lastTransitionTime")}
    generation = _integer(entry.get("observedGeneration"))
    return {
        **texts,
        "message": _limited(entry.get("message"), MAX_MESSAGE_LENGTH),
        **({} if generation is None else {"observedGeneration": generation}),
    }


def _workload(
    common: dict[str, Any],
    metadata: Mapping[str, Any],
    annotations: Mapping[str, str],
    spec: Mapping[str, Any],
    status: Mapping[str, Any],
) -> Workload:
    entries: list[dict[str, Any]] = status.get("conditions") or []
    conditions = {_limited(entry["type"]): _condition(entry) for entry in entries[:MAX_CONDITIONS]}
    reserved, evicted = bool(status.get("admission")), _holds(conditions, "Evicted")
    quota = conditions.get("QuotaReserved", {})
    cause, created = conditions["Evicted"] if evicted and reserved else quota, metadata.get("creationTimestamp")
    assigned = (status.get("admission") or {}).get("podSetAssignments") or []
    updates = [update for check in status.get("admissionChecks") or [] for update in check.get("podSetUpdates") or []]
    pod_sets: list[dict[str, Any]] = spec.get("podSets") or []
    # Kueue counts these pods, whatever the annotation says.
    count = _integer(pod_sets[0].get("count")) if len(pod_sets) == 1 else None
    if exceeded_limit(updates, MAX_UPDATES):
        raise ValueError("its admission checks change more of its pods than is kept")
    return Workload(
        **common,
        first=_number(annotations.get(names.FIRST)),
        count=count if count is not None and 0 < count <= MAX_WORKERS else 0,
        active=spec.get("active") is not False,
        reserved=reserved,
        admitted=reserved and not evicted and _holds(conditions, "Admitted"),
        evicted=evicted,
        ready=_holds(conditions, "PodsReady"),
        since=parse_rfc3339(quota.get("lastTransitionTime") or created),
        has_topology=any(entry.get("topologyAssignment") for entry in assigned),
        reason=_limited(cause.get("reason")),
        message=_limited(cause.get("message"), MAX_MESSAGE_LENGTH),
        flavors=tuple(sorted({_limited(name) for entry in assigned for name in (entry.get("flavors") or {}).values()})),
        updates=tuple(updates),
        conditions=tuple(conditions.values()),
    )


def version(metadata: Mapping[str, Any]) -> int:
    """Resource version of an object or a list, 0 if it has none."""
    return _number(metadata.get("resourceVersion"), MAX_VERSION_DIGITS)


def job_of(metadata: Mapping[str, Any]) -> str:
    """Name of the job that an object belongs to, by its label."""
    return str((metadata.get("labels") or {}).get(names.JOB, ""))


def _owner(metadata: Mapping[str, Any]) -> str:
    for reference in metadata.get("ownerReferences") or []:
        if reference.get("kind") == kinds.JOB.name and reference.get("controller"):
            return _limited(reference.get("uid"))
    return ""


def _pod(
    common: dict[str, Any],
    metadata: Mapping[str, Any],
    annotations: Mapping[str, str],
    spec: Mapping[str, Any],
    status: Mapping[str, Any],
) -> Pod:
    labels = metadata.get("labels") or {}
    role = _limited(labels.get(names.ROLE))
    conditions = {entry["type"]: entry for entry in status.get("conditions") or []}
    # Containers that the user's template adds do not decide.
    statuses: list[dict[str, Any]] = status.get("containerStatuses") or []
    init_statuses: list[dict[str, Any]] = status.get("initContainerStatuses") or []
    container = next((entry for entry in statuses if entry.get("name") == role), {})
    spec_container: dict[str, Any] = next(
        (entry for entry in spec.get("containers") or [] if entry.get("name") == role), {}
    )
    state = container.get("state") or {}
    terminated = state.get("terminated") or {}
    ended = status.get("phase") in ("Succeeded", "Failed")
    container_ended = bool(terminated) and spec.get("restartPolicy") == "Never"
    other_runs = any("running" in (entry.get("state") or {}) for entry in statuses)
    finished = parse_rfc3339(terminated.get("finishedAt"))
    ready, contents = _holds(conditions, "Ready"), _holds(conditions, "ContainersReady")
    waiting, message = _waiting_reason(conditions, [container, *init_statuses, *statuses], role)
    if not waiting and not state.keys() & {"running", "terminated"}:
        waiting, message = _initialization(spec, init_statuses)
    return Pod(
        **common,
        role=role,
        index=_number(labels.get(names.INDEX)),
        failures=_number(annotations.get(names.FAILURES)),
        node=_limited(spec.get("nodeName")),
        avoids=_nodes(annotations.get(names.AVOIDS)),
        failed_on=_nodes(annotations.get(names.FAILED_ON)),
        endpoint=_limited(annotations.get(names.ENDPOINT)),
        group=_group(labels, annotations),
        unqueued=names.QUEUE in labels
        and not _is_gated(spec)
        and names.FINALIZER not in (metadata.get("finalizers") or [])
        and not ended,
        abandoned=_is_gated(spec) and names.FINALIZER not in (metadata.get("finalizers") or []),
        template=_limited(annotations.get(names.TEMPLATE)),
        image=_limited(spec_container.get("image"), MAX_IMAGE_LENGTH),
        created=parse_rfc3339(metadata.get("creationTimestamp")) or 0.0,
        placed=_placed(conditions),
        has_run=any(_has_run(entry) for entry in [*init_statuses, *statuses]),
        started=parse_rfc3339((state.get("running") or terminated).get("startedAt")),
        finished=finished if finished is not None or not ended else parse_rfc3339(status.get("startTime")),
        phase=_limited(status.get("phase")) or "Pending",
        code=_integer(terminated.get("exitCode")),
        restarts=sum(_integer(entry.get("restartCount")) or 0 for entry in [container, *init_statuses]),
        ready=ready,
        silent=contents and not ready and status.get("phase") == "Running" and not _waits_for_a_gate(conditions),
        container_ended=container_ended,
        lingers=container_ended and other_runs and not ended,
        ended_by=PodEnd.NOT_BEGUN
        if names.NOT_BEGUN in annotations and ended
        else ended_by(status, _holds(conditions, "DisruptionTarget"), _limited(terminated.get("reason"))),
        address=_limited(status.get("podIP")),
        waiting=waiting,
        message=message
        or (_limited(annotations.get(names.NOT_BEGUN), MAX_MESSAGE_LENGTH) if ended else "")
        or _end_message(status, terminated)
        or _init_failure(init_statuses),
    )


def _has_run(container: Mapping[str, Any]) -> bool:
    """Whether a container runs or ever ran: one that waits for a restart has run before."""
    states = (container.get("state") or {}).keys() | (container.get("lastState") or {}).keys()
    return bool(states & {"running", "terminated"}) or bool(_integer(container.get("restartCount")))


def _nodes(text: object) -> tuple[str, ...]:
    nodes = text.split(",", MAX_AVOIDED) if isinstance(text, str) else []
    return tuple(node for node in nodes[:MAX_AVOIDED] if 0 < len(node) < MAX_WORD_LENGTH)


def _group(labels: Mapping[str, str], annotations: Mapping[str, str]) -> PodGroup | None:
    if names.GROUP not in labels:
        return None
    return PodGroup(
        _limited(labels.get(names.QUEUE)), _limited(labels[names.GROUP]), _number(annotations.get(names.GROUP_SIZE))
    )


def _is_gated(spec: Mapping[str, Any]) -> bool:
    return any(gate.get("name") == names.GATE for gate in spec.get("schedulingGates") or [])


def _waiting_reason(
    conditions: Mapping[str, Any], containers: Iterable[Mapping[str, Any]], role: str
) -> tuple[str, str]:
    """The reason why a pod does not start: one word, and a sentence.

    Args:
        containers: statuses of all of its containers, Tandem's own first.
        role: the name of Tandem's own container.
    """
    for container in containers:
        waiting = (container.get("state") or {}).get("waiting") or {}
        if waiting.get("reason") in BROKEN_WAITING:
            # The first and the second attempt of the same pull.
            reason = str(waiting["reason"]).replace("ErrImagePull", "ImagePullBackOff")
            last = _last_line(((container.get("lastState") or {}).get("terminated") or {}).get("message"))
            message = last or _limited(waiting.get("message") or waiting["reason"], MAX_MESSAGE_LENGTH)
            return reason, message if container.get(
                "name"
            ) == role else f"container {_limited(container.get('name'))}: {message}"
    scheduled = conditions.get("PodScheduled", {})
    if scheduled.get("status") == "False":
        return _limited(scheduled.get("reason")) or "Unschedulable", _limited(
            scheduled.get("message"), MAX_MESSAGE_LENGTH
        )
    return "", ""


def _initialization(spec: Mapping[str, Any], containers: Iterable[Mapping[str, Any]]) -> tuple[str, str]:
    """A reason and a sentence about an init container that runs: until it ends, nothing else of its pod starts."""
    sidecars = {entry.get("name") for entry in spec.get("initContainers") or [] if entry.get("restartPolicy")}
    for container in containers:
        if "running" in (container.get("state") or {}) and container.get("name") not in sidecars:
            return INITIALIZING, f"init container {_limited(container.get('name'))} runs"
    return "", ""


def _waits_for_a_gate(conditions: Mapping[str, Any]) -> bool:
    """Whether a pod is not ready because of a readiness gate. If its node does not answer, the node controller sets the
    condition to false and leaves the reason as it was."""
    return bool(conditions.get("Ready", {}).get("reason") == "ReadinessGatesNotReady")


def _holds(conditions: Mapping[str, Any], kind: str) -> bool:
    return bool(conditions.get(kind, {}).get("status") == "True")


def _end_message(status: Mapping[str, Any], terminated: Mapping[str, Any]) -> str:
    """Message about the end of a pod: the kubelet's if it ended the pod, else the container's last one."""
    if terminated.get("reason") == OUT_OF_MEMORY:
        return f"{OUT_OF_MEMORY}: it used more memory than its limit"
    message = _limited(status.get("message"), MAX_MESSAGE_LENGTH).strip()
    return (message if status.get("reason") else "") or _last_line(terminated.get("message")) or message


def _placed(conditions: Mapping[str, Any]) -> float | None:
    scheduled = conditions.get("PodScheduled", {})
    return parse_rfc3339(scheduled.get("lastTransitionTime")) if scheduled.get("status") == "True" else None


def _init_failure(containers: Iterable[Mapping[str, Any]]) -> str:
    """Message about an init container that has failed, empty if none has: nothing after it ran."""
    for container in containers:
        terminated = (container.get("state") or {}).get("terminated") or {}
        if code := _integer(terminated.get("exitCode")):
            message = f"init container {_limited(container.get('name'))} ended with exit code {code}"
            last = _last_line(terminated.get("message"))
            return f"{message}: {last}" if last else message
    return ""


def _last_line(text: str | None) -> str:
    lines = [line.strip() for line in (text or "").splitlines() if line.strip()]
    return lines[-1][:MAX_MESSAGE_LENGTH] if lines else ""


def _number(text: object, digits: int = MAX_DIGITS) -> int:
    """The whole number in a text, 0 for anything else: whoever may create a pod can write anything into it."""
    return int(text) if isinstance(text, str) and len(text) <= digits and text.isascii() and text.isdecimal() else 0


def _integer(number: object) -> int | None:
    return number if isinstance(number, int) and abs(number) < 10**MAX_DIGITS else None


def _limited(text: object, max_length: int = MAX_WORD_LENGTH) -> str:
    return text[:max_length] if isinstance(text, str) else ""
