"""Long series made short enough to draw, without losing what a reader would want to see."""

import numpy as np

from tandem_cli.report.run import Floats


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
