"""A job at one moment, with its pods and events, fetched from the cluster in three concurrent requests.

Events of a pod that is gone are told too, so they are known by the name of what they speak of, not by what is there:
the objects of a job have names that follow from its own. What was told before the job was made is an earlier job's of
the same name.
"""

import re
from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

from pydantic import ValidationError

from tandem import labels as names
from tandem.errors import UserError
from tandem.exitcode import ExitCode
from tandem.formatting import printable, seconds
from tandem.job import KIND
from tandem.labels import COORDINATOR, EVALUATOR, WORKER, stem
from tandem.manifest.fields import nearest
from tandem.pod_template import GROUP
from tandem.status import Status
from tandem_cli.kubernetes.kubectl import Kubectl, NotFound
from tandem_cli.view import JobEvent, JobSummary, JobView, Pod, State

_ORDER = (names.COORDINATOR, names.WORKER, names.EVALUATOR)
_TROUBLES = ("DisruptionTarget",)
"""Conditions that say why a pod goes."""


def pods(items: Iterable[Mapping[str, Any]]) -> tuple[Pod, ...]:
    """The pods of a job, in the order of roles and places; the older of two first."""
    found = sorted(items, key=lambda item: str(item["metadata"].get("creationTimestamp", "")))
    return tuple(sorted((pod(item) for item in found), key=lambda one: (_rank(one.role), one.index)))


def pod(item: Mapping[str, Any]) -> Pod:
    """One pod, as the API server shows it."""
    metadata, status = item["metadata"], item.get("status") or {}
    labels = metadata.get("labels") or {}
    role = str(labels.get(names.ROLE, ""))
    number = str(labels.get(names.INDEX) or "")
    index = int(number) if number.isdecimal() else 0
    container = _container(status, role)
    state, why, since = _state(metadata, status, container)
    return Pod(
        name=f"{role}-{index}" if role != names.COORDINATOR else role,
        pod=str(metadata["name"]),
        uid=str(metadata.get("uid", "")),
        role=role,
        index=index,
        node=str((item.get("spec") or {}).get("nodeName") or ""),
        state=state,
        why=why,
        restarts=int(container.get("restartCount", 0)),
        since=since or seconds(metadata.get("creationTimestamp")),
        container=role,
        has_logs=any(kind in (container.get("state") or {}) for kind in ("running", "terminated"))
        or "terminated" in (container.get("lastState") or {}),
    )


def _rank(role: str) -> int:
    return _ORDER.index(role) if role in _ORDER else len(_ORDER)


def _container(status: Mapping[str, Any], role: str) -> Mapping[str, Any]:
    """Ours among those of the pod: a template may have added others."""
    all_of_them: list[Mapping[str, Any]] = status.get("containerStatuses") or []
    return next((one for one in all_of_them if one.get("name") == role), {})


def _state(
    metadata: Mapping[str, Any], status: Mapping[str, Any], container: Mapping[str, Any]
) -> tuple[State, str, float | None]:
    going = _condition(status, *_TROUBLES, holds="True")
    reasons = [_said(going), _said(status)]
    phase = status.get("phase")
    now = container.get("state") or {}
    if ended := now.get("terminated"):
        good = ended.get("exitCode") == 0
        why = "" if good else _joined(*reasons, _ended(ended))
        return "done" if good else "failed", why, seconds(ended.get("finishedAt"))
    if phase in ("Succeeded", "Failed"):
        return "done" if phase == "Succeeded" else "failed", _joined(*reasons), None
    if deleted := metadata.get("deletionTimestamp"):
        asked = seconds(deleted)
        grace = metadata.get("deletionGracePeriodSeconds") or 0
        return "leaving", _joined(*reasons), None if asked is None else asked - float(grace)
    if running := now.get("running"):
        since = seconds(running.get("startedAt"))
        if container.get("ready"):
            return "running", _joined(*reasons), since
        return "not ready", _joined(*reasons, _before(container)), since
    if waits := now.get("waiting"):
        reason = str(waits.get("reason", ""))
        if reason in ("ContainerCreating", "PodInitializing"):
            return "starting", "", None
        return "waiting", _joined(*reasons, _said(waits), _before(container)), None
    unplaced = _condition(status, "PodScheduled", holds="False")
    return "waiting", _joined(*reasons, _said(unplaced) or ("no node yet" if not status else "")), None


def _condition(status: Mapping[str, Any], *kinds: str, holds: str) -> Mapping[str, Any]:
    conditions: list[Mapping[str, Any]] = status.get("conditions") or []
    return next((one for one in conditions if one.get("type") in kinds and one.get("status") == holds), {})


def _said(part: Mapping[str, Any]) -> str:
    """Reason and message of a part of a pod, as one phrase."""
    return ": ".join(str(part[key]) for key in ("reason", "message") if part.get(key))


def _ended(ended: Mapping[str, Any]) -> str:
    """How a container ended. Its message is the end of its log, and may be long: the log is there for that."""
    code = ended.get("exitCode")
    known = next((one.name.lower().replace("_", " ") for one in ExitCode if one == code and one > 1), "")
    how = f"exit code {code}" + (f" ({known})" if known else "")
    reason = str(ended.get("reason") or "")
    last = str(ended.get("message") or "").strip().rpartition("\n")[2]
    return _joined(reason if reason not in ("Error", "Completed") else "", how, last)


def _before(container: Mapping[str, Any]) -> str:
    last = (container.get("lastState") or {}).get("terminated")
    return f"before: {_ended(last)}" if last else ""


def _joined(*parts: str) -> str:
    return "; ".join(part for part in parts if part)


_OBJECTS = (
    (("Pod",), rf"({WORKER}|{EVALUATOR})-(\d+)-[0-9a-z]{{5}}", "{0}-{1}"),
    (("Pod",), rf"{COORDINATOR}-0-[0-9a-z]{{5}}", COORDINATOR),
    (("Service", "Endpoints"), COORDINATOR, COORDINATOR),
    (("Secret", "ConfigMap", "PersistentVolumeClaim"), "(token|job|checkpoints)", "{0}"),
)
"""What is made for a job: kinds, names after its stem, and what they are called here. As the controllers name them."""
_SECOND = 1.0
"""Events have whole seconds, and so has the time at which a job was made."""


def job_events(items: Iterable[Mapping[str, Any]], job: str, made: float) -> tuple[JobEvent, ...]:
    """What is told of a job and its objects, the newest last.

    Args:
        made: when the job was made, seconds since the epoch.
    """
    found: dict[tuple[str, str, str], JobEvent] = {}
    for item in items:
        one = _job_event(item, job)
        if one is None or one.at < made - _SECOND:
            continue
        key = (one.who, one.reason, one.text)
        found[key] = _together(found[key], one) if key in found else one
    return tuple(sorted(found.values(), key=lambda one: (int(one.at), one.revision, one.at)))


def who(kind: str, name: str, job: str) -> str | None:
    """What an object is in a job; None if it is no object of this job. Empty for the job itself."""
    if kind == KIND:
        return "" if name == job else None
    begin = f"{stem(job)}-"
    if not name.startswith(begin):
        return None
    rest = name.removeprefix(begin)
    for kinds, pattern, called in _OBJECTS:
        if kind in kinds and (found := re.fullmatch(pattern, rest)):
            return called.format(*found.groups())
    return None


def _job_event(item: Mapping[str, Any], job: str) -> JobEvent | None:
    about = item.get("involvedObject") or {}
    whom = who(str(about.get("kind", "")), str(about.get("name", "")), job)
    if whom is None:
        return None
    series = item.get("series") or {}
    made, revision = item["metadata"].get("creationTimestamp"), str(item["metadata"].get("resourceVersion", ""))
    times = (series.get("lastObservedTime"), item.get("lastTimestamp"), item.get("eventTime"), made)
    at = next((found for found in map(seconds, times) if found is not None), 0.0)
    first = next((found for found in map(seconds, (item.get("firstTimestamp"), *times[2:])) if found is not None), at)
    return JobEvent(
        at=at,
        first=min(first, at),
        who=whom,
        reason=str(item.get("reason") or ""),
        text=" ".join(str(item.get("message") or "").split()),
        count=int(series.get("count") or item.get("count") or 1),
        warning=item.get("type") == "Warning",
        # Some events have microseconds and others whole seconds: their times alone would mix up what follows closely.
        revision=int(revision) if revision.isdecimal() else 0,
    )


def _together(one: JobEvent, other: JobEvent) -> JobEvent:
    return replace(
        one,
        at=max(one.at, other.at),
        first=min(one.first, other.first),
        count=one.count + other.count,
        revision=max(one.revision, other.revision),
    )


RESOURCE = f"distributedtrainingjobs.{GROUP}"

Raw = Mapping[str, Any]


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
            f"the status of {name} cannot be read at {printable(place)}: the operator and this tandem have different "
            f"versions. Install the operator's version here; meanwhile: kubectl get {RESOURCE} {name} -o yaml"
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
