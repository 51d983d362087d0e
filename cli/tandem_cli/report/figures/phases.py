"""The breakdown of training time: data, compute, checkpoints, and the time without steps around restarts."""

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter

from tandem.charts.chart import LIGHT
from tandem.formatting import duration, plain, share
from tandem_cli.report.clock import Clock
from tandem_cli.report.figures.painted import empty, shade_restarts, time_axis
from tandem_cli.report.run import Floats, Run
from tandem_cli.report.style import Theme
from tandem_cli.report.summary import time_by_phase

COLORS = {
    "compute": LIGHT["trainer"],
    "data": LIGHT["gpu"],
    "checkpoint": LIGHT["checkpoint"],
    "restart": LIGHT["alert"],
    "start": LIGHT["evaluator"],
    "other": LIGHT["line"],
}
SPARE = (LIGHT["muted"], LIGHT["other"])
"""For phases that are not known by name here."""

WORDS = {"compute": "in steps", "data": "waiting for data", "checkpoint": "saving"}
"""What a phase is called; others by their own name."""
ORDER = ("compute", "data", "checkpoint")


def draw(run: Run, clock: Clock, look: Theme) -> Figure | None:
    """One bar for the whole run above shares over time. None when no phases were logged."""
    total = time_by_phase(run)
    if not run.rates.phases or not total:
        return None
    figure = empty(look, 3.9 if look.narrow else 3.4, "Where training's time went")
    bar, over_time = figure.subplots(2, 1, height_ratios=(1, 3.4))
    _bar(bar, total, look)
    _shares(over_time, run, clock, look)
    return figure


def _colors(names: list[str]) -> dict[str, str]:
    spare = iter(SPARE * len(names))
    return {name: COLORS.get(name) or next(spare) for name in names}


def _bar(axes: Axes, total: dict[str, float], look: Theme) -> None:
    colors, whole, left = _colors(list(total)), sum(total.values()), 0.0
    for name, seconds in total.items():
        axes.barh(
            0,
            seconds,
            left=left,
            color=colors[name],
            height=0.8,
            edgecolor=LIGHT["paper"],
            linewidth=0.8,
            label=f"{WORDS.get(name, plain(name))} {duration(seconds)} · {share(seconds / whole)}",
        )
        left += seconds
    axes.set_xlim(0, whole)
    axes.axis("off")
    axes.legend(
        loc="lower left",
        bbox_to_anchor=(-0.005, 1.0),
        ncols=2 if look.narrow else 6,
        handlelength=0.9,
        handleheight=0.9,
        columnspacing=1.4,
    )


def _shares(axes: Axes, run: Run, clock: Clock, look: Theme) -> None:
    names = sorted(run.rates.phases, key=lambda name: (ORDER.index(name) if name in ORDER else 9, name))
    colors = _colors(names)
    edges = np.linspace(0, clock.length or 1.0, (90 if look.narrow else 160) + 1)
    begin, end = clock.axis(run.rates.time - run.rates.seconds), clock.axis(run.rates.time)
    length = _laid(begin, end, run.rates.seconds, edges)
    floor = np.zeros(len(edges))
    for name in names:
        share = np.divide(
            _laid(begin, end, run.rates.phases[name], edges), length, out=np.zeros_like(length), where=length > 0
        )
        top = floor + np.append(share, share[-1:])
        axes.fill_between(edges, floor, top, step="post", color=colors[name], alpha=0.85, linewidth=0)
        floor = top
    shade_restarts(axes, run, clock)
    time_axis(axes, clock)
    axes.set_ylim(0, max(1.0, min(1.2, float(floor.max()))))
    axes.set_title("Share of each second")
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{100 * value:.0f} %"))


def _laid(begin: Floats, end: Floats, amount: Floats, edges: Floats) -> Floats:
    """Amounts, each spread evenly over its stretch, summed up in the columns between the edges."""
    result = np.zeros(len(edges) - 1)
    for low, high, value in zip(begin, end, amount, strict=True):
        if not (high > low and np.isfinite(value)):
            continue
        first = max(0, int(np.searchsorted(edges, low, side="right")) - 1)
        last = min(len(result), int(np.searchsorted(edges, high, side="left")))
        overlap = np.minimum(high, edges[first + 1 : last + 1]) - np.maximum(low, edges[first:last])
        result[first:last] += value * np.maximum(0, overlap) / (high - low)
    return result
