"""Submits a job to SLURM, and stores the submitted scripts in the folder `slurm` of its run directory."""

import os
import shlex
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

from tandem.errors import UserError
from tandem.formatting import one_line
from tandem.job.manifest.reading import parse_job, raise_for_unmet
from tandem.job.resource import DistributedTrainingJob
from tandem.processes.launch import TOKEN
from tandem.rundir.layout import RunDir
from tandem.rundir.ownership import SLURM
from tandem_cli.job_words import deprecations, summary
from tandem_cli.local.known import remember
from tandem_cli.packing import Pack
from tandem_cli.platforms import Checked, Cluster, Report, SubmittedJob
from tandem_cli.slurm.platform import OnSlurm
from tandem_launcher.local.prepare import disk_errors
from tandem_launcher.slurm import profile as profiles
from tandem_launcher.slurm import scheduler, script
from tandem_launcher.slurm.jobs import Submission, awaited, forget, forget_refusal, note_refusal, record_submission
from tandem_launcher.slurm.preparation import prepare, unmet_prerequisites
from tandem_launcher.slurm.profile import Profile
from tandem_launcher.slurm.scheduler import SlurmError
from tandem_launcher.slurm.script import EXTEND


def submit(path: Path, job: DistributedTrainingJob, profile: Profile, waits_for: str = "") -> Submission:
    """Submit a job whose run directory is prepared.

    Args:
        waits_for: ID of a job that must complete before this one starts; empty: none.

    Raises:
        UserError: SLURM or the disk refuses. Nothing stays in the queue, unless SLURM refuses that, too; the run
            directory records the reason.
    """
    run_dir = RunDir(path.resolve())
    paths = script.ScriptPaths(run_dir.path, sys.executable)
    folder = run_dir.path / SLURM
    # A job inherits the environment of its submission, which SLURM stores: the token must not be in it.
    variables = {name: value for name, value in os.environ.items() if name != TOKEN}
    waits = [f"--dependency=afterok:{waits_for}"] if waits_for else []
    python = script.python_on_a_node(profile, paths)
    ids: list[str] = []
    submission = Submission("")
    try:
        with disk_errors(path):
            folder.mkdir(parents=True, exist_ok=True)
            Path(script.LOGS).mkdir(exist_ok=True)
            (folder / EXTEND).write_text(script.extension(job, profile, paths))
            text = script.training(job, profile, paths)
            ids.append(_submitted(folder / "train.sh", text, waits, variables))
            submission = Submission(ids[0], python=python)
            # Recorded before the next submission: the job may start now, and its head reads the record.
            record_submission(path, submission)
            if script.has_evaluation_job(job, profile):
                text = script.evaluation(job, profile, paths)
                ids.append(_submitted(folder / "evaluate.sh", text, [f"--dependency=after:{ids[0]}"], variables))
                submission = Submission(ids[0], ids[1], python)
                record_submission(path, submission)
    except UserError as error:
        # Both jobs or none: evaluators without a training, or the reverse, would hold nodes in vain.
        note_refusal(path, str(error))
        if remaining := [job_id for job_id in ids if not _is_cancelled(job_id)]:
            raise UserError(f"{error}; what was submitted remains: scancel {' '.join(remaining)}") from error
        raise
    forget(path)
    forget_refusal(path)
    remember(path)
    return submission


def _is_cancelled(job_id: str) -> bool:
    """Cancel a job; return whether SLURM did."""
    try:
        scheduler.cancel(job_id)
    except SlurmError:
        return False
    return True


def _submitted(file: Path, text: str, options: Sequence[str], variables: dict[str, str]) -> str:
    file.write_text(text)
    file.chmod(0o700)
    try:
        return scheduler.submit(file, options, variables)
    except SlurmError as error:
        if not (placement := script.describe_placement(text, variables)):
            raise
        raise SlurmError(f"{error}; {file.name} requests {placement}") from error


class Slurm(Cluster):
    """The SLURM cluster of this login node.

    Args:
        profile_name: profile of the user's configuration; empty: the default one.
        run_dir: run directory of a single job; None: a folder in `runs`, named after the job.
        fresh: move an earlier run away and start over.
        after: run directory of a run that must complete first; None: none.
    """

    def __init__(self, profile_name: str, run_dir: Path | None, fresh: bool, after: Path | None) -> None:
        self._profile, self._run_dir, self._fresh = profiles.profile(profile_name), run_dir, fresh
        self._after = after

    def submit(
        self, jobs: Sequence[Checked], settings: tuple[str, ...], pack: Pack | None, report: Report
    ) -> Iterator[SubmittedJob]:
        if self._run_dir is not None and len(jobs) > 1:
            raise UserError("--run-dir is for one FILE")
        waits_for = "" if self._after is None else awaited(self._after)
        for job, _, source in jobs:
            # The profile may add settings, such as one rank per GPU, so the job is read again.
            job = parse_job(source, (*settings, *script.fitted_overrides(job, self._profile)))
            path = self._run_dir or Path("runs") / job.metadata.name
            code = None if pack is None else pack.folder
            problems = [] if pack is None else list(pack.missing_scripts(job))
            problems += unmet_prerequisites(job, path, self._fresh, code, self._after if waits_for else None)
            raise_for_unmet(problems, source, settings)
            fresh_command = shlex.join(["tandem", "submit", "--slurm", source.file, "--fresh"])
            notes = [*deprecations(job), *(problem.message for problem in problems)]
            notes += [idle] if (idle := script.describe_idle_gpus(job, self._profile)) else []
            notes += prepare(path, job, self._fresh, fresh_command, None if pack is None else (pack.digest, pack.file))
            for note in notes:
                report(f"note: {one_line(note)}", True)
            submission = submit(path, job, self._profile, waits_for)
            yield SubmittedJob(
                run=OnSlurm(path),
                outcome="submitted",
                description=f"as job {' and '.join(submission.ids)}: {one_line(summary(job))}",
                next_steps=(
                    *([f"it starts when job {waits_for} ({self._after}) is complete"] if waits_for else []),
                    f"tandem status {shlex.quote(str(path))} --watch",
                    f"tandem logs {shlex.quote(str(path))} --follow",
                ),
            )
