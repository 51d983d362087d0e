"""What a snapshot says of the children: who is at work, and what the run is waiting for.

The first seconds of a run must not be silent, so the latter is told in a few words.
"""

from collections.abc import Iterable
from dataclasses import dataclass

from tandem.formatting import number, several
from tandem.snapshot import Snapshot
from tandem.status import AGAIN
from tandem.supervision import Child


def waiting_for(children: Iterable[Child], snapshot: Snapshot | None, done: bool, own_command: bool = False) -> str:
    """Empty while training steps, or a script runs.

    Args:
        snapshot: the coordinator's newest, None before its first.
        done: training is complete.
        own_command: a command of the user's own trains, and what it begins with is its own business.
    """
    children = list(children)
    agents = [child for child in children if child.role == "agent"]
    evaluators = [child for child in children if child.role == "evaluator"]
    if done or not agents:
        left = sum(child.running for child in evaluators)
        return f"training is complete; {several(left, 'evaluator')} finishing" if left else "training is complete"
    if snapshot is None:
        return f"starting: coordinator, {several(len(agents), 'worker')}"
    _, again, seconds = (snapshot.status.message or "").rpartition(AGAIN)
    if again:
        return f"{again}{seconds}"
    there = len(snapshot.members)
    if snapshot.status.phase == "Running" and snapshot.status.progress is None:
        # A script of the user's own that says nothing of its steps.
        return ""
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
    return "starting the script" if own_command else "starting: loading the data, building the model"


@dataclass(frozen=True)
class Asked:
    """How it stood when the user asked to stop."""

    saved: int | None
    """The step of the newest checkpoint, None if there was none."""
    step: int | None
    """Steps that were made, None if nobody had said."""


def leaving_for(children: Iterable[Child], asked: Asked, saved: int | None, requests: int, silent: bool = False) -> str:
    """What a run waits for that the user asked to stop, and what another Ctrl-C does.

    Args:
        saved: the step of the newest checkpoint.
        requests: how often the user asked.
        silent: a script of the user's own trains that says nothing of its steps, and saves on its own.
    """
    if requests > 1:
        return "leaving at once"
    running = [child for child in children if child.running]
    agents = sum(child.role == "agent" for child in running)
    evaluators = sum(child.role == "evaluator" for child in running)
    if agents and silent:
        what = f"ending the script: {several(agents, 'worker')} leaving"
    elif agents and saved == asked.saved:
        what = "saving" if asked.step is None else f"saving, at step {number(asked.step)}"
    elif agents:
        return f"saved checkpoint {number(saved or 0)}; {several(agents, 'worker')} leaving"
    elif evaluators:
        what = f"giving up the work of {several(evaluators, 'evaluator')}"
    else:
        return "leaving"
    return f"{what}; Ctrl-C again leaves at once"


def members_at_work(snapshot: Snapshot | None) -> list[str]:
    """Replicas whose ranks have made steps."""
    if snapshot is None:
        return []
    return [member.replica for member in snapshot.members if any(rank.step > 0 for rank in member.ranks)]
