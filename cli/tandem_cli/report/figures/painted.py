"""Charts as a matplotlib figure, for PNG files; and what all figures share: an empty figure, a time axis, restarts."""

from collections.abc import Sequence
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, MaxNLocator

from tandem.charts import drawing
from tandem.charts.chart import LIGHT, Axis, Chart, Curve, Panel
from tandem.formatting import duration
from tandem.measures import outages
from tandem_cli.report.clock import Clock
from tandem_cli.report.run import Run
from tandem_cli.report.style import Theme

MOST_MARKED = 400
"""More restarts than this are a smear; the table has them all."""


def empty(look: Theme, height: float, title: str) -> Figure:
    """A figure of a height in inches; with its title where the page around it does not say it."""
    figure = Figure(figsize=(look.width, height + (0.35 if look.titled else 0)))
    if look.titled:
        figure.suptitle(title, x=0.008, ha="left", fontsize=13, fontweight="bold")
    return figure


def time_axis(axes: Axes, clock: Clock, label: bool = True) -> None:
    """Make x the run's time, from its beginning to its end, with a mark where a pause was cut out."""
    length = clock.length or 1.0
    axes.set_xlim(-0.005 * length, 1.005 * length)
    axes.xaxis.set_major_locator(MaxNLocator(8, min_n_ticks=3))
    if label:
        axes.set_xlabel(f"time ({clock.unit})")
    for pause in clock.pauses:
        axes.axvline(pause.at, color=LIGHT["muted"], linewidth=0.9, linestyle=(0, (1, 2)), zorder=1)
    if label:
        for pause in clock.pauses[:12]:
            axes.annotate(
                f"{duration(pause.seconds)} pause",
                (pause.at, 0),
                xycoords=("data", "axes fraction"),
                xytext=(3, 4),
                textcoords="offset points",
                fontsize=7,
                color=LIGHT["muted"],
            )


def time_of(clock: Clock) -> Axis:
    """The same axis for a chart."""
    pauses = tuple((pause.at, duration(pause.seconds)) for pause in clock.pauses)
    return Axis(low=0.0, high=clock.length or 1.0, label=f"time ({clock.unit})", pauses=pauses)


def steps_of(run: Run) -> Axis:
    """The axis of optimizer steps, for a chart."""
    last = max([*run.counted.step[-1:].tolist(), *(c.step for c in run.checkpoints), 1])
    return Axis(low=0.0, high=float(last), label="step", whole=True)


def shade_restarts(axes: Axes, run: Run, clock: Clock) -> None:
    """Shade the time without steps around each change of the group."""
    for outage in outages(run.generations)[:MOST_MARKED]:
        begin, end = clock.at(outage.begin), clock.at(outage.end)
        axes.axvspan(begin, end, color=LIGHT["alert"], alpha=0.13, linewidth=0, zorder=0)
        axes.axvline(end, color=LIGHT["alert"], linewidth=0.7, alpha=0.55, zorder=0)


def spread(positions: list[float], distance: float) -> list[int]:
    """Indices of positions, in their order, that are at least so far apart: the ones there is room to label."""
    chosen: list[int] = []
    for index in np.argsort(positions, kind="stable").tolist():
        if not chosen or positions[index] - positions[chosen[-1]] >= distance:
            chosen.append(index)
    return chosen


PANEL_INCHES = 2.35
STYLES: dict[str, dict[str, Any]] = {
    "line": {},
    "spread": {},
    "stairs": {"drawstyle": "steps-post"},
    "dots": {"marker": "o", "markersize": 3.6},
    "star": {"marker": "*", "markersize": 13, "linestyle": "none", "mec": LIGHT["paper"], "mew": 0.8, "zorder": 5},
}


def draw(charts: Sequence[Chart], look: Theme, title: str) -> Figure:
    """All charts side by side, on a narrow figure one below the other."""
    heights = [panel.height for panel in charts[0].panels]
    across = 1 if look.narrow else len(charts)
    columns = heights * (len(charts) // across)
    figure = empty(look, PANEL_INCHES * sum(columns) + 0.4, title)
    grid = figure.subplots(len(columns), across, squeeze=False, height_ratios=columns)
    for number, chart in enumerate(charts):
        for place, panel in enumerate(chart.panels):
            row = place + (number * len(heights) if look.narrow else 0)
            _panel(grid[row, 0 if look.narrow else number], panel, chart.axis, last=place == len(heights) - 1)
    return figure


def _panel(axes: Axes, panel: Panel, axis: Axis, last: bool) -> None:
    reasons = any(band.words for band in panel.bands)
    axes.set_title(panel.title, pad=24 if reasons else 8)
    if panel.aside:
        axes.set_title(panel.aside, loc="right", color=LIGHT["checkpoint"], fontsize=9)
    for curve in panel.curves:
        _curve(axes, curve)
    values = drawing.of_values((y for curve in panel.curves for _, y in curve.points if y is not None), panel)
    if values.logarithmic:
        axes.set_yscale("log")
        axes.yaxis.set_minor_formatter(FuncFormatter(lambda *_: ""))
        axes.tick_params(axis="y", which="minor", length=0)
    else:
        axes.yaxis.set_major_locator(MaxNLocator(5, integer=panel.unit == "count"))
    axes.set_ylim(values.low, values.high)
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: drawing.word(value, panel.unit)))
    _bands(axes, panel, axis)
    if panel.flags:
        feet: dict[str, Any] = {
            "transform": axes.get_xaxis_transform(),
            "color": LIGHT["alert"],
            "markersize": 5,
            "label": panel.flag,
        }
        axes.plot(panel.flags, np.full(len(panel.flags), 0.03), "x", **feet)
    handles, labels = axes.get_legend_handles_labels()
    if labels:
        known = dict(zip(labels, handles, strict=True))
        axes.legend(known.values(), known.keys(), loc="best")
    _across(axes, axis, last)


def _curve(axes: Axes, curve: Curve) -> None:
    if not curve.points:
        return
    x = np.array([x for x, _ in curve.points], np.float64)
    y = np.array([np.nan if y is None else y for _, y in curve.points], np.float64)
    style = {"linewidth": curve.width, "alpha": curve.strength, "label": curve.label or None, **STYLES[curve.kind]}
    if curve.dashed:
        style |= {"linestyle": "--"}
    if not curve.width:
        style |= {"linestyle": "none", "mfc": "none"}
    color = LIGHT[curve.color]
    axes.plot(x, y, color=color, **style)
    if curve.filled:
        axes.fill_between(
            x, 0, y, step="post" if curve.kind == "stairs" else None, color=color, alpha=0.13, linewidth=0
        )  # fmt: skip


def _bands(axes: Axes, panel: Panel, axis: Axis) -> None:
    free, length = axis.low, (axis.high - axis.low) or 1.0
    for band in panel.bands:
        axes.axvspan(band.begin, band.end, color=LIGHT["alert"], alpha=0.13, linewidth=0, zorder=0)
        axes.axvline(band.end, color=LIGHT["alert"], linewidth=0.7, alpha=0.55, zorder=0)
        room = length * 0.14
        late = band.end + room > axis.high
        begin = band.end - room if late else band.end
        if not band.words or begin < free:
            continue
        free = begin + room
        axes.annotate(
            "\n".join(band.words),
            (band.end, 1),
            xycoords=("data", "axes fraction"),
            xytext=(0, 3),
            textcoords="offset points",
            ha="right" if late else "left",
            va="bottom",
            fontsize=7.5,
            linespacing=1.25,
            color=LIGHT["alert"],
            annotation_clip=False,
        )


def _across(axes: Axes, axis: Axis, last: bool) -> None:
    room = 0.01 * ((axis.high - axis.low) or 1.0)
    axes.set_xlim(axis.low - room, axis.high + room)
    axes.xaxis.set_major_locator(MaxNLocator(6, min_n_ticks=3, integer=axis.whole))
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: drawing.word(value, "number")))
    for place, words in axis.pauses[:12]:
        axes.axvline(place, color=LIGHT["muted"], linewidth=0.9, linestyle=(0, (1, 2)), zorder=1)
        if last:
            at: dict[str, Any] = {
                "xycoords": ("data", "axes fraction"),
                "xytext": (3, 4),
                "textcoords": "offset points",
            }
            axes.annotate(f"{words} pause", (place, 0), fontsize=7, color=LIGHT["muted"], **at)
    if last:
        axes.set_xlabel(axis.label)
