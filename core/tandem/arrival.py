"""Waits for the job of a run directory: the pods of a job start in any order, also before the one that records it."""

import time
from collections.abc import Callable

from tandem.job import DistributedTrainingJob
from tandem.rundir import RunDir

POLL_SECONDS = 0.2
SAY_WAITING_SECONDS = 10.0


def wait_for_job(rundir: RunDir, say: Callable[[str], None]) -> DistributedTrainingJob | None:
    """The job, as soon as it is recorded; None if it failed before it was.

    Args:
        say: told once, if that takes long.

    Raises:
        ValueError, OSError: what is recorded is no job, or cannot be read.
    """
    started, said = time.monotonic(), False
    while True:
        try:
            return rundir.read_job()
        except FileNotFoundError:
            if rundir.failed() is not None:
                return None
            if not said and time.monotonic() - started > SAY_WAITING_SECONDS:
                said = True
                say(f"waiting for {rundir.job_file}")
            time.sleep(POLL_SECONDS)
