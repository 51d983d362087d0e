"""A job at one moment, with its pods and events, fetched from the cluster in three concurrent requests.

Events of deleted pods count too, so an event belongs to a job by the name of its object, not by the existing objects:
the names of a job's objects follow from its own. Events from before the job's creation belong to an earlier job of the
same name.
"""

import re
from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

from pydantic import ValidationError

from tandem.errors import UserError
from tandem.formatting import parse_rfc3339, printable
from tandem.job import labels as names
from tandem.job.labels import COORDINATOR, EVALUATOR, WORKER, stem
from tandem.job.manifest.fields import closest_choice
from tandem.job.pod_template import GROUP
from tandem.job.resource import KIND
from tandem.processes.exitcode import ExitCode
from tandem.wire.status import Status
from tandem_cli.kubernetes.kubectl import Kubectl, NotFound
from tandem_cli.view import JobEvent, JobSummary, JobView, PodView, State

_ORDER = (names.COORDINATOR, names.WORKER, names.EVALUATOR)
_DISRUPTIONS = ("DisruptionTarget",)
"""Conditions that tell why a pod is removed."""


def parse_pods(items: Iterable[Mapping[str, Any]]) -> tuple[PodView, ...]:
    """Parse the pods of a job, sorted by role, index and age."""
    by_age = sorted(items, key=lambda item: str(item["metadata"].get("creationTimestamp", "")))
    return tuple(sorted((parse_pod(item) for item in by_age), key=lambda parsed: (_rank(parsed.role), parsed.index)))


def parse_pod(item: Mapping[str, Any]) -> PodView:
    """Parse a pod object."""
    metadata, status = item["metadata"], item.get("status") or {}
    labels = metadata.get("labels") or {}
    role = str(labels.get(names.ROLE, ""))
    number = str(labels.get(names.INDEX) or "")
    index = int(number) if number.isdecimal() else 0
    container = _container(status, role)
    state, reason, since = _state(metadata, status, container)
    return PodView(
        name=f"{role}-{index}" if role != names.COORDINATOR else role,
        pod=str(metadata["name"]),
        uid=str(metadata.get("uid", "")),
        role=role,
        index=index,
        node=str((item.get("spec") or {}).get("nodeName") or ""),
        state=state,
        why=reason,
        restarts=int(container.get("restartCount", 0)),
        since=since or parse_rfc3339(metadata.get("creationTimestamp")),
        container=role,
        has_logs=any(kind in (container.get("state") or {}) for kind in ("running", "terminated"))
        or "terminated" in (container.get("lastState") or {}),
    )


def _rank(role: str) -> int:
    return _ORDER.index(role) if role in _ORDER else len(_ORDER)


def _container(status: Mapping[str, Any], role: str) -> Mapping[str, Any]:
    """Return the status of our container; a template may have added others."""
    statuses: list[Mapping[str, Any]] = status.get("containerStatuses") or []
    return next((container for container in statuses if container.get("name") == role), {})


def _state(
    metadata: Mapping[str, Any], status: Mapping[str, Any], container: Mapping[str, Any]
) -> tuple[State, str, float | None]:
    disruption = _condition(status, *_DISRUPTIONS, holds="True")
    reasons = [_reason(disruption), _reason(status)]
    phase = status.get("phase")
    now = container.get("state") or {}
    if terminated := now.get("terminated"):
        succeeded = terminated.get("exitCode") == 0
        reason = "" if succeeded else _joined(*reasons, _termination(terminated))
        return "done" if succeeded else "failed", reason, parse_rfc3339(terminated.get("finishedAt"))
    if phase in ("Succeeded", "Failed"):
        return "done" if phase == "Succeeded" else "failed", _joined(*reasons), None
    if deletion := metadata.get("deletionTimestamp"):
        # The timestamp is the end of the grace period.
        deadline = parse_rfc3339(deletion)
        grace = metadata.get("deletionGracePeriodSeconds") or 0
        return "leaving", _joined(*reasons), None if deadline is None else deadline - float(grace)
    if running := now.get("running"):
        since = parse_rfc3339(running.get("startedAt"))
        if container.get("ready"):
            return "running", _joined(*reasons), since
        return "not ready", _joined(*reasons, _last_termination(container)), since
    if waiting := now.get("waiting"):
        reason = str(waiting.get("reason", ""))
        if reason in ("ContainerCreating", "PodInitializing"):
            return "starting", "", None
        return "waiting", _joined(*reasons, _reason(waiting), _last_termination(container)), None
    unplaced = _condition(status, "PodScheduled", holds="False")
    return "waiting", _joined(*reasons, _reason(unplaced) or ("no node yet" if not status else "")), None


def _condition(status: Mapping[str, Any], *kinds: str, holds: str) -> Mapping[str, Any]:
    conditions: list[Mapping[str, Any]] = status.get("conditions") or []
    matches = (condition for condition in conditions if condition.get("type") in kinds)
    return next((condition for condition in matches if condition.get("status") == holds), {})


def _reason(part: Mapping[str, Any]) -> str:
    """Return the reason and message of a part of a pod."""
    return ": ".join(str(part[key]) for key in ("reason", "message") if part.get(key))


def _termination(terminated: Mapping[str, Any]) -> str:
    """Describe the end of a container: reason, exit code and the last line of its message.

    The message is the end of the container's log and may be long.
    """
    code = terminated.get("exitCode")
    name = next((meaning.name.lower().replace("_", " ") for meaning in ExitCode if meaning == code and meaning > 1), "")
    exit_code = f"exit code {code}" + (f" ({name})" if name else "")
    reason = str(terminated.get("reason") or "")
    last_line = str(terminated.get("message") or "").strip().rpartition("\n")[2]
    return _joined(reason if reason not in ("Error", "Completed") else "", exit_code, last_line)


def _last_termination(container: Mapping[str, Any]) -> str:
    terminated = (container.get("lastState") or {}).get("terminated")
    return f"before: {_termination(terminated)}" if terminated else ""


def _joined(*parts: str) -> str:
    return "; ".join(part for part in parts if part)


_OBJECTS = (
    (("Pod",), rf"({WORKER}|{EVALUATOR})-(\d+)-[0-9a-z]{{5}}", "{0}-{1}"),
    (("Pod",), rf"{COORDINATOR}-0-[0-9a-z]{{5}}", COORDINATOR),
    (("Service", "Endpoints"), COORDINATOR, COORDINATOR),
    (("Secret", "ConfigMap", "PersistentVolumeClaim"), "(token|job|checkpoints)", "{0}"),
)
"""Objects of a job: kinds, pattern of the name after the job's stem, and the name in views."""
_SECOND = 1.0
"""Resolution of the timestamps of events and jobs, in seconds."""


def job_events(items: Iterable[Mapping[str, Any]], job: str, created_at: float) -> tuple[JobEvent, ...]:
    """Select and merge the events of a job and its objects, the newest last.

    Args:
        created_at: creation time of the job, in seconds since the epoch.
    """
    merged: dict[tuple[str, str, str], JobEvent] = {}
    for item in items:
        event = _job_event(item, job)
        if event is None or event.at < created_at - _SECOND:
            continue
        key = (event.who, event.reason, event.text)
        merged[key] = _merge(merged[key], event) if key in merged else event
    return tuple(sorted(merged.values(), key=lambda event: (int(event.at), event.revision, event.at)))


def component(kind: str, name: str, job: str) -> str | None:
    """Return the name of an object within a job; empty for the job itself, None for objects of others."""
    if kind == KIND:
        return "" if name == job else None
    begin = f"{stem(job)}-"
    if not name.startswith(begin):
        return None
    suffix = name.removeprefix(begin)
    for kinds, pattern, component_name in _OBJECTS:
        if kind in kinds and (match := re.fullmatch(pattern, suffix)):
            return component_name.format(*match.groups())
    return None


def _job_event(item: Mapping[str, Any], job: str) -> JobEvent | None:
    about = item.get("involvedObject") or {}
    name = component(str(about.get("kind", "")), str(about.get("name", "")), job)
    if name is None:
        return None
    series = item.get("series") or {}
    created, revision = item["metadata"].get("creationTimestamp"), str(item["metadata"].get("resourceVersion", ""))
    times = (series.get("lastObservedTime"), item.get("lastTimestamp"), item.get("eventTime"), created)
    last = next((time for time in map(parse_rfc3339, times) if time is not None), 0.0)
    first = next(
        (time for time in map(parse_rfc3339, (item.get("firstTimestamp"), *times[2:])) if time is not None), last
    )
    return JobEvent(
        at=last,
        first=min(first, last),
        who=name,
        reason=str(item.get("reason") or ""),
        text=" ".join(str(item.get("message") or "").split()),
        count=int(series.get("count") or item.get("count") or 1),
        warning=item.get("type") == "Warning",
        # Some events have microseconds and others whole seconds, so times alone would not sort close ones.
        revision=int(revision) if revision.isdecimal() else 0,
    )


def _merge(event: JobEvent, other: JobEvent) -> JobEvent:
    return replace(
        event,
        at=max(event.at, other.at),
        first=min(event.first, other.first),
        count=event.count + other.count,
        revision=max(event.revision, other.revision),
    )


RESOURCE = f"distributedtrainingjobs.{GROUP}"

Raw = Mapping[str, Any]


def fetch_job_view(kubectl: Kubectl, name: str, events: tuple[JobEvent, ...] | None = None) -> JobView:
    """Fetch a job with its pods and events.

    Args:
        events: known events, which are then not fetched again; a namespace may have very many.

    Raises:
        NotFound: there is no such job; the message suggests a similar name.
        ClusterError: the cluster, or kubectl, refused.
    """
    with ThreadPoolExecutor(2) as pool:
        future_pods = pool.submit(fetch_pods, kubectl, name)
        future_events = pool.submit(fetch_events, kubectl) if events is None else None
        job = fetch_job(kubectl, name)
        if future_events is not None:
            events = job_events(future_events.result(), name, job.made)
        return JobView(job=job, pods=future_pods.result(), job_events=events or ())


def fetch_job(kubectl: Kubectl, name: str) -> JobSummary:
    """Fetch a job without its pods and events.

    Raises:
        NotFound: there is no such job; the message suggests a similar name.
        ClusterError: the cluster, or kubectl, refused.
    """
    try:
        return job_summary(kubectl.json("get", RESOURCE, name))
    except NotFound as error:
        raise NotFound(_not_found_message(kubectl, name)) from error


def fetch_jobs(kubectl: Kubectl, everywhere: bool = False, selector: str = "") -> list[JobSummary]:
    """Fetch the jobs of the namespace, or of all namespaces.

    Args:
        selector: label selector; empty: all jobs.

    Raises:
        ClusterError: the cluster, or kubectl, refused.
    """
    options = [*(["--all-namespaces"] if everywhere else []), *(["-l", selector] if selector else [])]
    jobs = kubectl.json("get", RESOURCE, *options)
    return [job_summary(item) for item in jobs["items"]]


def fetch_pods(kubectl: Kubectl, name: str, role: str = "") -> tuple[PodView, ...]:
    """Fetch the pods of a job, of one role or of all.

    Raises:
        ClusterError: the cluster, or kubectl, refused.
    """
    selector = f"{names.JOB}={name}" + (f",{names.ROLE}={role}" if role else "")
    return parse_pods(kubectl.json("get", "pods", "-l", selector)["items"])


def fetch_events(kubectl: Kubectl) -> list[Raw]:
    """Fetch all events of the namespace: the API server cannot select those of several objects.

    Raises:
        ClusterError: the cluster, or kubectl, refused.
    """
    items: list[Raw] = kubectl.json("get", "events")["items"]
    return items


def job_summary(item: Raw) -> JobSummary:
    """Parse a job object.

    Raises:
        UserError: the status cannot be parsed, because the operator has another version.
    """
    metadata, status = item["metadata"], item.get("status") or {}
    return JobSummary(
        name=str(metadata["name"]),
        namespace=str(metadata.get("namespace", "")),
        uid=str(metadata.get("uid", "")),
        made=parse_rfc3339(metadata.get("creationTimestamp")) or 0.0,
        status=_status(str(metadata["name"]), status),
        taken_up=bool(status.get("phase")),
        leaving="deletionTimestamp" in metadata,
    )


def _status(name: str, status: Raw) -> Status:
    """Parse a status; fields of a newer operator are ignored."""
    try:
        return Status.read(dict(status))
    except ValidationError as error:
        place = ".".join(str(part) for part in error.errors()[0]["loc"])
        raise UserError(
            f"the status of {name} cannot be read at {printable(place)}: the operator and this tandem have different "
            f"versions. Install the operator's version here; meanwhile: kubectl get {RESOURCE} {name} -o yaml"
        ) from error


def _not_found_message(kubectl: Kubectl, name: str) -> str:
    jobs = [item["metadata"] for item in kubectl.json("get", RESOURCE)["items"]]
    names = sorted(str(metadata["name"]) for metadata in jobs)
    place = kubectl.namespace or next((metadata["namespace"] for metadata in jobs), "this namespace")
    if suggestion := closest_choice(name, names):
        hint = f"did you mean {suggestion}?"
    elif names:
        hint = f"jobs there: {', '.join(names[:8])}"
    else:
        hint = "there are no jobs; another --namespace? `tandem status --all-namespaces` shows all"
    return printable(f"there is no job {name} in {place}; {hint}")
