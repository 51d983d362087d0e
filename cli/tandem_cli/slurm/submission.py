"""Gives a job to SLURM: its run directory is prepared here, and its scripts, as they were submitted, are kept in the
folder `slurm` of it.
"""

import os
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path

from tandem.code import store
from tandem.errors import Unmet, UserError
from tandem.formatting import one_line
from tandem.job import DistributedTrainingJob
from tandem.launch import TOKEN
from tandem.manifest.reading import job_of, refuse
from tandem.rundir.layout import RunDir
from tandem.rundir.ownership import SLURM
from tandem_cli.job_words import summary
from tandem_cli.local.known import remember
from tandem_cli.local.prepare import claim
from tandem_cli.output import echo
from tandem_cli.packing import Pack
from tandem_cli.platforms import Checked, Cluster
from tandem_cli.slurm import profile as profiles
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


class Slurm(Cluster):
    """The SLURM cluster of this login node.

    Args:
        profile_name: of the user's configuration; empty: its default.
        run_dir: for one job; None: a folder of its name in `runs`.
        fresh: move an earlier run away and begin anew.
    """

    def __init__(self, profile_name: str, run_dir: Path | None, fresh: bool) -> None:
        self._profile, self._run_dir, self._fresh = profiles.profile(profile_name), run_dir, fresh

    def submit(self, jobs: Sequence[Checked], settings: tuple[str, ...], pack: Pack | None) -> None:
        if self._run_dir is not None and len(jobs) > 1:
            raise UserError("--run-dir is for one FILE")
        for job, _, source in jobs:
            job = job_of(source, (*settings, *script.fitted(job, self._profile)))
            path = self._run_dir or Path("runs") / job.metadata.name
            unmet_here = lacking(job, path, self._fresh, pack)
            refuse(unmet_here, source, settings)
            again = shlex.join(["tandem", "submit", "--slurm", source.file, "--fresh"])
            notes = [one.message for one in unmet_here]
            notes += prepare(path, job, self._fresh, again, pack)
            for note in notes:
                echo(f" {one_line(note)}", mark="note:", colour="yellow", err=True)
            given = submit(path, job, self._profile)
            echo(f" as job {' and '.join(given.ids)}: {one_line(summary(job))}", mark="submitted", colour="green")
            echo(f"  tandem status {shlex.quote(str(path))} --watch")
            echo(f"  tandem logs {shlex.quote(str(path))} --follow")
