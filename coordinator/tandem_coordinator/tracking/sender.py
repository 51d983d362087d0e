"""Brings a tracking server to the state of the run directory."""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from math import inf

from tandem.job.resource import DistributedTrainingJob
from tandem.job.tracking import Mlflow
from tandem.rundir.layout import RunDir
from tandem.rundir.ledger import newest_ledger
from tandem.wire.status import CheckpointRef
from tandem_coordinator.tracking.curves import Curves, ledger_points
from tandem_coordinator.tracking.mlflow_run import MlflowRun

LEDGER_SECONDS = 600.0
"""Time between two points of the ledger, in seconds."""


class Sender:
    """A sender that brings the server to the state of the run directory, each time it is called.

    Args:
        uri: of the server or store.
    """

    def __init__(self, rundir: RunDir, job: DistributedTrainingJob, uri: str) -> None:
        self._rundir, self._job, self._uri = rundir, job, uri
        self._mlflow = job.spec.tracking.mlflow or Mlflow()
        self._state: tuple[Curves, MlflowRun] | None = None
        self._ledger_at = -inf

    def send(self) -> bool:
        """Send what is new and final; returns whether the job has ended, so that nothing more will come.

        Raises:
            Exception: the server cannot be reached or refuses, or the run directory cannot be read. Call it again.
        """
        with self._connected() as (curves, run):
            is_over = self._rundir.ended()
            now = time.time()
            if (repeated := curves.repeated_from()) is not None:
                run.mark_repeated(*repeated)
            run.send(curves.training(now, is_over))
            run.send(curves.evaluations(now))
            if now - self._ledger_at >= LEDGER_SECONDS:
                self._send_ledger(run)
                self._ledger_at = now
            return is_over and self._is_evaluated(curves)

    def end(self) -> None:
        """Send the last records once nothing more comes, or when this process has to exit.

        Raises:
            Exception: as `send`.
        """
        with self._connected() as (curves, run):
            self._send_ledger(run)
            is_done = self._rundir.done() is not None
            best = curves.best()
            try:
                if is_done and best is not None and self._mlflow.register_best:
                    run.register(best)
            finally:
                # Of a run that has ended, also where the server takes no model.
                run.end("FINISHED" if is_done else "FAILED" if self._rundir.failed() is not None else "KILLED")

    def _send_ledger(self, run: MlflowRun) -> None:
        if (record := newest_ledger(self._rundir)) is not None:
            run.send(ledger_points(record))

    @contextmanager
    def _connected(self) -> Iterator[tuple[Curves, MlflowRun]]:
        if self._state is None:
            # Connected first: while the server is away, no log is read.
            run = MlflowRun(self._rundir, self._job, self._uri)
            has_base = self._job.spec.trainer.is_fine_tuning
            self._state = Curves(self._rundir, self._job, has_base), run
        try:
            yield self._state
        except BaseException:
            # What was read and not sent is read again, and what the server has is asked.
            self._state = None
            raise

    def _is_evaluated(self, curves: Curves) -> bool:
        done = self._rundir.done()
        if done is None or not self._job.spec.evaluation.processes or not isinstance(done.get("final"), dict):
            return True
        return curves.is_evaluated(CheckpointRef.read(done["final"]))
