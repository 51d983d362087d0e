"""The axes that pictures of a report share: the run's time, its steps, restarts and pauses."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from tandem.formatting import duration
from tandem.measures import outages
from tandem_cli.report.clock import Clock
from tandem_cli.report.run import Run
from tandem_coordinator.charts.chart import Axis
from tandem_coordinator.charts.drawing import DOTTED, MAX_PAUSES, across, line, rectangle

MAX_MARKED = 400
"""More restarts than this are a smear; the table has them all."""


@dataclass(frozen=True)
class Plot:
    """The pixels of a plot, and where values lie in it."""

    axis: Axis
    left: float
    width: float
    top: float
    height: float
    most: float = 1.0
    """The value at the top; 0 is at the foot."""

    @property
    def right(self) -> float:
        """Where it ends."""
        return self.left + self.width

    @property
    def bottom(self) -> float:
        """Its foot."""
        return self.top + self.height

    def x(self, value: float) -> float:
        """Where a value of the axis lies; one outside lies at the edge."""
        return self.left + across(self.axis).place(value) * self.width

    def y(self, value: float) -> float:
        """Where a height lies; one outside lies at the edge."""
        return self.bottom - min(1.0, max(0.0, value / self.most)) * self.height


def time_of(clock: Clock) -> Axis:
    """The axis of the run's time, from its beginning to its end."""
    pauses = tuple((pause.at, duration(pause.seconds)) for pause in clock.pauses)
    return Axis(low=0.0, high=clock.length or 1.0, label=f"time ({clock.unit})", pauses=pauses)


def steps_of(run: Run) -> Axis:
    """The axis of optimizer steps."""
    last = max([*run.counted.step[-1:].tolist(), *(c.step for c in run.checkpoints), 1])
    return Axis(low=0.0, high=float(last), label="step", whole=True)


def restarts(run: Run, clock: Clock, plot: Plot) -> list[str]:
    """The time without steps around each change of the group, shaded."""
    parts = []
    for outage in outages(run.generations)[:MAX_MARKED]:
        begin, end = clock.at(outage.begin), clock.at(outage.end)
        if end < plot.axis.low or begin > plot.axis.high:
            continue
        parts.append(rectangle(plot.x(begin), plot.top, plot.x(end) - plot.x(begin), plot.height, "alert", 0.13))
        if end <= plot.axis.high:
            parts.append(line(plot.x(end), plot.top, plot.x(end), plot.bottom, "alert", 0.7, ' stroke-opacity="0.55"'))
    return parts


def pauses(axis: Axis, plot: Plot) -> list[str]:
    """A line wherever a time in which nothing ran was cut out; the axis says how long it was."""
    places = (plot.x(place) for place, _ in axis.pauses[:MAX_PAUSES])
    return [line(x, plot.top, x, plot.bottom, "muted", 0.9, DOTTED) for x in places]


def spread(positions: Sequence[float], distance: float) -> list[int]:
    """Indices of positions, in their order, that are at least so far apart: the ones there is room to label."""
    chosen: list[int] = []
    for index in np.argsort(positions, kind="stable").tolist():
        if not chosen or positions[index] - positions[chosen[-1]] >= distance:
            chosen.append(index)
    return chosen
