"""Ownership of a run directory: whether a new job resumes from it, replaces it, or is refused.

`tandem run` and the coordinator both decide here, before they record their job, so a laptop and a cluster behave alike
(docs/decisions/0024-run-directories.md):

- **Nothing was saved: the directory has no owner.** The job takes it. The files of an attempt that failed, or that had
  another task, are moved into the folder `attempt`, so that neither its failures nor its rewinds count for the next.
- **Something was saved**: `checkpoint.onExisting` decides. `Resume` continues from the newest checkpoint if the job
  still trains the same (`differences`), also after the end if there is more to do by now. `Fresh` moves everything into
  the folder `previous` and starts over. `Refuse` leaves everything alone.

There is at most one of each folder, the newest. Moving is a rename of each entry into a folder with a temporary name;
after a crash in the middle, the next process completes the move first. Generation numbers do not restart at 1: a group
of the earlier run may still be alive behind a broken network, and its checkpoints must not count.

A resumed run must see the samples that it would have seen, and its state must fit: the fields that decide these two
must be the same. Everything else may change. How far a run goes, how fast it learns, and the arguments of the user's
own script are the user's choice; a session compares its data and state with the checkpoint itself.
"""

import json
import shutil
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from tandem.job.resource import DistributedTrainingJob, OnExisting, Spec
from tandem.job.tasks import Loop
from tandem.model import whole_number
from tandem.rundir.durable import TEMPORARY, read_json_or_none, replace_json, sync_folder
from tandem.rundir.layout import EARLIER_FOLDERS, FOLDERS, RunDir


def differences(recorded: DistributedTrainingJob, job: DistributedTrainingJob) -> list[str]:
    """The fields that keep `job` from resuming what `job_to_record` has saved, one line for each; empty if it can."""
    lines = []
    if recorded.metadata.name != job.metadata.name:
        lines.append(f"metadata.name: there {recorded.metadata.name}, now {job.metadata.name}")
    # Different tasks have different fields: comparing those would only bury the reason.
    before, after = recorded.spec.trainer.task, job.spec.trainer.task
    if before != after:
        return [*lines, f"spec.trainer.task: there {_as_json(before)}, now {_as_json(after)}"]
    return lines + list(_compare("spec.trainer", _saved_with(recorded.spec), _saved_with(job.spec)))


def goes_further(recorded: DistributedTrainingJob, job: DistributedTrainingJob) -> bool:
    """Whether `job` has something to do where `job_to_record` is complete: more epochs or steps, or, for a script of
    the user's own, another command, environment or code."""
    before, after = recorded.spec.trainer, job.spec.trainer
    if after.task is None:
        return any(getattr(before, name) != getattr(after, name) for name in ("command", "args", "env", "code"))
    early, late = _horizon(before.settings_of_loop), _horizon(after.settings_of_loop)
    return any(more > less for less, more in zip(early, late, strict=True))


def _horizon(config: Loop) -> tuple[float, float]:
    return config.epochs, float("inf") if config.max_steps is None else config.max_steps


def _saved_with(spec: Spec) -> dict[str, Any]:
    """The settings that the checkpoints of a task depend on, by their names in the manifest. The parameters of a user's
    own task are not among them: they are the user's choice, as the arguments of a script are."""
    if spec.trainer.task is None:
        return {}
    loop, parameters = spec.trainer.settings_of_loop, {}
    if spec.trainer.is_built_in:
        images = spec.trainer.images
        parameters = {"model": images.model, "data": {**images.data.dump(), "download": None}}
    saved_loop = {
        "initialWeights": loop.initial_weights,
        "initialOptimizer": loop.initial_optimizer,
        "globalBatchSize": loop.global_batch_size,
        "dropLast": loop.drop_last,
        "seed": loop.seed,
        # These come back with the checkpoint; learning rates do not.
        "optimizer": {**loop.optimizer.dump(), "learningRate": None, "adamwLearningRate": None},
    }
    return {"loop": saved_loop, "parameters": parameters}


def _compare(path: str, recorded: Any, job: Any) -> Iterator[str]:
    if isinstance(recorded, dict) and isinstance(job, dict):
        for key in sorted({*recorded, *job}):
            yield from _compare(f"{path}.{key}", recorded.get(key), job.get(key))
    elif recorded != job:
        yield f"{path}: there {_as_json(recorded)}, now {_as_json(job)}"


def _as_json(value: Any) -> str:
    return "not set" if value is None else json.dumps(value)


LOCK = "local.lock"
ENDPOINT = "endpoint.json"
"""File with the address and token of the coordinator of a local run; it exists while the run is alive."""
SLURM = "slurm"
"""Folder with the batch scripts and job ids of a run that was submitted to SLURM."""
BUCKETS = "buckets.json"
"""File with the buckets that the run directory is a copy of (tandem.rundir.bucket)."""
UNMOVED_NAMES = {LOCK, ENDPOINT, SLURM, BUCKETS, "numbering.json", "code", *EARLIER_FOLDERS}
"""Names that are not moved. Code is named by its content, so a run that was moved away still finds its own."""
TANDEM_NAMES = (
    *FOLDERS,
    *("stacks", "watched", "micro-batches", "finished-members", "tracking"),
    *("coordinator.json", "coordinator.beside.json"),
    *("best.json", "latest.json", "wrong.json"),
    *("BROKEN-OFF", "DONE", "FAILED.json", "report.html", "report", "csv", "tensorboard"),
)
"""Names of Tandem's own files and folders, except job.json, which is moved last: it says which job the others belong
to."""

Earlier = Literal["previous", "attempt"]


class RunDirOccupied(Exception):  # noqa: N818 - a state of the directory
    """Checkpoints or files were saved here, and the job cannot or must not resume them."""

    def __init__(self, saved: str, differs: list[str]) -> None:
        super().__init__(saved, differs)
        self.saved = saved
        """A noun phrase for what was saved."""
        self.differs = differs
        """The lines of `differences`; empty if the job says `Refuse`."""


class JobFileUnreadable(Exception):  # noqa: N818 - a state of the file
    """Checkpoints or files were saved here, and job.json cannot be read."""


@dataclass(frozen=True)
class OwnershipDecision:
    """The decision about the content of a run directory."""

    aside: Earlier | None = None
    """The folder to move the content to; None: the job resumes it."""
    reopens: bool = False
    """Whether the run is complete, and the job has more to do."""
    tries_again: bool = False
    """Whether the run has failed, and is resumed."""


def decide_ownership(run_dir: RunDir, job: DistributedTrainingJob, on_existing: OnExisting) -> OwnershipDecision:
    """Decide what happens to the content of a run directory. Changes nothing.

    Raises:
        RunDirOccupied, JobFileUnreadable: see there.
        OSError: the directory cannot be read.
    """
    # job.json is written first and moved last: without it, the directory belongs to nobody.
    if not run_dir.job_file.exists():
        return OwnershipDecision()
    saved, has_user_files = _saved(run_dir), bool(_user_files(run_dir))
    folder: Earlier = "previous" if saved or has_user_files else "attempt"
    try:
        recorded = run_dir.read_job()
    except ValueError:
        # Without the recorded job nothing can be compared: only moving everything away is safe.
        if on_existing == "Fresh" or folder == "attempt":
            return OwnershipDecision(folder)
        raise JobFileUnreadable from None
    failed = run_dir.failed() is not None
    differs = differences(recorded, job)
    if on_existing == "Fresh":
        return OwnershipDecision(folder)
    # Nothing to protect: a failed attempt, or one at another job, only has to get out of the way.
    if not saved and not (has_user_files and differs):
        return OwnershipDecision("attempt" if failed or differs else None)
    content = saved or f"the files {', '.join(_user_files(run_dir)[:3])}"
    if on_existing == "Refuse":
        raise RunDirOccupied(content, [])
    if differs:
        raise RunDirOccupied(content, differs)
    # Resumed: after its end only if this job goes further than the recorded one did.
    done = run_dir.done() is not None
    return OwnershipDecision(reopens=done and goes_further(recorded, job), tries_again=failed)


def apply_decision(run_dir: RunDir, finding: OwnershipDecision) -> None:
    """Carry out a decision, so that the job can be recorded. Resets the restart budget and the replicas that were left
    out.

    Raises:
        OSError: it cannot be written.
    """
    if finding.aside is not None:
        # Everything goes, counters included.
        _move(run_dir, finding.aside)
        return
    if finding.reopens:
        run_dir.reopen()
    if finding.tries_again:
        run_dir.set_aside_failure()
    beside_state: dict[str, object] = {"leftOut": []}
    if finding.reopens:
        # Replicas that finished successfully have more to do now.
        beside_state["finished"] = []
    # A resumed run must not fail for the failures of the attempt before it.
    for file, none in ((run_dir.coordinator_file, {"failures": 0}), (run_dir.beside_coordinator_file, beside_state)):
        content = read_json_or_none(file)
        if isinstance(content, dict) and any(content.get(name) for name in none):
            replace_json(file, content | none)


def job_to_record(run_dir: RunDir, job: DistributedTrainingJob) -> DistributedTrainingJob:
    """The job to record: a run that stays complete keeps the recorded trainer, for nothing is trained in another way.
    Call it after `apply_decision`.

    Raises:
        OSError: it cannot be read.
    """
    if run_dir.done() is None or not run_dir.job_file.exists():
        return job
    trainer = run_dir.read_job().spec.trainer
    return job.model_copy(update={"spec": job.spec.model_copy(update={"trainer": trainer})})


def complete_moves(run_dir: RunDir) -> None:
    """Complete the moves that a crash has interrupted. Call it before `decide_ownership`."""
    for name in EARLIER_FOLDERS:
        if _unfinished_move(run_dir, name).exists():
            _move(run_dir, name)


def has_saved(run_dir: RunDir) -> bool:
    """Whether anything was saved in a run directory: nobody minds if the rest is moved away."""
    return bool(_saved(run_dir) or _user_files(run_dir))


def foreign_names(path: Path) -> list[str]:
    """Names in a folder that are not Tandem's."""
    return _user_files(RunDir(path))


def _saved(run_dir: RunDir) -> str:
    """A noun phrase for what was saved; empty if nothing was."""
    if names := [*run_dir.set_aside_names(), *run_dir.checkpoint_names()]:
        return names[-1]
    return "a run that is complete" if run_dir.done_file.exists() else ""


def _user_files(run_dir: RunDir) -> list[str]:
    return sorted(
        entry.name
        for entry in run_dir.path.iterdir()
        if entry.name not in {*TANDEM_NAMES, *UNMOVED_NAMES, "job.json"} and not entry.name.startswith(TEMPORARY)
    )


def _unfinished_move(run_dir: RunDir, name: Earlier | str) -> Path:
    return run_dir.path / f"{TEMPORARY}{name}"


def _paths_to_move(run_dir: RunDir, name: str) -> Iterator[Path]:
    """The paths to move: all of an earlier run; of an attempt that saved nothing only Tandem's own, for the script's
    files belong to the user. job.json comes last: after a crash the rest can still be attributed."""
    names = [*TANDEM_NAMES, *(_user_files(run_dir) if name == "previous" else []), "job.json"]
    yield from (run_dir.path / entry for entry in names if (run_dir.path / entry).exists())


def _move(run_dir: RunDir, name: Earlier | str) -> None:
    # Before anything moves: the generation records that the numbers are read from are about to go.
    _reserve_numbers(run_dir)
    unfinished, target = _unfinished_move(run_dir, name), run_dir.path / name
    unfinished.mkdir(exist_ok=True)
    for path in _paths_to_move(run_dir, name):
        path.rename(unfinished / path.name)
    # Renames may reach the disk in any order; the one to the final name must be the last.
    sync_folder(run_dir.path)
    # Only the newest is kept.
    if target.exists():
        shutil.rmtree(target)
    unfinished.rename(target)
    sync_folder(run_dir.path)


def _reserve_numbers(run_dir: RunDir) -> None:
    """Continue numbering after the highest generation that was ever assigned here."""
    content = read_json_or_none(run_dir.coordinator_file)
    assigned = whole_number(content.get("generation")) if isinstance(content, dict) else None
    with suppress(OSError):  # a folder that cannot be listed has no generations
        assigned = max(assigned or 0, run_dir.newest_generation())
    first = max((assigned or 0) + 1, run_dir.first_generation())
    if first > 1:
        replace_json(run_dir.numbering_file, {"first": first})
