"""Renders a scene as a screen of at most 20 lines and 80 columns, which is readable without colours.

In fewer columns labels become shorter before any value is cut.
"""

import json
import math
import shlex
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise

from rich.cells import cell_len
from rich.console import Console, ConsoleOptions, Group, RenderableType, RenderResult
from rich.constrain import Constrain
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from tandem import formatting
from tandem.formatting import count_noun, elapsed, metric_name, number, one_line
from tandem.wire.status import Event, Phase, Progress, Score, Snapshot, Status, persistent_trouble, phase_word

MAX_POINTS = 240
"""Points of the loss curve; beyond that, neighbours are merged."""


@dataclass(frozen=True, kw_only=True)
class Trail:
    """The loss so far, from the snapshots: steps and losses, ascending in steps."""

    points: tuple[tuple[int, float], ...] = ()

    def follow(self, snapshot: Snapshot) -> "Trail":
        """Extend the trail by a snapshot's loss. Steps that a restart takes back are removed."""
        progress, loss = snapshot.status.progress, snapshot.status.loss
        if progress is None or loss is None or (self.points and self.points[-1] == (progress.step, loss)):
            return self
        earlier_points = tuple(point for point in self.points if point[0] < progress.step)
        points = (*earlier_points, (progress.step, loss))
        if len(points) > MAX_POINTS:
            halves = zip(points[::2], points[1::2], strict=False)
            points = tuple((later[0], (earlier[1] + later[1]) / 2) for earlier, later in halves)
        return replace(self, points=points)

    @property
    def losses(self) -> tuple[float, ...]:
        """The losses alone."""
        return tuple(loss for _, loss in self.points)


@dataclass(frozen=True, kw_only=True)
class Scene:
    """A run at one moment."""

    job: str
    run_dir: str
    """Run directory, as the user would type it."""
    endpoint: str = ""
    """Base URL of the coordinator; empty before it has one."""
    elapsed: float = 0.0
    """Seconds since `tandem run` was started."""
    waiting: str = ""
    """Event that the run is waiting for; empty while it trains."""
    notice: str = ""
    """Notice for the user: that the run is saving, and what another Ctrl-C does."""
    leaving: bool = False
    """Whether the user has asked to stop."""
    own_command: bool = False
    """Whether the user's own script trains."""
    output: str = ""
    """The last line that the script printed."""
    draining: bool = False
    """Whether training is complete and evaluators are still working."""
    cores: int = 1
    """Cores of this machine that the run may use."""
    evaluates: bool = True
    """Whether there are evaluators."""
    snapshot: Snapshot | None = None
    """The latest snapshot of the coordinator."""
    trail: Trail = field(default_factory=Trail)
    events: tuple[Event, ...] = ()
    """The coordinator's events and those of this machine, oldest first."""


def merged(*sources: Iterable[Event]) -> tuple[Event, ...]:
    """Merge events of several sources in order of time."""
    return tuple(sorted((event for source in sources for event in source), key=lambda event: event.at))


ENOUGH = 68
"""Columns above which full labels fit."""
SHORT = {
    "throughput": "rate",
    "checkpoint": "saved",
    "evaluated": "scored",
    "evaluators": "evals",
    "trainers": "train",
    "world size": "world",
    "accuracy": "acc",
    "generation": "gen",
}
"""Labels for a narrow terminal."""
WIDEST = 120
"""Maximum columns that are used; bars of 200 are no easier to read."""
SPARK = 24
"""Width of the loss curve."""
NOTE = 33
"""Width of the text beside a bar."""
NOTED = 48
"""Columns above which a bar fits beside its full text."""
EVENTS = 4
"""Events that are shown; one fewer with a GPU line, and one fewer with a trouble line."""

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
"""Sign and colour of each kind of event: what matters must be visible without colours, too."""


@dataclass(frozen=True)
class _Room:
    """Space on a terminal of this width."""

    width: int

    @property
    def narrow(self) -> bool:
        return self.width < ENOUGH

    @property
    def label(self) -> int:
        """Width of the column of labels."""
        return 10 if self.narrow else 14

    @property
    def values(self) -> int:
        """Width of the column of values."""
        return self.width - self.label

    def word(self, word: str) -> str:
        return SHORT.get(word, word) if self.narrow else word

    def labelled(self, word: str) -> str:
        return f"  {self.word(word)}"


class _Picture:
    """A scene that fits any width it is drawn on."""

    def __init__(self, scene: Scene) -> None:
        self._scene = scene

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        width = min(options.max_width, WIDEST)
        yield Constrain(_rendered(self._scene, _Room(width)), WIDEST)


def screen(scene: Scene) -> RenderableType:
    """Render the whole screen."""
    return _Picture(scene)


def _rendered(scene: Scene, room: _Room) -> RenderableType:
    status = scene.snapshot.status if scene.snapshot else Status()
    parts: list[RenderableType] = [_title(scene, status), *_progress(scene, status, room), Text()]
    if scene.snapshot is not None and (status.progress is not None or status.phase == "Running"):
        parts += [_facts(scene, status, room), Text(), _processors(scene, scene.snapshot, room), Text()]
    gpu = status.utilization is not None and status.utilization.gpu is not None
    events = scene.events[-(EVENTS - gpu - (persistent_trouble(status.troubles) is not None)) :]
    if events:
        parts += [*(_event(event) for event in events), Text()]
    parts.append(_foot(scene, room))
    return Group(*parts)


def _title(scene: Scene, status: Status) -> Table:
    word, style = phase(scene, status)
    row = Table.grid(expand=True)
    row.add_column(ratio=1, no_wrap=True, overflow="ellipsis")
    row.add_column(justify="right", no_wrap=True)
    row.add_row(
        Text.assemble(("  ", ""), (scene.job, "bold"), "  ", (word, style)), Text(elapsed(scene.elapsed), "dim")
    )
    return row


def phase(scene: Scene, status: Status) -> tuple[str, str]:
    """Phase of the run in a word, and a colour."""
    if scene.leaving:
        return "leaving", "yellow"
    if scene.draining and not scene.evaluates:
        return "ending", "cyan"
    if not scene.draining and (early := phase_word(status.phase, status.message)) != status.phase:
        return early.lower(), PHASES[status.phase][1]
    word, style = PHASES["Draining" if scene.draining else status.phase]
    # A script that logs no steps may be doing anything.
    return ("running" if word == "training" and status.progress is None else word), style


def _progress(scene: Scene, status: Status, room: _Room) -> list[RenderableType]:
    progress = status.progress
    total = progress.total_steps if progress else None
    step = progress.step if progress else 0
    bar: list[RenderableType] = []
    if total:
        row = Table.grid(expand=True, padding=(0, 1))
        row.add_column(width=1)
        row.add_column(ratio=1)
        row.add_column(justify="right", width=5)
        row.add_row("", _bar(step, total), Text(formatting.percent_done(step, total)))
        bar = [row]
    if scene.waiting:
        return [*bar, Text(f"  {scene.waiting}", "cyan", no_wrap=True, overflow="ellipsis")]
    if progress is None:
        return [_script(scene)]
    parts = [f"step {number(step)}" + (f" of {number(total)}" if total else "")]
    if progress.remaining_seconds is not None and not scene.leaving:
        remaining = f"{elapsed(progress.remaining_seconds)} left"
        parts.append(remaining if room.narrow else f"about {remaining}")
    if progress.epoch is not None:
        epoch = f"epoch {progress.epoch:.1f}"
        if len("  " + " · ".join([*parts, epoch])) <= room.width:
            parts.insert(1, epoch)
    return [*bar, Text("  " + " · ".join(parts), no_wrap=True, overflow="ellipsis")]


def _script(scene: Scene) -> Text:
    """Describe a script that logs no steps: since when it has been running, and what it printed last."""
    generations = scene.snapshot.generations if scene.snapshot else []
    since = time.strftime("since %H:%M:%S", time.localtime(generations[-1].opened_at)) if generations else ""
    output = one_line(scene.output) if scene.output else "nothing printed yet"
    return Text.assemble(
        ("  " + " · ".join([since] * bool(since) + [""]), "dim"), output, no_wrap=True, overflow="ellipsis"
    )


def _facts(scene: Scene, status: Status, room: _Room) -> Table:
    rows = Table.grid(padding=(0, 0))
    rows.add_column(width=room.label, style="dim", no_wrap=True)
    rows.add_column(width=room.values, no_wrap=True, overflow="ellipsis")
    if status.loss is not None:
        curve = sparkline(scene.trail.losses, min(SPARK, room.width - room.label - 12))
        rows.add_row(room.labelled("loss"), Text.assemble((number(status.loss), "bold"), "  ", (curve, "cyan")))
    if status.throughput is not None:
        rows.add_row(room.labelled("throughput"), f"{number(status.throughput)} samples/s")
    rows.add_row(room.labelled("workers"), _workers(status, room))
    newest = status.latest_checkpoint
    if newest is not None or not scene.own_command:
        text = Text(f"step {number(newest.step)}") if newest else Text("none yet", "dim")
        rows.add_row(room.labelled("checkpoint"), text)
    if (trouble := persistent_trouble(status.troubles)) is not None:
        rows.add_row(room.labelled("trouble"), Text(f"✗ {one_line(trouble.text)}", "red"))
    if scene.evaluates:
        rows.add_row(room.labelled("evaluated"), _evaluated(status, room))
        rows.add_row(room.labelled("best"), _best(status, room))
    return rows


def _workers(status: Status, room: _Room) -> str:
    parts = []
    if status.workers is not None:
        parts.append(f"{status.workers.ready}/{status.workers.desired}")
    if status.world_size is not None:
        parts.append(f"{room.word('world size')} {status.world_size}")
    if status.generation is not None:
        parts.append(f"{room.word('generation')} {status.generation}")
    return " · ".join([*parts, count_noun(status.restarts, "restart")])


def _evaluated(status: Status, room: _Room) -> Text:
    newest = status.latest_evaluation
    if newest is None:
        return Text("none yet", "dim")
    lag = status.evaluation_lag_steps
    late = "" if lag is None else f" · {number(lag)}" + (" behind" if room.narrow else " steps behind")
    late = late if lag is None or lag > 0 else " · up to date"
    score = _score(newest, room)
    return Text.assemble(score, (_base_score(newest, status, room.values - len(score + late)), "dim"), (late, "dim"))


def _best(status: Status, room: _Room) -> Text:
    best = status.best_checkpoint
    if best is not None:
        score = _score(best, room)
        more = _base_score(best, status, room.values - len(score))
        certainty = formatting.confidence(best.metric, (best.low, best.high), best.tied)
        more += certainty if len(score + more + certainty) <= room.values else ""
        return Text.assemble((score, "green"), (more, "dim"))
    base = next(iter(status.against_base), None)
    if base is None:
        return Text("none yet", "dim")
    metric = room.word(metric_name(base.metric))
    return Text(f"none yet · base model {metric} {formatting.score(base.metric, base.base)}", "dim")


def _base_score(score: Score, status: Status, room: int) -> str:
    """The base model's score, if there is one and it fits.

    Args:
        room: columns.
    """
    base = next((comparison.base for comparison in status.against_base if comparison.metric == score.metric), None)
    if base is None:
        return ""
    value = formatting.score(score.metric, base)
    return next((text for text in (f" · base model {value}", f" (base {value})") if len(text) <= room), "")


def _score(score: Score, room: _Room) -> str:
    metric = room.word(metric_name(score.metric))
    return f"step {number(score.step)} · {metric} {formatting.score(score.metric, score.value)}"


def _processors(scene: Scene, snapshot: Snapshot, room: _Room) -> Table:
    use = snapshot.status.utilization
    busy = sum(evaluator.state != "idle" for evaluator in snapshot.evaluators)
    note = f"{busy} of {len(snapshot.evaluators)} busy" if snapshot.evaluators and room.width >= NOTED else ""
    lines: list[tuple[str, ProgressBar, str]] = []
    lines.append(("trainers", *_cores(use.trainer_cpu if use else None, scene.cores)))
    if scene.evaluates:
        lines.append(("evaluators", *_cores(use.evaluator_cpu if use else None, scene.cores, note)))
    if use and use.gpu is not None:
        memory = f" · {formatting.size(use.gpu_memory_bytes)}" if use.gpu_memory_bytes is not None else ""
        lines.append(("GPU", _bar(use.gpu, 1.0), f"  {formatting.share(use.gpu)}{memory}"))
    rows = Table.grid(expand=True, padding=(0, 0))
    rows.add_column(min_width=room.label, style="dim", no_wrap=True)
    rows.add_column(ratio=1)
    rows.add_column(width=max(len(text) for _, _, text in lines) if room.narrow else NOTE, no_wrap=True)
    for label, bar, text in lines:
        rows.add_row(room.labelled(label), bar, text)
    return rows


def _cores(busy: float | None, cores: int, note: str = "") -> tuple[ProgressBar, str]:
    parts = [f"{busy:.1f} of {count_noun(cores, 'core')}", *([note] if note else [])] if busy is not None else []
    return _bar(min(busy or 0.0, cores), cores), "  " + " · ".join(parts)


def _bar(done: float, total: float) -> ProgressBar:
    return ProgressBar(
        total=total or 1, completed=done, style="bright_black", complete_style="cyan", finished_style="cyan"
    )


def _event(event: Event) -> Text:
    time_of_day = time.strftime("%H:%M:%S", time.localtime(event.at))
    mark, style = EVENT_MARKS[event.kind]
    text = (f"{mark} {one_line(event.text)}", style)
    return Text.assemble((f"  {time_of_day} ", "dim"), text, no_wrap=True, overflow="ellipsis")


def _foot(scene: Scene, room: _Room) -> RenderableType:
    if scene.notice:
        return Text(f"  {scene.notice}", "bold yellow", no_wrap=True, overflow="ellipsis")
    hint = "Ctrl-C saves and leaves"
    available = room.width - 3 - len(hint)
    location = scene.run_dir
    page = f"tandem open {shlex.quote(location)}"
    pages = [text for text in (f"live page: {page}", page) if scene.endpoint and cell_len(text) <= available]
    location = pages[0] if pages else formatting.truncate_start(location, available)
    row = Table.grid(expand=True, padding=(0, 1))
    row.add_column(ratio=1, no_wrap=True, overflow="ellipsis")
    row.add_column(no_wrap=True)
    row.add_row(Text(f"  {location}", "dim"), Text(hint, "dim"))
    return row


SPARKS = "▁▂▃▄▅▆▇█"


def sparkline(values: Sequence[float], width: int) -> str:
    """Draw a curve of at most `width` characters, on a logarithmic scale if all values are positive.

    Losses fall by powers of ten; on a linear scale everything after the first seconds is one flat line.
    """
    values = [value for value in values if math.isfinite(value)]
    if len(values) < 2 or width < 2:
        return ""
    cells = min(width, len(values))
    edges = [round(index * len(values) / cells) for index in range(cells + 1)]
    means = [math.fsum(values[a:b]) / (b - a) for a, b in pairwise(edges)]
    if min(means) > 0:
        means = [math.log(mean) for mean in means]
    low, high = min(means), max(means)
    if high - low < 1e-12:
        return SPARKS[0] * cells
    return "".join(SPARKS[round((mean - low) / (high - low) * (len(SPARKS) - 1))] for mean in means)


Value = str | int | float | None


REPORTED_PHASES = ("Running", "Succeeded", "Failed", "Suspended")
"""Phases that are described by more than what the run is waiting for."""


def event_line(event: Event) -> str:
    """Format an event as one line."""
    return _line(event.at, event=event.kind, text=event.text)


def state_line(scene: Scene, now: float) -> str:
    """Format the state of the run as one line; unknown values are omitted.

    Args:
        now: seconds since the epoch.
    """
    status = scene.snapshot.status if scene.snapshot is not None else Status()
    if status.progress is None and status.phase not in REPORTED_PHASES and not scene.draining:
        return _line(
            now, phase="Leaving" if scene.leaving else "Starting", waiting=scene.notice or scene.waiting or None
        )
    progress, workers, use = status.progress, status.workers, status.utilization
    newest, evaluated, best = status.latest_checkpoint, status.latest_evaluation, status.best_checkpoint
    troubles = status.troubles
    return _line(
        now,
        phase="Leaving" if scene.leaving else "Draining" if scene.draining else status.phase,
        step=progress.step if progress else None,
        totalSteps=progress.total_steps if progress else None,
        epoch=None if progress is None or progress.epoch is None else round(progress.epoch, 2),
        loss=_short(status.loss),
        samplesPerSecond=None if status.throughput is None else round(status.throughput),
        remainingSeconds=_remaining(progress),
        workers=f"{workers.ready}/{workers.desired}" if workers else None,
        worldSize=status.world_size,
        generation=status.generation,
        restarts=status.restarts,
        checkpoint=newest.step if newest else None,
        evaluated=evaluated.step if evaluated else None,
        lagSteps=status.evaluation_lag_steps,
        # `loss` alone is the training loss.
        **({_score_name(evaluated.metric): _short(evaluated.value)} if evaluated else {}),
        best=best.step if best else None,
        bestValue=_short(best.value) if best else None,
        baseValue=_short(status.against_base[0].base) if status.against_base else None,
        trainerCpu=_short(use.trainer_cpu) if use else None,
        evaluatorCpu=_short(use.evaluator_cpu) if use else None,
        # After a failure the last line may be the error of a rank that only lost its peer. Events name the cause.
        output=None if status.phase in ("Restarting", "Failed") else scene.output or None,
        savesFailed=(troubles.saves_failed_in_a_row or None) if troubles else None,
        linesLost=(troubles.lines_lost or None) if troubles else None,
        waiting=scene.notice or scene.waiting or None,
    )


def _remaining(progress: Progress | None) -> int | None:
    return None if progress is None or progress.remaining_seconds is None else round(progress.remaining_seconds)


def _score_name(metric: str) -> str:
    return "evaluatedLoss" if metric == "loss" else metric


def _short(value: float | None) -> float | None:
    return None if value is None else float(f"{value:.4g}")


def _line(timestamp: float, **fields: Value) -> str:
    pairs = {"time": time.strftime("%H:%M:%S", time.localtime(timestamp)), **fields}
    return " ".join(f"{name}={_written(value)}" for name, value in pairs.items() if value is not None)


def _written(value: Value) -> str:
    if not isinstance(value, str):
        return str(value)
    plain = one_line(value)
    return plain if plain and not set(plain) & set(' "=\\') else json.dumps(plain, ensure_ascii=False)
