"""Two jobs that each hold a part of what the other needs: one gives its pods back. Pure.

Nothing in Kubernetes places the pods of a job together (Kueue does, where it is installed: runPolicy.queueName). Two
jobs that come at the same time can each get some of their workers placed, fewer than they need to begin, and then both
wait for ever on what the other holds. A job that holds pods and cannot begin is *starved*.

    a starved job gives way to an older starved job after half a minute
    the oldest gives way, too, after five minutes, if others wait: it may want more than the cluster has

Who gives way deletes its workers, makes none for two minutes, and then tries again. Since when it does is the time of
its condition Running with the reason GaveWay, so another operator knows it as well.

Rejected: placing pods by ourselves (a scheduler of our own), and making a job's pods one after the other (starts take
longer always, for a case that is rare).
"""

from collections.abc import Sequence
from dataclasses import dataclass

from tandem.job import DistributedTrainingJob
from tandem.status import Status
from tandem.times import seconds
from tandem_operator.course import condition
from tandem_operator.observed import Pod

PATIENCE_SECONDS = 30.0
LONGEST_PATIENCE_SECONDS = 300.0
WAY_SECONDS = 120.0
"""How long who gave way keeps out of it."""
GAVE_WAY = "GaveWay"
UNSCHEDULABLE = "Unschedulable"


@dataclass(frozen=True, order=True)
class Claimant:
    """A job that is starved, or has given way; the oldest is the smallest."""

    created: float
    """When the job was made, seconds since the epoch."""
    uid: str
    name: str
    starved: bool = True


def starved_for(job: DistributedTrainingJob, workers: Sequence[Pod], now: float) -> float | None:
    """How long the job has held workers and not been able to begin, None if it is not so."""
    live = [pod for pod in workers if pod.live]
    waiting = [pod for pod in live if pod.waiting == UNSCHEDULABLE]
    placed = len(live) - len(waiting)
    if not waiting or not 0 < placed < job.spec.workers.min_replicas:
        return None
    return now - min(pod.created for pod in waiting)


def rival(seconds_starved: float, me: Claimant, others: Sequence[Claimant]) -> Claimant | None:
    """To whom to give way, None for nobody."""
    older = [other for other in others if other.starved and other < me]
    if older and seconds_starved >= PATIENCE_SECONDS:
        return min(older)
    if others and seconds_starved >= LONGEST_PATIENCE_SECONDS:
        return min(others)
    return None


def way_ends(status: Status | None) -> float | None:
    """When a job that has given way tries again, seconds since the epoch; None for one that has not."""
    state = condition(status, "Running")
    if state is None or state.reason != GAVE_WAY:
        return None
    return (seconds(state.last_transition_time) or 0.0) + WAY_SECONDS
