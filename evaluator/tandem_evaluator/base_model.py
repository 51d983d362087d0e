"""The weights of the base model: what training began with, in the form of a checkpoint, for its evaluation.

    python -m tandem_evaluator.base_model

writes `checkpoints/base/`, as the trainer writes the weights of any checkpoint. So every way to evaluate reads the base
model as it reads a checkpoint: the built-in metrics, and a program of the user's that has never heard of `pretrained`.
The folder is removed once the evaluation is published (docs/decisions/0046-base-model.md).

It is a process of its own, since an evaluator whose checkpoints a program evaluates has not loaded torch.
"""

import os
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from shutil import rmtree
from typing import TYPE_CHECKING, Any

from tandem.code import without_folder
from tandem.formatting import one_line
from tandem.launch import RUN_DIR, module_command
from tandem.rundir.checkpoint import CHUNK, FILE, WEIGHTS, FileEntry, Manifest, checksum
from tandem.rundir.durable import commit_folder, encode, sync_file, temporary_beside
from tandem.rundir.evaluations import BASE
from tandem.rundir.layout import RunDir
from tandem_evaluator.claim import claim
from tandem_evaluator.scoring import ProgramFailed

if TYPE_CHECKING:
    from tandem_trainer.task import Task

TRIES = 2
LOOK_SECONDS = 0.1
"""Between two looks at whether the weights are there, and whether we have to leave."""
MAX_WHY = 400
"""Characters of an error that a message quotes."""
COMMAND = module_command("tandem_evaluator.base_model")


class BaseWeights:
    """The folder with the weights of a run's base model."""

    def __init__(self, rundir: RunDir, command: list[str] = COMMAND) -> None:
        """
        Args:
            command: that writes the folder.
        """
        self._rundir, self._command = rundir, command
        self._folder = rundir.checkpoint(BASE.name)

    def prepare(self, holder: str, going_on: Callable[[], bool]) -> None:
        """Have the folder written, by one evaluator for all. Returns without it if `going_on` said no.

        Args:
            holder: the name of this process.

        Raises:
            ProgramFailed: the base model cannot be loaded.
            OSError: the disk fails.
        """
        while not self._folder.exists() and going_on():
            held = claim(self._rundir.leases / f"evaluate-{BASE.name}-weights.json", holder)
            if held is None:
                time.sleep(LOOK_SECONDS)
                continue
            with held:
                for left in reversed(range(TRIES)):
                    if self._folder.exists() or not (why := self._written(going_on)):
                        break
                    if not left:
                        raise ProgramFailed(f"the base model cannot be loaded: {why}")

    def remove(self) -> None:
        """Nobody needs it any more."""
        rmtree(self._folder, ignore_errors=True)

    def _written(self, going_on: Callable[[], bool]) -> str:
        """Run the command; why it failed, empty if it did not, or had to leave."""
        process = subprocess.Popen(
            self._command,
            env=without_folder(os.environ),
            stdin=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
            errors="replace",
        )
        errors: str | None = None
        while errors is None:
            try:
                _, errors = process.communicate(timeout=LOOK_SECONDS)
            except subprocess.TimeoutExpired:
                if not going_on():
                    process.kill()
                    process.communicate()
                    return ""
        print(errors, end="", flush=True)
        if process.returncode == 0:
            return ""
        last = next((line for line in reversed(errors.splitlines()) if line.strip()), "")
        return one_line(last)[:MAX_WHY] or f"its process ended with exit code {process.returncode}"


def write(rundir: RunDir, task: "Task[Any]") -> None:
    """Write the weights that a task's training begins with as a checkpoint.

    Raises:
        ConfigurationError, UnusableInput: they cannot be loaded.
        OSError: the disk fails.
    """
    from safetensors.torch import save_file

    from tandem_trainer.checkpoint.state import weights

    # Which may be a download of hours: what is written aside and then rests is swept away as a leftover.
    model = task.model()
    task.initialize(model)
    final = rundir.checkpoint(BASE.name)
    aside = temporary_beside(final)
    aside.mkdir(parents=True)
    try:
        save_file({name: tensor.contiguous() for name, tensor in weights(model).items()}, aside / WEIGHTS)
        manifest = Manifest(**BASE.model_dump(), created_at=time.time(), world_size=1, files=[_entry(aside / WEIGHTS)])
        (aside / FILE).write_bytes(encode(manifest.sealed()))
        for name in (WEIGHTS, FILE):
            sync_file(aside / name)
        with suppress(FileExistsError):  # another process was first
            commit_folder(aside, final)
    finally:
        rmtree(aside, ignore_errors=True)


def _entry(path: Path) -> FileEntry:
    checksums, size = [], 0
    with path.open("rb", buffering=0) as file:
        while chunk := file.read(CHUNK):
            checksums.append(checksum(chunk))
            size += len(chunk)
    return FileEntry(path=path.name, size=size, xxh3=checksums)


def main() -> int:
    """Write the weights. Returns the exit code; the last line printed says what is wrong."""
    from tandem_trainer.failure import ConfigurationError
    from tandem_trainer.task import task_in

    rundir = RunDir(os.environ[RUN_DIR])
    try:
        write(rundir, task_in(rundir))
    except (ConfigurationError, OSError) as error:
        print(error, file=sys.stderr, flush=True)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
