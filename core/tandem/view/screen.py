"""A scene as a screen: at most 20 lines, 80 columns are enough, and it reads the same without colours."""

import time

from rich.console import Group, RenderableType
from rich.constrain import Constrain
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from tandem import formatting
from tandem.formatting import elapsed, metric_name, number, several
from tandem.printable import one_line
from tandem.snapshot import Event, Snapshot
from tandem.status import Phase, Score, Status
from tandem.view.scene import Scene
from tandem.view.sparkline import sparkline

LABEL = 14
"""Width of the column of labels."""
WIDEST = 120
"""Columns that are used at most; bars of 200 are no easier to read."""
SPARK = 24
"""Width of the loss curve."""
EVENTS = 4
"""Events that are shown; one less where there is a GPU line."""

PHASES: dict[Phase, tuple[str, str]] = {
    "Pending": ("starting", "cyan"),
    "Starting": ("starting", "cyan"),
    "Running": ("training", "green"),
    "Restarting": ("restarting", "yellow"),
    "Draining": ("evaluating what is left", "cyan"),
    "Suspended": ("suspended", "yellow"),
    "Succeeded": ("complete", "green"),
    "Failed": ("failed", "red"),
}
EVENT_MARKS = {"info": (" ", ""), "warning": ("!", "yellow"), "error": ("✗", "red")}
"""A sign and a colour: what matters must show without colours too."""


def screen(scene: Scene) -> RenderableType:
    """The whole picture."""
    status = scene.snapshot.status if scene.snapshot else Status()
    parts: list[RenderableType] = [_title(scene, status), *_progress(scene, status), Text()]
    if scene.snapshot is not None and status.progress is not None:
        parts += [_facts(scene, status), Text(), _processors(scene, scene.snapshot), Text()]
    gpu = status.utilization is not None and status.utilization.gpu is not None
    events = scene.events[-(EVENTS - gpu) :]
    if events:
        parts += [*(_event(event) for event in events), Text()]
    parts.append(_foot(scene))
    return Constrain(Group(*parts), WIDEST)


def _title(scene: Scene, status: Status) -> Table:
    word, style = PHASES["Draining" if scene.draining else status.phase]
    row = Table.grid(expand=True)
    row.add_column(ratio=1, no_wrap=True, overflow="ellipsis")
    row.add_column(justify="right", no_wrap=True)
    row.add_row(
        Text.assemble(("  ", ""), (scene.job, "bold"), "  ", (word, style)), Text(elapsed(scene.elapsed), "dim")
    )
    return row


def _progress(scene: Scene, status: Status) -> list[RenderableType]:
    progress = status.progress
    total = progress.total_steps if progress else None
    step = progress.step if progress else 0
    bar: list[RenderableType] = []
    if total:
        row = Table.grid(expand=True, padding=(0, 1))
        row.add_column(width=1)
        row.add_column(ratio=1)
        row.add_column(justify="right", width=5)
        row.add_row("", _bar(step, total), Text(f"{100 * step // total} %"))
        bar = [row]
    if scene.waiting:
        return [*bar, Text(f"  {scene.waiting}", "cyan", no_wrap=True, overflow="ellipsis")]
    words = [f"step {number(step)}" + (f" of {number(total)}" if total else "")]
    if progress and progress.epoch is not None:
        words.append(f"epoch {progress.epoch:.1f}")
    if progress and progress.remaining_seconds is not None:
        words.append(f"about {elapsed(progress.remaining_seconds)} left")
    return [*bar, Text("  " + " · ".join(words), no_wrap=True, overflow="ellipsis")]


def _facts(scene: Scene, status: Status) -> Table:
    rows = Table.grid(padding=(0, 0))
    rows.add_column(width=LABEL, style="dim", no_wrap=True)
    rows.add_column(no_wrap=True, overflow="ellipsis")
    if status.loss is not None:
        curve = sparkline(scene.trail.losses, SPARK)
        rows.add_row("  loss", Text.assemble((number(status.loss), "bold"), "  ", (curve, "cyan")))
    if status.throughput is not None:
        rows.add_row("  throughput", f"{number(status.throughput)} samples/s")
    rows.add_row("  workers", _workers(status))
    newest = status.latest_checkpoint
    rows.add_row("  checkpoint", f"step {number(newest.step)}" if newest else Text("none yet", "dim"))
    if scene.evaluates:
        rows.add_row("  evaluated", _evaluated(status))
        best = status.best_checkpoint
        rows.add_row("  best", Text(_score(best), "green") if best else Text("none yet", "dim"))
    return rows


def _workers(status: Status) -> str:
    words = []
    if status.workers is not None:
        words.append(f"{status.workers.ready}/{status.workers.desired}")
    if status.world_size is not None:
        words.append(f"world size {status.world_size}")
    if status.generation is not None:
        words.append(f"generation {status.generation}")
    return " · ".join([*words, several(status.restarts, "restart")])


def _evaluated(status: Status) -> Text:
    newest = status.latest_evaluation
    if newest is None:
        return Text("none yet", "dim")
    lag = status.evaluation_lag_steps
    behind = "" if lag is None else " · up to date" if lag <= 0 else f" · {number(lag)} steps behind"
    return Text.assemble(_score(newest), (behind, "dim"))


def _score(score: Score) -> str:
    return f"step {number(score.step)} · {metric_name(score.metric)} {formatting.score(score.metric, score.value)}"


def _processors(scene: Scene, snapshot: Snapshot) -> Table:
    use = snapshot.status.utilization
    rows = Table.grid(expand=True, padding=(0, 0))
    rows.add_column(width=LABEL, style="dim", no_wrap=True)
    rows.add_column(ratio=1)
    rows.add_column(width=33, no_wrap=True, overflow="ellipsis")
    rows.add_row("  trainers", *_cores(use.trainer_cpu if use else None, scene.cores))
    if scene.evaluates:
        busy = sum(evaluator.state != "idle" for evaluator in snapshot.evaluators)
        note = f" · {busy} of {len(snapshot.evaluators)} busy" if snapshot.evaluators else ""
        rows.add_row("  evaluators", *_cores(use.evaluator_cpu if use else None, scene.cores, note))
    if use and use.gpu is not None:
        memory = f" · {use.gpu_memory_bytes / 2**30:.1f} GiB" if use.gpu_memory_bytes is not None else ""
        rows.add_row("  GPU", _bar(use.gpu, 1.0), f"  {formatting.share(use.gpu)}{memory}")
    return rows


def _cores(busy: float | None, cores: int, note: str = "") -> tuple[ProgressBar, str]:
    words = f"  {busy:.1f} of {several(cores, 'core')}{note}" if busy is not None else ""
    return _bar(min(busy or 0.0, cores), cores), words


def _bar(done: float, total: float) -> ProgressBar:
    return ProgressBar(
        total=total or 1, completed=done, style="bright_black", complete_style="cyan", finished_style="cyan"
    )


def _event(event: Event) -> Text:
    at = time.strftime("%H:%M:%S", time.localtime(event.at))
    mark, style = EVENT_MARKS[event.kind]
    words = (f"{mark} {one_line(event.text)}", style)
    return Text.assemble((f"  {at} ", "dim"), words, no_wrap=True, overflow="ellipsis")


def _foot(scene: Scene) -> RenderableType:
    if scene.notice:
        return Text(f"  {scene.notice}", "bold yellow", no_wrap=True, overflow="ellipsis")
    metrics = [f"{scene.endpoint}/metrics"] if scene.endpoint else []
    row = Table.grid(expand=True, padding=(0, 1))
    row.add_column(ratio=1, no_wrap=True, overflow="ellipsis")
    row.add_column(no_wrap=True)
    row.add_row(Text("  " + " · ".join([*metrics, scene.run_dir]), "dim"), Text("Ctrl-C saves and leaves", "dim"))
    return row
