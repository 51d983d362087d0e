"""The training side of a save: copies the state into shared memory, hands it to the writer process, and continues.

One save is in flight at a time. A save that falls due meanwhile is skipped and counted, never waited for; only the last
one is waited for. Every rank saves its part (tandem_trainer.checkpoint.staging); the ranks only have to call `save`
after the same steps.
"""

import json
import logging
import os
import platform
import subprocess
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import torch

import tandem
from tandem.processes.launch import module_command
from tandem.rundir import sync_client
from tandem.rundir.checkpoint import WEIGHTS, DataPosition
from tandem.rundir.code import environment_without_code
from tandem.rundir.layout import RunDir, checkpoint_name
from tandem.wire.status import CheckpointRef
from tandem_trainer.checkpoint.exchange import Exchange
from tandem_trainer.checkpoint.staging import FileLayout, Staging, shared_memory, signature
from tandem_trainer.checkpoint.train_state import Contents
from tandem_trainer.checkpoint.writer import leave_failure_note, temporary_folder

log = logging.getLogger(__name__)

Outcome = dict[str, Any]


@dataclass(frozen=True)
class Author:
    """Facts about the writing rank and its generation, for every manifest of this generation."""

    generation: int
    """Number of the generation."""
    parent: str | None
    """Name of the checkpoint that it resumed from; None if it started from the beginning."""
    world_size: int
    """Number of ranks."""
    rank: int = 0
    """This rank."""
    rounds_weights: bool = False
    """Whether weights for evaluators are rounded to bfloat16; weights to resume from have a file of their own then."""
    mesh: Mapping[str, int] | None = None
    """Number of ranks in each dimension of the mesh; None if all ranks are replicas."""
    writers: int | None = None
    """Number of ranks, counted from 0, that may write a part of a checkpoint; None for all."""


def writers_of(is_shared: bool) -> int | None:
    """The number of first ranks that may write a part of a checkpoint; None for all.

    Args:
        is_shared: whether all ranks have the same copy of the state in memory.
    """
    if is_shared:
        return 1
    # Where pods share no disk, the first node writes: the writer of part 0 has to see all parts.
    return int(os.environ["LOCAL_WORLD_SIZE"]) if os.environ.get(sync_client.SOCKET) else None


class SaveFailed(Exception):  # noqa: N818 - it says what happened
    """The last checkpoint could not be written."""


class Saver:
    """Saves the checkpoints of one generation. Not thread-safe: only the training thread may call it."""

    def __init__(
        self, rundir: RunDir, author: Author, before: Callable[[], None], report: Callable[[Outcome], None]
    ) -> None:
        """
        Args:
            before: called from another thread before each commit, while training continues; returns when everything
                that must not be newer than the checkpoint is on disk.
            report: called from another thread with the outcome of each save.
        """
        self._rundir, self._author, self._before_commit, self._report = rundir, author, before, report
        self._descriptor = shared_memory()
        self._layout: FileLayout | None = None
        self._part: int | None = None
        self._staging: Staging | None = None
        self._exchange: Exchange | None = None
        self._process: subprocess.Popen[str] | None = None
        self._signature: tuple[object, ...] | None = None
        self._saves = 0
        self._idle = threading.Event()
        self._idle.set()
        self._outcome: Outcome = {}
        self.last: CheckpointRef | None = None
        self.superseded = False
        self._abandoned = self._is_released = False

    @property
    def busy(self) -> bool:
        """Whether a save is in flight."""
        return not self._idle.is_set()

    def prepare(self, contents: Contents) -> None:
        """Lay out memory for the contents and start the writer, unless done already. `save` does it, too, but during
        the stall."""
        assert not self.busy
        files = contents.files(self._author.rounds_weights)
        if self._signature == signature(files):
            return
        self._signature = signature(files)
        # The layout has the dtypes of the files; staging casts the live tensors to them.
        laid_out = files | {WEIGHTS: contents.rounded()} if self._author.rounds_weights else files
        writers = self._author.writers or self._author.world_size
        self._layout = FileLayout.from_files(laid_out, writers)
        self._part = self._layout.part_of(self._author.rank, writers)
        self._exchange = Exchange(laid_out, self._layout, self._author.rank, writers)
        if self._part is not None:
            self._staging = Staging(self._descriptor, laid_out, self._layout, self._part)
            if self._process is None:
                try:
                    self._start_writer()
                except OSError as error:
                    # The save tries again; there may be memory for the process by then.
                    log.warning("the writer of checkpoints cannot be started yet: %s", error)

    def save(self, step: int, position: DataPosition, contents: Contents) -> float:
        """Stage this rank's part of the state and start its commit. Returns the seconds that training stalled here.

        The tensors may change as soon as this returns. Must not be called while a save is in flight.
        """
        started = time.perf_counter()
        self.prepare(contents)
        self._saves += 1
        files = contents.files(self._author.rounds_weights)
        assert self._exchange is not None
        if self._part is None:
            for _ in self._exchange.receive(files):
                pass  # the other ranks need this rank's elements
            return time.perf_counter() - started
        assert self._layout is not None
        assert self._staging is not None
        self._staging.copy(files, self._exchange.receive(files))
        reference = CheckpointRef(name=checkpoint_name(step), step=step, generation=self._author.generation)
        request = {
            "name": reference.name,
            "generation": self._author.generation,
            "number": self._saves,
            "part": self._part,
            "parts": self._layout.parts,
            "files": self._layout.sizes,
            "regions": [region.dump() for region in self._staging.regions],
            "facts": self.facts(step, position, contents.loop) if self._part == 0 else {},
        }
        self._idle.clear()
        request["stallSeconds"] = time.perf_counter() - started
        threading.Thread(target=self._commit, args=(request, reference), daemon=True).start()
        return time.perf_counter() - started

    def wait(self) -> Outcome:
        """Wait for the save in flight, if any, and return the outcome of the last one."""
        self._idle.wait()
        return self._outcome

    def close(self) -> None:
        """Wait for the save in flight and end the writer."""
        self.wait()
        self._stop_writer()
        self._release_memory()

    def abandon(self) -> None:
        """End without waiting for the save in flight. Its writer finishes by itself if the parts of all ranks come."""
        self._abandoned = True
        process, self._process = self._process, None
        if process is not None and process.stdin is not None:
            with suppress(OSError):
                process.stdin.close()
            # The writer is a child: somebody has to read its exit status.
            threading.Thread(target=process.wait, daemon=True).start()
        self._release_memory()

    def _release_memory(self) -> None:
        if not self._is_released:
            os.close(self._descriptor)
        self._is_released = True

    def _start_writer(self) -> "subprocess.Popen[str]":
        """Start the writer process.

        Raises:
            OSError: the machine cannot start another process now.
        """
        self._stop_writer()
        args = ["--run-dir", str(self._rundir.path), "--descriptor", str(self._descriptor)]
        command = module_command("tandem_trainer.checkpoint.writer", *args)
        self._process = subprocess.Popen(
            command,
            env=environment_without_code(os.environ),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            pass_fds=[self._descriptor],
            start_new_session=True,
        )
        return self._process

    def _stop_writer(self) -> None:
        if self._process is None:
            return
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        try:
            self._process.stdin.close()
        except BrokenPipeError:
            pass  # the writer died within a request; the failed save has reported it
        self._process.wait()
        self._process.stdout.close()
        self._process = None

    def facts(self, step: int, position: DataPosition, loop: dict[str, Any]) -> dict[str, Any]:
        """Return the manifest of the state after a step, without its files."""
        return {
            "name": checkpoint_name(step),
            "step": step,
            "generation": self._author.generation,
            "createdAt": time.time(),
            "worldSize": self._author.world_size,
            "mesh": dict(self._author.mesh or {"data": self._author.world_size}),
            "data": position.dump(),
            "rng": {"kind": "keyed", "by": ["seed", "step", "sample"]},
            "loop": loop,
            "versions": {"tandem": tandem.__version__, "torch": torch.__version__, "python": platform.python_version()},
        } | ({"parent": self._author.parent} if self._author.parent else {})

    def _commit(self, request: dict[str, Any], reference: CheckpointRef) -> None:
        try:
            outcome = self._written(request)
        except Exception as error:
            # Any error fails this save only; the next one may succeed.
            log.exception("checkpoint=%s not written", request["name"])
            outcome = {"failed": repr(error)}
            self._leave_failure_note(request, repr(error))
        self._finish(reference, {"stallSeconds": request["stallSeconds"]} | outcome)

    def _written(self, request: dict[str, Any]) -> Outcome:
        """Send a request to the writer and wait for its answer."""
        self._before_commit()
        if self._abandoned:
            return {"failed": "its group is gone"}
        # No process: the last one died, and a new one could not be started then.
        process = self._process or self._start_writer()
        assert process.stdin is not None
        assert process.stdout is not None
        line = ""
        # A broken pipe: the writer died earlier.
        with suppress(BrokenPipeError):
            process.stdin.write(json.dumps(request) + "\n")
            process.stdin.flush()
            line = process.stdout.readline()
        if not line:
            self._leave_failure_note(request, "the writer process has died")
            if not self._abandoned:
                self._start_writer()
            return {"failed": "the writer process has died"}
        answer: Outcome = json.loads(line)
        return answer

    def _leave_failure_note(self, request: dict[str, Any], reason: str) -> None:
        """Tell the writer of part 0 not to wait for this rank's part."""
        folder = temporary_folder(self._rundir, request["name"], request["generation"], request["number"])
        leave_failure_note(folder, request["part"], reason)

    def _finish(self, reference: CheckpointRef, outcome: Outcome) -> None:
        if self._abandoned:
            return
        self._outcome = outcome | {"name": reference.name, "step": reference.step}
        if "committed" in outcome:
            self.last = reference
        if "superseded" in outcome:
            self.superseded = True
        try:
            self._report(self._outcome)
        finally:
            self._idle.set()
