"""The scores of a running trial, as its evaluators publish them.

The results of a run on a disk of this machine are read: each checkpoint's, with the scores that decide which checkpoint
is the best. Of a job on a cluster the status has the newest one; a copy of its files would take longer than the
evaluation.
"""

import time

from tandem.rundir.catalog import Lineage, Results
from tandem.rundir.layout import RunDir
from tandem.wire.status import Score, Status
from tandem_cli.client.run import RunHandle


class Scores:
    """Follows the scores of one trial.

    Args:
        metric: metric of the job's evaluators.
    """

    def __init__(self, run: RunHandle, metric: str) -> None:
        self._metric = metric
        rundir = None if run.folder is None else RunDir(run.folder)
        self._results = None if rundir is None else Results(rundir)
        self._lineage = None if rundir is None else Lineage(rundir)
        self.metrics: set[str] = set()
        """Metrics that evaluators have reported."""

    def new(self, status: Status) -> list[tuple[int, float]]:
        """The scores since the last call, as pairs of step and score; some may be repeated.

        Args:
            status: status of the run.

        Raises:
            OSError, ValueError: the results or the lineage cannot be read.
        """
        return sorted(self._read() if self._results is not None else self._reported(status))

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
