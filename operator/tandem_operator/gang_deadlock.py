"""Gang deadlock: two jobs each hold part of what the other needs, so one releases its pods. Pure.

Nothing in Kubernetes places the pods of a job together (Kueue does, where it is installed: runPolicy.queueName). Two
jobs that come at the same time can each get some of their workers placed, fewer than they need to begin, and then both
wait for ever on what the other holds. A job that holds pods and cannot begin is *starved*.

    a starved job gives way to an older starved job after a while (PATIENCE_SECONDS)
    the oldest gives way, too, after twice as long, if others wait: it may want more than the cluster has

Only *rivals* give way to each other: each lacks something that the other asks for, as the scheduler names it, and no
node selector keeps their pods apart. Nobody frees a GPU for a job that waits for memory, or for a volume. And it takes
longer than an autoscaler needs for a node: until then, that may be all they wait for. So what a job that stays partly
placed for ever can cost another is one such while.

Who gives way deletes its workers, makes none for two minutes, and then tries again. Since when it does is the time of
its condition Running with the reason GaveWay, so another operator knows it as well.

Rejected: placing pods by ourselves (a scheduler of our own), and making a job's pods one after the other (starts take
longer always, for a case that is rare).
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from tandem.formatting import seconds
from tandem.job import DistributedTrainingJob
from tandem.pod_template import Asked, asked_by_all
from tandem.reasons import Reason
from tandem.status import Status
from tandem_operator.lifecycle import condition
from tandem_operator.observed import Pod

PATIENCE_SECONDS = 600.0
"""Autoscalers take one to seven minutes for a node with GPUs. Where the number of nodes is fixed, less will do."""
WAY_SECONDS = 120.0
"""How long who gave way keeps out of it."""
UNSCHEDULABLE = "Unschedulable"


LACKING = re.compile(r"Insufficient ([A-Za-z0-9](?:[A-Za-z0-9./_-]*[A-Za-z0-9])?)|(Too many pods)")
"""How the scheduler names what its nodes have too little of."""
SLOT = "pods"
"""What every pod takes of its node."""


@dataclass(frozen=True, order=True)
class Claimant:
    """A job that is starved, or has given way; the oldest is the smallest."""

    created: float
    """When the job was made, seconds since the epoch."""
    uid: str
    name: str = field(compare=False)
    namespace: str = field(default="", compare=False)
    starved: bool = field(default=True, compare=False)
    asks: frozenset[str] = field(default=frozenset(), compare=False)
    """The resources that one of its workers takes."""
    lacks: frozenset[str] = field(default=frozenset(), compare=False)
    """Those of which no node has enough for it."""
    selector: Mapping[str, str] = field(default_factory=dict, compare=False)
    """The labels that its nodes must have."""


def claimant(
    job: DistributedTrainingJob, created: float, uid: str, workers: Sequence[Pod], starved: bool = True
) -> Claimant:
    """The job as others see it.

    Args:
        workers: all worker pods.
    """
    template = job.spec.workers.template
    amounts: list[Asked] = [dict(job.spec.workers.resources), *(asked for _, asked in asked_by_all(template))]
    asks = frozenset({SLOT} | {name for one in amounts for part in one.values() for name in part})
    found = {one or SLOT for pod in _waiting(workers) for one, _ in LACKING.findall(pod.words)}
    # Who holds nothing wants all of it.
    lacks = frozenset(found) if starved else asks
    selector = (template.get("spec") or {}).get("nodeSelector") or {}
    labels = {key: str(value) for key, value in selector.items()}
    return Claimant(created, uid, job.metadata.name, job.metadata.namespace, starved, asks, lacks, labels)


def is_partly_placed(workers: Sequence[Pod]) -> bool:
    """Whether a job with these workers can be starved, whatever it says."""
    waiting = len(_waiting(workers))
    return waiting > 0 and waiting < sum(pod.live for pod in workers)


def starved_for(job: DistributedTrainingJob, workers: Sequence[Pod], now: float) -> float | None:
    """How long the job has held workers and not been able to begin, None if it is not so."""
    if not is_partly_placed(workers):
        return None
    waiting = _waiting(workers)
    if sum(pod.live for pod in workers) - len(waiting) >= job.spec.fewest_workers:
        return None
    return now - min(pod.created for pod in waiting)


def rival(seconds_starved: float, me: Claimant, others: Sequence[Claimant], patience: float) -> Claimant | None:
    """To whom to give way, None for nobody.

    Args:
        patience: seconds, see PATIENCE_SECONDS.
    """
    rivals = [other for other in others if _overlap(me, other)]
    older = [other for other in rivals if other.starved and other < me]
    if older and seconds_starved >= patience:
        return min(older)
    if rivals and seconds_starved >= 2 * patience:
        return min(rivals)
    return None


def _overlap(one: Claimant, other: Claimant) -> bool:
    """Whether each could go on with what the other asks for."""
    apart = any(other.selector.get(key, value) != value for key, value in one.selector.items())
    return not apart and bool(one.lacks & other.asks) and bool(other.lacks & one.asks)


def _waiting(workers: Sequence[Pod]) -> list[Pod]:
    return [pod for pod in workers if pod.waiting == UNSCHEDULABLE and pod.live]


def way_ends(status: Status | None) -> float | None:
    """When a job that has given way tries again, seconds since the epoch; None for one that has not."""
    state = condition(status, "Running")
    if state is None or state.reason != Reason.GAVE_WAY:
        return None
    return (seconds(state.last_transition_time) or 0.0) + WAY_SECONDS
