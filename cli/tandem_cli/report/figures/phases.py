"""The breakdown of training time: data, compute, checkpoints, and the time without steps around restarts."""

import numpy as np

from tandem.formatting import ascii_name, duration, share
from tandem_cli.report.clock import Clock
from tandem_cli.report.figures.axes import Plot, pauses, restarts, time_of
from tandem_cli.report.run import Floats, RunData
from tandem_cli.report.summary import time_by_phase
from tandem_coordinator.charts.chart import Role, Viewport
from tandem_coordinator.charts.drawing import LETTER, framed, line, rectangle, text, time_axis

COLORS: dict[str, Role] = {
    "compute": "trainer",
    "data": "gpu",
    "checkpoint": "checkpoint",
    "restart": "alert",
    "start": "evaluator",
    "other": "line",
}
SPARE: tuple[Role, ...] = ("muted", "other")
"""Colours of phases that have none in COLORS."""

LABELS = {"compute": "in steps", "data": "waiting for data", "checkpoint": "saving"}
"""Labels of phases; others have their own name."""
ORDER = ("compute", "data", "checkpoint")

LEFT_MARGIN, RIGHT_MARGIN = 50.0, 12.0
BAR, HEIGHT, HEIGHT_NARROW = 26.0, 170.0, 150.0
"""Pixels: height of the bar of the whole run, and of the plot over time."""
ENTRY = 18.0
"""Height of a line of the legend, in pixels."""
STRENGTH = 0.85


def draw(name: str, title: str, description: str, run: RunData, clock: Clock, style: Viewport) -> str | None:
    """Draw one bar for the whole run above shares over time, as an SVG element. None if no phases were logged.

    Args:
        name: prefix of the ids in it.
        title: title of the drawing.
        description: description for readers who cannot see it.
    """
    total = time_by_phase(run, clock)
    if not run.rates.phases or not total:
        return None
    parts, y = _bar(total, style)
    shares, y = _shares(run, clock, style, y + 40)
    return framed(name, title, description, [*parts, *shares], style.width, y)


def _colors(names: list[str]) -> dict[str, Role]:
    spare = iter(SPARE * len(names))
    return {name: COLORS[name] if name in COLORS else next(spare) for name in names}


def _bar(total: dict[str, float], style: Viewport) -> tuple[list[str], float]:
    colors, total_seconds = _colors(list(total)), sum(total.values())
    parts: list[str] = []
    x, y = 0.0, ENTRY - 5
    for name, seconds in total.items():
        label = f"{LABELS.get(name, ascii_name(name))} {duration(seconds)} · {share(seconds / total_seconds)}"
        length = 16 + LETTER * len(label) + 18
        if x and x + length > style.width:
            x, y = 0.0, y + ENTRY
        parts += [rectangle(x, y - 10, 10, 10, colors[name]), text(x + 16, y, label, "ink")]
        x += length
    y += 10
    x = 0.0
    for name, seconds in total.items():
        width = style.width * seconds / total_seconds
        parts.append(rectangle(x, y, max(0.0, width - 1), BAR, colors[name]))
        x += width
    return parts, y + BAR


def _shares(run: RunData, clock: Clock, style: Viewport, top: float) -> tuple[list[str], float]:
    names = sorted(run.rates.phases, key=lambda name: (ORDER.index(name) if name in ORDER else 9, name))
    colors = _colors(names)
    edges = np.linspace(0, clock.length or 1.0, (90 if style.narrow else 160) + 1)
    begin, end = clock.axis(run.rates.time - run.rates.seconds), clock.axis(run.rates.time)
    length = _laid(begin, end, run.rates.seconds, edges)
    layers, floor = [], np.zeros(len(edges) - 1)
    for name in names:
        laid = _laid(begin, end, run.rates.phases[name], edges)
        part = np.divide(laid, length, out=np.zeros_like(length), where=length > 0)
        layers.append((colors[name], floor, floor + part))
        floor = floor + part
    axis = time_of(clock)
    height = HEIGHT_NARROW if style.narrow else HEIGHT
    plot = Plot(
        axis,
        LEFT_MARGIN,
        style.width - LEFT_MARGIN - RIGHT_MARGIN,
        top,
        height,
        top_value=max(1.0, min(1.2, float(floor.max()))),
    )
    parts = [text(0, top - 14, "Share of each second", "ink", bold=True)]
    parts += [
        f'<path d="{_stairs(plot, edges, low, high)}" fill="var(--{color})" fill-opacity="{STRENGTH:g}"/>'
        for color, low, high in layers
    ]
    for percent in (0, 25, 50, 75, 100):
        y = plot.y(percent / 100)
        parts += [
            line(LEFT_MARGIN - 4, y, LEFT_MARGIN, y, "line"),
            text(LEFT_MARGIN - 7, y + 4, f"{percent} %", "muted", "end"),
        ]
    parts += restarts(run, clock, plot)
    parts += [line(LEFT_MARGIN, plot.bottom, plot.right, plot.bottom, "line"), *pauses(axis, plot)]
    parts += time_axis(axis, LEFT_MARGIN, plot.width, plot.bottom)
    return parts, plot.bottom + 42


def _stairs(plot: Plot, edges: Floats, low: Floats, high: Floats) -> str:
    """Outline of a layer: along its top to the right, back along its bottom."""
    top = [(edges[i + side], high[i]) for i in range(len(high)) for side in (0, 1)]
    back = [(edges[i + side], low[i]) for i in reversed(range(len(low))) for side in (1, 0)]
    return "M" + "L".join(f"{plot.x(x):.1f} {plot.y(y):.1f}" for x, y in (*top, *back)) + "Z"


def _laid(begin: Floats, end: Floats, amount: Floats, edges: Floats) -> Floats:
    """Distribute amounts evenly over their intervals, and sum them in the columns between the edges."""
    result = np.zeros(len(edges) - 1)
    for low, high, value in zip(begin, end, amount, strict=True):
        if not (high > low and np.isfinite(value)):
            continue
        first = max(0, int(np.searchsorted(edges, low, side="right")) - 1)
        last = min(len(result), int(np.searchsorted(edges, high, side="left")))
        overlap = np.minimum(high, edges[first + 1 : last + 1]) - np.maximum(low, edges[first:last])
        result[first:last] += value * np.maximum(0, overlap) / (high - low)
    return result
