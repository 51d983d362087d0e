"""The weights of the base model of a fine-tuning, written as a checkpoint for its evaluation.

    python -m tandem_evaluator.base_model

writes `checkpoints/base/`, as the trainer writes the weights of any checkpoint. So every way to evaluate reads the base
model as it reads a checkpoint: the built-in metrics, and a program of the user's that does not know of `pretrained`.
The folder is removed once the evaluation is published (docs/decisions/0046-base-model.md).

It runs in a process of its own, because an evaluator whose checkpoints a program evaluates has not loaded torch.
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

from tandem.formatting import one_line
from tandem.processes.launch import RUN_DIR, module_command
from tandem.rundir.checkpoint import CHUNK_BYTES, FILE, WEIGHTS, FileEntry, Manifest, checksum
from tandem.rundir.code import environment_without_code
from tandem.rundir.durable import commit_folder, encode, sync_file, temporary_beside
from tandem.rundir.evaluations import BASE
from tandem.rundir.layout import RunDir
from tandem_evaluator.claim import claim
from tandem_evaluator.scoring import ProgramFailed

if TYPE_CHECKING:
    from tandem_trainer.task import Task

TRIES = 2
POLL_SECONDS = 0.1
"""Interval between two checks whether the weights exist, and whether the evaluator has to stop."""
MAX_MESSAGE_LENGTH = 400
"""Maximum length of an error that a message quotes, in characters."""
COMMAND = module_command("tandem_evaluator.base_model")


class BaseWeights:
    """The folder with the weights of a run's base model."""

    def __init__(self, rundir: RunDir, command: list[str] = COMMAND) -> None:
        """
        Args:
            command: command that writes the folder.
        """
        self._rundir, self._command = rundir, command
        self._folder = rundir.checkpoint(BASE.name)

    def prepare(self, holder: str, should_continue: Callable[[], bool]) -> None:
        """Have one evaluator write the folder for all. Returns without it if `should_continue` returned False.

        Args:
            holder: name of this process.

        Raises:
            ProgramFailed: the base model cannot be loaded.
            OSError: the disk fails.
        """
        while not self._folder.exists() and should_continue():
            acquired = claim(self._rundir.leases / f"evaluate-{BASE.name}-weights.json", holder)
            if acquired is None:
                time.sleep(POLL_SECONDS)
                continue
            with acquired:
                for remaining_tries in reversed(range(TRIES)):
                    if self._folder.exists() or not (reason := self._run_command(should_continue)):
                        break
                    if not remaining_tries:
                        raise ProgramFailed(f"the base model cannot be loaded: {reason}")

    def remove(self) -> None:
        """Remove the folder, which is not needed any more."""
        rmtree(self._folder, ignore_errors=True)

    def _run_command(self, should_continue: Callable[[], bool]) -> str:
        """Run the command; returns the reason of its failure, empty if it succeeded or had to stop."""
        process = subprocess.Popen(
            self._command,
            env=environment_without_code(os.environ),
            stdin=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
            errors="replace",
        )
        errors: str | None = None
        while errors is None:
            try:
                _, errors = process.communicate(timeout=POLL_SECONDS)
            except subprocess.TimeoutExpired:
                if not should_continue():
                    process.kill()
                    process.communicate()
                    return ""
        print(errors, end="", flush=True)
        if process.returncode == 0:
            return ""
        last = next((line for line in reversed(errors.splitlines()) if line.strip()), "")
        return one_line(last)[:MAX_MESSAGE_LENGTH] or f"its process ended with exit code {process.returncode}"


def write(rundir: RunDir, task: "Task[Any]") -> None:
    """Write the weights that a task's training begins with as a checkpoint.

    Raises:
        ConfigurationError, UnusableInput: they cannot be loaded.
        OSError: the disk fails.
    """
    from safetensors.torch import save_file

    from tandem_trainer.checkpoint.state import weights

    # Load before creating the folder: the download may take hours, and an unchanged temporary folder is removed as a
    # leftover.
    model = task.model()
    task.initialize(model)
    final = rundir.checkpoint(BASE.name)
    temporary = temporary_beside(final)
    temporary.mkdir(parents=True)
    try:
        save_file({name: tensor.contiguous() for name, tensor in weights(model).items()}, temporary / WEIGHTS)
        manifest = Manifest(
            **BASE.model_dump(), created_at=time.time(), world_size=1, files=[_entry(temporary / WEIGHTS)]
        )
        (temporary / FILE).write_bytes(encode(manifest.sealed()))
        for name in (WEIGHTS, FILE):
            sync_file(temporary / name)
        with suppress(FileExistsError):  # another process was first
            commit_folder(temporary, final)
    finally:
        rmtree(temporary, ignore_errors=True)


def _entry(path: Path) -> FileEntry:
    checksums, size = [], 0
    with path.open("rb", buffering=0) as file:
        while chunk := file.read(CHUNK_BYTES):
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
