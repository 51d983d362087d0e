"""Starts of pods: why nothing of a pod has begun although it has a node, as its own Events say.

The status of a pod says only `ContainerCreating` while a volume does not mount, a ConfigMap is missing or an image is
pulled. The kubelet says more in Events about the pod. They are read for a pod of which nothing has begun for some
seconds, a few pods of a job at a time and each rarely: at a thousand jobs, watching all Events of a cluster would cost
more than everything else that the operator does.

A pod of which nothing has begun for MAX_START_SECONDS is a failed start: it is ended, with these words, and counts
(tandem_operator.pod_ends). Not while its image is pulled: the next pod would begin that anew.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tandem_operator.observed import Pod
from tandem_operator.reporting import Want

ASK_SECONDS = 10.0
"""Since a pod was given a node. Most begin sooner."""
ASK_AGAIN_SECONDS = 20.0
MAX_ASKED = 2
"""Pods of a job that are asked about at one look: the others wait for the same."""
MAX_START_SECONDS = 900.0
"""How long a pod may take to begin once it has a node. A disk that has to leave another node first takes six minutes
(the attach-detach controller's maximum)."""
PULLING = "Pulling"
CREATING = "ContainerCreating"
MAX_WORDS = 500
UNREAD = Want(CREATING, "its containers are being created; its Events cannot be read")


@dataclass(frozen=True)
class Start:
    """What was last known of the start of one pod."""

    asked: float
    """When, seconds since the epoch."""
    want: Want


def unexplained(pods: Iterable[Pod], known: Mapping[str, Start], now: float) -> list[Pod]:
    """Pods to ask about now, those that were asked about longest ago first.

    Args:
        known: by UID.
    """
    due = [
        pod
        for pod in pods
        if waits(pod, now)
        and not pod.waiting
        and (pod.uid not in known or now - known[pod.uid].asked >= ASK_AGAIN_SECONDS)
    ]
    due.sort(key=lambda pod: known[pod.uid].asked if pod.uid in known else 0.0)
    return due[:MAX_ASKED]


def waits(pod: Pod, now: float) -> bool:
    """Whether a pod has had a node for some time and nothing of it has begun."""
    placed = pod.live and pod.placed is not None and not pod.has_begun
    return placed and now - (pod.placed or now) >= ASK_SECONDS


def is_failed(pod: Pod, want: Want | None, now: float) -> bool:
    """Whether a pod will not begin any more, as far as one may wait for it."""
    is_late = waits(pod, now) and now - (pod.placed or now) >= MAX_START_SECONDS
    if pod.waiting or want is None or want == UNREAD:
        # Its status says why; or nobody knows whether its image is still pulled.
        return is_late and bool(pod.waiting)
    return is_late and want.reason != PULLING


def explained(events: Sequence[Mapping[str, Any]]) -> Want:
    """Why a pod has not begun, by the newest of its Events."""
    newest = max(events, key=_at, default=None)
    if newest is None:
        return Want(CREATING, "its containers are being created, and its node says no more")
    reason, message = newest.get("reason"), newest.get("message")
    words = message[:MAX_WORDS] if isinstance(message, str) and message else str(reason)[:MAX_WORDS]
    is_word = isinstance(reason, str) and reason.isascii() and reason.isalnum() and len(reason) <= 64
    return Want(str(reason) if is_word else CREATING, words)


def _at(event: Mapping[str, Any]) -> str:
    """When an Event happened last: times of one server in RFC 3339, which are ordered as texts are."""
    series = event.get("series")
    times = (
        series.get("lastObservedTime") if isinstance(series, Mapping) else None,
        event.get("lastTimestamp"),
        event.get("eventTime"),
    )
    return next((str(one)[:19] for one in times if one), "")
