"""Throughput and world size over time, each change of the group marked with its reason."""

from itertools import zip_longest

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, MaxNLocator

from tandem.report.clock import Clock
from tandem.report.figures.canvas import empty, restarts, shade_restarts, time_axis
from tandem.report.run import Floats, Run
from tandem.report.series import envelope, smooth, thin
from tandem.report.style import LIGHT, Look
from tandem.report.words import duration, reason


def draw(run: Run, clock: Clock, look: Look) -> Figure | None:
    """Throughput above world size. None when neither was logged."""
    sizes = _sizes(run)
    if not len(run.rates) and not len(run.world.time) and sizes is None:
        return None
    figure = empty(look, 3.7 if look.narrow else 3.9, "Throughput and world size")
    above, below = figure.subplots(2, 1, sharex=True, height_ratios=(2.4, 1))
    _throughput(above, run, clock, look)
    _world(below, sizes, clock)
    for axes in (above, below):
        shade_restarts(axes, run, clock)
    _reasons(above, run, clock, look)
    time_axis(above, clock, label=False)
    time_axis(below, clock)
    return figure


def throughput(run: Run) -> tuple[Floats, Floats]:
    """Time and samples a second: what trainers measured, else what the coordinator saw."""
    if len(run.rates):
        return run.rates.time, run.rates.throughput
    return run.world.time, run.world.throughput


def _throughput(axes: Axes, run: Run, clock: Clock, look: Look) -> None:
    axes.set_title("Throughput (samples/s)", pad=24 if len(run.generations) > 1 else 8)
    time, rate = throughput(run)
    order = np.argsort(time, kind="stable")
    time, rate = _with_gaps(time[order], rate[order], run)
    if len(time):
        x, columns = clock.axis(time), 260 if look.narrow else 420
        long = len(x) > 2 * columns
        color = LIGHT["trainer"]
        if long:
            axes.plot(*envelope(x, rate, columns), color=color, linewidth=0.6, alpha=0.35)
            mean = smooth(rate, len(x) // columns * 4)
            x, rate = thin(x, np.where(np.isfinite(rate), mean, np.nan), columns)
        axes.plot(x, rate, color=color, linewidth=1.5, marker="o" if len(x) == 1 else None)
        axes.fill_between(x, 0, rate, color=color, alpha=0.12, linewidth=0)
    axes.set_ylim(bottom=0)
    axes.margins(y=0.1)
    axes.yaxis.set_major_locator(MaxNLocator(5))
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.0f}" if value >= 10 else f"{value:g}"))


def _with_gaps(time: Floats, rate: Floats, run: Run) -> tuple[Floats, Floats]:
    """Break the line where there were no steps."""
    stops = np.array([stopped for _, stopped, _ in restarts(run)], np.float64)
    places = np.searchsorted(time, stops, side="right")
    return np.insert(time, places, stops), np.insert(rate, places, np.nan)


def _sizes(run: Run) -> tuple[Floats, Floats] | None:
    """World size as a staircase: from what is known of each generation, else from the coordinator's samples."""
    times, sizes = [], []
    for generation, following in zip_longest(run.generations, run.generations[1:]):
        if generation.opened_at is None or generation.world_size is None:
            break
        times.append(generation.opened_at)
        sizes.append(generation.world_size)
        closed = [moment for moment in (generation.closed_at, generation.last_step_at) if moment is not None]
        if following is not None and closed:
            times.append(max(closed))
            sizes.append(0)
    else:
        if times:
            return np.array([*times, run.ended_at]), np.array([*sizes, sizes[-1]], np.float64)
    if not len(run.world.time):
        return None
    changed = np.flatnonzero(np.diff(run.world.size, prepend=-1))
    time = np.append(run.world.time[changed], run.world.time[-1])
    return time, np.append(run.world.size[changed], run.world.size[-1]).astype(np.float64)


def _world(axes: Axes, sizes: tuple[Floats, Floats] | None, clock: Clock) -> None:
    axes.set_title("World size (ranks)")
    largest = 1.0
    if sizes is not None:
        x = clock.axis(sizes[0])
        axes.fill_between(x, 0, sizes[1], step="post", color=LIGHT["trainer"], alpha=0.22, linewidth=0)
        axes.step(x, sizes[1], where="post", color=LIGHT["trainer"], linewidth=1.5)
        largest = max(1.0, float(sizes[1].max()))
    axes.set_ylim(0, 1.15 * largest)
    axes.yaxis.set_major_locator(MaxNLocator(3, integer=True))


def _reasons(axes: Axes, run: Run, clock: Clock, look: Look) -> None:
    length = clock.length or 1.0
    room = length * (0.34 if look.narrow else 0.14)
    free = -np.inf
    for generation, stopped, went_on in restarts(run):
        place = clock.at(went_on)
        late = place + room > 1.01 * length
        begin = place - room if late else place
        if begin < free:
            continue
        free = begin + room
        axes.annotate(
            f"{reason(generation.reason) or 'restarted'}\n{duration(went_on - stopped)} without a step",
            (place, 1),
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
