"""A job's own object: what is kept of it, and how it is parsed.

A template may hold anything, up to the megabyte and a half that an object may have. More than any real job needs is not
kept, and the job is refused with a message.
"""

import json
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

import xxhash
from pydantic import ValidationError

from tandem.formatting import count_noun
from tandem.job.labels import RETRY_AT
from tandem.job.resource import DistributedTrainingJob
from tandem.job.tasks import parameters_type
from tandem.model import JsonLimits, Model, RuleBroken, exceeded_limit
from tandem.wire.reasons import Reason
from tandem.wire.status import Status
from tandem_operator import kinds, names, retry
from tandem_operator.bounded import UNREAD
from tandem_operator.observed import MAX_MESSAGE_LENGTH, Children, JobFile

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
