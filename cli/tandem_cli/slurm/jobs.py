"""The jobs of SLURM that are a run's, as the folder `slurm` of its run directory names them: `submission.json`, and in
`extensions` a file for each job that gives a running training one more node (tandem_cli.slurm.extension).
`refused.json` says why the last submission failed.

So every command finds them from the run directory, on any machine that shares it.
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
from tandem_cli.local.prepare import need_space
from tandem_cli.local.processes import user_name
from tandem_cli.slurm import scheduler
from tandem_cli.slurm.scheduler import QueuedJob, SlurmError

FILE = "submission.json"
EXTENSIONS = "extensions"
"""Folder with an empty file for each extension, which is called like its job."""
REFUSED = "refused.json"
"""Why the run could not be submitted the last time."""
NO_EXTENSION = "no-extension.json"
"""Why SLURM has not taken an extension."""
NOT_STARTED = "not-started.json"
"""Which process srun does not start, and why."""
REMEMBERED_SECONDS = 2.0
"""How long an answer of squeue counts for this process: sites ask their users not to poll."""


@dataclass(frozen=True)
class Place:
    """Where a process of a run is."""

    job: str
    node: str


@dataclass(frozen=True)
class Submission:
    """The jobs of SLURM that are a run's."""

    training: str
    evaluation: str | None = None
    """The array of the evaluators, where it is a job of its own."""
    python: Sequence[str] = (sys.executable,)
    """Words that start Tandem's Python on a node, with modules, environment and container of the profile."""

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
    python = content.get("python")
    words = tuple(map(str, python)) if isinstance(python, list) and python else (sys.executable,)
    return Submission(content["training"], evaluation if isinstance(evaluation, str) else None, words)


def extensions(path: Path) -> list[str]:
    """The jobs that give the training one more node each, the oldest first. Some may have ended."""
    with suppress(OSError):
        found = [file.name for file in (path / SLURM / EXTENSIONS).iterdir()]
        return sorted((name for name in found if name.isdecimal()), key=int)
    return []


def own(path: Path) -> Submission:
    """The same, of a run of this user: what it names is started.

    Raises:
        UserError: it is another user's, or was not given to SLURM.
    """
    found = of(path)
    if found is None:
        raise UserError(f"{path} was not given to SLURM")
    if (owner := (path / SLURM / FILE).stat().st_uid) != os.geteuid():
        raise UserError(f"{path} is a run of the user {user_name(owner)}, who alone may look into its processes")
    return found


def record(path: Path, submission: Submission) -> None:
    """Say in the run directory which jobs are its own.

    Raises:
        OSError: it cannot be written.
    """
    (path / SLURM).mkdir(parents=True, exist_ok=True)
    replace_json(path / SLURM / FILE, asdict(submission))


def note_refusal(path: Path, why: str) -> None:
    """Say in the run directory why the run was not submitted. A disk that refuses costs the note alone."""
    with suppress(OSError):
        replace_json(path / SLURM / REFUSED, {"why": why, "at": time.time()})


def forget_refusal(path: Path) -> None:
    """Take the note away: the run is begun."""
    with suppress(OSError):
        (path / SLURM / REFUSED).unlink(missing_ok=True)


def note_not_started(path: Path, why: str) -> None:
    """Say in the run directory which process srun does not start. A disk that refuses costs the note alone."""
    with suppress(OSError):
        replace_json(path / SLURM / NOT_STARTED, {"why": why})


def forget_not_started(path: Path) -> None:
    """Take that note away: all have begun."""
    with suppress(OSError):
        (path / SLURM / NOT_STARTED).unlink(missing_ok=True)


def refusal(path: Path) -> str:
    """Why the run was not submitted the last time, as a sentence without its full stop; empty if it was, or if nobody
    has tried."""
    content = read_json_or_none(path / SLURM / REFUSED)
    why = content.get("why") if isinstance(content, dict) else None
    return printable(why).rstrip(".") if isinstance(why, str) else ""


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
        jobs = scheduler.queue([*submission.ids, *extensions(path)])
        _seen[path] = time.monotonic(), jobs
    return jobs


def running_extensions(path: Path) -> list[str]:
    """Those that have a node now.

    Raises:
        SlurmError: SLURM does not say.
    """
    lent = extensions(path)
    return [job.id for job in queued(path) if job.id in lent and job.state == "RUNNING"] if lent else []


def forget(path: Path) -> None:
    """Ask squeue anew the next time."""
    _seen.pop(path, None)


def is_alive(path: Path) -> bool:
    """Whether a run waits in the queue or runs. Where SLURM is not there to ask, its coordinator's file says it."""
    if of(path) is None:
        return False
    try:
        return bool(queued(path))
    except SlurmError:
        return (path / ENDPOINT).exists()


def awaited(path: Path) -> str:
    """The number of the job that a run's completion is waited for with; empty if it is complete.

    Raises:
        UserError: it never completes: it is not in the queue.
        SlurmError: SLURM does not say.
    """
    submission = of(path)
    training = "" if submission is None else submission.training
    if any(job.id == training for job in queued(path)):
        return training
    if RunDir(path).done() is None:
        raise UserError(f"{path} is not complete and not in SLURM's queue, so it cannot be waited for; submit it first")
    return ""


def stop(path: Path, at_once: bool) -> None:
    """Ask a run to save and leave, and not to come back. Jobs that wait leave the queue.

    Args:
        at_once: end it as `scancel` does.

    Raises:
        SlurmError: SLURM refuses.
    """
    submission = of(path)
    lent = extensions(path)
    for job in scheduler.queue([] if submission is None else [*submission.ids, *lent]):
        if at_once or job.waits:
            scheduler.cancel(job.id)
        elif job.state == "RUNNING" and job.id not in lent:
            # An extension ends with the training, which saves on its node first.
            scheduler.signal_batch(job.id, "INT")
    forget(path)


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
        words = f"job {mine.id} is {mine.state.lower()} on {mine.nodes}"
        return "Running", "; ".join(filter(None, (words, lacks(path))))
    state = scheduler.ended(submission.training)
    words = f"job {submission.training} ended ({state or 'SLURM does not remember how'})"
    try:
        need_space(path)
    except (UserError, OSError) as error:
        words = f"{words}; {str(error).rstrip('.')}"
    return "Ended", words


def lacks(path: Path) -> str:
    """Which nodes and processes a running training has not got, and why, as a sentence; empty if it has all.

    Raises:
        SlurmError: SLURM does not say.
    """
    return "; ".join(filter(None, (_extension_words(path), _not_started(path))))


def _extension_words(path: Path) -> str:
    lent = extensions(path)
    waiting = [job for job in queued(path) if job.id in lent and job.waits] if lent else []
    if waiting:
        first = waiting[0]
        return f"job {first.id}, for one more node, waits in partition {first.partition}: {scheduler.why(first)}"
    refused = read_json_or_none(path / SLURM / NO_EXTENSION)
    if not isinstance(refused, dict) or "why" not in refused:
        return ""
    return f"no further node can be asked for: {refused['why']}"


def _not_started(path: Path) -> str:
    """Which process srun does not start now, and why, as a sentence's part; empty if there is none."""
    content = read_json_or_none(path / SLURM / NOT_STARTED)
    why = content.get("why") if isinstance(content, dict) else None
    return f"{printable(why)}; it is tried again every few seconds" if isinstance(why, str) else ""
