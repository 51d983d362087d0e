"""The timeline of processor use: trainers above, evaluators below, and each checkpoint's way from one to the other.

Each process has a row filled to its busy cores. Between the two groups lies the lane of checkpoints; a curve leads from
each to the blocks in which evaluators worked on it. What it shows at a glance: training is busy all the time,
evaluators work beside it, and no row of training has a hole where a checkpoint was taken.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.collections import PatchCollection
from matplotlib.figure import Figure
from matplotlib.patches import PathPatch, Rectangle
from matplotlib.path import Path

from tandem.charts.chart import LIGHT, Role
from tandem.formatting import cores, duration, plain, share
from tandem.measures import Generation
from tandem_cli.report.clock import Clock, means
from tandem_cli.report.figures.painted import empty, shade_restarts, spread, time_axis
from tandem_cli.report.run import Floats, Ints, Kind, Run, RunCheckpoint, Use, Work
from tandem_cli.report.style import Theme

MOST_ROWS = 12
"""Of one kind. More processes than this share rows, each the mean of neighbours."""

MOST_LINKS = 160
"""More curves than this hide what they should show; then the blocks and ticks stand alone."""

MOST_DIAMONDS = 100
"""More checkpoints than this are thin ticks."""

TITLE = "Processors: training and evaluation in tandem"
TITLE_CLOSE = "A closer look: training and evaluation in tandem"

BESIDE_SECONDS = 2.0
"""A sample that is so near to a generation tells of it."""

CLOSE_CHECKPOINTS = 9
"""How many checkpoints a close look shows."""

COLORS: dict[Kind, Role] = {"trainer": "trainer", "gpu": "gpu", "evaluator": "evaluator"}


@dataclass(frozen=True)
class ProcessRow:
    """One row of the time line."""

    label: str
    kind: Kind
    uses: tuple[Use, ...]
    """One process, or several that share the row."""
    base: float
    """Where its floor is, in units of a row's height from the top, negative."""


def draw(run: Run, clock: Clock, look: Theme, window: tuple[float, float] | None = None) -> Figure | None:
    """The whole run, or the `window` between two times. None when no processor use and no evaluation was logged."""
    since = clock.at(window[0]) * clock.unit_seconds if window else 0.0
    if window is not None:
        clock = clock.seen_from(window[0], window[1] - window[0])
    uses = [at_work(use, run.generations) for use in _with_work(run)]
    if not uses:
        return None
    trainers = [row for kind in ("trainer", "gpu") for row in _grouped([u for u in uses if u.kind == kind])]
    evaluators = _grouped([use for use in uses if use.kind == "evaluator"])
    above = [ProcessRow(label, use[0].kind, use, -1.75 - 1.18 * i) for i, (label, use) in enumerate(trainers)]
    lane = (above[-1].base if above else -0.2) - 0.85
    below = [ProcessRow(label, use[0].kind, use, lane - 2.2 - 1.18 * i) for i, (label, use) in enumerate(evaluators)]
    bottom = (below[-1].base if below else lane - 0.4) - 0.15
    figure = empty(look, 0.36 * -bottom + 0.75, TITLE_CLOSE if window else TITLE)
    axes = figure.subplots()
    _frame(axes, clock, bottom)
    if window is not None:
        axes.set_xlim(0, clock.at(window[1]))
        axes.set_xlabel(f"time since {duration(since)} ({clock.unit})")
    shade_restarts(axes, run, clock)
    for row in (*above, *below):
        _fill(axes, row, clock, look)
    _captions(axes, look, above, lane, below)
    shown = [c for c in run.checkpoints if c.at is not None and _within(c.at, window)]
    _checkpoints(axes, shown, run, clock, look, lane)
    works = [work for work in run.works if _within(work.end, window) or _within(work.begin, window)]
    _blocks(axes, works, below, clock, look)
    _links(axes, works, run.checkpoints, below, clock, lane)
    return figure


def close_window(run: Run) -> tuple[float, float] | None:
    """A stretch in the middle with a few checkpoints, where the whole run has too many to tell apart. None if not."""
    taken = sorted(c.at for c in run.checkpoints if c.at is not None)
    if len(taken) <= 4 * CLOSE_CHECKPOINTS or not run.works:
        return None
    evaluated = sorted({c.at for c in run.checkpoints if c.at is not None and c.evaluation})
    middle = evaluated[len(evaluated) // 2] if evaluated else taken[len(taken) // 2]
    first = int(np.clip(np.searchsorted(taken, middle) - CLOSE_CHECKPOINTS // 2, 0, len(taken) - CLOSE_CHECKPOINTS))
    begin, end = taken[first], taken[first + CLOSE_CHECKPOINTS - 1]
    margin = 0.12 * (end - begin)
    return begin - margin, end + margin


def at_work(use: Use, generations: Sequence[Generation]) -> Use:
    """The use of a rank or its GPU with a value from each generation's first step to its last line.

    Samples come once or twice a second, and the first and the last of a process are often missing: what is not known
    is as in the sample beside it.
    """
    order = np.argsort(use.time, kind="stable")
    time, busy = use.time[order], use.busy[order]
    for one in generations if use.kind != "evaluator" else ():
        begin, end = one.first_step_at, one.last_line_at
        if begin is None or end is None or (use.name.isdigit() and int(use.name) >= (one.world_size or np.inf)):
            continue
        known = np.flatnonzero(np.isfinite(busy) & (time > begin - BESIDE_SECONDS) & (time < end + BESIDE_SECONDS))
        if not len(known):
            continue
        first, after = int(np.searchsorted(time, begin)), int(np.searchsorted(time, end))
        values = [_told(time, busy, known, time[place], place) for place in range(first, after)]
        # What was before the first step is not known to have been the same.
        was = first > 0 and bool(np.isfinite(busy[first - 1]))
        ends = [_told(time, busy, known, begin, first) if was else np.nan, _told(time, busy, known, end, after)]
        busy = np.concatenate([busy[:first], ends[:1], values, ends[1:], busy[after:]])
        time = np.concatenate([time[:first], [begin], time[first:after], [end], time[after:]])
    return Use(use.name, use.kind, time, busy)


def _told(time: Floats, busy: Floats, known: Ints, moment: float, place: int) -> float:
    """The use at a moment: what the sample at `place` says, which speaks of the time before it, else the nearest."""
    if place < len(busy) and np.isfinite(busy[place]):
        return float(busy[place])
    return float(busy[known[np.argmin(np.abs(time[known] - moment))]])


def _with_work(run: Run) -> list[Use]:
    """Rows for all processes with a known use, and for evaluators that are known by their work alone."""
    known = {use.name for use in run.uses if use.kind == "evaluator"}
    nothing = np.empty(0)
    silent = [name for name in dict.fromkeys(work.evaluator for work in run.works) if name not in known]
    return [*run.uses, *(Use(name, "evaluator", nothing, nothing) for name in silent)]


def _grouped(uses: Sequence[Use]) -> list[tuple[str, tuple[Use, ...]]]:
    """A label and the processes of each row."""
    if not uses:
        return []
    size = -(-len(uses) // MOST_ROWS)
    rows = [tuple(uses[first : first + size]) for first in range(0, len(uses), size)]
    return [(_label(row), row) for row in rows]


def _label(uses: tuple[Use, ...]) -> str:
    first, last = _short(uses[0]), _short(uses[-1])
    if len(uses) == 1:
        return first
    return f"{first} to {last.removeprefix('rank ').removeprefix('GPU ').removeprefix('evaluator ')}"


def _short(use: Use) -> str:
    name = plain(use.name).removeprefix("evaluator-")[-16:]
    return {"trainer": f"rank {name}", "gpu": f"GPU {name}", "evaluator": f"evaluator {name}"}[use.kind]


def _frame(axes: Axes, clock: Clock, bottom: float) -> None:
    time_axis(axes, clock)
    axes.set_ylim(bottom, 0)
    axes.set_yticks([])
    axes.grid(visible=True, axis="x")
    axes.spines["left"].set_visible(False)


def _within(time: float, window: tuple[float, float] | None) -> bool:
    return window is None or window[0] <= time <= window[1]


def _fill(axes: Axes, row: ProcessRow, clock: Clock, look: Theme) -> None:
    """Fill the row up to the busy cores, and write its mean beside it."""
    low, high = axes.get_xlim()
    color = LIGHT[COLORS[row.kind]]
    axes.plot([low, high], [row.base, row.base], color=LIGHT["line"], linewidth=0.7, zorder=1)
    _beside(axes, row.base + 0.42, row.label, 8 if look.narrow else 9, LIGHT["ink"], "normal")
    samples = [_stretches(use, clock) for use in row.uses if len(use.time)]
    if not samples:
        return
    most = max(1.0, float(np.ceil(np.nanmax([_usual_most(use) for use in row.uses if len(use.time)]) - 0.15)))
    edges, busy = samples[0] if len(samples) == 1 else _shared(samples, low, high)
    if len(edges) > 900:
        columns = np.linspace(low, high, 500)
        busy = means((edges[:-1] + edges[1:]) / 2, busy, columns)
        edges = columns
    height = np.clip(busy / most * 0.95, 0, 1)
    # Not fill_between: that leaves out the last value before a gap.
    axes.stairs(row.base + height, edges, baseline=row.base, fill=True, color=color, alpha=0.72, linewidth=0, zorder=2)
    visible = busy[(edges[1:] > low) & (edges[:-1] < high)]
    if np.isfinite(visible).any():
        mean = float(np.nanmean(visible))
        axes.annotate(
            share(mean) if row.kind == "gpu" else cores(mean),
            (1, row.base + 0.42),
            xycoords=("axes fraction", "data"),
            xytext=(5, 0),
            textcoords="offset points",
            va="center",
            fontsize=8.5,
            fontweight="bold",
            color=color,
        )


def _usual_most(use: Use) -> float:
    good = use.busy[np.isfinite(use.busy)]
    return float(np.quantile(good, 0.95)) if len(good) else 0.0


def _stretches(use: Use, clock: Clock) -> tuple[Floats, Floats]:
    """Edges [N+1] and values [N]: each sample speaks of the time since the one before it."""
    order = np.argsort(use.time, kind="stable")
    time, busy = use.time[order], use.busy[order]
    usual = float(np.median(np.diff(time))) if len(time) > 1 else 1.0
    first = time[:1] - usual
    return clock.axis(np.concatenate([first, time])), busy


def _shared(samples: list[tuple[Floats, Floats]], low: float, high: float) -> tuple[Floats, Floats]:
    """The mean of several processes over columns of the picture."""
    columns = np.linspace(low, high, 400)
    rows = [means((edges[:-1] + edges[1:]) / 2, busy, columns) for edges, busy in samples]
    present = np.isfinite(rows).sum(axis=0)
    total = np.nansum(rows, axis=0)
    return columns, np.where(present > 0, total / np.maximum(1, present), np.nan)


def _captions(axes: Axes, look: Theme, above: list[ProcessRow], lane: float, below: list[ProcessRow]) -> None:
    size = 8 if look.narrow else 9
    for rows, title in ((above, "TRAINING"), (below, "EVALUATION")):
        if rows:
            _beside(axes, rows[0].base + 1.32, title, size - 1, LIGHT[COLORS[rows[0].kind]], "bold")
    _beside(axes, lane, "checkpoints", size, LIGHT["checkpoint"], "normal")
    first = (above or below)[0]
    axes.annotate(
        "busy",
        (1, first.base + 1.32),
        xycoords=("axes fraction", "data"),
        xytext=(5, 0),
        textcoords="offset points",
        va="center",
        fontsize=8,
        color=LIGHT["muted"],
    )


def _beside(axes: Axes, height: float, text: str, size: float, color: str, weight: str) -> None:
    axes.annotate(
        text,
        (0, height),
        xycoords=("axes fraction", "data"),
        xytext=(-6, 0),
        textcoords="offset points",
        ha="right",
        va="center",
        fontsize=size,
        color=color,
        fontweight=weight,
    )


def _checkpoints(axes: Axes, shown: list[RunCheckpoint], run: Run, clock: Clock, look: Theme, lane: float) -> None:
    """A diamond for each: full when it was evaluated, empty when it was not, a cross when it was bad."""
    kinds: tuple[tuple[list[RunCheckpoint], dict[str, Any]], ...] = (
        ([c for c in shown if not c.bad and c.evaluation], {"marker": "D", "mfc": LIGHT["checkpoint"]}),
        ([c for c in shown if not c.bad and not c.evaluation], {"marker": "D", "mfc": LIGHT["paper"]}),
        ([c for c in shown if c.bad], {"marker": "X", "mfc": LIGHT["alert"]}),
    )
    many = len(shown) > MOST_DIAMONDS
    for members, style in kinds:
        if members:
            x = clock.axis(np.array([c.at for c in members], np.float64))
            if many:
                style |= {"marker": "|", "mew": 0.8, "markersize": 7}
                x = np.unique(np.round(x / clock.length, 3)) * clock.length
            size: dict[str, Any] = {"markersize": 5.5, "mec": LIGHT["checkpoint"]}
            axes.plot(x, np.full(len(x), lane), linestyle="none", zorder=5, **(size | style))
    low, high = axes.get_xlim()
    places = [clock.at(c.at) for c in shown if c.at is not None]
    letters = max((len(f"{c.step:,}") for c in shown), default=1)
    for index in spread(places, (high - low) * letters * (0.031 if look.narrow else 0.0105)):
        axes.annotate(
            f"{shown[index].step:,}",
            (places[index], lane),
            xytext=(0, 6),
            textcoords="offset points",
            ha="center",
            fontsize=7.5,
            color=LIGHT["muted"],
        )


def _blocks(axes: Axes, works: list[Work], below: list[ProcessRow], clock: Clock, look: Theme) -> None:
    """A block for each piece of an evaluator's work, with the step of its checkpoint where there is room.

    Blocks that are narrower than their outline would cover the row they stand in: then there are none.
    """
    low, high = axes.get_xlim()
    widths = [clock.at(work.end) - clock.at(work.begin) for work in works]
    if not works or (len(works) > MOST_LINKS and np.median(widths) < 0.006 * (high - low)):
        return
    letters = max(len(f"{work.step:,}") for work in works)
    needed = (high - low) * letters * (0.025 if look.narrow else 0.0085)
    bases = {use.name: row.base for row in below for use in row.uses}
    patches = []
    for work in works:
        begin, end = clock.at(work.begin), clock.at(work.end)
        base = bases[work.evaluator]
        patches.append(Rectangle((begin, base), end - begin, 1.0))
        if end - begin >= needed:
            axes.annotate(
                f"{work.step:,}",
                ((begin + end) / 2, base + 1.0),
                xytext=(0, -2),
                textcoords="offset points",
                ha="center",
                va="top",
                fontsize=7,
                color=LIGHT["ink"],
                zorder=6,
            )
    axes.add_collection(
        PatchCollection(patches, facecolor="none", edgecolor=LIGHT["evaluator"], linewidth=0.9, zorder=4), autolim=False
    )


def _links(
    axes: Axes,
    works: list[Work],
    checkpoints: Sequence[RunCheckpoint],
    below: list[ProcessRow],
    clock: Clock,
    lane: float,
) -> None:
    """A curve from each checkpoint to the blocks in which it was evaluated."""
    if not works or len(works) > MOST_LINKS:
        return
    bases = {use.name: row.base for row in below for use in row.uses}
    taken = {(c.name, c.generation): c.at for c in checkpoints if c.at is not None}
    lines = []
    for work in works:
        at = taken.get((work.checkpoint, work.generation))
        if at is None:
            continue
        x0, x1 = clock.at(at), clock.at(work.begin)
        y0, y1 = lane - 0.22, bases[work.evaluator] + 1.0
        bend = 0.55 * (y1 - y0) if y0 - y1 < 1.6 else -0.75
        curve = Path(
            [(x0, y0), (x0, y0 + bend), (x1, y1 - bend), (x1, y1)], [Path.MOVETO, Path.CURVE4, Path.CURVE4, Path.CURVE4]
        )
        lines.append(curve)
    for curve in lines:
        axes.add_patch(
            PathPatch(curve, facecolor="none", edgecolor=LIGHT["checkpoint"], linewidth=0.8, alpha=0.6, zorder=3)
        )
