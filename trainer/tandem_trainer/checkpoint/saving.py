"""The training side of a save: copies the state into shared memory, hands it to the writer process, and continues.

One save is in flight at a time. A save that falls due meanwhile is skipped and counted, never waited for; the last one
is waited for. Every rank saves its part (tandem_trainer.checkpoint.staging); all call `save` after the same steps,
which is all that they have to agree on.
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
from tandem.code import without_folder
from tandem.launch import module_command
from tandem.rundir.checkpoint import WEIGHTS, DataPosition
from tandem.rundir.layout import RunDir, checkpoint_name
from tandem.status import CheckpointRef
from tandem_trainer.checkpoint.exchange import Exchange
from tandem_trainer.checkpoint.staging import Layout, Staging, shared_memory, signature
from tandem_trainer.checkpoint.train_state import Contents
from tandem_trainer.checkpoint.writer import aside_folder, say_why_not

log = logging.getLogger(__name__)

Outcome = dict[str, Any]


@dataclass(frozen=True)
class Author:
    """Who writes: goes into every manifest of this generation."""

    generation: int
    """Its number."""
    parent: str | None
    """The checkpoint it resumed from."""
    world_size: int
    """Ranks."""
    rank: int = 0
    """This one."""
    rounds_weights: bool = False
    """Weights for evaluators are rounded to bfloat16; those to resume from have a file of their own then."""
    mesh: Mapping[str, int] | None = None
    """Ranks in each dimension of the mesh; None: all of them replicate."""
    parts: int | None = None
    """Most ranks that write a part of a checkpoint; None: all of them."""


class SaveFailed(Exception):  # noqa: N818 - it says what happened
    """The last checkpoint could not be written."""


class Saver:
    """Saves of one generation. Not thread-safe: the training thread alone calls it."""

    def __init__(
        self, rundir: RunDir, author: Author, before: Callable[[], None], report: Callable[[Outcome], None]
    ) -> None:
        """
        Args:
            before: called from another thread before each commit, while training goes on; returns when what must not
                be newer than the checkpoint is on the disk.
            report: called from another thread with what became of each save.
        """
        self._rundir, self._author, self._before, self._report = rundir, author, before, report
        self._descriptor = shared_memory()
        self._layout: Layout | None = None
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

    @property
    def busy(self) -> bool:
        """Whether a save is in flight."""
        return not self._idle.is_set()

    def prepare(self, contents: Contents) -> None:
        """Lay out memory for such a state and start the writer, if that has not been done; saves do it by themselves,
        but later."""
        assert not self.busy
        files = contents.files(self._author.rounds_weights)
        if self._signature == signature(files):
            return
        self._signature = signature(files)
        laid_out = files | {WEIGHTS: contents.rounded()} if self._author.rounds_weights else files
        self._layout = Layout.of(laid_out, self._author.parts or self._author.world_size)
        self._part = self._layout.part_of(self._author.rank, self._author.world_size)
        self._exchange = Exchange(laid_out, self._layout, self._author.rank, self._author.world_size)
        if self._part is not None:
            self._staging = Staging(self._descriptor, laid_out, self._layout, self._part)
            if self._process is None:
                try:
                    self._start_writer()
                except OSError as error:
                    # There may be memory for it by the time of the save, which tries again.
                    log.warning("the writer of checkpoints cannot be started yet: %s", error)

    def save(self, step: int, position: DataPosition, contents: Contents) -> float:
        """Stage our part of the state and have it committed. Returns the seconds that training stood still here.

        The tensors may change as soon as this returns. Must not be called while a save is in flight.
        """
        started = time.perf_counter()
        self.prepare(contents)
        self._saves += 1
        files = contents.files(self._author.rounds_weights)
        assert self._exchange is not None
        if self._part is None:
            for _ in self._exchange.bring(files):
                pass  # the others need our share
            return time.perf_counter() - started
        assert self._layout is not None
        assert self._staging is not None
        self._staging.copy(files, self._exchange.bring(files))
        reference = CheckpointRef(name=checkpoint_name(step), step=step, generation=self._author.generation)
        request = {
            "name": reference.name,
            "generation": self._author.generation,
            "number": self._saves,
            "part": self._part,
            "parts": self._layout.parts,
            "files": self._layout.sizes,
            "regions": [vars(region) for region in self._staging.regions],
            "facts": self._facts(reference, position, contents.loop) if self._part == 0 else {},
        }
        self._idle.clear()
        request["stallSeconds"] = time.perf_counter() - started
        threading.Thread(target=self._commit, args=(request, reference), daemon=True).start()
        return time.perf_counter() - started

    def wait(self) -> Outcome:
        """Wait for the save in flight, if any, and return what became of the last one."""
        self._idle.wait()
        return self._outcome

    def close(self) -> None:
        """Wait for the save in flight and end the writer."""
        self.wait()
        self._stop_writer()
        os.close(self._descriptor)

    def _start_writer(self) -> "subprocess.Popen[str]":
        """
        Raises:
            OSError: the machine has no room for another process now.
        """
        self._stop_writer()
        words = ["--run-dir", str(self._rundir.path), "--descriptor", str(self._descriptor)]
        command = module_command("tandem_trainer.checkpoint.writer", *words)
        self._process = subprocess.Popen(
            command,
            env=without_folder(os.environ),
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
            pass  # it died with a request half-written, which the failed save has reported
        self._process.wait()
        self._process.stdout.close()
        self._process = None

    def _facts(self, reference: CheckpointRef, position: DataPosition, loop: dict[str, Any]) -> dict[str, Any]:
        """The manifest without its files."""
        return {
            "name": reference.name,
            "step": reference.step,
            "generation": reference.generation,
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
            # Whatever it was: the save has failed, and the next one may not.
            log.exception("checkpoint=%s not written", request["name"])
            outcome = {"failed": repr(error)}
            self._say_why_not(request, repr(error))
        self._finish(reference, {"stallSeconds": request["stallSeconds"]} | outcome)

    def _written(self, request: dict[str, Any]) -> Outcome:
        """Have our part written, and wait for it."""
        # Where the last one died and no other could be started, this is the time to try again.
        process = self._process or self._start_writer()
        assert process.stdin is not None
        assert process.stdout is not None
        self._before()
        line = ""
        # A broken pipe: it had died before.
        with suppress(BrokenPipeError):
            process.stdin.write(json.dumps(request) + "\n")
            process.stdin.flush()
            line = process.stdout.readline()
        if not line:
            self._say_why_not(request, "the writer process has died")
            self._start_writer()
            return {"failed": "the writer process has died"}
        answer: Outcome = json.loads(line)
        return answer

    def _say_why_not(self, request: dict[str, Any], why: str) -> None:
        """Let the writer of part 0 not wait for ours."""
        aside = aside_folder(self._rundir, request["name"], request["generation"], request["number"])
        say_why_not(aside, request["part"], why)

    def _finish(self, reference: CheckpointRef, outcome: Outcome) -> None:
        self._outcome = outcome | {"name": reference.name, "step": reference.step}
        if "committed" in outcome:
            self.last = reference
        if "superseded" in outcome:
            self.superseded = True
        try:
            self._report(self._outcome)
        finally:
            self._idle.set()
