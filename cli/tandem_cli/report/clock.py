"""The time axis of figures: seconds since the run began, without the stretches in which nothing ran.

A run that was stopped in the evening and went on in the morning would otherwise be two specks at the ends of an empty
axis. A pause is a time in which no process of the run wrote a line; the place where one was cut out is marked.
"""

from dataclasses import dataclass, replace

import numpy as np

from tandem_cli.report.run import Floats

PAUSE_SECONDS = 120.0
"""The coordinator writes every second and evaluators every five: two minutes without a line, and nothing was there."""

UNITS = (("s", 1.0, 240.0), ("min", 60.0, 4 * 3600.0), ("h", 3600.0, 4 * 86400.0), ("days", 86400.0, float("inf")))
"""Name, seconds, and up to which length of an axis it is the one to read in."""


@dataclass(frozen=True)
class Pause:
    """A stretch that was cut out."""

    at: float
    """Where it was, on the axis."""
    seconds: float
    """How long it was."""


@dataclass(frozen=True)
class Clock:
    """Turns times into positions on the axis."""

    real: Floats
    """[K] Ends of the stretches in which the run was going on, seconds since the epoch, ascending."""
    shown: Floats
    """[K] The same on the axis, in units."""
    unit: str
    """s, min, h or days."""
    unit_seconds: float
    """Seconds in a unit."""
    pauses: tuple[Pause, ...]
    """What was cut out."""

    def axis(self, time: Floats) -> Floats:
        """Positions on the axis; inside a pause, the place where it was cut out."""
        return np.interp(time, self.real, self.shown)

    def at(self, time: float) -> float:
        """One position on the axis."""
        return float(np.interp(time, self.real, self.shown))

    def between(self, begin: float, end: float) -> float:
        """Seconds from one time to another in which the run was going on."""
        return max(0.0, self.at(end) - self.at(begin)) * self.unit_seconds

    def since_start(self, time: float) -> float:
        """Seconds from the beginning of the run to a time, in which it was going on."""
        return self.between(float(self.real[0]), time)

    def seen_from(self, time: float, seconds: float) -> "Clock":
        """The same clock with its 0 at `time`, in the unit that suits a window of this length."""
        unit, unit_seconds = _unit(seconds)
        scale = self.unit_seconds / unit_seconds
        pauses = tuple(replace(pause, at=(pause.at - self.at(time)) * scale) for pause in self.pauses)
        return Clock(self.real, (self.shown - self.at(time)) * scale, unit, unit_seconds, pauses)

    @property
    def length(self) -> float:
        """Length of the axis in units."""
        return float(self.shown[-1] - self.shown[0])

    @property
    def seconds(self) -> float:
        """Seconds in which the run was going on."""
        return self.length * self.unit_seconds


def of(marks: Floats) -> Clock:
    """The clock of a run, from the times at which something was logged (ascending)."""
    if len(marks) == 0:
        marks = np.zeros(1)
    gaps = np.diff(marks)
    cuts = np.flatnonzero(gaps > PAUSE_SECONDS)
    # Before each cut, time passed since the beginning less the pauses so far; after it, the same.
    paused = np.concatenate([[0.0], np.cumsum(gaps[cuts])])
    real = np.concatenate([marks[:1], np.column_stack([marks[cuts], marks[cuts + 1]]).ravel(), marks[-1:]])
    shown = real - marks[0] - np.repeat(paused, 2)
    unit, unit_seconds = _unit(float(shown[-1]))
    pauses = tuple(
        Pause(float(at) / unit_seconds, float(length)) for at, length in zip(shown[1:-1:2], gaps[cuts], strict=True)
    )
    return Clock(real, shown / unit_seconds, unit, unit_seconds, pauses)


def _unit(seconds: float) -> tuple[str, float]:
    return next((name, length) for name, length, longest in UNITS if seconds < longest)


def envelope(x: Floats, y: Floats, columns: int) -> tuple[Floats, Floats]:
    """The lowest and the highest value of each of `columns` equal stretches of x, as a zigzag to draw.

    A single spike among a million values stays visible, which it would not in a mean or in every thousandth value.
    `x` ascends. Short series come back as they are; a stretch of NaN alone becomes one NaN, a gap in the line.
    """
    if len(x) <= 2 * columns:
        return x, y
    starts = _starts(x, columns)
    low, high = np.fmin.reduceat(y, starts), np.fmax.reduceat(y, starts)
    middle = (x[starts] + x[np.append(starts[1:], len(x)) - 1]) / 2
    return np.repeat(middle, 2), np.column_stack([low, high]).ravel()


def thin(x: Floats, y: Floats, columns: int) -> tuple[Floats, Floats]:
    """One value of each of `columns` equal stretches of x: for series that are smooth already."""
    if len(x) <= columns:
        return x, y
    starts = _starts(x, columns)
    return x[starts], y[starts]


def smooth(y: Floats, width: int) -> Floats:
    """Mean over the `width` values around each, passing over what is not finite; fewer at the ends."""
    good = np.isfinite(y)
    total = np.concatenate([[0.0], np.cumsum(np.where(good, y, 0.0))])
    count = np.concatenate([[0], np.cumsum(good)])
    index = np.arange(len(y))
    first, last = np.maximum(0, index - width // 2), np.minimum(len(y), index + width // 2 + 1)
    number = count[last] - count[first]
    return np.where(number > 0, (total[last] - total[first]) / np.maximum(1, number), np.nan)


def means(x: Floats, y: Floats, edges: Floats) -> Floats:
    """Mean of the finite y in each stretch between two edges, NaN where there is none."""
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
