"""The observed state of a job: the few facts of each API object that decisions depend on.

The rest of an object is dropped: a thousand jobs have several thousand objects of ten kilobytes each.

A template may hold anything, up to the megabyte and a half that an object may have. More than any real job needs is not
kept, and the job is refused with a message.
"""

import json
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import xxhash
from pydantic import ValidationError

from tandem.formatting import count_noun, parse_rfc3339
from tandem.job.labels import RETRY_AT
from tandem.job.resource import DistributedTrainingJob
from tandem.job.tasks import parameters_type
from tandem.model import JsonLimits, Model, RuleBroken, exceeded_limit
from tandem.processes.exitcode import ExitCode
from tandem.wire.reasons import Reason
from tandem.wire.status import Status
from tandem_operator import kinds, names, retry
from tandem_operator.bounded import UNREAD
from tandem_operator.kinds import Kind
from tandem_operator.pod_ends import OUT_OF_MEMORY, PodEnd, ended_by

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
    """Number of restarts of its container by the kubelet."""
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
    return KubeObject(kind=kind, **common)


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
        restarts=_integer(container.get("restartCount")) or 0,
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


Object = dict[str, Any]
IDENTITY_FIELDS = ("namespace", "name", "uid")
"""Fields of a job's metadata that every object has."""
VERSION_FIELDS = ("resourceVersion", "creationTimestamp", "deletionTimestamp")
"""Further fields of the metadata that are kept, besides the generation and one annotation. The others hold the whole
job a second time, managed fields a third time."""
MAX_NAME_LENGTH = 253
"""Maximum length of a name, a namespace or a UID, in characters. The API server accepts no more, and what it generates
is shorter."""
MAX_SPEC = JsonLimits(depth=48, values=30_000, characters=2**20)
MAX_STATUS = JsonLimits(depth=8, values=5_000, characters=2**18)
REFUSED = "tandemRefused"
REASON, DIGEST = "tandemReason", "tandemDigest"
"""Fields beside `spec` that no API object has: why the spec was dropped, as a sentence and as one word, and its
digest."""
FINAL_FIELDS = ("phase", "completionTime")
"""Fields of an unreadable status that must not be forgotten."""


class InvalidSpec(Exception):  # noqa: N818 - it is a state of the job, and its reason
    """A job object that the API server accepted and this operator cannot run; says why.

    Args:
        reason: the same in one CamelCase word.
    """

    def __init__(self, message: str, reason: str = Reason.INVALID_SPEC) -> None:
        super().__init__(message)
        self.reason = reason


def refused(body: Object, reason: str, message: str) -> Object:
    """A job's object without its spec."""
    return {**body, "spec": None, REFUSED: message, REASON: reason, DIGEST: digest(body.get("spec"))}


def is_refused(before: Object, body: Object) -> bool:
    """Whether a job was refused before with the same spec."""
    was_refused = REFUSED in before and before["metadata"]["uid"] == body["metadata"]["uid"]
    return was_refused and before[REASON] != Reason.NO_ROOM and before[DIGEST] == digest(body["spec"])


def digest(spec: Any) -> str:
    """A short hash of a spec. The same generation of a job is read differently once its CRD has changed."""
    return "" if spec is None else xxhash.xxh3_128_hexdigest(json.dumps(spec).encode())


def no_room(namespace: str, mebibytes: float) -> str:
    """Message for a job whose spec is not held."""
    return (
        f"the specs of the jobs in the namespace {namespace} take {mebibytes:.0f} MiB of the operator's memory, and it "
        "has no more for one namespace: delete jobs, or move text out of their specs; nothing is done about this job "
        "until there is room, which is checked every minute"
    )


ROOM_SECONDS = 60.0
"""Interval between two reconciles of a job whose pods have no room, which is that of the lists."""


def no_room_for_pods(namespace: str) -> str:
    """Message for a job whose pods are not all known."""
    return (
        f"the namespace {namespace} has more pods of jobs than the operator has memory for in one namespace; nothing "
        "is done about this job until there is room, which is checked every minute"
    )


def trimmed(body: Mapping[str, Any]) -> Object:
    """The parts of a job's object that are kept.

    Raises:
        LookupError, TypeError, ValueError, AttributeError: it is not an object of the API server.
    """
    raw = body["metadata"]
    metadata: Object = {name: valid_name(raw.get(name)) for name in IDENTITY_FIELDS} | {"resourceVersion": ""}
    metadata |= {field: _text(raw[field]) for field in VERSION_FIELDS if field in raw}
    generation = raw.get("generation")
    metadata["generation"] = generation if isinstance(generation, int) and 0 < generation <= 2**53 else 1
    if (retry_at := retry.requested_retry(raw)) is not None:
        metadata["annotations"] = {RETRY_AT: retry_at}
    type_fields = {field: body.get(field) for field in ("apiVersion", "kind")}
    result: Object = {field: text if isinstance(text, str) else "" for field, text in type_fields.items()}
    result["metadata"] = metadata
    if reason := body.get(UNREAD):
        result = refused(result, Reason.INVALID_SPEC, str(reason))
    elif reason := exceeded_limit(spec := body.get("spec"), MAX_SPEC):
        result = refused(result, Reason.INVALID_SPEC, f"spec {reason}")
    else:
        result["spec"] = spec
    status = body.get("status")
    if isinstance(status, dict):
        result["status"] = _final_fields(status) if exceeded_limit(status, MAX_STATUS) else status
    return result


def valid_name(value: object) -> str:
    """Check a name and return it.

    Raises:
        TypeError: it is not a valid name.
    """
    if not isinstance(value, str) or not 0 < len(value) <= MAX_NAME_LENGTH:
        raise TypeError(f"a name is {type(value).__name__}, or empty, or too long")
    return value


def _text(value: object) -> str:
    return value if isinstance(value, str) and len(value) <= MAX_NAME_LENGTH else ""


def parsed(body: Mapping[str, Any]) -> DistributedTrainingJob:
    """Parse a job's object.

    Raises:
        InvalidSpec: it is not a valid job.
    """
    if REFUSED in body:
        raise InvalidSpec(body[REFUSED], body[REASON])
    metadata = {"name": body["metadata"]["name"], "namespace": body["metadata"]["namespace"]}
    manifest = {"apiVersion": body.get("apiVersion"), "kind": body.get("kind"), "metadata": metadata}
    try:
        job = DistributedTrainingJob.read({**manifest, "spec": body.get("spec")})
    except ValidationError as error:
        raise InvalidSpec(_first_error(error)) from None
    if job.spec.trainer.parameters and (kind := parameters_type(job.spec.trainer.task, job.spec.trainer.parameters)):
        _refuse_parameters(kind, job.spec.trainer.parameters)
    return job.model_copy(update={"status": status_of(body)})


def _refuse_parameters(kind: type[Model], parameters: Mapping[str, Any]) -> None:
    """
    Raises:
        InvalidSpec: they are not those of the task. The API server takes any object there, and the coordinator would
            refuse it at each of its starts.
    """
    try:
        kind.parse(parameters)
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        path = ".".join(("spec.trainer.parameters", *map(str, first["loc"])))[:MAX_MESSAGE_LENGTH]
        raise InvalidSpec(f"{path}: {first['msg'][:MAX_MESSAGE_LENGTH]}") from None


def status_of(body: Mapping[str, Any]) -> Status | None:
    """The status of a job's object; of an unreadable one only how the job has ended, if it has."""
    status = body.get("status")
    if not status or not isinstance(status, dict):
        return None
    try:
        return Status.read(status)
    except ValidationError:
        # It is that of another operator version, or edited by hand: everything but the end can be observed again.
        with suppress(ValidationError):
            return Status.read(_final_fields(status))
    return None


def _final_fields(status: Mapping[str, Any]) -> Object:
    return {key: status[key] for key in FINAL_FIELDS if key in status and not exceeded_limit(status[key], MAX_STATUS)}


def _first_error(error: ValidationError) -> str:
    """The first of the validation errors. The CRD let it pass, because it is older or newer than the operator."""
    first = error.errors(include_url=False, include_input=False)[0]
    path = ".".join(str(part) for part in first["loc"])[:MAX_MESSAGE_LENGTH]
    if first["type"] == "value_error" and not isinstance(first["ctx"]["error"], RuleBroken):
        # The CRD does not validate the content of templates.
        return f"{path}: {str(first['ctx']['error'])[:MAX_MESSAGE_LENGTH]}"
    return f"{path}: {first['msg'][:MAX_MESSAGE_LENGTH]}; the CRD and the operator may be of different versions"


def immutable_change(job: DistributedTrainingJob, uid: str, children: Children) -> str | None:
    """Describe a forbidden change of a job that the API server cannot detect, None if there is none.

    The number of processes per replica is part of the coordinator's rules and of the command of every running agent. A
    CEL rule rejects a change of it where it follows from `processesPerReplica`, from whole GPUs, or from `gpuResource`.
    Fractions of GPUs have names that no rule can list, and the CRD does not validate templates. So the number is
    recorded on the ConfigMap with the job, and a job with another number is not reconciled: the next coordinator would
    reject its agents, which would train on without one.
    """
    job_file = children.get(kinds.CONFIG_MAP, names.job_file(job.metadata.name))
    if not isinstance(job_file, JobFile) or job_file.owner != uid or not job_file.processes:
        return None
    before, now = job_file.processes, job.spec.workers.processes
    if before == now:
        return None
    return (
        f"each replica of this job has {count_noun(before, 'process', 'processes')}, and by the GPUs that "
        f"workers.resources or workers.template requests now it would have {now}. This cannot be changed: revert it or "
        "create a job with another name. Until then the operator does not reconcile this job; its pods keep running"
    )
