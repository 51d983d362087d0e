"""The context of a training process: its place in the job, and the request to save and leave."""

import math
import os
import platform
import signal
import time
from collections.abc import Sequence
from dataclasses import dataclass
from types import FrameType

from tandem.processes.launch import GENERATION, NODE, REPLICA
from tandem.rundir.layout import RunDir
from tandem_trainer.process_group import Group
from tandem_trainer.pulse import Pulse

SIGNAL_PATIENCE_SECONDS = 2.0
"""Time within which the generation of a rank that has to go, and that others survive, is closed, in seconds."""


class StopRequest:
    """Request to save and leave: by SIGTERM, or by the agent through the pulse."""

    def __init__(self, pulse: Pulse | None) -> None:
        self._pulse, self._signalled_at = pulse, math.inf
        self.patience = 0.0
        """Seconds for which a signal does not count yet. Where ranks regroup, a rank that has to go leaves its state to
        those that stay, unless its agent orders a save meanwhile."""
        signal.signal(signal.SIGTERM, self._on_signal)

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        self._signalled_at = min(self._signalled_at, time.monotonic())

    def is_signalled(self) -> bool:
        """Whether a signal has come."""
        return self._signalled_at < math.inf

    def __bool__(self) -> bool:
        is_ordered = self._pulse is not None and self._pulse.order == "save-and-leave"
        return is_ordered or time.monotonic() >= self._signalled_at + self.patience


@dataclass(frozen=True)
class RankContext:
    """Identity of this process in its job."""

    rundir: RunDir
    """The job's run directory."""
    group: Group
    """The ranks of this generation."""
    generation: int
    """Number of the generation."""
    members: list[str]
    """Replicas of the generation, in rank order."""
    pulse: Pulse | None
    """Channel to the agent; None where there is no agent."""
    machines: Sequence[str] = ()
    """Replica and node of each rank."""

    def machine(self, rank: int) -> str:
        """Return replica and node of a rank."""
        return self.machines[rank] if rank < len(self.machines) else "alone"


def rank_context(rundir: RunDir, group: Group, pulse: Pulse | None) -> RankContext:
    """Create the context of this process from its environment. Collective.

    Without a coordinator the generation is one more than the newest in the run directory.
    """
    number = int(os.environ.get(GENERATION, "0"))
    if not number:
        following = max(rundir.newest_generation() + 1, rundir.first_generation())
        number = int(group.tell({"generation": following})["generation"])
    views = group.gather({"replica": os.environ.get(REPLICA, "alone"), "node": os.environ.get(NODE) or platform.node()})
    members = [str(view["replica"]) for view in views]
    machines = [f"{view['replica']} on {view['node']}" for view in views]
    return RankContext(rundir, group, number, list(dict.fromkeys(members)), pulse, machines)
