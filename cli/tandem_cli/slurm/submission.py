"""Gives a job to SLURM: its run directory is prepared here, and its scripts, as they were submitted, are kept in the
folder `slurm` of it.
"""

import os
import sys
from collections.abc import Sequence
from pathlib import Path

from tandem.code import store
from tandem.errors import Unmet, UserError
from tandem.job import DistributedTrainingJob
from tandem.launch import TOKEN
from tandem.rundir.layout import RunDir
from tandem.rundir.ownership import SLURM
from tandem_cli.local.known import remember
from tandem_cli.local.prepare import claim
from tandem_cli.packing import Pack
from tandem_cli.slurm import scheduler, script
from tandem_cli.slurm.jobs import Submission, forget, queued, record
from tandem_cli.slurm.profile import Profile
from tandem_cli.slurm.scheduler import SlurmError
from tandem_coordinator.prerequisites import on_shared_disk, unmet


def lacking(job: DistributedTrainingJob, path: Path, fresh: bool = False, pack: Pack | None = None) -> list[Unmet]:
    """What keeps a job from running on nodes that share this machine's disk, or is unwise."""
    run_dir = RunDir(path)
    code = None if pack is None else pack.folder
    scripts = [] if pack is None else list(pack.left_out(job))
    return scripts + unmet(job, on_shared_disk(job, run_dir, fresh, code=code))


def prepare(path: Path, job: DistributedTrainingJob, fresh: bool, again: str, pack: Pack | None = None) -> list[str]:
    """Make a run directory ready for the job, which is recorded in it; returns what the user should know.

    Raises:
        UserError: it cannot be used, the run is in the queue already, or SLURM does not answer.
    """
    scheduler.check()
    if queue := queued(path):
        first = queue[0]
        raise UserError(
            f"{path} is the run of job {first.id}, which is {first.state.lower()}. Stop it first: tandem stop {path}"
        )
    held = claim(path, job, fresh, again)
    try:
        if pack is not None:
            store(held.run_dir, pack.digest, pack.file)
    finally:
        held.release()
    return list(held.notes)


def submit(path: Path, job: DistributedTrainingJob, profile: Profile) -> Submission:
    """Give a job, whose run directory is prepared, to SLURM.

    Raises:
        SlurmError: it is refused; nothing is left in the queue.
        OSError: the scripts cannot be written.
    """
    run_dir = RunDir(path.resolve())
    places = script.Places(run_dir.path, sys.executable)
    folder = run_dir.path / SLURM
    folder.mkdir(parents=True, exist_ok=True)
    Path(script.LOGS).mkdir(exist_ok=True)
    # A job inherits the variables of who submits it, and SLURM keeps them.
    variables = {name: value for name, value in os.environ.items() if name != TOKEN}
    training = _submitted(folder / "train.sh", script.training(job, profile, places), [], variables)
    given = Submission(training)
    record(path, given)
    if script.evaluates_apart(job, profile):
        text = script.evaluation(job, profile, places)
        try:
            array = _submitted(folder / "evaluate.sh", text, [f"--dependency=after:{training}"], variables)
        except SlurmError:
            scheduler.cancel(training)
            raise
        given = Submission(training, array)
        record(path, given)
    forget(path)
    remember(path)
    return given


def _submitted(file: Path, text: str, options: Sequence[str], variables: dict[str, str]) -> str:
    file.write_text(text)
    file.chmod(0o700)
    return scheduler.submit(file, options, variables)
