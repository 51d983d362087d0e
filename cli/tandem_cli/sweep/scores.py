"""The scores of a running trial, as its evaluators publish them.

The results of a run on a disk of this machine are read: each checkpoint's, with the scores that decide which checkpoint
is the best. Of a job on a cluster the status has the newest one; a copy of its files would take longer than the
evaluation.
"""

import time

from tandem.rundir.catalog import Lineage, Results
from tandem.rundir.evaluations import Goal
from tandem.rundir.layout import RunDir
from tandem.wire.status import Score, Status
from tandem_cli.client.run import RunHandle


class Scores:
    """Follows the scores of one trial.

    Args:
        metric: metric of the job's evaluators.
    """

    def __init__(self, run: RunHandle, metric: str, goal: Goal) -> None:
        self._metric, self._goal = metric, goal
        rundir = None if run.folder is None else RunDir(run.folder)
        self._results = None if rundir is None else Results(rundir)
        self._lineage = None if rundir is None else Lineage(rundir)
        self._best: tuple[float, int] | None = None
        self._best_rank: float | None = None
        self.metrics: set[str] = set()
        """Metrics that evaluators have reported."""

    @property
    def best(self) -> tuple[float, int] | None:
        """The best score, and the step of its checkpoint; None while there is none."""
        return self._best

    def new(self, status: Status) -> list[tuple[int, float]]:
        """The scores since the last call, as pairs of step and score; some may be repeated.

        Args:
            status: status of the run.

        Raises:
            OSError, ValueError: the results or the lineage cannot be read.
        """
        scores = list(self._read()) if self._results is not None else list(self._reported(status))
        for step, score in scores:
            rank = -score if self._goal == "Maximize" else score
            if self._best_rank is None or rank < self._best_rank:
                self._best, self._best_rank = (score, step), rank
        return sorted(scores)

    def _read(self) -> list[tuple[int, float]]:
        assert self._results is not None, "the caller has checked it"
        assert self._lineage is not None, "it comes with the results"
        self._lineage.look()
        new = []
        for result, _ in self._results.new(time.time()):
            self.metrics.update(result.metrics)
            # Checkpoints off the chain were superseded by a restart.
            if self._metric in result.deciding and self._lineage.counts(result.checkpoint):
                new.append((result.checkpoint.step, result.deciding[self._metric]))
        return new

    def _reported(self, status: Status) -> list[tuple[int, float]]:
        scores = [score for score in (status.latest_evaluation, status.best_checkpoint) if isinstance(score, Score)]
        self.metrics.update(score.metric for score in scores)
        return [(score.step, score.value) for score in scores if score.metric == self._metric]
