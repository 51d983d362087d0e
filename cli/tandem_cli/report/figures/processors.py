"""The timeline of processor use: trainers above, evaluators below, and the path of each checkpoint between them.

Each process has a row filled to its busy cores. Between the two groups is the lane of checkpoints; a curve leads from
each to the blocks in which evaluators worked on it. The picture shows at a glance that training is busy all the time,
that evaluators work beside it, and that no row of training has a gap where a checkpoint was taken.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from tandem.formatting import ascii_name, cores, duration, share
from tandem.wire.measures import Generation
from tandem_cli.report.clock import Clock, means
from tandem_cli.report.figures.axes import Plot, pauses, restarts, spread, time_of
from tandem_cli.report.run import EvaluationWork, Floats, Ints, Kind, RunCheckpoint, RunData, Use
from tandem_coordinator.charts.chart import Role, Viewport
from tandem_coordinator.charts.drawing import LETTER, framed, line, text, time_axis

MAX_ROWS = 12
"""Rows of one kind; more processes share rows, each the mean of neighbours."""

MAX_LINKS = 160
"""Curves that are drawn; with more, only blocks and ticks are drawn."""

MAX_DIAMONDS = 100
"""Checkpoints that are drawn as diamonds; more are thin ticks."""

BESIDE_SECONDS = 2.0
"""Distance within which a sample still describes a generation."""

CLOSE_CHECKPOINTS = 9
"""Checkpoints in a close-up."""

COLORS: dict[Kind, Role] = {"trainer": "trainer", "gpu": "gpu", "evaluator": "evaluator"}

UNIT = 26.0
"""Height of a row, in pixels."""
LEFT_MARGIN, LEFT_NARROW, RIGHT = 112.0, 98.0, 76.0
"""Pixels beside the plot, for the names of rows and their means."""
SMALL_LETTER = LETTER * 0.8


@dataclass(frozen=True)
class ProcessRow:
    """Row of the timeline."""

    label: str
    kind: Kind
    uses: tuple[Use, ...]
    """One process, or several that share the row."""
    base: float
    """Position of its bottom, in row heights from the top."""

    @property
    def foot(self) -> float:
        """Position of its bottom, in pixels."""
        return self.base * UNIT


def draw(
    name: str,
    title: str,
    description: str,
    run: RunData,
    clock: Clock,
    style: Viewport,
    window: tuple[float, float] | None = None,
) -> str | None:
    """Draw the whole run, or the `window` between two times, as an SVG element. None if neither processor use nor an
    evaluation was logged.

    Args:
        name: prefix of the ids in it.
        title: title of the drawing.
        description: description for readers who cannot see it.
    """
    since = clock.position(window[0]) * clock.unit_seconds if window else 0.0
    if window is not None:
        clock = clock.seen_from(window[0], window[1] - window[0])
    uses = [at_work(use, run.generations) for use in _with_work(run)]
    if not uses:
        return None
    trainers = [row for kind in ("trainer", "gpu") for row in _grouped([u for u in uses if u.kind == kind])]
    evaluators = _grouped([use for use in uses if use.kind == "evaluator"])
    above = [ProcessRow(label, use[0].kind, use, 1.75 + 1.18 * i) for i, (label, use) in enumerate(trainers)]
    lane = (above[-1].base if above else 0.2) + 0.85
    below = [ProcessRow(label, use[0].kind, use, lane + 2.2 + 1.18 * i) for i, (label, use) in enumerate(evaluators)]
    bottom = (below[-1].base if below else lane + 0.4) + 0.15
    axis = time_of(clock)
    if window is not None:
        axis = replace(axis, high=clock.position(window[1]), label=f"time since {duration(since)} ({clock.unit})")
    left_margin = LEFT_NARROW if style.narrow else LEFT_MARGIN
    plot = Plot(axis, left_margin, style.width - left_margin - RIGHT, 0.0, bottom * UNIT)
    parts = restarts(run, clock, plot)
    for row in (*above, *below):
        parts += _row(row, clock, plot)
    parts += _captions(above, lane, below, plot)
    checkpoints = [c for c in run.checkpoints if c.written_at is not None and _within(c.written_at, window)]
    works = [work for work in run.works if _within(work.end, window) or _within(work.begin, window)]
    parts += _links(works, run.checkpoints, below, clock, plot, lane)
    parts += _blocks(works, below, clock, plot)
    parts += _checkpoints(checkpoints, clock, plot, lane)
    parts += [line(plot.x0, plot.bottom, plot.right, plot.bottom, "line"), *pauses(axis, plot)]
    parts += time_axis(axis, plot.x0, plot.width, plot.bottom)
    return framed(name, title, description, parts, style.width, plot.bottom + 42)


def close_window(run: RunData) -> tuple[float, float] | None:
    """Choose a window in the middle with a few checkpoints, if the whole run has too many to distinguish; else None."""
    written_times = sorted(c.written_at for c in run.checkpoints if c.written_at is not None)
    if len(written_times) <= 4 * CLOSE_CHECKPOINTS or not run.works:
        return None
    evaluated = sorted({c.written_at for c in run.checkpoints if c.written_at is not None and c.evaluation})
    middle = evaluated[len(evaluated) // 2] if evaluated else written_times[len(written_times) // 2]
    first = int(
        np.clip(
            np.searchsorted(written_times, middle) - CLOSE_CHECKPOINTS // 2, 0, len(written_times) - CLOSE_CHECKPOINTS
        )
    )
    begin, end = written_times[first], written_times[first + CLOSE_CHECKPOINTS - 1]
    margin = 0.12 * (end - begin)
    return begin - margin, end + margin


def at_work(use: Use, generations: Sequence[Generation]) -> Use:
    """Extend the use of a rank or its GPU to the time from each generation's first step to its last line.

    Samples come once or twice a second, and the first and the last of a process are often missing: an unknown value is
    that of the neighbouring sample.
    """
    order = np.argsort(use.time, kind="stable")
    time, busy = use.time[order], use.busy[order]
    for generation in generations if use.kind != "evaluator" else ():
        begin, end = generation.first_step_at, generation.last_line_at
        if begin is None or end is None or (use.name.isdigit() and int(use.name) >= (generation.world_size or np.inf)):
            continue
        finite = np.flatnonzero(np.isfinite(busy) & (time > begin - BESIDE_SECONDS) & (time < end + BESIDE_SECONDS))
        if not len(finite):
            continue
        first, after = int(np.searchsorted(time, begin)), int(np.searchsorted(time, end))
        values = [_use_at(time, busy, finite, time[place], place) for place in range(first, after)]
        # Before the first step the value need not have been the same.
        was = first > 0 and bool(np.isfinite(busy[first - 1]))
        ends = [_use_at(time, busy, finite, begin, first) if was else np.nan, _use_at(time, busy, finite, end, after)]
        busy = np.concatenate([busy[:first], ends[:1], values, ends[1:], busy[after:]])
        time = np.concatenate([time[:first], [begin], time[first:after], [end], time[after:]])
    return Use(use.name, use.kind, time, busy)


def _use_at(time: Floats, busy: Floats, finite: Ints, moment: float, place: int) -> float:
    """The use at a moment: that of the sample at `place`, which describes the time before it, else of the nearest
    sample."""
    if place < len(busy) and np.isfinite(busy[place]):
        return float(busy[place])
    return float(busy[finite[np.argmin(np.abs(time[finite] - moment))]])


def _with_work(run: RunData) -> list[Use]:
    """Rows of all processes with a known use, and of evaluators that are known by their work alone."""
    names = {use.name for use in run.uses if use.kind == "evaluator"}
    nothing = np.empty(0)
    silent = [name for name in dict.fromkeys(work.evaluator for work in run.works) if name not in names]
    return [*run.uses, *(Use(name, "evaluator", nothing, nothing) for name in silent)]


def _grouped(uses: Sequence[Use]) -> list[tuple[str, tuple[Use, ...]]]:
    """Label and processes of each row."""
    if not uses:
        return []
    size = -(-len(uses) // MAX_ROWS)
    rows = [tuple(uses[first : first + size]) for first in range(0, len(uses), size)]
    return [(_label(row), row) for row in rows]


def _label(uses: tuple[Use, ...]) -> str:
    first, last = _short(uses[0]), _short(uses[-1])
    if len(uses) == 1:
        return first
    return f"{first} to {last.removeprefix('rank ').removeprefix('GPU ').removeprefix('evaluator ')}"


def _short(use: Use) -> str:
    name = ascii_name(use.name).removeprefix("evaluator-")[-16:]
    return {"trainer": f"rank {name}", "gpu": f"GPU {name}", "evaluator": f"evaluator {name}"}[use.kind]


def _within(time: float, window: tuple[float, float] | None) -> bool:
    return window is None or window[0] <= time <= window[1]


def _row(row: ProcessRow, clock: Clock, plot: Plot) -> list[str]:
    """Draw a row filled up to the busy cores, with its name and its mean beside it."""
    color = COLORS[row.kind]
    middle = row.foot - 0.42 * UNIT + 4
    parts = [
        line(plot.x0, row.foot, plot.right, row.foot, "line", 0.7),
        text(plot.x0 - 7, middle, row.label, "ink", "end"),
    ]
    samples = [_stretches(use, clock) for use in row.uses if len(use.time)]
    if not samples:
        return parts
    low, high = plot.axis.low, plot.axis.high
    top_value = max(1.0, float(np.ceil(np.nanmax([_usual_top(use) for use in row.uses if len(use.time)]) - 0.15)))
    edges, busy = samples[0] if len(samples) == 1 else _shared(samples, low, high)
    if len(edges) > 900:
        columns = np.linspace(low, high, 500)
        busy = means((edges[:-1] + edges[1:]) / 2, busy, columns)
        edges = columns
    if path := _filled(edges, np.clip(busy / top_value * 0.95, 0, 1), row.foot, plot):
        parts.append(f'<path d="{path}" fill="var(--{color})" fill-opacity="0.72"/>')
    visible = busy[(edges[1:] > low) & (edges[:-1] < high)]
    if np.isfinite(visible).any():
        mean = float(np.nanmean(visible))
        label = share(mean) if row.kind == "gpu" else cores(mean)
        parts.append(text(plot.right + 6, middle, label, color, bold=True, size=11))
    return parts


def _filled(edges: Floats, height: Floats, foot: float, plot: Plot) -> str:
    """Make one path for the whole row: up at the start of each interval, along its values, down at its end."""
    steps: list[str] = []
    is_up = False
    for begin, end, value in zip(edges[:-1], edges[1:], height, strict=True):
        if not np.isfinite(value) or end <= plot.axis.low or begin >= plot.axis.high:
            steps += [f"V{foot:.1f}Z"] if is_up else []
            is_up = False
            continue
        if not is_up:
            steps.append(f"M{plot.x(begin):.1f} {foot:.1f}")
        steps.append(f"V{foot - value * UNIT:.1f}H{plot.x(end):.1f}")
        is_up = True
    return "".join(steps) + (f"V{foot:.1f}Z" if is_up else "")


def _usual_top(use: Use) -> float:
    good = use.busy[np.isfinite(use.busy)]
    return float(np.quantile(good, 0.95)) if len(good) else 0.0


def _stretches(use: Use, clock: Clock) -> tuple[Floats, Floats]:
    """Edges [N+1] and values [N]: each sample describes the time since the one before it."""
    order = np.argsort(use.time, kind="stable")
    time, busy = use.time[order], use.busy[order]
    usual = float(np.median(np.diff(time))) if len(time) > 1 else 1.0
    first = time[:1] - usual
    return clock.axis(np.concatenate([first, time])), busy


def _shared(samples: list[tuple[Floats, Floats]], low: float, high: float) -> tuple[Floats, Floats]:
    """Mean of several processes over columns of the picture."""
    columns = np.linspace(low, high, 400)
    rows = [means((edges[:-1] + edges[1:]) / 2, busy, columns) for edges, busy in samples]
    present = np.isfinite(rows).sum(axis=0)
    total = np.nansum(rows, axis=0)
    return columns, np.where(present > 0, total / np.maximum(1, present), np.nan)


def _captions(above: list[ProcessRow], lane: float, below: list[ProcessRow], plot: Plot) -> list[str]:
    parts = []
    for rows, title in ((above, "TRAINING"), (below, "EVALUATION")):
        if rows:
            y = rows[0].foot - 1.32 * UNIT + 4
            parts.append(text(plot.x0 - 7, y, title, COLORS[rows[0].kind], "end", bold=True, size=11))
    parts.append(text(plot.x0 - 7, lane * UNIT + 4, "checkpoints", "checkpoint", "end"))
    first = (above or below)[0]
    return [*parts, text(plot.right + 6, first.foot - 1.32 * UNIT + 4, "busy", "muted", size=11)]


def _checkpoints(checkpoints: list[RunCheckpoint], clock: Clock, plot: Plot, lane: float) -> list[str]:
    """Draw a diamond for each checkpoint: filled if it was evaluated, empty if not, a cross if it was bad."""
    y = lane * UNIT
    parts = []
    if len(checkpoints) > MAX_DIAMONDS:
        ticks = sorted({round(plot.x(clock.position(c.written_at))) for c in checkpoints if c.written_at is not None})
        parts += [line(x, y - 5, x, y + 5, "checkpoint", 0.8) for x in ticks]
    else:
        for checkpoint in sorted(checkpoints, key=lambda c: bool(c.bad)):
            assert checkpoint.written_at is not None
            group = f'<g transform="translate({plot.x(clock.position(checkpoint.written_at)):.1f} {y:.1f})">'
            if checkpoint.bad:
                shape = '<path d="M-4 -4l8 8m0 -8l-8 8" stroke="var(--alert)" stroke-width="2.2" fill="none"/>'
            else:
                inside = "checkpoint" if checkpoint.evaluation else "paper"
                shape = f'<path d="M0 -5l4 5l-4 5l-4 -5Z" fill="var(--{inside})" stroke="var(--checkpoint)"/>'
            parts.append(f"{group}{shape}</g>")
    places = [plot.x(clock.position(c.written_at)) for c in checkpoints if c.written_at is not None]
    letters = max((len(f"{c.step:,}") for c in checkpoints), default=1)
    labelled = spread(places, SMALL_LETTER * letters + 8)
    return parts + [text(places[i], y - 9, f"{checkpoints[i].step:,}", "muted", "middle", size=10) for i in labelled]


def _blocks(works: list[EvaluationWork], below: list[ProcessRow], clock: Clock, plot: Plot) -> list[str]:
    """Draw a block for each shard that an evaluator worked on, with the step of its checkpoint if there is room.

    Blocks narrower than their outline would cover the row they are in; then none is drawn.
    """
    places = [(plot.x(clock.position(work.begin)), plot.x(clock.position(work.end))) for work in works]
    widths = [end - begin for begin, end in places]
    if not works or (len(works) > MAX_LINKS and np.median(widths) < 0.006 * plot.width):
        return []
    needed = SMALL_LETTER * max(len(f"{work.step:,}") for work in works) + 4
    feet = {use.name: row.foot for row in below for use in row.uses}
    parts = []
    for work, (begin, end) in zip(works, places, strict=True):
        top = feet[work.evaluator] - UNIT
        parts.append(
            f'<rect x="{begin:.1f}" y="{top:.1f}" width="{end - begin:.1f}" height="{UNIT:g}" fill="none" '
            'stroke="var(--evaluator)" stroke-width="0.9"/>'
        )
        if end - begin >= needed:
            parts.append(text((begin + end) / 2, top + 10, f"{work.step:,}", "ink", "middle", size=9.5))
    return parts


def _links(
    works: list[EvaluationWork],
    checkpoints: Sequence[RunCheckpoint],
    below: list[ProcessRow],
    clock: Clock,
    plot: Plot,
    lane: float,
) -> list[str]:
    """Draw a curve from each checkpoint to the blocks in which it was evaluated."""
    if not works or len(works) > MAX_LINKS:
        return []
    feet = {use.name: row.foot for row in below for use in row.uses}
    written_times = {(c.name, c.generation): c.written_at for c in checkpoints if c.written_at is not None}
    parts = []
    for work in works:
        written_at = written_times.get((work.checkpoint, work.generation))
        if written_at is None:
            continue
        x0, x1 = plot.x(clock.position(written_at)), plot.x(clock.position(work.begin))
        y0, y1 = (lane + 0.22) * UNIT, feet[work.evaluator] - UNIT
        bend = 0.55 * (y1 - y0) if y1 - y0 < 1.6 * UNIT else 0.75 * UNIT
        parts.append(
            f'<path d="M{x0:.1f} {y0:.1f}C{x0:.1f} {y0 + bend:.1f} {x1:.1f} {y1 - bend:.1f} {x1:.1f} {y1:.1f}" '
            'stroke="var(--checkpoint)" stroke-width="0.8" stroke-opacity="0.6" fill="none"/>'
        )
    return parts
