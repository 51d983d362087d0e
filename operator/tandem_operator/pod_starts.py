"""Starts of pods: why no container of a pod has started although the pod has a node, as the pod's own Events say.

The status of a pod says only `ContainerCreating` while a volume does not mount, a ConfigMap is missing or an image is
pulled. The kubelet reports more in Events about the pod. The operator reads them only for a pod whose containers have
not started for some seconds, for a few pods of a job at a time, and rarely for each: at a thousand jobs, watching all
Events of a cluster would cost more than everything else that the operator does.

A pod whose containers have not started after MAX_START_SECONDS is a failed start: the operator terminates it with this
message, and it counts as a failure (tandem_operator.pod_ends). A pod whose image is being pulled is exempt: the next
pod would begin the pull again.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tandem_operator.observed import Pod
from tandem_operator.reporting import JobProblem

POLL_AFTER_SECONDS = 10.0
"""Delay before the Events of a pod are read, counted from its placement on a node. Most pods start sooner."""
POLL_INTERVAL_SECONDS = 20.0
"""Interval between two reads of the Events of one pod."""
MAX_EVENT_REQUESTS = 2
"""Maximum number of pods of a job whose Events are read in one reconcile: the others wait for the same thing."""
MAX_START_SECONDS = 900.0
"""Maximum time from the placement of a pod to the start of its first container. Detaching a disk from another node
first takes up to six minutes (the maximum of the attach-detach controller)."""
PULLING = "Pulling"
CREATING = "ContainerCreating"
MAX_MESSAGE_LENGTH = 500
UNREAD = JobProblem(CREATING, "its containers are being created; its Events cannot be read")


@dataclass(frozen=True)
class PodStart:
    """The last known state of the start of one pod."""

    polled_at: float
    """Time at which its Events were read, seconds since the epoch."""
    problem: JobProblem


def unexplained(pods: Iterable[Pod], starts: Mapping[str, PodStart], now: float) -> list[Pod]:
    """Pods whose Events are due to be read, least recently read first.

    Args:
        starts: earlier results, by the pods' UIDs.
    """
    due = [
        pod
        for pod in pods
        if waits(pod, now)
        and not pod.waiting
        and (pod.uid not in starts or now - starts[pod.uid].polled_at >= POLL_INTERVAL_SECONDS)
    ]
    # Pods whose Events were never read come first.
    due.sort(key=lambda pod: starts[pod.uid].polled_at if pod.uid in starts else 0.0)
    return due[:MAX_EVENT_REQUESTS]


def waits(pod: Pod, now: float) -> bool:
    """Whether a pod has had a node for some time and none of its containers has started."""
    placed = pod.live and pod.placed is not None and not pod.has_run
    return placed and now - (pod.placed or now) >= POLL_AFTER_SECONDS


def is_failed(pod: Pod, problem: JobProblem | None, now: float) -> bool:
    """Whether the start of a pod has taken too long and counts as failed.

    Args:
        problem: the reason from the pod's Events; None if they were not read.
    """
    is_late = waits(pod, now) and now - (pod.placed or now) >= MAX_START_SECONDS
    if pod.waiting or problem is None or problem == UNREAD:
        # The pod's status gives the reason; without one, its image may still be being pulled.
        return is_late and bool(pod.waiting)
    return is_late and problem.reason != PULLING


def explained(events: Sequence[Mapping[str, Any]]) -> JobProblem:
    """The reason why a pod has not started, from its newest Event."""
    # An Event repeats as one object with a later time, so the newest one describes the current obstacle.
    newest = max(events, key=_last_seen, default=None)
    if newest is None:
        return JobProblem(CREATING, "its containers are being created, and its node says no more")
    reason, message = newest.get("reason"), newest.get("message")
    text = message[:MAX_MESSAGE_LENGTH] if isinstance(message, str) and message else str(reason)[:MAX_MESSAGE_LENGTH]
    is_reason = isinstance(reason, str) and reason.isascii() and reason.isalnum() and len(reason) <= 64
    return JobProblem(str(reason) if is_reason else CREATING, text)


def _last_seen(event: Mapping[str, Any]) -> str:
    """Time of an Event's last occurrence, in RFC 3339: times of one server, so they sort as text."""
    series = event.get("series")
    times = (
        series.get("lastObservedTime") if isinstance(series, Mapping) else None,
        event.get("lastTimestamp"),
        event.get("eventTime"),
    )
    return next((str(time)[:19] for time in times if time), "")
