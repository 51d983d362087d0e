"""How pods end, and what follows from it: the one table behind replacements, failures that count, status and Events.

`docs/operator.md` has the same table for users; a test compares the two.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from tandem.reasons import Reason

HEALTHY_SECONDS = 60.0
"""A pod whose container ran for so long did start well."""
ROOMY_SECONDS = 600.0
"""A pod that was at work for so long did fit into its limits at first; one that exceeds them sooner will again."""

DISRUPTED = {"Preempting", "Terminated", "NodeLost", "NodeShutdown", "Shutdown", "NodeAffinity"}
"""Reasons of failed pods whose node did without them. Kubernetes from 1.26 on says so with a DisruptionTarget."""
AT_ADMISSION = {"NodeShutdown", "Shutdown", "NodeAffinity"}
"""Those that a kubelet also gives to a pod that it does not start."""
EVICTED, OF_THE_NODE = "Evicted", "The node "
"""Reason of an eviction, and how the message begins where the node lacked something: else the pod had more than its own
limits (the size of an emptyDir, ephemeral storage), of which no DisruptionTarget tells."""
DEADLINE = "DeadlineExceeded"
OUT_OF_MEMORY = "OOMKilled"


class PodEnd(StrEnum):
    """How a pod has ended."""

    FINISHED = "Finished"
    LEFT_OUT = "LeftOut"
    DISRUPTED = "Disrupted"
    REJECTED = Reason.POD_REJECTED
    OVER_LIMIT = Reason.LIMIT_EXCEEDED
    NOT_BEGUN = Reason.NOT_BEGUN
    FAILED = "Failed"


@dataclass(frozen=True)
class Consequence:
    """Consequences of the end of a pod."""

    words: str
    """Verb of the Event: what the pod did."""
    counts: bool = False
    """It is a failure, one more in a row unless it did start well. After six the place is not going to be filled."""
    forgives: bool = True
    """It ends a row of failures."""
    starts_well: float = HEALTHY_SECONDS
    """Seconds after which it did start well."""
    is_proven_by_steps: bool = True
    """A pod whose group has made steps did start well, however short that was."""
    is_trouble: bool = False
    """The status tells of it until the pod after it has run for a minute."""


CONSEQUENCES: Mapping[PodEnd, Consequence] = {
    PodEnd.FINISHED: Consequence("ended with exit code 0"),
    PodEnd.LEFT_OUT: Consequence("was left out of the group"),
    PodEnd.DISRUPTED: Consequence("was evicted"),
    PodEnd.REJECTED: Consequence("was rejected by its node", forgives=False, is_proven_by_steps=False, is_trouble=True),
    PodEnd.OVER_LIMIT: Consequence(
        "exceeded its own limit",
        counts=True,
        forgives=False,
        starts_well=ROOMY_SECONDS,
        is_proven_by_steps=False,
        is_trouble=True,
    ),
    PodEnd.NOT_BEGUN: Consequence(
        "did not begin", counts=True, forgives=False, is_proven_by_steps=False, is_trouble=True
    ),
    PodEnd.FAILED: Consequence("ended", counts=True, forgives=False),
}


def ended_by(status: Mapping[str, Any], is_disruption_target: bool, reason: str) -> PodEnd | None:
    """Disruption by the cluster that has ended a pod, or is about to; None: there is none, or the pod still runs.

    Args:
        status: the pod's.
        reason: Kubernetes' word for how our container ended.
    """
    if is_disruption_target:
        return PodEnd.DISRUPTED
    why = status.get("reason") if status.get("phase") == "Failed" else None
    if why and why != DEADLINE and (why not in DISRUPTED or why in AT_ADMISSION) and not _has_started(status):
        return PodEnd.REJECTED
    if why == EVICTED and not str(status.get("message")).startswith(OF_THE_NODE):
        return PodEnd.OVER_LIMIT
    if why in DISRUPTED or why == EVICTED:
        return PodEnd.DISRUPTED
    return PodEnd.OVER_LIMIT if reason == OUT_OF_MEMORY else None


def _has_started(status: Mapping[str, Any]) -> bool:
    """Whether any container of a pod has."""
    containers = [*(status.get("initContainerStatuses") or []), *(status.get("containerStatuses") or [])]
    return any((one.get("state") or {}).keys() & {"running", "terminated"} for one in containers)
