"""A job of one node that a running training has besides its own: in place of a node that failed, or for a replica that
`tandem scale` has added.

    python -m tandem_cli.slurm.extension --run-dir DIR

SLURM gives a running job no nodes where its administrators have not allowed that, so the node comes as a job of its
own. Its batch script is this process: it enters the job in the run directory, keeps the node while the training runs,
and ends when that does, is requeued, or is lost. The head of the training finds the job there, starts an agent on its
node by `srun --jobid`, and cancels it when the node is needed no more. It does not matter who has submitted it: the
head does where SLURM takes jobs from compute nodes; elsewhere a person does from a login node.
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
from tandem_cli.slurm import jobs, scheduler
from tandem_cli.slurm.jobs import EXTENSIONS, NO_EXTENSION, Place
from tandem_cli.slurm.scheduler import QueuedJob, SlurmError, Throttle
from tandem_cli.slurm.script import EXTEND

LOOK_SECONDS = 15.0
"""Between two questions whether the training runs."""
REFUSED_SECONDS = 300.0
"""Before SLURM is asked again after it has refused a job."""

log = logging.getLogger("tandem.slurm")


class Extensions:
    """The extensions of a training, for its head.

    Args:
        path: the run directory.
        may_submit: whether the head asks for nodes by itself; otherwise it takes those that others submit.
    """

    def __init__(self, path: Path, may_submit: bool) -> None:
        self._path, self._may_submit = path, may_submit
        self._queue: list[QueuedJob] = []
        self.ending: list[Place] = []
        """Nodes of jobs that SLURM is ending: what runs there saves, for as long as KillWait says."""
        self._refused = Throttle(REFUSED_SECONDS)

    def look(self) -> list[Place]:
        """Ask SLURM; returns the nodes that there are, of the oldest job first.

        Raises:
            SlurmError: SLURM does not say.
        """
        entered = jobs.extensions(self._path)
        found = scheduler.queue(entered) if entered else []
        self._queue = [job for job in found if job.waits or job.state == "RUNNING"]
        self.ending = [Place(job.id, job.nodes) for job in found if job.state == "COMPLETING"]
        for job in set(entered) - {job.id for job in self._queue} - {place.job for place in self.ending}:
            leave(self._path, job)
        return [Place(job.id, job.nodes) for job in self._queue if job.state == "RUNNING"]

    def ask_for(self, wanted: int) -> None:
        """Submit those that are lacking. What SLURM refuses is tried again later, and is in the status meanwhile."""
        script = self._path / SLURM / EXTEND
        lacking = wanted - len(self._queue)
        if lacking <= 0 or not self._may_submit or not self._refused.is_due():
            return
        try:
            if not script.exists():
                return
            for _ in range(lacking):
                job = scheduler.submit(script, [], outside(os.environ))
                enter(self._path, job)
                log.info("event=asks-for-node job=%s", job)
        except (SlurmError, OSError) as error:
            log.warning("event=no-extension why=%r", str(error))
            with suppress(OSError):
                replace_json(self._path / SLURM / NO_EXTENSION, {"why": str(error)})
            return
        self._refused.hurry()
        with suppress(OSError):
            (self._path / SLURM / NO_EXTENSION).unlink(missing_ok=True)

    def surplus(self, wanted: int) -> list[str]:
        """The jobs that are too many: those that wait before those that run."""
        running = [job.id for job in self._queue if not job.waits]
        return (running + [job.id for job in self._queue if job.waits])[max(0, wanted) :]

    def give_back(self, job: str) -> None:
        """Cancel one."""
        with suppress(SlurmError):
            scheduler.cancel(job)
            log.info("event=gives-node-back job=%s", job)

    def close(self) -> None:
        """Cancel all. One that cannot be cancelled now ends by itself."""
        for job in jobs.extensions(self._path):
            self.give_back(job)
            leave(self._path, job)
        with suppress(OSError):
            (self._path / SLURM / NO_EXTENSION).unlink(missing_ok=True)


def outside(variables: Mapping[str, str]) -> dict[str, str]:
    """Variables for what SLURM shall do outside of the job that asks: without those that describe this job."""
    return {name: value for name, value in variables.items() if not name.startswith("SLURM") or name == "SLURM_CONF"}


def enter(path: Path, job: str) -> None:
    """Say in the run directory that a job is an extension of its training.

    Raises:
        OSError: it cannot be written.
    """
    folder = path / SLURM / EXTENSIONS
    folder.mkdir(exist_ok=True)
    (folder / job).touch()


def leave(path: Path, job: str) -> None:
    """Take the job out again."""
    with suppress(OSError):
        (path / SLURM / EXTENSIONS / job).unlink(missing_ok=True)


def hold(path: Path, job: str) -> str:
    """Keep the node of this job while the training runs that runs now; returns why it ends."""
    submission = jobs.of(path)
    training = "" if submission is None else submission.training
    life = ""
    while True:
        try:
            now = scheduler.life(training) if training else ""
            if not now:
                return f"job {training or 'of this run'} does not run"
            if life and now != life:
                return f"job {training} has begun again with nodes of its own"
            if not life:
                enter(path, job)
            life = now
        except SlurmError as error:
            log.warning("event=training-unknown why=%r", str(error))
        time.sleep(LOOK_SECONDS)


def main() -> int:
    """Entry point. Returns the exit code."""
    logging.basicConfig(level=logging.INFO, stream=sys.stdout, format="%(asctime)s level=%(levelname)s %(message)s")
    parser = argparse.ArgumentParser(prog="python -m tandem_cli.slurm.extension", description="One more node.")
    parser.add_argument("--run-dir", type=Path, required=True)
    path = parser.parse_args().run_dir
    job = os.environ.get("SLURM_JOB_ID", "")
    if not job:
        print("tandem: this is for a batch script of SLURM; submit it with sbatch", file=sys.stderr)
        return 2
    log.info("event=holds-node run=%s", path)
    try:
        log.info("event=ends why=%r", hold(path, job))
    finally:
        leave(path, job)
    return 0


if __name__ == "__main__":
    sys.exit(main())
