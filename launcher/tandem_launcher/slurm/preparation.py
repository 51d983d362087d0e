"""Prepares the run directory of a job on SLURM: checks the job's prerequisites, and records the job."""

from pathlib import Path

from tandem.errors import UnmetRequirement, UserError
from tandem.job.resource import DistributedTrainingJob
from tandem.rundir.code import store_pack
from tandem.rundir.layout import RunDir
from tandem_coordinator.prerequisites import on_shared_disk, unmet
from tandem_launcher.local.prepare import claim, disk_errors
from tandem_launcher.slurm import scheduler
from tandem_launcher.slurm.jobs import queued


def unmet_prerequisites(
    job: DistributedTrainingJob,
    path: Path,
    fresh: bool = False,
    code: Path | None = None,
    awaited_run: Path | None = None,
) -> list[UnmetRequirement]:
    """Return the unmet prerequisites of a job on nodes that share this machine's disk.

    Args:
        code: folder of the job's code; None: it has none of its own.
        awaited_run: the run that the job waits for, whose files may not exist yet.
    """
    return unmet(job, on_shared_disk(job, RunDir(path), fresh, code=code, awaited=awaited_run))


def prepare(
    path: Path, job: DistributedTrainingJob, fresh: bool, fresh_command: str, code: tuple[str, Path] | None = None
) -> list[str]:
    """Prepare a run directory and record the job in it; return notes for the user.

    Args:
        code: digest and file of the job's packed code; None: it has none.

    Raises:
        UserError: the directory cannot be used, the run is already in the queue, or SLURM does not answer.
    """
    # Before anything is written: sbatch would hang for minutes if the controller is down.
    scheduler.check()
    if queue := queued(path):
        first = queue[0]
        raise UserError(
            f"{path} is the run of job {first.id}, which is {first.state.lower()}. Stop it first: tandem stop {path}"
        )
    # The lock guards only the preparation: `tandem run` must not start in the directory meanwhile.
    claimed = claim(path, job, fresh, fresh_command)
    try:
        if code is not None:
            with disk_errors(path):
                store_pack(claimed.run_dir, *code)
    finally:
        claimed.release()
    return list(claimed.notes)
