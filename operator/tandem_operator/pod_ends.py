"""Ends of pods and their consequences: the one table behind replacements, failures that count, status and Events.

`docs/operator.md` has the same table for users; a test compares the two.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from tandem.wire.reasons import Reason

HEALTHY_SECONDS = 60.0
"""Time after which a container has started well."""
ROOMY_SECONDS = 600.0
"""Time after which a pod has proved that it fits into its limits. One that exceeds them earlier will do so again."""

DISRUPTED = {"Preempting", "Terminated", "NodeLost", "NodeShutdown", "Shutdown", "NodeAffinity"}
"""Reasons of failed pods that were ended for the sake of their node or of other pods. Since 1.26 Kubernetes also sets
the condition DisruptionTarget."""
ADMISSION_REASONS = {"NodeShutdown", "Shutdown", "NodeAffinity"}
"""Reasons that a kubelet also gives to a pod that it rejects at admission."""
EVICTED, NODE_PRESSURE_PREFIX = "Evicted", "The node "
"""Reason of an eviction, and the prefix of its message if the node was short of a resource. Without that prefix the pod
had exceeded its own limits (the size of an emptyDir, ephemeral storage), for which there is no DisruptionTarget."""
DEADLINE = "DeadlineExceeded"
OUT_OF_MEMORY = "OOMKilled"


class PodEnd(StrEnum):
    """The way in which a pod has ended."""

    FINISHED = "Finished"
    LEFT_OUT = "LeftOut"
    DISRUPTED = "Disrupted"
    REJECTED = Reason.POD_REJECTED
    OVER_LIMIT = Reason.LIMIT_EXCEEDED
    NOT_BEGUN = Reason.NOT_BEGUN
    FAILED = "Failed"


@dataclass(frozen=True)
class Consequence:
    """The consequences of one way to end."""

    verb: str
    """The verb of the Event, with the pod as its subject."""
    counts: bool = False
    """Whether it is a failure: one more in a row, unless the pod had started well. After six the replica counts as
    unable to start."""
    resets: bool = True
    """Whether it ends a row of failures."""
    healthy_after: float = HEALTHY_SECONDS
    """Seconds after which the pod had started well."""
    is_proven_by_steps: bool = True
    """Whether a pod whose group has made steps had started well, however short its life was."""
    is_reported: bool = False
    """Whether the status reports it, until the replacement has run for a minute."""


CONSEQUENCES: Mapping[PodEnd, Consequence] = {
    PodEnd.FINISHED: Consequence("ended with exit code 0"),
    PodEnd.LEFT_OUT: Consequence("was left out of the group"),
    PodEnd.DISRUPTED: Consequence("was evicted"),
    PodEnd.REJECTED: Consequence("was rejected by its node", resets=False, is_proven_by_steps=False, is_reported=True),
    PodEnd.OVER_LIMIT: Consequence(
        "exceeded its own limit",
        counts=True,
        resets=False,
        healthy_after=ROOMY_SECONDS,
        is_proven_by_steps=False,
        is_reported=True,
    ),
    PodEnd.NOT_BEGUN: Consequence(
        "did not begin", counts=True, resets=False, is_proven_by_steps=False, is_reported=True
    ),
    PodEnd.FAILED: Consequence("ended", counts=True, resets=False),
}


def ended_by(status: Mapping[str, Any], is_disruption_target: bool, reason: str) -> PodEnd | None:
    """The disruption that has ended a pod, or is about to; None if there is none, or the pod still runs.

    Args:
        status: the pod's.
        reason: Kubernetes' reason for the end of our container.
    """
    if is_disruption_target:
        return PodEnd.DISRUPTED
    # The pod's own reason is set only by the kubelet or a controller that ended it.
    pod_reason = status.get("reason") if status.get("phase") == "Failed" else None
    # Some reasons of a disruption are also used at admission, so it matters whether a container had started.
    if (
        pod_reason
        and pod_reason != DEADLINE
        and (pod_reason not in DISRUPTED or pod_reason in ADMISSION_REASONS)
        and not _has_started(status)
    ):
        return PodEnd.REJECTED
    # Both kinds of eviction have the same reason, and only the message tells them apart.
    if pod_reason == EVICTED and not str(status.get("message")).startswith(NODE_PRESSURE_PREFIX):
        return PodEnd.OVER_LIMIT
    if pod_reason in DISRUPTED or pod_reason == EVICTED:
        return PodEnd.DISRUPTED
    return PodEnd.OVER_LIMIT if reason == OUT_OF_MEMORY else None


def _has_started(status: Mapping[str, Any]) -> bool:
    """Whether any container of a pod has started."""
    containers = [*(status.get("initContainerStatuses") or []), *(status.get("containerStatuses") or [])]
    return any((container.get("state") or {}).keys() & {"running", "terminated"} for container in containers)
