"""A job at one moment, with its pods and what happened to it, asked of the cluster in three questions side by side."""

from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

from pydantic import ValidationError

from tandem import labels as names
from tandem.errors import UserError
from tandem.job import GROUP
from tandem.manifest.fields import nearest
from tandem.printable import printable
from tandem.status import Status
from tandem.times import seconds
from tandem_cli.kubernetes.events import JobEvent, job_events
from tandem_cli.kubernetes.kubectl import Kubectl
from tandem_cli.kubernetes.kubectl_errors import NotFound
from tandem_cli.kubernetes.pods import Pod, pods

RESOURCE = f"distributedtrainingjobs.{GROUP}"
ENDED = ("Succeeded", "Failed")

Raw = Mapping[str, Any]


@dataclass(frozen=True, kw_only=True)
class JobSummary:
    """One job."""

    name: str
    namespace: str
    uid: str
    made: float
    """Seconds since the epoch."""
    status: Status
    taken_up: bool
    """Whether the operator has written a status."""
    leaving: bool
    """Whether it is being deleted."""

    @property
    def ended(self) -> bool:
        """Whether nothing will happen any more."""
        return self.status.phase in ENDED


@dataclass(frozen=True, kw_only=True)
class JobView:
    """One job and all that belongs to it."""

    job: JobSummary
    pods: tuple[Pod, ...] = ()
    job_events: tuple[JobEvent, ...] = ()


def look(kubectl: Kubectl, name: str, known: tuple[JobEvent, ...] | None = None) -> JobView:
    """All about one job.

    Args:
        known: what happened, if that is not to be asked again: the events of a namespace may be very many.

    Raises:
        NotFound: there is no such job; names the one that may have been meant.
        ClusterError: the cluster, or kubectl, refused.
    """
    with ThreadPoolExecutor(2) as askers:
        asked_pods = askers.submit(ask_pods, kubectl, name)
        asked_events = askers.submit(ask_events, kubectl) if known is None else None
        job = ask_job(kubectl, name)
        told = known or () if asked_events is None else job_events(asked_events.result(), name, job.made)
        return JobView(job=job, pods=asked_pods.result(), job_events=told)


def ask_job(kubectl: Kubectl, name: str) -> JobSummary:
    """The job alone.

    Raises:
        NotFound: as above.
        ClusterError: as above.
    """
    try:
        return job_summary(kubectl.json("get", RESOURCE, name))
    except NotFound as error:
        raise NotFound(_not_there(kubectl, name)) from error


def ask_jobs(kubectl: Kubectl, everywhere: bool = False) -> list[JobSummary]:
    """All jobs of the namespace, or of all.

    Raises:
        ClusterError: as above.
    """
    found = kubectl.json("get", RESOURCE, *(["--all-namespaces"] if everywhere else []))
    return [job_summary(item) for item in found["items"]]


def ask_pods(kubectl: Kubectl, name: str, role: str = "") -> tuple[Pod, ...]:
    """The pods of a job, of one role or of all.

    Raises:
        ClusterError: as above.
    """
    selector = f"{names.JOB}={name}" + (f",{names.ROLE}={role}" if role else "")
    return pods(kubectl.json("get", "pods", "-l", selector)["items"])


def ask_events(kubectl: Kubectl) -> list[Raw]:
    """All events of the namespace: the API server cannot choose those of several objects.

    Raises:
        ClusterError: as above.
    """
    items: list[Raw] = kubectl.json("get", "events")["items"]
    return items


def job_summary(whole: Raw) -> JobSummary:
    """A job as the API server shows it.

    Raises:
        UserError: its status cannot be read, because the operator is of another version.
    """
    metadata, status = whole["metadata"], whole.get("status") or {}
    return JobSummary(
        name=str(metadata["name"]),
        namespace=str(metadata.get("namespace", "")),
        uid=str(metadata.get("uid", "")),
        made=seconds(metadata.get("creationTimestamp")) or 0.0,
        status=_status(str(metadata["name"]), status),
        taken_up=bool(status.get("phase")),
        leaving="deletionTimestamp" in metadata,
    )


def _status(name: str, status: Raw) -> Status:
    """What a newer operator has added is passed over."""
    try:
        return Status.read(dict(status))
    except ValidationError as error:
        place = ".".join(str(part) for part in error.errors()[0]["loc"])
        raise UserError(
            f"the status of {name} cannot be read at {printable(place)}: the operator is of another version than this "
            f"tandem. Install the version of the operator here; meanwhile: kubectl get {RESOURCE} {name} -o yaml"
        ) from error


def _not_there(kubectl: Kubectl, name: str) -> str:
    found = [item["metadata"] for item in kubectl.json("get", RESOURCE)["items"]]
    known = sorted(str(metadata["name"]) for metadata in found)
    place = kubectl.namespace or next((metadata["namespace"] for metadata in found), "this namespace")
    if near := nearest(name, known):
        hint = f"did you mean {near}?"
    elif known:
        hint = f"jobs there: {', '.join(known[:8])}"
    else:
        hint = "there are no jobs; another --namespace? `tandem status --all-namespaces` shows all"
    return printable(f"there is no job {name} in {place}; {hint}")
