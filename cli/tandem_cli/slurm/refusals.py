"""Steps of a job that srun does not start, though SLURM says that their nodes are well: it does not know one of the
options, or something of the cluster's fails before the step.

None of that is the job's fault, and some of it passes, so such a step is tried again and again. The status says so
meanwhile. Where no agent could be started at all, the job is given up, so that it does not keep its nodes for nothing.
"""

from collections import Counter
from collections.abc import Collection
from pathlib import Path

from tandem_cli.slurm import jobs, scheduler
from tandem_cli.slurm.scheduler import SlurmAwayError

MAX_COUNT = 12
"""Consecutive refusals of every agent after which the job fails, if srun has never started one of them. At one attempt
every ten seconds this takes two minutes."""


class Refusals:
    """The refusals since the head of a job has started.

    Args:
        path: the run directory, in which the status finds the newest one.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._counts: Counter[str] = Counter()
        self._begun: set[str] = set()
        self.why = ""
        """The newest one, as a sentence without its full stop."""
        jobs.forget_not_started(path)

    def add(self, name: str, node: str, said: str) -> None:
        """Count that a step did not begin.

        Args:
            said: by srun.
        """
        error = scheduler.complaint("srun", said)
        if isinstance(error, SlurmAwayError):
            return
        self._counts[name] += 1
        self.why = f"{name} cannot be started on {node}: {str(error).rstrip('.')}"
        jobs.note_not_started(self._path, self.why)

    def begun(self, name: str) -> None:
        """Say that a step has begun."""
        self._begun.add(name)
        self.drop(name)

    def drop(self, name: str) -> None:
        """Forget how often it did not begin: it has, or its node is gone."""
        if self._counts.pop(name, 0) and not self._counts:
            jobs.forget_not_started(self._path)

    def waits_for(self, name: str) -> bool:
        """Whether the last try to start a step was refused, as far as is known."""
        return name in self._counts

    def is_hopeless(self, agents: Collection[str]) -> bool:
        """Whether none of these will ever be started."""
        if not agents or not self._begun.isdisjoint(agents):
            return False
        return all(self._counts[name] >= MAX_COUNT for name in agents)
