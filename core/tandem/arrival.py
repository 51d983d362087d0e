"""Waits for the job of a run directory: the pods of a job start in any order, also before the one that records it.

A volume may hold the directory of an earlier job of the same name. What that one recorded, its job and its failure, is
not this job's: a process that is told which object its job is (launch.UID) waits until that one is recorded.
"""

import time
from collections.abc import Callable

from tandem.job import DistributedTrainingJob
from tandem.launch import INCARNATION
from tandem.rundir.layout import RunDir

POLL_SECONDS = 0.1
SAY_WAITING_SECONDS = 10.0
SAY_AGAIN_SECONDS = 60.0


def wait_for_job(rundir: RunDir, say: Callable[[str], None], uid: str = "") -> DistributedTrainingJob | None:
    """The job, as soon as it is recorded; None if it failed before it was.

    Args:
        say: told if that takes long, and every minute from then on.
        uid: which object the job is; empty: whichever is recorded.

    Raises:
        ValueError, OSError: what is recorded is no job, or cannot be read.
    """
    started = time.monotonic()
    due = started + SAY_WAITING_SECONDS
    while True:
        try:
            job = rundir.read_job()
        except FileNotFoundError:
            if rundir.failed() is not None:
                return None
            waits = f"waiting for {rundir.job_file}"
        else:
            if not uid or job.metadata.annotations.get(INCARNATION) == uid:
                return job
            waits = f"{rundir.job_file} is an earlier job's; waiting for the coordinator to record this one"
        if time.monotonic() >= due:
            due += SAY_AGAIN_SECONDS
            say(f"{waits}, for {time.monotonic() - started:.0f} s so far")
        time.sleep(POLL_SECONDS)
