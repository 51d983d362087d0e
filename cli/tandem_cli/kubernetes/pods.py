"""A pod of a job as a person wants to know it: what it is in the job, where it is, how it is, and why. Pure."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from tandem import labels as names
from tandem.exitcode import ExitCode
from tandem.times import seconds

State = Literal["waiting", "starting", "running", "not ready", "leaving", "done", "failed"]

_ORDER = (names.COORDINATOR, names.WORKER, names.EVALUATOR)
_TROUBLES = ("DisruptionTarget",)
"""Conditions that say why a pod goes."""


@dataclass(frozen=True, kw_only=True)
class Pod:
    """One pod."""

    name: str
    """What it is in the job: worker-0, evaluator-1, coordinator."""
    pod: str
    """Its name on the cluster."""
    uid: str
    role: str
    index: int
    """Its place in the group; 0 for the coordinator."""
    node: str
    """Empty while it has none."""
    state: State
    why: str
    """What keeps it from running, or how it ended; empty where nothing needs to be said."""
    restarts: int
    """How often its container was started again in place."""
    since: float | None
    """When it came into its state, seconds since the epoch."""
    container: str
    """The container whose logs count."""
    has_logs: bool
    """Whether its container has been started; one that waits to be started again still has the log of the last time."""


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
