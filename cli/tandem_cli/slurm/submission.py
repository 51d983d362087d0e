"""A job that was given to SLURM: its run directory, its scripts and its numbers.

The folder `slurm` of the run directory has the scripts as they were submitted, and `submission.json`, which says which
jobs of SLURM are the run's. So every command finds them from the run directory, on any machine that shares it.
"""

import os
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from tandem.code import store
from tandem.errors import UserError
from tandem.job import DistributedTrainingJob
from tandem.launch import TOKEN
from tandem.rundir.durable import read_json_or_none, replace_json
from tandem.rundir.layout import RunDir
from tandem.rundir.ownership import ENDPOINT, SLURM
from tandem_cli.local.known import remember
from tandem_cli.local.prepare import claim
from tandem_cli.packing import Pack
from tandem_cli.slurm import scheduler, script
from tandem_cli.slurm.profile import Profile
from tandem_cli.slurm.scheduler import QueuedJob, SlurmError

FILE = "submission.json"
REMEMBERED_SECONDS = 2.0
"""How long an answer of squeue counts for this process: sites ask their users not to poll."""


@dataclass(frozen=True)
class Submission:
    """The jobs of SLURM that are a run's."""

    training: str
    evaluation: str | None = None
    """The array of the evaluators, where it is a job of its own."""

    @property
    def ids(self) -> list[str]:
        """All of them."""
        return [self.training, *([self.evaluation] if self.evaluation else [])]


def of(path: Path) -> Submission | None:
    """The jobs of a run; None if it was not given to SLURM."""
    content = read_json_or_none(path / SLURM / FILE)
    if not isinstance(content, dict) or not isinstance(content.get("training"), str):
        return None
    evaluation = content.get("evaluation")
    return Submission(content["training"], evaluation if isinstance(evaluation, str) else None)


def record(path: Path, submission: Submission) -> None:
    """Say in the run directory which jobs are its own.

    Raises:
        OSError: it cannot be written.
    """
    (path / SLURM).mkdir(parents=True, exist_ok=True)
    replace_json(path / SLURM / FILE, {"training": submission.training, "evaluation": submission.evaluation})


_seen: dict[Path, tuple[float, list[QueuedJob]]] = {}


def queued(path: Path) -> list[QueuedJob]:
    """The run's jobs that wait or run.

    Raises:
        SlurmError: SLURM does not say.
    """
    submission = of(path)
    if submission is None:
        return []
    at, jobs = _seen.get(path, (0.0, []))
    if not at or time.monotonic() - at > REMEMBERED_SECONDS:
        jobs = scheduler.queue(submission.ids)
        _seen[path] = time.monotonic(), jobs
    return jobs


def is_alive(path: Path) -> bool:
    """Whether a run waits in the queue or runs. Where SLURM is not there to ask, its coordinator's file says it."""
    if of(path) is None:
        return False
    try:
        return bool(queued(path))
    except SlurmError:
        return (path / ENDPOINT).exists()


def prepare(path: Path, job: DistributedTrainingJob, fresh: bool, again: str, pack: Pack | None = None) -> list[str]:
    """Make a run directory ready for the job, which is recorded in it; returns what the user should know.

    Raises:
        UserError: it cannot be used, or the run is in the queue already.
    """
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
    record(path, Submission(training))
    if script.evaluates_apart(job, profile):
        text = script.evaluation(job, profile, places)
        try:
            array = _submitted(folder / "evaluate.sh", text, [f"--dependency=after:{training}"], variables)
        except SlurmError:
            scheduler.cancel(training)
            raise
        record(path, Submission(training, array))
    _seen.pop(path, None)
    remember(path)
    return of(path) or Submission(training)


def _submitted(file: Path, text: str, options: Sequence[str], variables: dict[str, str]) -> str:
    file.write_text(text)
    file.chmod(0o700)
    return scheduler.submit(file, options, variables)


def stop(path: Path, at_once: bool) -> None:
    """Ask a run to save and leave, and not to come back. Jobs that wait leave the queue.

    Args:
        at_once: end it as `scancel` does.

    Raises:
        SlurmError: SLURM refuses.
    """
    for job in scheduler.queue(of_or_none(path)):
        if at_once or job.waits:
            scheduler.cancel(job.id)
        elif job.state == "RUNNING":
            scheduler.signal_batch(job.id, "INT")
    _seen.pop(path, None)


def of_or_none(path: Path) -> list[str]:
    """The numbers of a run's jobs."""
    submission = of(path)
    return [] if submission is None else submission.ids


def state_words(path: Path) -> tuple[str, str]:
    """How a run stands with SLURM: `Pending`, `Running` or `Ended`, and a sentence; two empty texts if it is no run of
    SLURM.

    Raises:
        SlurmError: SLURM does not say.
    """
    submission = of(path)
    if submission is None:
        return "", ""
    jobs = queued(path)
    mine = next((job for job in jobs if job.id == submission.training), None)
    if mine is not None and mine.waits:
        return "Pending", f"job {mine.id} waits in partition {mine.partition}: {scheduler.why(mine)}"
    if mine is not None:
        return "Running", f"job {mine.id} is {mine.state.lower()} on {mine.nodes}"
    state = scheduler.ended(submission.training)
    return "Ended", f"job {submission.training} ended ({state or 'SLURM does not remember how'})"
