"""Takes steps of a run again, in a run directory of its own, and compares them bit for bit.

The directory gets the checkpoint before the steps, the records of the generations up to it, and the job as it was then,
with as many workers as the group had, no evaluators, and a save after the last step. `tandem run` then does what it
does after any restart. A run follows from its seed, its data and the size of its group: on a machine of the same kind
each loss is the same number, and the checkpoint after the steps consists of the same bytes.
"""

import os
import shutil
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from tandem.errors import UserError
from tandem.formatting import number
from tandem.job.resource import DistributedTrainingJob
from tandem.job.trainer import Trainer
from tandem.rundir.checkpoint import Broken, Manifest
from tandem.rundir.code import CodeError, unpack
from tandem.rundir.layout import RunDir
from tandem.rundir.log import LogReader
from tandem.rundir.provenance import CheckpointEntry, JobEntry, content_digest
from tandem.rundir.records import TRAINING, Step
from tandem_cli.client.client import Client
from tandem_cli.client.run import RunHandle
from tandem_cli.packing import packed
from tandem_cli.prove.window import Window

POLL_SECONDS = 0.3
THREADS = "OMP_NUM_THREADS"
NAME = "replay"
HOGWILD = "hogwild"
ENDED = ("Succeeded", "Failed", "Suspended")
DROPPED = ("tracking", "runPolicy", "coordinator", "prices")
"""Parts of a job's spec that a replay does without: where numbers are sent, and what ends, queues and prices it."""


@dataclass(frozen=True)
class Replay:
    """Result of taking steps again."""

    window: Window
    steps: int
    """Steps that were taken."""
    same_losses: int
    """Steps of the window with the same loss and the same samples."""
    compared: int
    """Steps of the window that both logs have."""
    first_difference: str
    """The first step whose loss or samples differ; empty if none does."""
    state: str
    """Difference of the checkpoint after the steps; empty if it is the same, bit for bit."""
    machine: Mapping[str, tuple[str, str]]
    """Differences between the machine of the run and this one, by name: then and now."""


def replay(
    rundir: RunDir, job: JobEntry, window: Window, folder: Path, code: Path | None, tick: Callable[[int], None]
) -> Replay:
    """Take the steps of a window again.

    Args:
        rundir: the run; its checkpoint at the start of the window has to be on the disk.
        job: the job as it was when the steps were taken.
        folder: an empty folder for the replay.
        code: folder with the job's code; None: that of the pack in the run directory, if the job has one.
        tick: called with the newest step, now and then.

    Raises:
        UserError: the job cannot be run here, or gives other numbers each time.
    """
    trainer = _trainer(job)
    if trainer.settings_of_loop.strategy == HOGWILD:
        raise UserError(
            "no step of hogwild can be taken again: its ranks update in any order. --steps none verifies the record"
        )
    own = RunDir(folder / NAME)
    _prepare(rundir, own, window)
    code = code_folder(rundir, trainer.code, code, folder / "code")
    with _threads(window.generation.machine.get("threads", "")):
        run = Client().submit(_job(job.job, window), run_dir=own.path, code=code)
    try:
        manifest = _wait(run, own, window.end, tick)
    finally:
        if run.poll() is None:
            run.stop(now=True)
    return _compare(rundir, own, window, manifest)


def _trainer(job: JobEntry) -> Trainer:
    try:
        return DistributedTrainingJob.read(job.job).spec.trainer
    except ValidationError as error:
        raise UserError("the job in the record is not one that this version of Tandem reads") from error


def _prepare(rundir: RunDir, own: RunDir, window: Window) -> None:
    """Fill the run directory of a replay up to the start of the window."""
    own.create()
    if window.start is None:
        return
    # Records of the generations after it would make another checkpoint count.
    shutil.copytree(rundir.checkpoint(window.start.name), own.checkpoint(window.start.name), copy_function=_copy)
    for record in rundir.generation_records():
        if record.generation <= window.start.generation:
            own.record_generation(record)
    for rewind in rundir.rewind_records():
        if rewind.generation < window.generation.generation:
            own.record_rewind(rewind)
    for misfit in rundir.misfits():
        if misfit.generation < window.generation.generation:
            own.record_misfit(misfit)


def _copy(source: str, target: str) -> None:
    """Copy a file of a checkpoint, which nobody writes to any more: as a hard link where that is possible."""
    try:
        os.link(source, target)
    except OSError:
        shutil.copyfile(source, target)


def code_folder(rundir: RunDir, digest: str | None, source: Path | None, folder: Path) -> Path | None:
    """The folder with the code of a job; None if it has none.

    Args:
        digest: digest of its pack; None if the job has none.
        source: folder that the user names; None: that of the pack in the run directory.
        folder: folder to unpack it into.
    """
    if source is not None:
        with packed(source) as pack:
            if pack.digest == digest:
                return source
        raise UserError(
            f"{source} is not the code of the job: packed, it has the digest {pack.digest}, and the job ran "
            f"{digest or 'without a pack'}"
        )
    if digest is None:
        return None
    folder.mkdir()
    try:
        with rundir.pack(digest).open("rb") as file:
            unpack(file, digest, folder)
    except CodeError as error:
        raise UserError(str(error)) from error
    except OSError as error:
        raise UserError(
            f"the code {digest[:19]}… of the job is not in {rundir.path}; give its folder with --code DIR"
        ) from error
    return folder


def _job(job: Mapping[str, Any], window: Window) -> dict[str, Any]:
    """The job of a replay."""
    spec = {name: value for name, value in job["spec"].items() if name not in DROPPED}
    checkpoint = {"everySteps": window.end.step}
    if precision := spec.get("checkpoint", {}).get("weightsPrecision"):
        checkpoint["weightsPrecision"] = precision
    spec["checkpoint"] = checkpoint
    workers = dict(spec.get("workers", {}))
    workers["replicas"] = len(window.generation.members)
    for name in ("minReplicas", "maxReplicas"):
        workers.pop(name, None)
    spec["workers"], spec["evaluators"] = workers, {"replicas": 0}
    return {**job, "metadata": {"name": NAME}, "spec": spec}


@contextmanager
def _threads(count: str) -> Iterator[None]:
    """Have ranks compute with as many threads as those of the run: sums depend on it."""
    before = os.environ.get(THREADS)
    if count.isdecimal():
        os.environ[THREADS] = count
    try:
        yield
    finally:
        if before is None:
            os.environ.pop(THREADS, None)
        else:
            os.environ[THREADS] = before


def _wait(run: RunHandle, own: RunDir, end: CheckpointEntry, tick: Callable[[int], None]) -> Manifest:
    """Wait for the checkpoint after the steps.

    Raises:
        UserError: the replay ended without it, or went on beyond it.
    """
    while True:
        ended = run.poll()
        try:
            return own.manifest(end.name)
        except (FileNotFoundError, Broken):
            status = run.status() if ended is None else ended
        step = 0 if status.progress is None else status.progress.step
        tick(step)
        if ended is not None:
            raise UserError(f"the replay ended before step {number(end.step)}: {status.phase}. {status.message or ''}")
        newest = max(own.checkpoint_names(), default="")
        if newest > end.name:
            raise UserError(f"the replay saved no checkpoint after step {number(end.step)}: the script saves elsewhere")
        time.sleep(POLL_SECONDS)


def _compare(rundir: RunDir, own: RunDir, window: Window, manifest: Manifest) -> Replay:
    before = _steps(rundir, window.generation.generation)
    replayed = _steps(own, own.newest_generation())
    both = [step for step in range(window.first, window.last + 1) if step in before and step in replayed]
    different = [step for step in both if _result(before[step]) != _result(replayed[step])]
    record = own.generation_record(own.newest_generation())
    own_machine = {} if record is None else record.machine
    first_difference = ""
    if different:
        then, now = before[different[0]], replayed[different[0]]
        first_difference = f"step {number(different[0])}: loss {then.loss!r} then, {now.loss!r} now"
        if then.ids != now.ids:
            first_difference += f"; samples {then.ids} then, {now.ids} now"
    return Replay(
        window=window,
        steps=window.end.step - window.start_step,
        same_losses=len(both) - len(different),
        compared=len(both),
        first_difference=first_difference,
        state=_state_difference(rundir, window.end, manifest),
        machine={
            name: (then, own_machine.get(name, ""))
            for name, then in window.generation.machine.items()
            if then != own_machine.get(name, "")
        },
    )


def _state_difference(rundir: RunDir, end: CheckpointEntry, manifest: Manifest) -> str:
    """The difference between the checkpoint of a replay and the entry of the run's."""
    if content_digest(manifest) == end.content:
        return ""
    try:
        original = {entry.path: entry for entry in rundir.manifest(end.name).files}
    except (FileNotFoundError, Broken):
        same_weights = end.weights and manifest.weights_digest == end.weights
        return "the weights are the same, the rest of the state is not" if same_weights else "the weights differ"
    names = sorted(entry.path for entry in manifest.files if original.get(entry.path) != entry)
    missing = sorted(original.keys() - {entry.path for entry in manifest.files})
    return f"other files: {', '.join([*names, *missing])}"


def _steps(rundir: RunDir, generation: int) -> dict[int, Step]:
    records = LogReader(rundir.training_log(generation), TRAINING)
    return {record.step: record for record in records if isinstance(record, Step)}


def _result(step: Step) -> tuple[str, str | None]:
    return repr(step.loss), step.ids
