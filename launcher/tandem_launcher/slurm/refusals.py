"""Steps of a job that srun cannot start although their nodes are up: srun does not know an option, or something of the
cluster fails before the step.

The job is not at fault, and some causes pass, so such a step is retried, and the status shows the reason. If no agent
was ever started, the job fails, so that it does not hold its nodes in vain.
"""

from collections import Counter
from collections.abc import Collection
from pathlib import Path

from tandem_launcher.slurm import jobs, scheduler
from tandem_launcher.slurm.scheduler import SlurmUnavailableError

MAX_REFUSALS = 12
"""Consecutive refusals of every agent after which the job fails, if srun has never started one of them. At one attempt
every ten seconds this takes two minutes."""


class Refusals:
    """Counts the refusals since the head of a job has started.

    Args:
        path: the run directory, in which the newest one is recorded for the status.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._counts: Counter[str] = Counter()
        self._started: set[str] = set()
        self.reason = ""
        """Reason of the newest refusal, without a full stop."""
        jobs.forget_not_started(path)

    def add(self, name: str, node: str, output: str) -> None:
        """Count a refusal.

        Args:
            output: of srun.
        """
        error = scheduler.error_from("srun", output)
        if isinstance(error, SlurmUnavailableError):
            # A busy controller is no refusal; the next attempt may succeed.
            return
        self._counts[name] += 1
        self.reason = f"{name} cannot be started on {node}: {str(error).rstrip('.')}"
        jobs.note_not_started(self._path, self.reason)

    def mark_started(self, name: str) -> None:
        """Record that a step has started."""
        self._started.add(name)
        self.drop(name)

    def drop(self, name: str) -> None:
        """Reset the count of a step that has started, or whose node is gone."""
        if self._counts.pop(name, 0) and not self._counts:
            jobs.forget_not_started(self._path)

    def waits_for(self, name: str) -> bool:
        """Whether the last known attempt to start a step was refused."""
        return name in self._counts

    def is_hopeless(self, agents: Collection[str]) -> bool:
        """Whether all of these agents have been refused so often that none will start."""
        if not agents or not self._started.isdisjoint(agents):
            return False
        return all(self._counts[name] >= MAX_REFUSALS for name in agents)
