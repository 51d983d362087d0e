"""Extensions: one-node jobs of a running training, which replace a failed node or serve a replica that `tandem scale`
added.

    python -m tandem_launcher.slurm.extension --run-dir DIR

SLURM adds no nodes to a running job unless its administrators allow it, so each further node is a job of its own.
Its batch script is this process: it registers the job in the run directory, holds the node while the training runs, and
ends when the training ends, is requeued, or is lost. The head of the training finds the job there, starts an agent on
its node by `srun --jobid`, and cancels it when the node is no longer needed. Anybody may submit it: the head does where
SLURM accepts jobs from compute nodes; elsewhere a user does from a login node.
"""

import argparse
import logging
import os
import sys
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

from tandem.rundir.durable import replace_json
from tandem.rundir.ownership import SLURM
from tandem_launcher.slurm import jobs, scheduler
from tandem_launcher.slurm.jobs import EXTENSIONS, NO_EXTENSION, NodeAllocation
from tandem_launcher.slurm.scheduler import QueuedJob, SlurmError, Throttle
from tandem_launcher.slurm.script import EXTEND

POLL_SECONDS = 15.0
"""Interval between checks that the training runs, in seconds."""
RETRY_SECONDS = 300.0
"""Delay after a refused submission, in seconds."""

log = logging.getLogger("tandem.slurm")


class Extensions:
    """The extensions of a training, managed by its head.

    Args:
        path: the run directory.
        may_submit: whether the head submits extensions; otherwise it only uses those that users submit.
    """

    def __init__(self, path: Path, may_submit: bool) -> None:
        self._path, self._may_submit = path, may_submit
        self._queue: list[QueuedJob] = []
        self.ending: list[NodeAllocation] = []
        """Nodes of jobs that SLURM is ending; their processes have KillWait to save."""
        self._refused = Throttle(RETRY_SECONDS)

    def poll(self) -> list[NodeAllocation]:
        """Query SLURM; return the nodes of running extensions, the oldest job first.

        Raises:
            SlurmError: SLURM does not answer.
        """
        registered = jobs.extensions(self._path)
        queued = scheduler.queue(registered) if registered else []
        self._queue = [job for job in queued if job.waits or job.state == "RUNNING"]
        self.ending = [NodeAllocation(job.id, job.nodes) for job in queued if job.state == "COMPLETING"]
        for job in set(registered) - {job.id for job in self._queue} - {node.job for node in self.ending}:
            # The job has ended without unregistering itself, for example with its node.
            unregister(self._path, job)
        return [NodeAllocation(job.id, job.nodes) for job in self._queue if job.state == "RUNNING"]

    def request(self, count: int) -> None:
        """Submit extensions up to `count`. A refusal is shown in the status, and retried later."""
        script = self._path / SLURM / EXTEND
        shortage = count - len(self._queue)
        # The throttle comes last: it counts as used only when a submission is really due.
        if shortage <= 0 or not self._may_submit or not self._refused.is_due():
            return
        try:
            # A job that was submitted by hand has no script for extensions.
            if not script.exists():
                return
            for _ in range(shortage):
                job = scheduler.submit(script, [], outer_environment(os.environ))
                register(self._path, job)
                log.info("event=asks-for-node job=%s", job)
        except (SlurmError, OSError) as error:
            log.warning("event=no-extension why=%r", str(error))
            with suppress(OSError):
                replace_json(self._path / SLURM / NO_EXTENSION, {"why": str(error)})
            return
        self._refused.hurry()
        with suppress(OSError):
            (self._path / SLURM / NO_EXTENSION).unlink(missing_ok=True)

    def surplus(self, count: int) -> list[str]:
        """Return the jobs beyond `count`, pending ones before running ones."""
        running = [job.id for job in self._queue if not job.waits]
        return (running + [job.id for job in self._queue if job.waits])[max(0, count) :]

    def release(self, job: str) -> None:
        """Cancel one extension."""
        with suppress(SlurmError):
            scheduler.cancel(job)
            log.info("event=gives-node-back job=%s", job)

    def close(self) -> None:
        """Cancel all extensions. One that cannot be cancelled ends by itself."""
        for job in jobs.extensions(self._path):
            self.release(job)
            unregister(self._path, job)
        with suppress(OSError):
            (self._path / SLURM / NO_EXTENSION).unlink(missing_ok=True)


def outer_environment(variables: Mapping[str, str]) -> dict[str, str]:
    """Return the environment for commands that act outside this job: without the variables that describe it."""
    return {name: value for name, value in variables.items() if not name.startswith("SLURM") or name == "SLURM_CONF"}


def register(path: Path, job: str) -> None:
    """Record a job as an extension in the run directory.

    Raises:
        OSError: it cannot be written.
    """
    folder = path / SLURM / EXTENSIONS
    folder.mkdir(exist_ok=True)
    (folder / job).touch()


def unregister(path: Path, job: str) -> None:
    """Delete that record."""
    with suppress(OSError):
        (path / SLURM / EXTENSIONS / job).unlink(missing_ok=True)


def hold(path: Path, job: str) -> str:
    """Hold the node of this job during the training's current life; return the reason of the end."""
    submission = jobs.submission_of(path)
    training = "" if submission is None else submission.training
    life = ""
    while True:
        try:
            now = scheduler.life(training) if training else ""
            if not now:
                return f"job {training or 'of this run'} does not run"
            # A requeued training gets all its nodes again, so this one is not needed.
            if life and now != life:
                return f"job {training} was requeued and has new nodes"
            if not life:
                register(path, job)
            life = now
        except SlurmError as error:
            log.warning("event=training-unknown why=%r", str(error))
        time.sleep(POLL_SECONDS)


def main() -> int:
    """Entry point. Returns the exit code."""
    logging.basicConfig(level=logging.INFO, stream=sys.stdout, format="%(asctime)s level=%(levelname)s %(message)s")
    parser = argparse.ArgumentParser(prog="python -m tandem_launcher.slurm.extension", description="One more node.")
    parser.add_argument("--run-dir", type=Path, required=True)
    path = parser.parse_args().run_dir
    job = os.environ.get("SLURM_JOB_ID", "")
    if not job:
        print("tandem: this is a batch script of SLURM; submit it with sbatch", file=sys.stderr)
        return 2
    log.info("event=holds-node run=%s", path)
    try:
        log.info("event=ends why=%r", hold(path, job))
    finally:
        unregister(path, job)
    return 0


if __name__ == "__main__":
    sys.exit(main())
