"""The use of queues: the order of what waits in them, and who has their quota. Pure.

A waiting job learns from it why it waits. Kueue names the quota that is missing, in the message of the Workload; its
visibility API knows the place in the queue; who has that quota is read from all Workloads (tandem_operator.queueing).
"""

import re
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from tandem.formatting import parse_rfc3339, rfc3339
from tandem.wire.queue_view import MAX_HOLDERS, MAX_MISSING, MissingQuota, OtherNamespaces, QueueView, QuotaHolder
from tandem_operator.observed import MAX_WORD_LENGTH

MISSING = re.compile(r"insufficient unused quota for (\S{1,316}) in flavor (\S{1,316}), (\S{1,64}) more needed")
"""Kueue's message about quota that foreign have (pkg/scheduler/flavorassigner, 0.14 and 0.17)."""
QUANTITY = re.compile(r"([0-9]{1,30}(?:\.[0-9]{1,30})?)(?:(m)|([kMGTPE])|([KMGTPE])i|e([0-9]{1,2}))?")
PREFIXES = "kMGTPE"
MAX_POD_SETS, MAX_RESOURCES = 16, 32
"""Maximum number of pod sets of a Workload, and of resources of one, that count."""

FlavorResource = tuple[str, str]
"""Names of a flavor and of a resource."""
Holders = tuple[Sequence[QuotaHolder], OtherNamespaces | None]
"""Holders in a namespace, the largest first, and numbers of the others."""


@dataclass(frozen=True)
class QueuePlace:
    """Place of a Workload that waits, from 1."""

    local: int
    """Place in its LocalQueue."""
    cluster: int
    """Place in the ClusterQueue."""


@dataclass(frozen=True)
class QuotaUse:
    """Quota that one Workload has."""

    namespace: str
    owner: tuple[str, str]
    """Kind and name of the object that Kueue admitted."""
    cluster_queue: str
    priority: int
    since: float | None
    amounts: Mapping[FlavorResource, float]


@dataclass(frozen=True)
class QueueUsage:
    """The queues in which jobs wait: places, and holders of quota."""

    places: Mapping[tuple[str, str], QueuePlace] = field(default_factory=dict)
    """Places by namespace and name of the Workload; empty where Kueue does not tell."""
    cluster_queues: Mapping[tuple[str, str], str] = field(default_factory=dict)
    """ClusterQueues by namespace and name of the LocalQueue."""
    cohorts: Mapping[str, str] = field(default_factory=dict)
    """Cohorts by ClusterQueue, of those that have one."""
    uses: Sequence[QuotaUse] = ()
    """Workloads that have quota."""
    _computed: dict[tuple[str, str, frozenset[FlavorResource]], Holders] = field(default_factory=dict, compare=False)

    def holders(self, namespace: str, cluster_queue: str, pairs: frozenset[FlavorResource]) -> Holders:
        """Holders of quota that a namespace waits for. Computed once for all of its jobs, each of which is reconciled
        every few seconds.

        Args:
            pairs: flavors and resources of that quota.
        """
        key = (namespace, cluster_queue, pairs)
        if key not in self._computed:
            cohort = self.cohorts.get(cluster_queue)
            uses = [
                (use, amount)
                for use in self.uses
                if use.cluster_queue == cluster_queue or (cohort and self.cohorts.get(use.cluster_queue) == cohort)
                if (amount := sum(use.amounts.get(pair, 0.0) for pair in pairs)) > 0
            ]
            self._computed[key] = _holders(uses, namespace)
        return self._computed[key]


@dataclass(frozen=True)
class WaitingWorkload:
    """The first Workload of a job that waits."""

    namespace: str
    job: tuple[str, str]
    """Kind and name of the job."""
    name: str
    message: str
    """Kueue's message about it."""


def with_wait(view: QueueView, waiting: WaitingWorkload, usage: QueueUsage) -> QueueView:
    """The queue of a job that waits, with its place, and who has what it waits for."""
    place = usage.places.get((waiting.namespace, waiting.name))
    missing = missing_quota(waiting.message)
    changes: dict[str, Any] = {"missing": missing}
    if place is not None:
        changes |= {"position": place.local, "cluster_position": place.cluster}
    cluster_queue = usage.cluster_queues.get((waiting.namespace, view.name))
    if missing and cluster_queue is not None:
        pairs = frozenset((entry.flavor, entry.resource) for entry in missing if entry.resource == missing[0].resource)
        all_holders, other_namespaces = usage.holders(waiting.namespace, cluster_queue, pairs)
        holders = [holder for holder in all_holders if (holder.kind, holder.name) != waiting.job]
        changes |= {"holders": holders[:MAX_HOLDERS], "more_holders": len(holders[MAX_HOLDERS:]) or None}
        changes["other_namespaces"] = other_namespaces
    return view.model_copy(update=changes)


def missing_quota(message: str) -> list[MissingQuota]:
    """Quota that Kueue's message says is missing because others have it."""
    entries = [
        MissingQuota(resource=resource, flavor=flavor, amount=amount)
        for resource, flavor, text in MISSING.findall(message)
        if (amount := quantity(text)) is not None
    ]
    return entries[:MAX_MISSING]


def _holders(uses: Iterable[tuple[QuotaUse, float]], namespace: str) -> Holders:
    """Holders in a namespace, the largest first, and numbers of the others."""
    own, foreign = defaultdict[tuple[str, str], list[tuple[QuotaUse, float]]](list), list[tuple[QuotaUse, float]]()
    for use, amount in uses:
        if use.namespace == namespace:
            own[use.owner].append((use, amount))
        else:
            foreign.append((use, amount))
    holders = [_holder(owner, entries) for owner, entries in own.items()]
    holders.sort(key=lambda holder: (-holder.amount, holder.kind, holder.name))
    if not foreign:
        return holders, None
    priorities = [use.priority for use, _ in foreign]
    return holders, OtherNamespaces(
        holders=len({(use.namespace, use.owner) for use, _ in foreign}),
        amount=sum(amount for _, amount in foreign),
        lowest_priority=min(priorities),
        highest_priority=max(priorities),
    )


def _holder(owner: tuple[str, str], entries: Sequence[tuple[QuotaUse, float]]) -> QuotaHolder:
    times = [use.since for use, _ in entries if use.since is not None]
    return QuotaHolder(
        kind=owner[0],
        name=owner[1],
        amount=sum(amount for _, amount in entries),
        priority=max(use.priority for use, _ in entries),
        since=rfc3339(min(times)) if times else None,
    )


def quota_use(body: Mapping[str, Any]) -> QuotaUse | None:
    """The quota that a Workload has; None if it has none, or what is there is no Workload of Kueue's."""
    with suppress(AttributeError, KeyError, TypeError):
        metadata, status = body["metadata"], body.get("status") or {}
        admission, conditions = status.get("admission"), status.get("conditions") or []
        times = {entry.get("type"): entry for entry in conditions if entry.get("status") == "True"}
        # Kueue leaves the admission of a Workload that has finished as it was.
        if not admission or "Finished" in times:
            return None
        amounts = defaultdict[FlavorResource, float](float)
        for assigned in (admission.get("podSetAssignments") or [])[:MAX_POD_SETS]:
            usage, flavors = assigned.get("resourceUsage") or {}, assigned.get("flavors") or {}
            for resource, text in list(usage.items())[:MAX_RESOURCES]:
                if (amount := quantity(text)) is not None:
                    amounts[_word(flavors.get(resource)), _word(resource)] += amount
        return QuotaUse(
            namespace=_word(metadata["namespace"]),
            owner=_owner(metadata),
            cluster_queue=_word(admission.get("clusterQueue")),
            priority=_priority((body.get("spec") or {}).get("priority")),
            since=parse_rfc3339((times.get("QuotaReserved") or {}).get("lastTransitionTime")),
            amounts=dict(amounts),
        )
    return None


def place_of(item: Mapping[str, Any]) -> tuple[tuple[str, str], QueuePlace] | None:
    """Namespace and name of a pending Workload, and its place; None if the answer has none."""
    with suppress(AttributeError, KeyError, TypeError):
        metadata = item["metadata"]
        local, cluster = item.get("positionInLocalQueue", 0), item.get("positionInClusterQueue", 0)
        if isinstance(local, int) and isinstance(cluster, int) and local >= 0 and cluster >= 0:
            return (_word(metadata["namespace"]), _word(metadata["name"])), QueuePlace(local + 1, cluster + 1)
    return None


def quantity(text: object) -> float | None:
    """The value of a quantity of Kubernetes: `8`, `500m`, `2Gi`; None if it is not one."""
    match = QUANTITY.fullmatch(text) if isinstance(text, str) else None
    if match is None:
        return None
    digits, milli, decimal, binary, exponent = match.groups()
    if milli:
        return float(digits) / 1000
    if decimal:
        return float(digits) * 1000.0 ** (1 + PREFIXES.index(decimal))
    if binary:
        return float(digits) * 1024.0 ** (1 + PREFIXES.index(binary.replace("K", "k")))
    return float(digits) * 10.0 ** int(exponent or 0)


def _owner(metadata: Mapping[str, Any]) -> tuple[str, str]:
    """Kind and name of the object that a Workload stands for."""
    owners: list[Mapping[str, Any]] = metadata.get("ownerReferences") or []
    owner = next((entry for entry in owners if entry.get("controller")), None)
    if owner is None:
        # A group of pods has all of them as owners, and its own name.
        return "Workload", _word(metadata["name"])
    return _word(owner.get("kind")), _word(owner.get("name"))


def _priority(value: object) -> int:
    return value if isinstance(value, int) and -(2**31) <= value < 2**31 else 0


def _word(text: object) -> str:
    return text[:MAX_WORD_LENGTH] if isinstance(text, str) else ""
