"""Gang deadlock: two jobs each hold part of what the other needs, so one of them releases its pods. Pure.

Nothing in Kubernetes places the pods of a job together (Kueue does, where it is installed: runPolicy.queueName). Of two
jobs that start at the same time, each can get some of its workers placed, fewer than it needs to start, and then both
wait for ever for what the other holds. A job that holds pods and cannot start is *starved*.

    a starved job backs off for an older starved job after a while (PATIENCE_SECONDS)
    the oldest backs off, too, after twice as long, if others wait: it may want more than the cluster has

Only *rivals* back off for each other: each is missing something that the other requests, as the scheduler names it, and
no node selector keeps their pods apart. No job releases a GPU for one that waits for memory, or for a volume. The
patience is longer than an autoscaler needs for a node, because until then a node may be all that they wait for. So a
job that stays partly placed for ever can cost another one at most one such period.

A job that backs off deletes its workers, creates none for two minutes, and then tries again. The start of the back-off
is the transition time of its condition Running with the reason GaveWay, so another operator knows it as well.

Rejected: placing pods by the operator (a scheduler of its own), and creating a job's pods one after the other (every
start would take longer, for a case that is rare).
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from tandem.formatting import parse_rfc3339
from tandem.job.pod_template import ResourceMap, resources_by_container
from tandem.job.resource import DistributedTrainingJob
from tandem.wire.reasons import Reason
from tandem.wire.status import Status
from tandem_operator.lifecycle import find_condition
from tandem_operator.observed import Pod

PATIENCE_SECONDS = 600.0
"""Time for which a starved job keeps its workers. Autoscalers take one to seven minutes for a node with GPUs; with a
fixed number of nodes, less is enough."""
BACKOFF_SECONDS = 120.0
"""Time for which a job that has backed off creates no workers."""
UNSCHEDULABLE = "Unschedulable"


INSUFFICIENT = re.compile(r"Insufficient ([A-Za-z0-9](?:[A-Za-z0-9./_-]*[A-Za-z0-9])?)|(Too many pods)")
"""Pattern by which the scheduler names the resources that its nodes have too little of."""
POD_SLOT = "pods"
"""The resource that every pod takes of its node."""


@dataclass(frozen=True, order=True)
class Claimant:
    """A job that is starved, or has backed off. Claimants sort by age, the oldest first."""

    created: float
    """Creation time of the job, seconds since the epoch."""
    uid: str
    name: str = field(compare=False)
    namespace: str = field(default="", compare=False)
    starved: bool = field(default=True, compare=False)
    requests: frozenset[str] = field(default=frozenset(), compare=False)
    """Names of the resources that one of its workers requests."""
    missing: frozenset[str] = field(default=frozenset(), compare=False)
    """Names of the requested resources that no node has enough of."""
    selector: Mapping[str, str] = field(default_factory=dict, compare=False)
    """Labels that its nodes must have."""


def claimant(
    job: DistributedTrainingJob, created: float, uid: str, workers: Sequence[Pod], starved: bool = True
) -> Claimant:
    """Describe a job as its rivals see it.

    Args:
        workers: all worker pods.
    """
    template = job.spec.workers.template
    containers: list[ResourceMap] = [
        dict(job.spec.workers.resources),
        *(amounts for _, amounts in resources_by_container(template)),
    ]
    requests = frozenset({POD_SLOT} | {name for parts in containers for part in parts.values() for name in part})
    insufficient = {name or POD_SLOT for pod in _waiting(workers) for name, _ in INSUFFICIENT.findall(pod.message)}
    # A job that has backed off holds nothing, so it is missing all that it requests.
    missing = frozenset(insufficient) if starved else requests
    selector = (template.get("spec") or {}).get("nodeSelector") or {}
    labels = {key: str(value) for key, value in selector.items()}
    return Claimant(created, uid, job.metadata.name, job.metadata.namespace, starved, requests, missing, labels)


def is_partly_placed(workers: Sequence[Pod]) -> bool:
    """Whether a job with these workers can be starved, whatever its spec says."""
    waiting = len(_waiting(workers))
    return waiting > 0 and waiting < sum(pod.live for pod in workers)


def starved_for(job: DistributedTrainingJob, workers: Sequence[Pod], now: float) -> float | None:
    """Time in seconds for which the job has held workers without being able to start; None if it is not starved."""
    if not is_partly_placed(workers):
        return None
    # As many placed workers as the job needs at least are no deadlock: it starts with fewer.
    waiting = _waiting(workers)
    if sum(pod.live for pod in workers) - len(waiting) >= job.spec.fewest_workers:
        return None
    return now - min(pod.created for pod in waiting)


def rival(seconds_starved: float, own: Claimant, claimants: Sequence[Claimant], patience: float) -> Claimant | None:
    """The job to back off for; None for none.

    Args:
        patience: seconds, see PATIENCE_SECONDS.
    """
    rivals = [other for other in claimants if _overlap(own, other)]
    # Only older jobs are yielded to at first, so that of two starved jobs exactly one backs off.
    older = [other for other in rivals if other.starved and other < own]
    if older and seconds_starved >= patience:
        return min(older)
    # The oldest may want more than the cluster has. Then it must not block the younger ones for ever.
    if rivals and seconds_starved >= 2 * patience:
        return min(rivals)
    return None


def _overlap(first: Claimant, second: Claimant) -> bool:
    """Whether each of two jobs could start with what the other requests."""
    # Node selectors that differ in one label can never select the same node.
    separated = any(second.selector.get(label, value) != value for label, value in first.selector.items())
    return not separated and bool(first.missing & second.requests) and bool(second.missing & first.requests)


def _waiting(workers: Sequence[Pod]) -> list[Pod]:
    return [pod for pod in workers if pod.waiting == UNSCHEDULABLE and pod.live]


def backoff_ends(status: Status | None) -> float | None:
    """Time at which a job that has backed off tries again, seconds since the epoch; None if it has not backed off."""
    state = find_condition(status, "Running")
    if state is None or state.reason != Reason.GAVE_WAY:
        return None
    return (parse_rfc3339(state.last_transition_time) or 0.0) + BACKOFF_SECONDS
