"""The time axis of figures: seconds since the start of the run, without the periods in which nothing ran.

A run that was stopped in the evening and resumed in the morning would otherwise be two specks at the ends of an empty
axis. A pause is a period in which no process of the run logged anything; its position on the axis is marked.
"""

from dataclasses import dataclass, replace

import numpy as np

from tandem.wire.measures import PAUSE_SECONDS, time_unit
from tandem_cli.report.run import Floats


@dataclass(frozen=True)
class Pause:
    """Period that was cut out."""

    position: float
    """Position on the axis."""
    seconds: float
    """Length in seconds."""


@dataclass(frozen=True)
class Clock:
    """Converts times to positions on the axis."""

    real: Floats
    """[K] Ends of the periods in which the run was active, in seconds since the epoch, ascending."""
    axis_positions: Floats
    """[K] The corresponding positions on the axis, in units."""
    unit: str
    """s, min, h or days."""
    unit_seconds: float
    """Seconds of a unit."""
    pauses: tuple[Pause, ...]
    """Periods that were cut out."""

    def axis(self, time: Floats) -> Floats:
        """Convert times to positions; inside a pause, the position where it was cut out."""
        return np.interp(time, self.real, self.axis_positions)

    def position(self, time: float) -> float:
        """Convert one time to its position."""
        return float(np.interp(time, self.real, self.axis_positions))

    def between(self, begin: float, end: float) -> float:
        """Seconds between two times in which the run was active."""
        return max(0.0, self.position(end) - self.position(begin)) * self.unit_seconds

    def since_start(self, time: float) -> float:
        """Seconds from the start of the run to a time, in which it was active."""
        return self.between(float(self.real[0]), time)

    def seen_from(self, time: float, seconds: float) -> "Clock":
        """A clock with its 0 at `time`, in the unit that suits a window of this length."""
        unit, unit_seconds = time_unit(seconds)
        scale = self.unit_seconds / unit_seconds
        pauses = tuple(replace(pause, position=(pause.position - self.position(time)) * scale) for pause in self.pauses)
        return Clock(self.real, (self.axis_positions - self.position(time)) * scale, unit, unit_seconds, pauses)

    @property
    def length(self) -> float:
        """Length of the axis, in units."""
        return float(self.axis_positions[-1] - self.axis_positions[0])

    @property
    def seconds(self) -> float:
        """Seconds in which the run was active."""
        return self.length * self.unit_seconds


def make_clock(marks: Floats) -> Clock:
    """Make the clock of a run from the times at which something was logged (ascending)."""
    if len(marks) == 0:
        marks = np.zeros(1)
    gaps = np.diff(marks)
    cuts = np.flatnonzero(gaps > PAUSE_SECONDS)
    # A pause has no length on the axis: both of its ends lie at the time since the start less the pauses before.
    paused = np.concatenate([[0.0], np.cumsum(gaps[cuts])])
    real = np.concatenate([marks[:1], np.column_stack([marks[cuts], marks[cuts + 1]]).ravel(), marks[-1:]])
    positions = real - marks[0] - np.repeat(paused, 2)
    unit, unit_seconds = time_unit(float(positions[-1]))
    pauses = tuple(
        Pause(float(cut) / unit_seconds, float(length))
        for cut, length in zip(positions[1:-1:2], gaps[cuts], strict=True)
    )
    return Clock(real, positions / unit_seconds, unit, unit_seconds, pauses)


def envelope(x: Floats, y: Floats, columns: int) -> tuple[Floats, Floats]:
    """Reduce a series to the lowest and the highest value of each of `columns` equal intervals of x, as a zigzag to
    draw.

    A single spike among a million values stays visible, which it would not in a mean or in every thousandth value. `x`
    ascends. Short series are returned unchanged; an interval of NaN alone becomes one NaN, a gap in the line.
    """
    if len(x) <= 2 * columns:
        return x, y
    starts = _starts(x, columns)
    low, high = np.fmin.reduceat(y, starts), np.fmax.reduceat(y, starts)
    middle = (x[starts] + x[np.append(starts[1:], len(x)) - 1]) / 2
    return np.repeat(middle, 2), np.column_stack([low, high]).ravel()


def thin(x: Floats, y: Floats, columns: int) -> tuple[Floats, Floats]:
    """Reduce a series to one value of each of `columns` equal intervals of x, for series that are already smooth."""
    if len(x) <= columns:
        return x, y
    starts = _starts(x, columns)
    return x[starts], y[starts]


def smooth(y: Floats, width: int) -> Floats:
    """Compute the mean over the `width` values around each value, ignoring values that are not finite; fewer at the
    ends."""
    good = np.isfinite(y)
    total = np.concatenate([[0.0], np.cumsum(np.where(good, y, 0.0))])
    count = np.concatenate([[0], np.cumsum(good)])
    index = np.arange(len(y))
    first, last = np.maximum(0, index - width // 2), np.minimum(len(y), index + width // 2 + 1)
    number = count[last] - count[first]
    return np.where(number > 0, (total[last] - total[first]) / np.maximum(1, number), np.nan)


def means(x: Floats, y: Floats, edges: Floats) -> Floats:
    """Compute the mean of the finite y between each two edges, NaN if there is none."""
    good = np.isfinite(x) & np.isfinite(y)
    place = np.searchsorted(edges, x[good], side="right") - 1
    inside = (place >= 0) & (place < len(edges) - 1)
    count = np.bincount(place[inside], minlength=len(edges) - 1)
    total = np.bincount(place[inside], weights=y[good][inside], minlength=len(edges) - 1)
    return np.where(count > 0, total / np.maximum(1, count), np.nan)


def _starts(x: Floats, columns: int) -> "np.typing.NDArray[np.intp]":
    length = max(float(x[-1] - x[0]), np.finfo(float).tiny)
    column = np.minimum(columns - 1, ((x - x[0]) / length * columns).astype(np.int64))
    return np.flatnonzero(np.diff(column, prepend=-1))
