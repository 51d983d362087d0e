"""Jobs as the API server has them: what is kept of an object, and what it says.

A template may hold anything, up to the megabyte and a half that an object may have. What is more than any real job
needs is not kept, and the job is refused in words.
"""

from collections.abc import Mapping
from contextlib import suppress
from typing import Any

from pydantic import ValidationError

from tandem.extent import Extent, excess
from tandem.formatting import several
from tandem.job import DistributedTrainingJob
from tandem.labels import RETRY_AT
from tandem.model import RuleBroken
from tandem.status import Status
from tandem_operator import kinds, names, retry
from tandem_operator.bounded import UNREAD
from tandem_operator.observed import Children, JobFile

Object = dict[str, Any]
NAMED = ("namespace", "name", "uid")
"""Of a job's metadata, what every object has."""
KEPT = ("resourceVersion", "creationTimestamp", "deletionTimestamp")
"""What else is kept of it, beside its generation and one annotation. The others hold the whole job a second time,
managed fields a third time."""
MOST_NAME = 253
"""Characters of a name, a namespace or a UID. The API server takes no more, and what it writes itself is shorter."""
MOST_SPEC = Extent(depth=48, values=30_000, characters=2**20)
MOST_STATUS = Extent(depth=8, values=5_000, characters=2**18)
REFUSED = "tandemRefused"
"""A field beside `spec` that no object has: why the spec was not kept."""
ENDS = ("phase", "completionTime")
"""Of a status that is not understood, what must not be forgotten."""
PROCESSES_CHANGED = "ProcessesChanged"
MOST_WORDS = 500


class InvalidSpec(Exception):  # noqa: N818 - it is a state of the job, and its reason
    """What the API server took and is no job that this operator can run; says why."""


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
        found |= {"spec": None, REFUSED: str(why)}
    elif why := excess(spec := body.get("spec"), MOST_SPEC):
        found |= {"spec": None, REFUSED: f"spec {why}"}
    else:
        found["spec"] = spec
    status = body.get("status")
    if isinstance(status, dict):
        found["status"] = _ends(status) if excess(status, MOST_STATUS) else status
    return found


def named(value: object) -> str:
    """A name as it is.

    Raises:
        TypeError: it is none.
    """
    if not isinstance(value, str) or not 0 < len(value) <= MOST_NAME:
        raise TypeError(f"a name is {type(value).__name__}, or empty, or too long")
    return value


def _text(value: object) -> str:
    return value if isinstance(value, str) and len(value) <= MOST_NAME else ""


def parsed(body: Mapping[str, Any]) -> DistributedTrainingJob:
    """The job that an object says.

    Raises:
        InvalidSpec: it says none.
    """
    if REFUSED in body:
        raise InvalidSpec(body[REFUSED])
    metadata = {"name": body["metadata"]["name"], "namespace": body["metadata"]["namespace"]}
    whole = {"apiVersion": body.get("apiVersion"), "kind": body.get("kind"), "metadata": metadata}
    try:
        job = DistributedTrainingJob.read({**whole, "spec": body.get("spec")})
        return job.model_copy(update={"status": status_of(body)})
    except ValidationError as error:
        raise InvalidSpec(_first(error)) from None


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
    return {key: status[key] for key in ENDS if key in status and not excess(status[key], MOST_STATUS)}


def _first(error: ValidationError) -> str:
    """The first of the mistakes. It may be an older CRD that let it pass, or a newer one."""
    first = error.errors(include_url=False, include_input=False)[0]
    where = ".".join(str(part) for part in first["loc"])[:MOST_WORDS]
    if first["type"] == "value_error" and not isinstance(first["ctx"]["error"], RuleBroken):
        # Of what a template holds, the CRD knows nothing.
        return f"{where}: {str(first['ctx']['error'])[:MOST_WORDS]}"
    return f"{where}: {first['msg'][:MOST_WORDS]}; the CRD and the operator may be of different versions"


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
