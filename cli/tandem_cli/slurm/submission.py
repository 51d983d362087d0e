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
from tandem_cli.local.prepare import claim, disk_errors
from tandem_cli.output import echo
from tandem_cli.packing import Pack
from tandem_cli.platforms import Checked, Cluster
from tandem_cli.slurm import profile as profiles
from tandem_cli.slurm import scheduler, script
from tandem_cli.slurm.jobs import Submission, awaited, forget, forget_refusal, note_refusal, queued, record
from tandem_cli.slurm.profile import Profile
from tandem_cli.slurm.scheduler import SlurmError
from tandem_cli.slurm.script import EXTEND
from tandem_coordinator.prerequisites import on_shared_disk, unmet


def lacking(
    job: DistributedTrainingJob, path: Path, fresh: bool = False, pack: Pack | None = None, coming: Path | None = None
) -> list[Unmet]:
    """What keeps a job from running on nodes that share this machine's disk, or is unwise.

    Args:
        coming: the run that it waits for: what that one will hold is not there yet.
    """
    run_dir = RunDir(path)
    code = None if pack is None else pack.folder
    scripts = [] if pack is None else list(pack.left_out(job))
    return scripts + unmet(job, on_shared_disk(job, run_dir, fresh, code=code, awaited=coming))


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
            with disk_errors(path):
                store(held.run_dir, pack.digest, pack.file)
    finally:
        held.release()
    return list(held.notes)


def submit(path: Path, job: DistributedTrainingJob, profile: Profile, waits_for: str = "") -> Submission:
    """Give a job, whose run directory is prepared, to SLURM.

    Args:
        waits_for: the number of a job that has to complete before this one starts; empty: none.

    Raises:
        UserError: SLURM refuses, or the disk does; nothing is left in the queue, and the run directory says why.
    """
    run_dir = RunDir(path.resolve())
    places = script.Places(run_dir.path, sys.executable)
    folder = run_dir.path / SLURM
    # A job inherits the variables of who submits it, and SLURM keeps them.
    variables = {name: value for name, value in os.environ.items() if name != TOKEN}
    waits = [f"--dependency=afterok:{waits_for}"] if waits_for else []
    python = script.python_on_a_node(profile, places)
    ids: list[str] = []
    given = Submission("")
    try:
        with disk_errors(path):
            folder.mkdir(parents=True, exist_ok=True)
            Path(script.LOGS).mkdir(exist_ok=True)
            (folder / EXTEND).write_text(script.extension(job, profile, places))
            text = script.training(job, profile, places)
            ids.append(_submitted(folder / "train.sh", text, waits, variables))
            given = Submission(ids[0], python=python)
            record(path, given)
            if script.evaluates_apart(job, profile):
                text = script.evaluation(job, profile, places)
                ids.append(_submitted(folder / "evaluate.sh", text, [f"--dependency=after:{ids[0]}"], variables))
                given = Submission(ids[0], ids[1], python)
                record(path, given)
    except UserError as error:
        note_refusal(path, str(error))
        for one in ids:
            scheduler.cancel(one)
        raise
    forget(path)
    forget_refusal(path)
    remember(path)
    return given


def _submitted(file: Path, text: str, options: Sequence[str], variables: dict[str, str]) -> str:
    file.write_text(text)
    file.chmod(0o700)
    try:
        return scheduler.submit(file, options, variables)
    except SlurmError as error:
        if not (asked := script.asked_for(text, variables)):
            raise
        raise SlurmError(f"{error}; {file.name} asks for {asked}") from error


class Slurm(Cluster):
    """The SLURM cluster of this login node.

    Args:
        profile_name: of the user's configuration; empty: its default.
        run_dir: for one job; None: a folder of its name in `runs`.
        fresh: move an earlier run away and begin anew.
        after: the run directory of a run that has to be complete first; None: none.
    """

    def __init__(self, profile_name: str, run_dir: Path | None, fresh: bool, after: Path | None) -> None:
        self._profile, self._run_dir, self._fresh = profiles.profile(profile_name), run_dir, fresh
        self._after = after

    def submit(self, jobs: Sequence[Checked], settings: tuple[str, ...], pack: Pack | None) -> None:
        if self._run_dir is not None and len(jobs) > 1:
            raise UserError("--run-dir is for one FILE")
        waits_for = "" if self._after is None else awaited(self._after)
        for job, _, source in jobs:
            job = job_of(source, (*settings, *script.fitted(job, self._profile)))
            path = self._run_dir or Path("runs") / job.metadata.name
            unmet_here = lacking(job, path, self._fresh, pack, self._after if waits_for else None)
            refuse(unmet_here, source, settings)
            again = shlex.join(["tandem", "submit", "--slurm", source.file, "--fresh"])
            notes = [one.message for one in unmet_here]
            notes += [idle] if (idle := script.idle_gpus(job, self._profile)) else []
            notes += prepare(path, job, self._fresh, again, pack)
            for note in notes:
                echo(f" {one_line(note)}", mark="note:", colour="yellow", err=True)
            given = submit(path, job, self._profile, waits_for)
            echo(f" as job {' and '.join(given.ids)}: {one_line(summary(job))}", mark="submitted", colour="green")
            if waits_for:
                echo(f"  it starts when job {waits_for} ({self._after}) is complete")
            echo(f"  tandem status {shlex.quote(str(path))} --watch")
            echo(f"  tandem logs {shlex.quote(str(path))} --follow")
