"""Throughput and world size over time, each change of the group marked with its reason, as charts that the live page
has too."""

from itertools import zip_longest

import numpy as np

from tandem.charts.chart import Band, Chart
from tandem.charts.stories import pace
from tandem.formatting import duration, reason
from tandem.measures import outages
from tandem_cli.report.clock import Clock, envelope, smooth, thin
from tandem_cli.report.figures.canvas import MOST_MARKED, time_of
from tandem_cli.report.figures.training import points
from tandem_cli.report.run import Floats, Run

COLUMNS = 420
"""Stretches that throughput is shown in."""


def charts(run: Run, clock: Clock) -> tuple[Chart, ...]:
    """Throughput above world size. None when neither was logged."""
    sizes = _sizes(run)
    if not len(run.rates) and not len(run.world.time) and sizes is None:
        return ()
    time, rate = throughput(run)
    order = np.argsort(time, kind="stable")
    time, rate = _without_outages(time[order], rate[order], run)
    x, spread = clock.axis(time), None
    if len(x) > 2 * COLUMNS:
        spread = points(*envelope(x, rate, COLUMNS))
        mean = smooth(rate, len(x) // COLUMNS * 4)
        x, rate = thin(x, np.where(np.isfinite(rate), mean, np.nan), COLUMNS)
    bands = [
        Band(
            begin=clock.at(outage.begin),
            end=clock.at(outage.end),
            words=(reason(outage.reason) or "restarted", f"{duration(outage.seconds)} without a step"),
        )
        for outage in outages(run.generations)[:MOST_MARKED]
    ]
    ranks = points(clock.axis(sizes[0]), sizes[1]) if sizes is not None else []
    return (pace(points(x, rate), ranks, time_of(clock), bands, spread or ()),)


def throughput(run: Run) -> tuple[Floats, Floats]:
    """Time and samples a second: what trainers measured, else what the coordinator saw."""
    if len(run.rates):
        return run.rates.time, run.rates.throughput
    return run.world.time, run.world.throughput


def _without_outages(time: Floats, rate: Floats, run: Run) -> tuple[Floats, Floats]:
    """Break the line where there were no steps: what a rank writes down late is of the time before."""
    for outage in outages(run.generations):
        inside = (time > outage.begin) & (time < outage.end)
        time, rate = time[~inside], rate[~inside]
        place = int(np.searchsorted(time, outage.begin, side="right"))
        time, rate = np.insert(time, place, outage.begin), np.insert(rate, place, np.nan)
    return time, rate


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
