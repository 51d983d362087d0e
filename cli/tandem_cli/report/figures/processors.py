"""The timeline of processor use: trainers above, evaluators below, and each checkpoint's way from one to the other.

Each process has a row filled to its busy cores. Between the two groups lies the lane of checkpoints; a curve leads from
each to the blocks in which evaluators worked on it. What it shows at a glance: training is busy all the time,
evaluators work beside it, and no row of training has a hole where a checkpoint was taken.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from tandem.formatting import cores, duration, plain, share
from tandem.measures import Generation
from tandem_cli.report.clock import Clock, means
from tandem_cli.report.figures.axes import Plot, pauses, restarts, spread, time_of
from tandem_cli.report.run import Floats, Ints, Kind, Run, RunCheckpoint, Use, Work
from tandem_coordinator.charts.chart import Look, Role
from tandem_coordinator.charts.drawing import LETTER, framed, line, text, time_axis

MAX_ROWS = 12
"""Of one kind. More processes than this share rows, each the mean of neighbours."""

MAX_LINKS = 160
"""More curves than this hide what they should show; then the blocks and ticks stand alone."""

MAX_DIAMONDS = 100
"""More checkpoints than this are thin ticks."""

BESIDE_SECONDS = 2.0
"""A sample that is so near to a generation tells of it."""

CLOSE_CHECKPOINTS = 9
"""How many checkpoints a close look shows."""

COLORS: dict[Kind, Role] = {"trainer": "trainer", "gpu": "gpu", "evaluator": "evaluator"}

UNIT = 26.0
"""Pixels of a row's height."""
LEFT, LEFT_NARROW, RIGHT = 112.0, 98.0, 76.0
"""Pixels beside the plot, for the names of rows and their means."""
SMALL_LETTER = LETTER * 0.8


@dataclass(frozen=True)
class ProcessRow:
    """One row of the time line."""

    label: str
    kind: Kind
    uses: tuple[Use, ...]
    """One process, or several that share the row."""
    base: float
    """Where its floor is, in units of a row's height from the top."""

    @property
    def foot(self) -> float:
        """Where its floor is, in pixels."""
        return self.base * UNIT


def draw(
    name: str,
    title: str,
    description: str,
    run: Run,
    clock: Clock,
    look: Look,
    window: tuple[float, float] | None = None,
) -> str | None:
    """The whole run, or the `window` between two times, as an SVG element. None when no processor use and no evaluation
    was logged.

    Args:
        name: prefix of the ids in it.
        title: what it is.
        description: what it shows, for those who do not see it.
    """
    since = clock.at(window[0]) * clock.unit_seconds if window else 0.0
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
        axis = replace(axis, high=clock.at(window[1]), label=f"time since {duration(since)} ({clock.unit})")
    left = LEFT_NARROW if look.narrow else LEFT
    plot = Plot(axis, left, look.width - left - RIGHT, 0.0, bottom * UNIT)
    parts = restarts(run, clock, plot)
    for row in (*above, *below):
        parts += _row(row, clock, plot)
    parts += _captions(above, lane, below, plot)
    shown = [c for c in run.checkpoints if c.at is not None and _within(c.at, window)]
    works = [work for work in run.works if _within(work.end, window) or _within(work.begin, window)]
    parts += _links(works, run.checkpoints, below, clock, plot, lane)
    parts += _blocks(works, below, clock, plot)
    parts += _checkpoints(shown, clock, plot, lane)
    parts += [line(plot.left, plot.bottom, plot.right, plot.bottom, "line"), *pauses(axis, plot)]
    parts += time_axis(axis, plot.left, plot.width, plot.bottom)
    return framed(name, title, description, parts, look.width, plot.bottom + 42)


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
    size = -(-len(uses) // MAX_ROWS)
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


def _within(time: float, window: tuple[float, float] | None) -> bool:
    return window is None or window[0] <= time <= window[1]


def _row(row: ProcessRow, clock: Clock, plot: Plot) -> list[str]:
    """The row filled up to the busy cores, with its name and its mean beside it."""
    color = COLORS[row.kind]
    middle = row.foot - 0.42 * UNIT + 4
    parts = [
        line(plot.left, row.foot, plot.right, row.foot, "line", 0.7),
        text(plot.left - 7, middle, row.label, "ink", "end"),
    ]
    samples = [_stretches(use, clock) for use in row.uses if len(use.time)]
    if not samples:
        return parts
    low, high = plot.axis.low, plot.axis.high
    most = max(1.0, float(np.ceil(np.nanmax([_usual_most(use) for use in row.uses if len(use.time)]) - 0.15)))
    edges, busy = samples[0] if len(samples) == 1 else _shared(samples, low, high)
    if len(edges) > 900:
        columns = np.linspace(low, high, 500)
        busy = means((edges[:-1] + edges[1:]) / 2, busy, columns)
        edges = columns
    if path := _filled(edges, np.clip(busy / most * 0.95, 0, 1), row.foot, plot):
        parts.append(f'<path d="{path}" fill="var(--{color})" fill-opacity="0.72"/>')
    visible = busy[(edges[1:] > low) & (edges[:-1] < high)]
    if np.isfinite(visible).any():
        mean = float(np.nanmean(visible))
        words = share(mean) if row.kind == "gpu" else cores(mean)
        parts.append(text(plot.right + 6, middle, words, color, bold=True, size=11))
    return parts


def _filled(edges: Floats, height: Floats, foot: float, plot: Plot) -> str:
    """One path for the whole row: up at the beginning of each stretch, along its values, down again at its end."""
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


def _captions(above: list[ProcessRow], lane: float, below: list[ProcessRow], plot: Plot) -> list[str]:
    parts = []
    for rows, title in ((above, "TRAINING"), (below, "EVALUATION")):
        if rows:
            y = rows[0].foot - 1.32 * UNIT + 4
            parts.append(text(plot.left - 7, y, title, COLORS[rows[0].kind], "end", bold=True, size=11))
    parts.append(text(plot.left - 7, lane * UNIT + 4, "checkpoints", "checkpoint", "end"))
    first = (above or below)[0]
    return [*parts, text(plot.right + 6, first.foot - 1.32 * UNIT + 4, "busy", "muted", size=11)]


def _checkpoints(shown: list[RunCheckpoint], clock: Clock, plot: Plot, lane: float) -> list[str]:
    """A diamond for each: full when it was evaluated, empty when it was not, a cross when it was bad."""
    y = lane * UNIT
    parts = []
    if len(shown) > MAX_DIAMONDS:
        ticks = sorted({round(plot.x(clock.at(c.at))) for c in shown if c.at is not None})
        parts += [line(x, y - 5, x, y + 5, "checkpoint", 0.8) for x in ticks]
    else:
        for one in sorted(shown, key=lambda c: bool(c.bad)):
            assert one.at is not None
            at = f'<g transform="translate({plot.x(clock.at(one.at)):.1f} {y:.1f})">'
            if one.bad:
                drawn = '<path d="M-4 -4l8 8m0 -8l-8 8" stroke="var(--alert)" stroke-width="2.2" fill="none"/>'
            else:
                inside = "checkpoint" if one.evaluation else "paper"
                drawn = f'<path d="M0 -5l4 5l-4 5l-4 -5Z" fill="var(--{inside})" stroke="var(--checkpoint)"/>'
            parts.append(f"{at}{drawn}</g>")
    places = [plot.x(clock.at(c.at)) for c in shown if c.at is not None]
    letters = max((len(f"{c.step:,}") for c in shown), default=1)
    told = spread(places, SMALL_LETTER * letters + 8)
    return parts + [text(places[i], y - 9, f"{shown[i].step:,}", "muted", "middle", size=10) for i in told]


def _blocks(works: list[Work], below: list[ProcessRow], clock: Clock, plot: Plot) -> list[str]:
    """A block for each piece of an evaluator's work, with the step of its checkpoint where there is room.

    Blocks that are narrower than their outline would cover the row they stand in: then there are none.
    """
    places = [(plot.x(clock.at(work.begin)), plot.x(clock.at(work.end))) for work in works]
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
    works: list[Work],
    checkpoints: Sequence[RunCheckpoint],
    below: list[ProcessRow],
    clock: Clock,
    plot: Plot,
    lane: float,
) -> list[str]:
    """A curve from each checkpoint to the blocks in which it was evaluated."""
    if not works or len(works) > MAX_LINKS:
        return []
    feet = {use.name: row.foot for row in below for use in row.uses}
    taken = {(c.name, c.generation): c.at for c in checkpoints if c.at is not None}
    parts = []
    for work in works:
        at = taken.get((work.checkpoint, work.generation))
        if at is None:
            continue
        x0, x1 = plot.x(clock.at(at)), plot.x(clock.at(work.begin))
        y0, y1 = (lane + 0.22) * UNIT, feet[work.evaluator] - UNIT
        bend = 0.55 * (y1 - y0) if y1 - y0 < 1.6 * UNIT else 0.75 * UNIT
        parts.append(
            f'<path d="M{x0:.1f} {y0:.1f}C{x0:.1f} {y0 + bend:.1f} {x1:.1f} {y1 - bend:.1f} {x1:.1f} {y1:.1f}" '
            'stroke="var(--checkpoint)" stroke-width="0.8" stroke-opacity="0.6" fill="none"/>'
        )
    return parts
