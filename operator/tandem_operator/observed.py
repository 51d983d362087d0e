"""The observed state of a job: the few facts of each API object that decisions depend on.

The rest of an object is not kept: a thousand jobs have several thousand objects of ten kilobytes each.

A template may hold anything, up to the megabyte and a half that an object may have. What is more than any real job
needs is not kept, and the job is refused in words.
"""

import json
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import xxhash
from pydantic import ValidationError

from tandem.causal_lm import parameters_of
from tandem.exitcode import ExitCode
from tandem.formatting import seconds, several
from tandem.job import DistributedTrainingJob
from tandem.labels import RETRY_AT
from tandem.model import Extent, RuleBroken, excess
from tandem.reasons import Reason
from tandem.status import Status
from tandem.tasks import CAUSAL_LM
from tandem_operator import kinds, names, retry
from tandem_operator.bounded import UNREAD
from tandem_operator.kinds import Kind
from tandem_operator.pod_ends import OUT_OF_MEMORY, PodEnd, ended_by

NO_CONFIGURATION = "CreateContainerConfigError"
"""Of a container that needs a Secret or a ConfigMap that is not there."""
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
"""Reasons of a waiting container that do not go away by waiting a moment."""

MAX_WORDS = 500
"""Characters of a container's last line that are kept, and of any other sentence."""
MAX_LETTERS = 256
"""Characters of a word, an address or a hash that are kept. Nothing of ours has more."""
MAX_IMAGE = 1024
MAX_AVOIDED = 8
"""Characters of the name of an image, as many as a job may say."""
MAX_DIGITS, MAX_VERSION_DIGITS = 9, 20
"""Of a number in a label or an annotation, and of a resource version. Python refuses thousands of digits."""


@dataclass(frozen=True, kw_only=True)
class Thing:
    """One object."""

    kind: Kind
    name: str
    uid: str = ""
    version: int = 0
    """Its resource version."""
    owner: str = ""
    """UID of the job that owns it; empty for a volume that outlives its job."""
    applied: str = ""
    """The hash of what the operator wanted of it."""
    deleting: bool = False
    """It has been told to go."""


@dataclass(frozen=True)
class PodGroup:
    """Pods that are queued and start together."""

    queue: str
    name: str
    size: int


@dataclass(frozen=True, kw_only=True)
class Pod(Thing):
    """A pod."""

    kind: Kind = kinds.POD
    role: str = ""
    index: int = 0
    failures: int = 0
    """How many of its forerunners in a row failed soon after their start."""
    node: str = ""
    avoids: tuple[str, ...] = ()
    """Nodes on which its place was left out of the group."""
    failed_on: tuple[str, ...] = ()
    """The nodes of its last forerunners in a row that failed soon after their start, oldest first."""
    endpoint: str = ""
    """Where it was told that the coordinator is, if it is a worker."""
    group: PodGroup | None = None
    """The queued group that it belongs to."""
    unqueued: bool = False
    """It names a queue, and nobody holds it there."""
    abandoned: bool = False
    """It waits in a queue that has done with its group: nothing will start it."""
    template: str = ""
    """A hash of all that was asked of it, if it is a coordinator or an evaluator."""
    image: str = ""
    """What its container runs, as it was asked for."""
    created: float = 0.0
    """Seconds since the epoch, as all times here."""
    placed: float | None = None
    """When it was given its node."""
    has_begun: bool = False
    """Any of its containers has run, init containers included."""
    started: float | None = None
    """When its container started."""
    finished: float | None = None
    """When its container ended, None while it may still run."""
    phase: str = "Pending"
    code: int | None = None
    """Its container's exit code."""
    restarts: int = 0
    """How often its kubelet has started its container again."""
    ready: bool = False
    silent: bool = False
    """Its containers are ready and it is not: its node does not answer any more."""
    over: bool = False
    """Its container has ended for good, whether its phase says so already or not."""
    lingers: bool = False
    """It is over, and others of the user's own in it still run."""
    ended_by: PodEnd | None = None
    """Disruption by the cluster that has ended the pod, or is about to (its node, its limits); None: there is none."""
    address: str = ""
    waiting: str = ""
    """Why it does not start, one word, where that is known."""
    words: str = ""
    """The same in a sentence, or the last that it said before it ended."""

    @property
    def ended(self) -> bool:
        """Whether it is over: the end of our container is the end, whatever a sidecar does."""
        return self.phase in ("Succeeded", "Failed") or self.over

    @property
    def end(self) -> PodEnd | None:
        """How it has ended, None if it has not."""
        if not self.ended:
            return None
        by_itself = {int(ExitCode.DONE): PodEnd.FINISHED, int(ExitCode.LEFT_OUT): PodEnd.LEFT_OUT}
        return self.ended_by or by_itself.get(-1 if self.code is None else self.code, PodEnd.FAILED)

    @property
    def live(self) -> bool:
        """Whether it is at work, or will be."""
        return not (self.ended or self.deleting or self.silent)


@dataclass(frozen=True, kw_only=True)
class Service(Thing):
    """The coordinator's Service."""

    kind: Kind = kinds.SERVICE
    address: str = ""
    """Its cluster IP."""


@dataclass(frozen=True, kw_only=True)
class VolumeClaim(Thing):
    """A claim on a volume."""

    kind: Kind = kinds.CLAIM
    phase: str = "Pending"
    adoptable: bool = False
    """Somebody has written on it that the job whose name it has may take it."""


@dataclass(frozen=True, kw_only=True)
class JobFile(Thing):
    """The ConfigMap with the job."""

    kind: Kind = kinds.CONFIG_MAP
    processes: int = 0
    """How many each replica has, 0 where that is not known."""


@dataclass(frozen=True)
class Children:
    """All objects of one job."""

    things: Mapping[tuple[Kind, str], Thing] = field(default_factory=dict)
    """By kind and name."""

    def get(self, kind: Kind, name: str) -> Thing | None:
        """One object."""
        return self.things.get((kind, name))

    def pods(self, role: str, owner: str) -> list[Pod]:
        """All pods of a role that a job owns, oldest first. Labels are anybody's to write, and the pods of an earlier
        job of the same name are there until garbage collection has removed them: neither is touched or counted.

        Args:
            owner: the job's UID.
        """
        return list(self._pods.get((role, owner), ()))

    @cached_property
    def _pods(self) -> Mapping[tuple[str, str], Sequence[Pod]]:
        """By role and owner. A look asks for them two dozen times, and a job may have thousands."""
        found: dict[tuple[str, str], list[Pod]] = {}
        pods = (thing for thing in self.things.values() if isinstance(thing, Pod))
        for pod in sorted(pods, key=lambda pod: (pod.created, pod.name)):
            found.setdefault((pod.role, pod.owner), []).append(pod)
        return found


def children(things: Iterable[Thing]) -> Children:
    """The objects as children."""
    return Children({(thing.kind, thing.name): thing for thing in things})


def observe(kind: Kind, body: Mapping[str, Any]) -> Thing:
    """The facts of one object."""
    metadata = body.get("metadata", {})
    annotations = metadata.get("annotations") or {}
    common: dict[str, Any] = {
        "name": metadata.get("name", ""),
        "uid": metadata.get("uid", ""),
        "version": version(metadata),
        "owner": _owner(metadata),
        "applied": _short(annotations.get(names.APPLIED)),
        "deleting": "deletionTimestamp" in metadata,
    }
    status = body.get("status") or {}
    if kind is kinds.POD:
        return _pod(common, metadata, annotations, body.get("spec") or {}, status)
    if kind is kinds.SERVICE:
        return Service(**common, address=_short((body.get("spec") or {}).get("clusterIP")))
    if kind is kinds.CLAIM:
        adoptable = annotations.get(names.ADOPT) == "true"
        return VolumeClaim(**common, phase=_short(status.get("phase")) or "Pending", adoptable=adoptable)
    if kind is kinds.CONFIG_MAP:
        return JobFile(**common, processes=_number(annotations.get(names.PROCESSES)))
    return Thing(kind=kind, **common)


def version(metadata: Mapping[str, Any]) -> int:
    """The resource version of an object or a list, 0 if it has none."""
    return _number(metadata.get("resourceVersion"), MAX_VERSION_DIGITS)


def job_of(metadata: Mapping[str, Any]) -> str:
    """The job that an object belongs to, by its label."""
    return str((metadata.get("labels") or {}).get(names.JOB, ""))


def _owner(metadata: Mapping[str, Any]) -> str:
    for reference in metadata.get("ownerReferences") or []:
        if reference.get("kind") == kinds.JOB.name and reference.get("controller"):
            return _short(reference.get("uid"))
    return ""


def _pod(
    common: dict[str, Any],
    metadata: Mapping[str, Any],
    annotations: Mapping[str, str],
    spec: Mapping[str, Any],
    status: Mapping[str, Any],
) -> Pod:
    labels = metadata.get("labels") or {}
    role = _short(labels.get(names.ROLE))
    conditions = {one["type"]: one for one in status.get("conditions") or []}
    # A container of the user's own beside ours (template) does not decide.
    statuses: list[dict[str, Any]] = status.get("containerStatuses") or []
    first: list[dict[str, Any]] = status.get("initContainerStatuses") or []
    container = next((one for one in statuses if one.get("name") == role), {})
    asked: dict[str, Any] = next((one for one in spec.get("containers") or [] if one.get("name") == role), {})
    state = container.get("state") or {}
    terminated = state.get("terminated") or {}
    ended = status.get("phase") in ("Succeeded", "Failed")
    over = bool(terminated) and spec.get("restartPolicy") == "Never"
    others = any("running" in (one.get("state") or {}) for one in statuses)
    finished = seconds(terminated.get("finishedAt"))
    ready, contents = _holds(conditions, "Ready"), _holds(conditions, "ContainersReady")
    waiting, words = _why_waiting(conditions, [container, *first, *statuses], role)
    return Pod(
        **common,
        role=role,
        index=_number(labels.get(names.INDEX)),
        failures=_number(annotations.get(names.FAILURES)),
        node=_short(spec.get("nodeName")),
        avoids=_nodes(annotations.get(names.AVOIDS)),
        failed_on=_nodes(annotations.get(names.FAILED_ON)),
        endpoint=_short(annotations.get(names.ENDPOINT)),
        group=_group(labels, annotations),
        unqueued=names.QUEUE in labels
        and not _is_gated(spec)
        and names.HELD not in (metadata.get("finalizers") or [])
        and not ended,
        abandoned=_is_gated(spec) and names.HELD not in (metadata.get("finalizers") or []),
        template=_short(annotations.get(names.TEMPLATE)),
        image=_short(asked.get("image"), MAX_IMAGE),
        created=seconds(metadata.get("creationTimestamp")) or 0.0,
        placed=_placed(conditions),
        has_begun=any(_has_begun(one) for one in [*first, *statuses]),
        started=seconds((state.get("running") or terminated).get("startedAt")),
        finished=finished if finished is not None or not ended else seconds(status.get("startTime")),
        phase=_short(status.get("phase")) or "Pending",
        code=_whole(terminated.get("exitCode")),
        restarts=_whole(container.get("restartCount")) or 0,
        ready=ready,
        silent=contents and not ready and status.get("phase") == "Running" and not _waits_for_a_gate(conditions),
        over=over,
        lingers=over and others and not ended,
        ended_by=PodEnd.NOT_BEGUN
        if names.NOT_BEGUN in annotations and ended
        else ended_by(status, _holds(conditions, "DisruptionTarget"), _short(terminated.get("reason"))),
        address=_short(status.get("podIP")),
        waiting=waiting,
        words=words
        or (_short(annotations.get(names.NOT_BEGUN), MAX_WORDS) if ended else "")
        or _last_words(status, terminated)
        or _failed_first(first),
    )


def _has_begun(container: Mapping[str, Any]) -> bool:
    """Whether a container runs or ever ran: one that waits to be started again does not for the first time."""
    states = (container.get("state") or {}).keys() | (container.get("lastState") or {}).keys()
    return bool(states & {"running", "terminated"}) or bool(_whole(container.get("restartCount")))


def _nodes(text: object) -> tuple[str, ...]:
    given = text.split(",", MAX_AVOIDED) if isinstance(text, str) else []
    return tuple(node for node in given[:MAX_AVOIDED] if 0 < len(node) < MAX_LETTERS)


def _group(labels: Mapping[str, str], annotations: Mapping[str, str]) -> PodGroup | None:
    if names.GROUP not in labels:
        return None
    return PodGroup(
        _short(labels.get(names.QUEUE)), _short(labels[names.GROUP]), _number(annotations.get(names.GROUP_SIZE))
    )


def _is_gated(spec: Mapping[str, Any]) -> bool:
    return any(gate.get("name") == names.GATE for gate in spec.get("schedulingGates") or [])


def _why_waiting(conditions: Mapping[str, Any], containers: Iterable[Mapping[str, Any]], role: str) -> tuple[str, str]:
    """Why a pod does not start: one word, and a sentence.

    Args:
        containers: statuses of all of its containers, ours first.
        role: the name of ours.
    """
    for one in containers:
        waiting = (one.get("state") or {}).get("waiting") or {}
        if waiting.get("reason") in BROKEN_WAITING:
            # The first and the second try of the same thing.
            reason = str(waiting["reason"]).replace("ErrImagePull", "ImagePullBackOff")
            last = _last_line(((one.get("lastState") or {}).get("terminated") or {}).get("message"))
            words = last or _short(waiting.get("message") or waiting["reason"], MAX_WORDS)
            return reason, words if one.get("name") == role else f"container {_short(one.get('name'))}: {words}"
    scheduled = conditions.get("PodScheduled", {})
    if scheduled.get("status") == "False":
        return _short(scheduled.get("reason")) or "Unschedulable", _short(scheduled.get("message"), MAX_WORDS)
    return "", ""


def _waits_for_a_gate(conditions: Mapping[str, Any]) -> bool:
    """Whether a pod is not ready because of a readiness gate, and not because its node does not answer: for that, the
    node controller takes the condition from it and leaves the reason as it was."""
    return bool(conditions.get("Ready", {}).get("reason") == "ReadinessGatesNotReady")


def _holds(conditions: Mapping[str, Any], kind: str) -> bool:
    return bool(conditions.get(kind, {}).get("status") == "True")


def _last_words(status: Mapping[str, Any], terminated: Mapping[str, Any]) -> str:
    """Why a pod has ended: what the kubelet says of an end that is its doing, else what the container said last."""
    if terminated.get("reason") == OUT_OF_MEMORY:
        return f"{OUT_OF_MEMORY}: it used more memory than its limit"
    said = _short(status.get("message"), MAX_WORDS).strip()
    return (said if status.get("reason") else "") or _last_line(terminated.get("message")) or said


def _placed(conditions: Mapping[str, Any]) -> float | None:
    scheduled = conditions.get("PodScheduled", {})
    return seconds(scheduled.get("lastTransitionTime")) if scheduled.get("status") == "True" else None


def _failed_first(containers: Iterable[Mapping[str, Any]]) -> str:
    """How an init container has ended, if it has failed: nothing after it ran."""
    for one in containers:
        terminated = (one.get("state") or {}).get("terminated") or {}
        if code := _whole(terminated.get("exitCode")):
            words = f"init container {_short(one.get('name'))} ended with exit code {code}"
            last = _last_line(terminated.get("message"))
            return f"{words}: {last}" if last else words
    return ""


def _last_line(text: str | None) -> str:
    lines = [line.strip() for line in (text or "").splitlines() if line.strip()]
    return lines[-1][:MAX_WORDS] if lines else ""


def _number(text: object, digits: int = MAX_DIGITS) -> int:
    """The whole number that a text is, 0 for anything else: whoever may make a pod may write what he likes into it."""
    return int(text) if isinstance(text, str) and len(text) <= digits and text.isascii() and text.isdecimal() else 0


def _whole(number: object) -> int | None:
    return number if isinstance(number, int) and abs(number) < 10**MAX_DIGITS else None


def _short(text: object, most: int = MAX_LETTERS) -> str:
    return text[:most] if isinstance(text, str) else ""


Object = dict[str, Any]
NAMED = ("namespace", "name", "uid")
"""Of a job's metadata, what every object has."""
KEPT = ("resourceVersion", "creationTimestamp", "deletionTimestamp")
"""What else is kept of it, beside its generation and one annotation. The others hold the whole job a second time,
managed fields a third time."""
MAX_NAME = 253
"""Characters of a name, a namespace or a UID. The API server takes no more, and what it writes itself is shorter."""
MAX_SPEC = Extent(depth=48, values=30_000, characters=2**20)
MAX_STATUS = Extent(depth=8, values=5_000, characters=2**18)
REFUSED = "tandemRefused"
REASON, DIGEST = "tandemReason", "tandemDigest"
"""Fields beside `spec` that no object has: why the spec was not kept, in a sentence and in one word, and its digest."""
ENDS = ("phase", "completionTime")
"""Of a status that is not understood, what must not be forgotten."""


class InvalidSpec(Exception):  # noqa: N818 - it is a state of the job, and its reason
    """A job object that the API server accepted and this operator cannot run; says why.

    Args:
        reason: the same in one CamelCase word.
    """

    def __init__(self, message: str, reason: str = Reason.INVALID_SPEC) -> None:
        super().__init__(message)
        self.reason = reason


def refused(body: Object, reason: str, words: str) -> Object:
    """A job's object without its spec."""
    return {**body, "spec": None, REFUSED: words, REASON: reason, DIGEST: digest(body.get("spec"))}


def is_refused(before: Object, body: Object) -> bool:
    """Whether a job was refused before with the same spec."""
    known = REFUSED in before and before["metadata"]["uid"] == body["metadata"]["uid"]
    return known and before[REASON] != Reason.NO_ROOM and before[DIGEST] == digest(body["spec"])


def digest(spec: Any) -> str:
    """A spec in a few letters. The same generation of a job is read differently once its CRD has changed."""
    return "" if spec is None else xxhash.xxh3_128_hexdigest(json.dumps(spec).encode())


def no_room(namespace: str, mebibytes: float) -> str:
    """The sentence for a job whose spec is not held."""
    return (
        f"the specs of the jobs in the namespace {namespace} take {mebibytes:.0f} MiB of the operator's memory, and it "
        "has no more for one namespace: delete jobs, or move text out of their specs; nothing is done about this job "
        "until there is room, which is looked for every minute"
    )


ROOM_SECONDS = 60.0
"""Between two looks at a job whose pods have no room: so often they are listed."""


def no_room_for_pods(namespace: str) -> str:
    """The sentence for a job whose pods are not all known."""
    return (
        f"the namespace {namespace} has more pods of jobs than the operator has memory for in one namespace; nothing "
        "is done about this job until there is room, which is looked for every minute"
    )


def kept(body: Mapping[str, Any]) -> Object:
    """What is kept of a job's object.

    Raises:
        LookupError, TypeError, ValueError, AttributeError: it is no object of the API server's.
    """
    given = body["metadata"]
    metadata: Object = {name: named(given.get(name)) for name in NAMED} | {"resourceVersion": ""}
    metadata |= {field: _text(given[field]) for field in KEPT if field in given}
    generation = given.get("generation")
    metadata["generation"] = generation if isinstance(generation, int) and 0 < generation <= 2**53 else 1
    if (again := retry.asked(given)) is not None:
        metadata["annotations"] = {RETRY_AT: again}
    said = {field: body.get(field) for field in ("apiVersion", "kind")}
    found: Object = {field: text if isinstance(text, str) else "" for field, text in said.items()}
    found["metadata"] = metadata
    if why := body.get(UNREAD):
        found = refused(found, Reason.INVALID_SPEC, str(why))
    elif why := excess(spec := body.get("spec"), MAX_SPEC):
        found = refused(found, Reason.INVALID_SPEC, f"spec {why}")
    else:
        found["spec"] = spec
    status = body.get("status")
    if isinstance(status, dict):
        found["status"] = _ends(status) if excess(status, MAX_STATUS) else status
    return found


def named(value: object) -> str:
    """A name as it is.

    Raises:
        TypeError: it is none.
    """
    if not isinstance(value, str) or not 0 < len(value) <= MAX_NAME:
        raise TypeError(f"a name is {type(value).__name__}, or empty, or too long")
    return value


def _text(value: object) -> str:
    return value if isinstance(value, str) and len(value) <= MAX_NAME else ""


def parsed(body: Mapping[str, Any]) -> DistributedTrainingJob:
    """The job that an object says.

    Raises:
        InvalidSpec: it says none.
    """
    if REFUSED in body:
        raise InvalidSpec(body[REFUSED], body[REASON])
    metadata = {"name": body["metadata"]["name"], "namespace": body["metadata"]["namespace"]}
    whole = {"apiVersion": body.get("apiVersion"), "kind": body.get("kind"), "metadata": metadata}
    try:
        job = DistributedTrainingJob.read({**whole, "spec": body.get("spec")})
    except ValidationError as error:
        raise InvalidSpec(_first(error)) from None
    if job.spec.trainer.task == CAUSAL_LM:
        _refuse_parameters(job.spec.trainer.parameters or {})
    return job.model_copy(update={"status": status_of(body)})


def _refuse_parameters(parameters: Mapping[str, Any]) -> None:
    """
    Raises:
        InvalidSpec: they are not those of `causal-lm`. The API server takes any object there, and the coordinator would
            refuse it at each of its starts.
    """
    try:
        parameters_of(parameters).parse(parameters)
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        where = ".".join(("spec.trainer.parameters", *map(str, first["loc"])))[:MAX_WORDS]
        raise InvalidSpec(f"{where}: {first['msg'][:MAX_WORDS]}") from None


def status_of(body: Mapping[str, Any]) -> Status | None:
    """The status that an object says; of one that is not understood, how the job has ended, if that is."""
    status = body.get("status")
    if not status or not isinstance(status, dict):
        return None
    try:
        return Status.read(status)
    except ValidationError:
        # Of another version of the operator, or somebody's handiwork: what can be known again is known again.
        with suppress(ValidationError):
            return Status.read(_ends(status))
    return None


def _ends(status: Mapping[str, Any]) -> Object:
    return {key: status[key] for key in ENDS if key in status and not excess(status[key], MAX_STATUS)}


def _first(error: ValidationError) -> str:
    """The first of the mistakes. It may be an older CRD that let it pass, or a newer one."""
    first = error.errors(include_url=False, include_input=False)[0]
    where = ".".join(str(part) for part in first["loc"])[:MAX_WORDS]
    if first["type"] == "value_error" and not isinstance(first["ctx"]["error"], RuleBroken):
        # Of what a template holds, the CRD knows nothing.
        return f"{where}: {str(first['ctx']['error'])[:MAX_WORDS]}"
    return f"{where}: {first['msg'][:MAX_WORDS]}; the CRD and the operator may be of different versions"


def changed(job: DistributedTrainingJob, uid: str, children: Children) -> str | None:
    """What of a job was changed that must not be, as far as the API server cannot see it, in a sentence.

    How many processes each replica has is in the coordinator's rules and in the command of every agent that runs. A CEL
    rule refuses to change it where it follows from `processesPerReplica`, from whole GPUs, or from `gpuResource`. Parts
    of GPUs have names that no rule can list, and of what stands in a template the CRD knows nothing. So the number is
    written on the ConfigMap with the job when that is made, and a job that says another one is held as it is: its
    agents would be refused by the next coordinator, and train on unheard.
    """
    made = children.get(kinds.CONFIG_MAP, names.job_file(job.metadata.name))
    if not isinstance(made, JobFile) or made.owner != uid or not made.processes:
        return None
    before, now = made.processes, job.spec.workers.processes
    if before == now:
        return None
    return (
        f"each replica of this job has {several(before, 'process', 'processes')}, and by the GPUs that "
        f"workers.resources or workers.template asks for now it would have {now}. That cannot be changed: undo it, or "
        "make a new job of another name. Until then nothing is done about this one; what runs goes on"
    )
