"""Kubernetes Events as sentences, oldest first, each said once with a count. Pure.

Events of a pod that is gone are told too, so they are known by the name of what they speak of, not by what is there:
the objects of a job have names that follow from its own. What was told before the job was made is an earlier job's of
the same name.
"""

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from tandem.job import KIND
from tandem.labels import COORDINATOR, EVALUATOR, WORKER, stem
from tandem.times import seconds

_OBJECTS = (
    (("Pod",), rf"({WORKER}|{EVALUATOR})-(\d+)-[0-9a-z]{{5}}", "{0}-{1}"),
    (("Pod",), rf"{COORDINATOR}-0-[0-9a-z]{{5}}", COORDINATOR),
    (("Service", "Endpoints"), COORDINATOR, COORDINATOR),
    (("Secret", "ConfigMap", "PersistentVolumeClaim"), "(token|job|checkpoints)", "{0}"),
)
"""What is made for a job: kinds, names after its stem, and what they are called here. As the controllers name them."""
_SECOND = 1.0
"""Events have whole seconds, and so has the time at which a job was made."""


@dataclass(frozen=True, kw_only=True)
class JobEvent:
    """Something that happened, once or more."""

    at: float
    """When for the last time, seconds since the epoch."""
    first: float
    """When for the first time."""
    who: str
    """What it happened to: worker-0, coordinator, checkpoints; empty for the job itself."""
    reason: str
    """One CamelCase word."""
    text: str
    """A sentence."""
    count: int
    warning: bool
    revision: int = 0
    """The order of what happened within one second."""


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


def news(before: Iterable[JobEvent], now: Iterable[JobEvent]) -> list[JobEvent]:
    """What has happened since, again or for the first time."""
    counts = {(one.who, one.reason, one.text): one.count for one in before}
    return [one for one in now if one.count > counts.get((one.who, one.reason, one.text), 0)]


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
