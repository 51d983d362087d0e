"""A curve in one line of text."""

import math
from collections.abc import Sequence
from itertools import pairwise

SPARKS = "▁▂▃▄▅▆▇█"


def sparkline(values: Sequence[float], width: int) -> str:
    """A curve of at most `width` characters, on a logarithmic scale where all values are positive.

    Losses fall by powers of ten; on a linear scale everything after the first seconds is one flat line.
    """
    values = [value for value in values if math.isfinite(value)]
    if len(values) < 2 or width < 2:
        return ""
    cells = min(width, len(values))
    edges = [round(index * len(values) / cells) for index in range(cells + 1)]
    means = [math.fsum(values[a:b]) / (b - a) for a, b in pairwise(edges)]
    if min(means) > 0:
        means = [math.log(mean) for mean in means]
    low, high = min(means), max(means)
    if high - low < 1e-12:
        return SPARKS[0] * cells
    return "".join(SPARKS[round((mean - low) / (high - low) * (len(SPARKS) - 1))] for mean in means)
