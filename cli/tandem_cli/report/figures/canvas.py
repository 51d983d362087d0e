"""What the figures have in common: an empty figure, a time axis, and where the group was restarted."""

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from tandem.charts.chart import Axis
from tandem.charts.palette import LIGHT
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
