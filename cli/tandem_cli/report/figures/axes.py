"""The axes that pictures of a report share: the run's time, its steps, its restarts and its pauses."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from tandem.formatting import duration
from tandem.wire.measures import outages
from tandem_cli.report.clock import Clock
from tandem_cli.report.run import RunData
from tandem_coordinator.charts.chart import Axis
from tandem_coordinator.charts.drawing import DOTTED, MAX_PAUSES, across, line, rectangle

MAX_MARKED = 400
"""Restarts that are drawn; more are a smear, and the table has them all."""


@dataclass(frozen=True)
class Plot:
    """Pixels of a plot, and the positions of values in it."""

    axis: Axis
    x0: float
    width: float
    top: float
    height: float
    top_value: float = 1.0
    """Value at the top; 0 is at the bottom."""

    @property
    def right(self) -> float:
        """Right edge."""
        return self.x0 + self.width

    @property
    def bottom(self) -> float:
        """Bottom edge."""
        return self.top + self.height

    def x(self, value: float) -> float:
        """Position of a value of the axis; a value outside is at the edge."""
        return self.x0 + across(self.axis).place(value) * self.width

    def y(self, value: float) -> float:
        """Position of a height; one outside is at the edge."""
        return self.bottom - min(1.0, max(0.0, value / self.top_value)) * self.height


def time_of(clock: Clock) -> Axis:
    """Axis of the run's time, from its start to its end."""
    pauses = tuple((pause.position, duration(pause.seconds)) for pause in clock.pauses)
    return Axis(low=0.0, high=clock.length or 1.0, label=f"time ({clock.unit})", pauses=pauses)


def steps_of(run: RunData) -> Axis:
    """Axis of optimizer steps."""
    last = max([*run.model_steps.step[-1:].tolist(), *(c.step for c in run.checkpoints), 1])
    return Axis(low=0.0, high=float(last), label="step", whole=True)


def restarts(run: RunData, clock: Clock, plot: Plot) -> list[str]:
    """Shade the time without steps around each change of the group."""
    parts = []
    for outage in outages(run.generations)[:MAX_MARKED]:
        begin, end = clock.position(outage.begin), clock.position(outage.end)
        if end < plot.axis.low or begin > plot.axis.high:
            continue
        parts.append(rectangle(plot.x(begin), plot.top, plot.x(end) - plot.x(begin), plot.height, "alert", 0.13))
        if end <= plot.axis.high:
            parts.append(line(plot.x(end), plot.top, plot.x(end), plot.bottom, "alert", 0.7, ' stroke-opacity="0.55"'))
    return parts


def pauses(axis: Axis, plot: Plot) -> list[str]:
    """Mark each position at which a pause was cut out; the axis has its length."""
    places = (plot.x(place) for place, _ in axis.pauses[:MAX_PAUSES])
    return [line(x, plot.top, x, plot.bottom, "muted", 0.9, DOTTED) for x in places]


def spread(positions: Sequence[float], distance: float) -> list[int]:
    """Select indices of positions, in their order, that are at least this far apart: those with room for a label."""
    chosen: list[int] = []
    for index in np.argsort(positions, kind="stable").tolist():
        if not chosen or positions[index] - positions[chosen[-1]] >= distance:
            chosen.append(index)
    return chosen
