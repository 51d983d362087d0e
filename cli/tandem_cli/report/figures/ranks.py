"""What each rank tells of itself over time, as a chart that the live page has too."""

import numpy as np

from tandem.charts import stories
from tandem.charts.chart import Band, Chart, Point
from tandem.charts.stories import Ranks
from tandem.measures import outages
from tandem_cli.report.clock import Clock, thin
from tandem_cli.report.figures.canvas import time_of
from tandem_cli.report.figures.training import points
from tandem_cli.report.run import OfRank, Run

COLUMNS = 420
"""Stretches that a series is shown in."""


def charts(run: Run, clock: Clock) -> tuple[Chart, ...]:
    """Throughput by rank, the ranks' own work and GPU memory. None where nothing was logged of them."""
    world = run.world
    rate = np.where(world.size > 0, world.throughput / np.maximum(1, world.size), np.nan)
    known = Ranks(
        throughput=points(*thin(clock.axis(world.time), rate, COLUMNS)),
        busy={one.rank: _over_time(one, clock, 1e-3) for one in run.busy},
        memory={one.rank: _over_time(one, clock, 1e9) for one in run.memory},
    )
    shaded = [Band(begin=clock.at(one.begin), end=clock.at(one.end)) for one in outages(run.generations)]
    story = stories.ranks(known, time_of(clock), shaded)
    return () if story is None else (story,)


def _over_time(one: OfRank, clock: Clock, unit: float) -> list[Point]:
    return points(*thin(clock.axis(one.time), one.value / unit, COLUMNS))
