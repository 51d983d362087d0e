"""Trains one variant on this machine, from the first process to the last, as `tandem run` does.

Each rank has the same number of threads in every run. Otherwise one worker would have all cores, and the same machine
would count as one worker's and as that of two.
"""

import os
import secrets
import shutil
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

from tandem.code import store
from tandem.formatting import number, printable
from tandem.rundir.layout import RunDir
from tandem_cli.bench.variants import Variant
from tandem_cli.local.local_run import Crew, LocalRun, Requests
from tandem_cli.local.placement import Placement, share_gpus, visible_gpus
from tandem_cli.local.prepare import claim
from tandem_cli.packing import Pack
from tandem_cli.terminal.screen import Scene

LINE_SECONDS = 5.0
"""Between two lines about a run where there is no terminal."""


@dataclass(frozen=True)
class Machine:
    """What the runs share."""

    cores: int
    """That this process may use."""
    threads: int
    """Of each rank."""
    gpus: tuple[str, ...] = field(default_factory=lambda: tuple(visible_gpus(dict(os.environ))))
    """As CUDA_VISIBLE_DEVICES names them."""


def train(
    variant: Variant, path: Path, machine: Machine, requests: Requests, display: "Told", pack: Pack | None
) -> None:
    """Train it in a run directory of its own; what was there is moved into `previous` of it.

    Args:
        path: of the run directory.

    Raises:
        UserError: the directory cannot be used.
    """
    held = claim(path, variant.job, True, "the same command with another --out")
    try:
        if pack is not None:
            store(held.run_dir, pack.digest, pack.file)
        mark = secrets.token_hex(8)
        held.sign(mark)
        scratch = Path(tempfile.mkdtemp(prefix=f"tandem-{mark[:8]}-"))
        gpus, _ = share_gpus(machine.gpus, variant.job)
        placement = Placement(threads=machine.threads)
        token = secrets.token_urlsafe(32)
        crew = Crew(variant.job, held.run_dir, token, mark, scratch, placement, machine.cores, gpus)
        LocalRun(crew, held, display, requests, 0, True, str(path)).run()
    finally:
        held.release()


def drop_checkpoints(run_dir: RunDir) -> None:
    """Remove the weights that a run has left. Its logs stay."""
    shutil.rmtree(run_dir.checkpoints, ignore_errors=True)


class Told:
    """Progress of all runs: a bar on a terminal, lines elsewhere."""

    draws = False

    def __init__(self, console: Console, steps: int, runs: int) -> None:
        self._console, self._steps, self._of, self._runs = console, steps, steps, runs
        self._number, self._what, self._next, self._shown = 0, "", 0.0, ""
        self._bar = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("{task.fields[waiting]}", style="dim"),
            console=console,
            transient=True,
            disable=not console.is_terminal,
        )
        self._task = self._bar.add_task("", total=steps, waiting="")

    def __enter__(self) -> "Told":
        self._bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._bar.stop()

    def begin(self, what: str, steps: int | None = None) -> None:
        """The next run begins.

        Args:
            steps: number of its steps, if it differs from that of the other runs.
        """
        self._number, self._what, self._next, self._shown = self._number + 1, what, 0.0, ""
        self._of = steps or self._steps
        self._bar.update(self._task, description=self._head, completed=0, total=self._of, waiting="")

    def end_run(self, result: str) -> None:
        """A run is over."""
        self._bar.console.print(printable(f"{self._head}: {result}"), markup=False, soft_wrap=True)

    def note(self, words: str) -> None:
        """Something besides about the run that is over."""
        self._bar.console.print(printable(words), markup=False, soft_wrap=True)

    @property
    def _head(self) -> str:
        return f"{self._number}/{self._runs} {self._what}"

    def show(self, scene: Scene) -> None:
        """How the present run gets on."""
        progress = scene.snapshot.status.progress if scene.snapshot is not None else None
        step = progress.step if progress is not None else 0
        waiting = printable(scene.notice or scene.waiting)
        if self._console.is_terminal:
            self._bar.update(self._task, completed=step, waiting=waiting)
            return
        line = f"{self._head}: {waiting or f'step {number(step)} of {number(self._of)}'}"
        if line != self._shown and time.monotonic() >= self._next:
            self._next, self._shown = time.monotonic() + LINE_SECONDS, line
            self._console.print(line, markup=False, soft_wrap=True)

    def end(self, scene: Scene) -> None:
        """Nothing: what was measured follows."""

    def close(self) -> None:
        """The bar stays for the next run."""
