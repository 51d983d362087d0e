"""Trains one variant on this machine, from the first process to the last, as `tandem run` does.

Each rank has the same number of threads in every run. Otherwise one worker would use all cores, and its speed could not
be compared with that of two.
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

from tandem.formatting import number, printable
from tandem.rundir.code import store_pack
from tandem.rundir.layout import RunDir
from tandem_cli.bench.variants import Variant
from tandem_cli.packing import Pack
from tandem_launcher.local.local_run import LocalRun, ProcessFactory, Requests
from tandem_launcher.local.placement import Placement, share_gpus, visible_gpus
from tandem_launcher.local.prepare import claim
from tandem_launcher.terminal.screen import Scene

LINE_SECONDS = 5.0
"""Seconds between two lines about a run without a terminal."""


@dataclass(frozen=True)
class TrialResources:
    """Resources that the runs share."""

    cores: int
    """Cores that this process may use."""
    threads: int
    """Threads of each rank."""
    gpus: tuple[str, ...] = field(default_factory=lambda: tuple(visible_gpus(dict(os.environ))))
    """GPUs, as CUDA_VISIBLE_DEVICES lists them."""


def train(
    variant: Variant,
    path: Path,
    machine: TrialResources,
    requests: Requests,
    display: "TrialDisplay",
    pack: Pack | None,
) -> None:
    """Train a variant in a run directory of its own; earlier contents are moved into its `previous`.

    Args:
        path: run directory.

    Raises:
        UserError: the run directory cannot be used.
    """
    claimed = claim(path, variant.job, True, "the same command with another --out")
    try:
        if pack is not None:
            store_pack(claimed.run_dir, pack.digest, pack.file)
        mark = secrets.token_hex(8)
        claimed.sign(mark)
        scratch = Path(tempfile.mkdtemp(prefix=f"tandem-{mark[:8]}-"))
        gpus, _ = share_gpus(machine.gpus, variant.job)
        placement = Placement(threads=machine.threads)
        token = secrets.token_urlsafe(32)
        crew = ProcessFactory(variant.job, claimed.run_dir, token, mark, scratch, placement, machine.cores, gpus)
        LocalRun(crew, claimed, display, requests, 0, True, str(path)).run()
    finally:
        claimed.release()


def drop_checkpoints(run_dir: RunDir) -> None:
    """Remove the checkpoints of a run. Its logs stay."""
    shutil.rmtree(run_dir.checkpoints, ignore_errors=True)


class TrialDisplay:
    """Progress of all runs: a bar on a terminal, lines elsewhere."""

    draws = False

    def __init__(self, console: Console, steps: int, runs: int) -> None:
        self._console, self._steps, self._total, self._runs = console, steps, steps, runs
        self._number, self._name, self._next, self._last_line = 0, "", 0.0, ""
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

    def __enter__(self) -> "TrialDisplay":
        self._bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._bar.stop()

    def begin(self, name: str, steps: int | None = None) -> None:
        """Start the next run.

        Args:
            steps: number of its steps, if it differs from that of the other runs.
        """
        self._number, self._name, self._next, self._last_line = self._number + 1, name, 0.0, ""
        self._total = steps or self._steps
        self._bar.update(self._task, description=self._head, completed=0, total=self._total, waiting="")

    def end_run(self, result: str) -> None:
        """Finish a run."""
        self._bar.console.print(printable(f"{self._head}: {result}"), markup=False, soft_wrap=True)

    def note(self, text: str) -> None:
        """Print a note about the run that has finished."""
        self._bar.console.print(printable(text), markup=False, soft_wrap=True)

    @property
    def _head(self) -> str:
        return f"{self._number}/{self._runs} {self._name}"

    def show(self, scene: Scene) -> None:
        """Show the progress of the current run."""
        progress = scene.snapshot.status.progress if scene.snapshot is not None else None
        step = progress.step if progress is not None else 0
        waiting = printable(scene.notice or scene.waiting)
        if self._console.is_terminal:
            self._bar.update(self._task, completed=step, waiting=waiting)
            return
        line = f"{self._head}: {waiting or f'step {number(step)} of {number(self._total)}'}"
        if line != self._last_line and time.monotonic() >= self._next:
            self._next, self._last_line = time.monotonic() + LINE_SECONDS, line
            self._console.print(line, markup=False, soft_wrap=True)

    def end(self, scene: Scene) -> None:
        """Do nothing: the measurement follows."""

    def close(self) -> None:
        """Do nothing: the bar stays for the next run."""
