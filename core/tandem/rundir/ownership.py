"""Ownership of a run directory: whether a new job resumes from it, replaces it, or is refused.

`tandem run` and the coordinator both ask here, before they record their job, so one answer holds on a laptop and on a
cluster (docs/decisions/0024-run-directories.md):

- **Nothing was saved: it is nobody's.** The job takes it. What a failed attempt, or one at something else, has left is
  moved into the folder `attempt`, so that neither its failures nor its rewinds count for the next one.
- **Something was saved**: `checkpoint.onExisting` decides. `Resume` goes on from the newest checkpoint if the job still
  trains the same (tandem.rundir.ownership), also after the end if there is more to do by now. `Fresh` moves everything
  into the folder `previous`, and begins anew. `Refuse` leaves it alone.

Of each of the two folders there is one, the newest. Moving is a rename for each entry, into a folder with a temporary
name; after a crash in the middle the next process completes it first. Generations are not counted from 1 again: a
group of the earlier run may still be alive behind a broken network, and what it writes must not count.

A run that is gone on with must see the samples that it would have seen, and its state must fit: so what decides about
these two must be the same. All else may change. How far a run goes, how fast it learns, and what a script of the user's
own is given are for the user to say; a session compares its data and state with the checkpoint by itself.
"""

import json
import shutil
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from tandem.job import DistributedTrainingJob, OnExisting, Spec
from tandem.model import whole
from tandem.rundir.durable import TEMPORARY, read_json_or_none, replace_json, sync_folder
from tandem.rundir.layout import EARLIER, FOLDERS, RunDir
from tandem.tasks import Loop


def differences(there: DistributedTrainingJob, given: DistributedTrainingJob) -> list[str]:
    """What keeps the second job from going on with what the first has saved."""
    found = []
    if there.metadata.name != given.metadata.name:
        found.append(f"metadata.name: there {there.metadata.name}, now {given.metadata.name}")
    before, after = there.spec.trainer.task, given.spec.trainer.task
    if before != after:
        return [*found, f"spec.trainer.task: there {_shown(before)}, now {_shown(after)}"]
    part = "config" if given.spec.trainer.is_built_in else "loop"
    return found + list(_compare(f"spec.trainer.{part}", _saved_with(there.spec), _saved_with(given.spec)))


def goes_further(there: DistributedTrainingJob, given: DistributedTrainingJob) -> bool:
    """Whether the second job has something to do where the first is complete: more epochs or steps, or a script of the
    user's own that is given something else."""
    before, after = there.spec.trainer, given.spec.trainer
    if after.task is None:
        return any(getattr(before, name) != getattr(after, name) for name in ("command", "args", "env", "code"))
    early, late = _horizon(before.settings_of_loop), _horizon(after.settings_of_loop)
    return any(more > less for less, more in zip(early, late, strict=True))


def _horizon(config: Loop) -> tuple[float, float]:
    return config.epochs, float("inf") if config.max_steps is None else config.max_steps


def _saved_with(spec: Spec) -> dict[str, Any]:
    """What the checkpoints of a task depend on, in the manifest's words. What a task of the user's own is given is for
    the user to say, as with a script."""
    if spec.trainer.task is None:
        return {}
    config, built_in = spec.trainer.settings_of_loop, spec.trainer.settings
    ours = {"model": built_in.model, "data": {**built_in.data.dump(), "download": None}}
    return {
        **(ours if spec.trainer.is_built_in else {}),
        "initialWeights": config.initial_weights,
        "initialOptimizer": config.initial_optimizer,
        "globalBatchSize": config.global_batch_size,
        "dropLast": config.drop_last,
        "seed": config.seed,
        # These come back with the checkpoint; learning rates do not.
        "optimizer": {**config.optimizer.dump(), "learningRate": None, "adamwLearningRate": None},
    }


def _compare(path: str, there: Any, given: Any) -> Iterator[str]:
    if isinstance(there, dict) and isinstance(given, dict):
        for key in sorted({*there, *given}):
            yield from _compare(f"{path}.{key}", there.get(key), given.get(key))
    elif there != given:
        yield f"{path}: there {_shown(there)}, now {_shown(given)}"


def _shown(value: Any) -> str:
    return "not set" if value is None else json.dumps(value)


LOCK = "local.lock"
ENDPOINT = "endpoint.json"
"""Where and with which token the coordinator of a local run answers; there while the run is alive."""
SLURM = "slurm"
"""The scripts and numbers of a run that was given to SLURM."""
STAYS = {LOCK, ENDPOINT, SLURM, "numbering.json", "code", *EARLIER}
"""Names that are not moved. Code is named by its content: a run that was moved aside finds its own there."""
OURS = (
    *FOLDERS,
    *("stacks", "watched", "micro-batches", "tracking", "coordinator.json", "coordinator.beside.json"),
    *("best.json", "latest.json", "wrong.json"),
    *("BROKEN-OFF", "DONE", "FAILED.json", "report.html", "report", "csv", "tensorboard"),
)
"""Names that Tandem gives, but for job.json, which is moved last: it says whose the rest is."""

Earlier = Literal["previous", "attempt"]


class Occupied(Exception):  # noqa: N818 - it is what is the case
    """Something was saved here that the job cannot, or is not to, go on with."""

    def __init__(self, saved: str, differs: list[str]) -> None:
        super().__init__(saved, differs)
        self.saved = saved
        """What was saved, for a sentence."""
        self.differs = differs
        """In what the two jobs differ; empty where the job says `Refuse`."""


class Unreadable(Exception):  # noqa: N818 - it is what is the case
    """Something was saved here, and job.json does not say what."""


@dataclass(frozen=True)
class Finding:
    """What becomes of what a run directory holds."""

    aside: Earlier | None = None
    """Where it is moved to; None: the job goes on with it."""
    reopens: bool = False
    """Whether the run has ended, and the job has more to do."""
    tries_again: bool = False
    """Whether the run has failed, and is gone on with."""


def look(run_dir: RunDir, job: DistributedTrainingJob, on_existing: OnExisting) -> Finding:
    """Decide, and change nothing.

    Raises:
        Occupied, Unreadable: see there.
        OSError: it cannot be read.
    """
    if not run_dir.job_file.exists():
        return Finding()
    saved, others = _saved(run_dir), bool(_others(run_dir))
    try:
        there = run_dir.read_job()
    except ValueError:
        if on_existing == "Fresh" or not (saved or others):
            return Finding("previous" if saved or others else "attempt")
        raise Unreadable from None
    failed = run_dir.failed() is not None
    differs = differences(there, job)
    if on_existing == "Fresh":
        return Finding("previous" if saved or others else "attempt")
    if not saved and not (others and differs):
        return Finding("attempt" if failed or differs else None)
    what = saved or f"the files {', '.join(_others(run_dir)[:3])}"
    if on_existing == "Refuse":
        raise Occupied(what, [])
    if differs:
        raise Occupied(what, differs)
    done = run_dir.done() is not None
    return Finding(reopens=done and goes_further(there, job), tries_again=failed)


def settle(run_dir: RunDir, finding: Finding) -> None:
    """Do what was found, so that the job can be recorded. The restart budget is whole again, and nobody is left out.

    Raises:
        OSError: it cannot be written.
    """
    if finding.aside is not None:
        _move(run_dir, finding.aside)
        return
    if finding.reopens:
        run_dir.reopen()
    if finding.tries_again:
        run_dir.set_aside_failure()
    beside: dict[str, object] = {"leftOut": []}
    if finding.reopens:
        # Who has ended well has more to do now.
        beside["finished"] = []
    for file, none in ((run_dir.coordinator_file, {"failures": 0}), (run_dir.beside_coordinator_file, beside)):
        content = read_json_or_none(file)
        if isinstance(content, dict) and any(content.get(name) for name in none):
            replace_json(file, content | none)


def recorded(run_dir: RunDir, job: DistributedTrainingJob) -> DistributedTrainingJob:
    """The job to be recorded: of a run that stays complete, nothing will be trained in another way than it was. To be
    called after `settle`.

    Raises:
        OSError: it cannot be read.
    """
    if run_dir.done() is None or not run_dir.job_file.exists():
        return job
    trainer = run_dir.read_job().spec.trainer
    return job.model_copy(update={"spec": job.spec.model_copy(update={"trainer": trainer})})


def complete_moves(run_dir: RunDir) -> None:
    """Complete what a crash has interrupted. To be called before `look`."""
    for name in EARLIER:
        if _under_way(run_dir, name).exists():
            _move(run_dir, name)


def others_in(path: Path) -> list[str]:
    """Names in a folder that are not Tandem's."""
    return _others(RunDir(path))


def _saved(run_dir: RunDir) -> str:
    """What was saved, for a sentence; empty if nothing was."""
    if names := [*run_dir.set_aside_names(), *run_dir.checkpoint_names()]:
        return names[-1]
    return "a run that is complete" if run_dir.done_file.exists() else ""


def _others(run_dir: RunDir) -> list[str]:
    return sorted(
        entry.name
        for entry in run_dir.path.iterdir()
        if entry.name not in {*OURS, *STAYS, "job.json"} and not entry.name.startswith(TEMPORARY)
    )


def _under_way(run_dir: RunDir, name: Earlier | str) -> Path:
    return run_dir.path / f"{TEMPORARY}{name}"


def _moved(run_dir: RunDir, name: str) -> Iterator[Path]:
    """What goes: all of an earlier run; of an attempt that saved nothing what is Tandem's, for a script's own files are
    not ours to move."""
    names = [*OURS, *(_others(run_dir) if name == "previous" else []), "job.json"]
    yield from (run_dir.path / one for one in names if (run_dir.path / one).exists())


def _move(run_dir: RunDir, name: Earlier | str) -> None:
    _number(run_dir)
    aside, target = _under_way(run_dir, name), run_dir.path / name
    aside.mkdir(exist_ok=True)
    for path in _moved(run_dir, name):
        path.rename(aside / path.name)
    sync_folder(run_dir.path)
    if target.exists():
        shutil.rmtree(target)
    aside.rename(target)
    sync_folder(run_dir.path)


def _number(run_dir: RunDir) -> None:
    """Count on from the highest generation that was ever given out here."""
    content = read_json_or_none(run_dir.coordinator_file)
    given = whole(content.get("generation")) if isinstance(content, dict) else None
    with suppress(OSError):  # a folder that cannot be listed has no generations
        given = max(given or 0, run_dir.newest_generation())
    first = max((given or 0) + 1, run_dir.first_generation())
    if first > 1:
        replace_json(run_dir.numbering_file, {"first": first})
