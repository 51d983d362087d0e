"""What a snapshot says of the children: who is at work, and what the run is waiting for.

The first seconds of a run must not be silent, so the latter is told in a few words.
"""

from collections.abc import Iterable

from tandem.formatting import several
from tandem.local.supervision import Child
from tandem.snapshot import Snapshot


def waiting_for(children: Iterable[Child], snapshot: Snapshot | None, done: bool) -> str:
    """Empty while training steps.

    Args:
        snapshot: the coordinator's newest, None before its first.
        done: training is complete.
    """
    children = list(children)
    agents = [child for child in children if child.role == "agent"]
    evaluators = [child for child in children if child.role == "evaluator"]
    if done or not agents:
        left = sum(child.running for child in evaluators)
        return f"training is complete; {several(left, 'evaluator')} finishing" if left else "training is complete"
    if snapshot is None:
        return f"starting: coordinator, {several(len(agents), 'worker')}"
    there = len(snapshot.members)
    if snapshot.status.progress is not None:
        if snapshot.status.phase != "Restarting":
            return ""
        return "restarting: " + (
            f"{there} of {len(agents)} workers are there" if there < len(agents) else "forming a group"
        )
    if there == 0:
        return f"starting: {several(len(agents), 'worker')} importing torch"
    if there < len(agents):
        return f"starting: {there} of {several(len(agents), 'worker')} are there"
    return "starting: loading the data, building the model"


def members_at_work(snapshot: Snapshot | None) -> list[str]:
    """Replicas whose ranks have made steps."""
    if snapshot is None:
        return []
    return [member.replica for member in snapshot.members if any(rank.step > 0 for rank in member.ranks)]
