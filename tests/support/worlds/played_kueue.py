"""Kueue in memory: one ClusterQueue with one flavor and one resource, over the bodies of Workloads.

The rules are those of its sources (0.14 and 0.17: pkg/scheduler, pkg/scheduler/preemption, pkg/controller/core):

- The queue is ordered by priority, then by creation; after an eviction for pods that were not ready by that eviction.
- The first that fits is admitted. One that does not fit preempts (`withinClusterQueue: LowerPriority`): candidates of
  lower priority, those that are evicted already first, then the lowest priority, then the last admitted, until it fits;
  then all that it can do without are spared, in the reverse order. One that can do neither is passed over
  (BestEffortFIFO).
- Who has preempted others stays the first in the queue until they have gone.
- An evicted Workload keeps its quota until its owner takes `admission` from its status, and is queued again unless its
  condition Requeued is false.

A deactivated Workload counts here until its quota is given back. Kueue itself does not count it from then on.
"""

import copy
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tandem.formatting import parse_rfc3339, rfc3339

Object = dict[str, Any]
FLAVOR = "a100"
NOT_READY, DEACTIVATED, PREEMPTED = "PodsReadyTimeout", "Deactivated", "Preempted"


@dataclass
class Claim:
    """A Workload, as the scheduler knows it."""

    name: str
    size: int
    priority: int
    queued_at: float
    admitted_at: float | None = None
    """Time since which quota is reserved for it."""
    evicted: bool = False
    queued: bool = True
    """It may be admitted."""


@dataclass(frozen=True)
class Decision:
    """Result of one scheduling cycle: the head of the queue is admitted, or waits for those that it preempts."""

    head: Claim
    preempts: tuple[Claim, ...] | None = None
    """None: it is admitted."""


def decide(claims: Iterable[Claim], nominal: int) -> Decision | None:
    """What the scheduler does next; None: nothing."""
    claims = list(claims)
    holders = [claim for claim in claims if claim.admitted_at is not None]
    free = nominal - sum(claim.size for claim in holders)
    waiting = [claim for claim in claims if claim.admitted_at is None and claim.queued]
    for head in sorted(waiting, key=lambda claim: (-claim.priority, claim.queued_at, claim.name)):
        if head.size <= free:
            return Decision(head)
        if head.size <= nominal and (targets := _targets(head, holders, free)):
            return Decision(head, tuple(targets))
    return None


def _targets(head: Claim, holders: Sequence[Claim], free: int) -> list[Claim]:
    """Claims to preempt, so that the head fits; none if it cannot."""
    candidates = [claim for claim in holders if claim.priority < head.priority]
    candidates.sort(key=lambda claim: (not claim.evicted, claim.priority, -(claim.admitted_at or 0.0), claim.name))
    targets: list[Claim] = []
    for candidate in candidates:
        targets.append(candidate)
        free += candidate.size
        if free >= head.size:
            break
    if free < head.size:
        return []
    for spared in targets[-2::-1]:
        if free - spared.size >= head.size:
            targets.remove(spared)
            free -= spared.size
    return targets


class PlayedKueue:
    """The Workloads as the API server has them, and Kueue's controllers."""

    def __init__(self, nominal: int) -> None:
        self.nominal = nominal
        self.workloads: dict[str, Object] = {}
        self.away = False
        """Nothing is admitted or preempted."""
        self.now = 1_000_000.0
        self.preemptions = 0
        self._version = 0

    # The API server

    def create(self, manifest: Object) -> Object | None:
        """Store a new Workload; None if the name is taken."""
        name = manifest["metadata"]["name"]
        if name in self.workloads:
            return None
        body = copy.deepcopy(manifest)
        body["metadata"] |= {"uid": f"uid-{self._version}", "creationTimestamp": rfc3339(self.now)}
        body["status"] = {}
        return self._store(name, body)

    def patch_status(self, name: str, uid: str, version: int, changes: Mapping[str, Any]) -> Object | None:
        """Change a status, as long as nobody else has; None: somebody has."""
        body = self.workloads.get(name)
        if body is None or (body["metadata"]["uid"], body["metadata"]["resourceVersion"]) != (uid, str(version)):
            return None
        status = {**body["status"], **changes}
        return self._store(name, {**body, "status": {key: value for key, value in status.items() if value is not None}})

    def delete(self, name: str, uid: str) -> None:
        if name in self.workloads and self.workloads[name]["metadata"]["uid"] == uid:
            del self.workloads[name]

    # Kueue

    @property
    def claims(self) -> dict[str, Claim]:
        """All Workloads, by their names."""
        return {name: _claim(name, body) for name, body in self.workloads.items()}

    @property
    def reserved(self) -> int:
        """Quota that is reserved."""
        return sum(claim.size for claim in self.claims.values() if claim.admitted_at is not None)

    def cycle(self) -> bool:
        """One cycle of the scheduler; False if there is nothing to do."""
        decision = None if self.away else decide(self.claims.values(), self.nominal)
        if decision is None:
            return False
        if decision.preempts is None:
            self._admit(decision.head.name)
            return True
        targets = [claim for claim in decision.preempts if not claim.evicted]
        for target in targets:
            self.preemptions += 1
            self.evict(target.name, PREEMPTED)
        return bool(targets)

    def evict(self, name: str, reason: str) -> None:
        """Take the quota of a Workload back, once its owner gives it."""
        self._set(name, Evicted=(True, reason))

    def set_active(self, name: str, active: bool, cause: str = "") -> None:
        """Somebody activates a Workload or deactivates it, or Kueue does with a cause."""
        body = self.workloads[name]
        self._store(name, {**body, "spec": {**body["spec"], "active": active}})
        if not active and not _holds(body, "Evicted"):
            self.evict(name, f"{DEACTIVATED}DueTo{cause}" if cause else DEACTIVATED)

    def requeue(self, name: str) -> None:
        """Queue a Workload again that is active and whose back-off is over. Kueue knows these reasons word for word."""
        body = self.workloads[name]
        requeued = _conditions(body).get("Requeued", {})
        known = requeued.get("reason") in (NOT_READY, DEACTIVATED)
        if body["spec"]["active"] and requeued.get("status") == "False" and known:
            self._set(name, Requeued=(True, "BackoffFinished"))

    def _admit(self, name: str) -> None:
        body = self.workloads[name]
        flavors = [{"name": "workers", "flavors": {"nvidia.com/gpu": FLAVOR}}]
        body = {
            **body,
            "status": {**body["status"], "admission": {"clusterQueue": "all", "podSetAssignments": flavors}},
        }
        self._store(name, body)
        self._set(name, QuotaReserved=(True, "QuotaReserved"), Admitted=(True, "Admitted"), Evicted=(False, "Admitted"))

    def _set(self, name: str, **conditions: tuple[bool, str]) -> None:
        body = self.workloads[name]
        entries = _conditions(body)
        for kind, (holds, reason) in conditions.items():
            value = {"type": kind, "status": str(holds), "reason": reason, "message": f"played: {reason}"}
            entries[kind] = {**value, "lastTransitionTime": rfc3339(self.now)}
        self._store(name, {**body, "status": {**body["status"], "conditions": list(entries.values())}})

    def _store(self, name: str, body: Object) -> Object:
        self._version += 1
        self.now += 1.0
        self.workloads[name] = {**body, "metadata": {**body["metadata"], "resourceVersion": str(self._version)}}
        return self.workloads[name]


def _conditions(body: Object) -> dict[str, Object]:
    return {entry["type"]: entry for entry in body["status"].get("conditions", [])}


def _holds(body: Object, kind: str) -> bool:
    return bool(_conditions(body).get(kind, {}).get("status") == "True")


def _claim(name: str, body: Object) -> Claim:
    conditions, created = _conditions(body), body["metadata"]["creationTimestamp"]
    evicted = conditions.get("Evicted", {})
    late = _holds(body, "Evicted") and evicted["reason"] == NOT_READY
    reserved = conditions["QuotaReserved"]["lastTransitionTime"] if "admission" in body["status"] else None
    return Claim(
        name,
        body["spec"]["podSets"][0]["count"],
        body["spec"]["priority"],
        parse_rfc3339(evicted["lastTransitionTime"] if late else created) or 0.0,
        parse_rfc3339(reserved),
        _holds(body, "Evicted"),
        body["spec"]["active"] and conditions.get("Requeued", {}).get("status") != "False",
    )
