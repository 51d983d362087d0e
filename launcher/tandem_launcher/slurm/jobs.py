"""The SLURM jobs of a run, recorded in the folder `slurm` of its run directory: `submission.json`, and in `extensions`
a file for each job that adds a node to a running training (tandem_launcher.slurm.extension). `refused.json` has the
reason why the last submission failed.

So every command finds the jobs from the run directory, on any machine that shares it.
"""

import os
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path

from tandem.errors import UserError
from tandem.formatting import printable
from tandem.rundir.durable import read_json_or_none, replace_json
from tandem.rundir.layout import RunDir
from tandem.rundir.ownership import ENDPOINT, SLURM
from tandem_launcher.local.prepare import need_space
from tandem_launcher.local.processes import user_name
from tandem_launcher.slurm import scheduler
from tandem_launcher.slurm.scheduler import QueuedJob, SlurmError

FILE = "submission.json"
EXTENSIONS = "extensions"
"""Folder with an empty file for each extension, named after its job ID."""
REFUSED = "refused.json"
"""File with the reason why the last submission was refused."""
NO_EXTENSION = "no-extension.json"
"""File with the reason why SLURM refused an extension."""
NOT_STARTED = "not-started.json"
"""File with the process that srun cannot start, and the reason."""
CACHE_SECONDS = 2.0
"""Lifetime of a cached answer of squeue, in seconds: sites ask their users not to poll."""


@dataclass(frozen=True)
class NodeAllocation:
    """A node of a SLURM job."""

    job: str
    node: str


@dataclass(frozen=True)
class Submission:
    """The SLURM jobs of a run."""

    training: str
    evaluation: str | None = None
    """Job array of the evaluators, if they have a job of their own."""
    python: Sequence[str] = (sys.executable,)
    """Command that starts Tandem's Python on a node, with the modules, environment and container of the profile."""

    @property
    def ids(self) -> list[str]:
        """Return the IDs of all jobs."""
        return [self.training, *([self.evaluation] if self.evaluation else [])]


def submission_of(path: Path) -> Submission | None:
    """Return the jobs of a run; None if it was not submitted to SLURM."""
    content = read_json_or_none(path / SLURM / FILE)
    if not isinstance(content, dict) or not isinstance(content.get("training"), str):
        return None
    evaluation = content.get("evaluation")
    python = content.get("python")
    command = tuple(map(str, python)) if isinstance(python, list) and python else (sys.executable,)
    return Submission(content["training"], evaluation if isinstance(evaluation, str) else None, command)


def extensions(path: Path) -> list[str]:
    """Return the jobs that add a node to the training, the oldest first. Some may have ended."""
    with suppress(OSError):
        names = [file.name for file in (path / SLURM / EXTENSIONS).iterdir()]
        return sorted((name for name in names if name.isdecimal()), key=int)
    return []


def own_submission(path: Path) -> Submission:
    """Return the jobs of a run of this user, whose recorded command may be executed.

    Raises:
        UserError: the run is another user's, or was not submitted to SLURM.
    """
    submission = submission_of(path)
    if submission is None:
        raise UserError(f"{path} was not submitted to SLURM")
    if (owner := (path / SLURM / FILE).stat().st_uid) != os.geteuid():
        raise UserError(f"{path} is a run of the user {user_name(owner)}, who alone may look into its processes")
    return submission


def record_submission(path: Path, submission: Submission) -> None:
    """Record the jobs of a run in its run directory.

    Raises:
        OSError: it cannot be written.
    """
    (path / SLURM).mkdir(parents=True, exist_ok=True)
    replace_json(path / SLURM / FILE, asdict(submission))


def note_refusal(path: Path, reason: str) -> None:
    """Record why the run was not submitted. An error of the disk is ignored."""
    with suppress(OSError):
        replace_json(path / SLURM / REFUSED, {"why": reason, "at": time.time()})


def forget_refusal(path: Path) -> None:
    """Delete that record, once the run is submitted."""
    with suppress(OSError):
        (path / SLURM / REFUSED).unlink(missing_ok=True)


def note_not_started(path: Path, reason: str) -> None:
    """Record which process srun cannot start, and why. An error of the disk is ignored."""
    with suppress(OSError):
        replace_json(path / SLURM / NOT_STARTED, {"why": reason})


def forget_not_started(path: Path) -> None:
    """Delete that record, once all processes have started."""
    with suppress(OSError):
        (path / SLURM / NOT_STARTED).unlink(missing_ok=True)


def refusal(path: Path) -> str:
    """Return why the last submission was refused, without a full stop; empty if it was not refused."""
    content = read_json_or_none(path / SLURM / REFUSED)
    reason = content.get("why") if isinstance(content, dict) else None
    return printable(reason).rstrip(".") if isinstance(reason, str) else ""


_cache: dict[Path, tuple[float, list[QueuedJob]]] = {}


def queued(path: Path) -> list[QueuedJob]:
    """Return the pending and running jobs of a run.

    Raises:
        SlurmError: SLURM does not answer.
    """
    submission = submission_of(path)
    if submission is None:
        return []
    fetched_at, queue = _cache.get(path, (0.0, []))
    if not fetched_at or time.monotonic() - fetched_at > CACHE_SECONDS:
        queue = scheduler.queue([*submission.ids, *extensions(path)])
        _cache[path] = time.monotonic(), queue
    return queue


def running_extensions(path: Path) -> list[str]:
    """Return the extensions that have a node now.

    Raises:
        SlurmError: SLURM does not answer.
    """
    added = extensions(path)
    return [job.id for job in queued(path) if job.id in added and job.state == "RUNNING"] if added else []


def forget(path: Path) -> None:
    """Drop the cached answer of squeue."""
    _cache.pop(path, None)


def is_alive(path: Path) -> bool:
    """Whether a run is pending or running. If SLURM does not answer, the coordinator's endpoint file decides."""
    if submission_of(path) is None:
        return False
    try:
        return bool(queued(path))
    except SlurmError:
        return (path / ENDPOINT).exists()


def awaited(path: Path) -> str:
    """Return the job on which the completion of a run depends; empty if the run is complete.

    Raises:
        UserError: the run is neither complete nor in the queue.
        SlurmError: SLURM does not answer.
    """
    submission = submission_of(path)
    training = "" if submission is None else submission.training
    if any(job.id == training for job in queued(path)):
        return training
    if RunDir(path).done() is None:
        raise UserError(f"{path} is not complete and not in SLURM's queue, so nothing can wait for it; submit it first")
    return ""


def stop(path: Path, immediately: bool) -> None:
    """Stop a run after a save, without a requeue. Pending jobs are cancelled.

    Args:
        immediately: cancel the running jobs too, without a save.

    Raises:
        SlurmError: SLURM refuses.
    """
    submission = submission_of(path)
    added = extensions(path)
    for job in scheduler.queue([] if submission is None else [*submission.ids, *added]):
        if immediately or job.waits:
            scheduler.cancel(job.id)
        elif job.state == "RUNNING" and job.id not in added:
            # Extensions end with the training, which first saves on their nodes.
            scheduler.signal_batch(job.id, "INT")
    forget(path)


def describe_state(path: Path) -> tuple[str, str]:
    """Return the state of a run in SLURM: `Pending`, `Running` or `Ended`, and a sentence; both empty for other runs.

    Raises:
        SlurmError: SLURM does not answer.
    """
    submission = submission_of(path)
    if submission is None:
        return "", ""
    jobs = queued(path)
    training = next((job for job in jobs if job.id == submission.training), None)
    if training is not None and training.waits:
        return (
            "Pending",
            f"job {training.id} waits in partition {training.partition}: {scheduler.wait_reason(training)}",
        )
    if training is not None:
        message = f"job {training.id} is {training.state.lower()} on {training.nodes}"
        return "Running", "; ".join(filter(None, (message, shortages(path))))
    state = scheduler.final_state(submission.training)
    message = f"job {submission.training} ended ({state or 'SLURM does not remember how'})"
    try:
        need_space(path)
    except (UserError, OSError) as error:
        message = f"{message}; {str(error).rstrip('.')}"
    return "Ended", message


def shortages(path: Path) -> str:
    """Describe the nodes and processes that a running training lacks; empty if it has all.

    Raises:
        SlurmError: SLURM does not answer.
    """
    return "; ".join(filter(None, (_describe_extensions(path), _not_started(path))))


def _describe_extensions(path: Path) -> str:
    added = extensions(path)
    waiting = [job for job in queued(path) if job.id in added and job.waits] if added else []
    if waiting:
        first = waiting[0]
        return (
            f"job {first.id}, for one more node, waits in partition {first.partition}: {scheduler.wait_reason(first)}"
        )
    refused = read_json_or_none(path / SLURM / NO_EXTENSION)
    if not isinstance(refused, dict) or "why" not in refused:
        return ""
    return f"no further node can be requested: {refused['why']}"


def _not_started(path: Path) -> str:
    """Describe the process that srun cannot start; empty if there is none."""
    content = read_json_or_none(path / SLURM / NOT_STARTED)
    reason = content.get("why") if isinstance(content, dict) else None
    return f"{printable(reason)}; retried every few seconds" if isinstance(reason, str) else ""
