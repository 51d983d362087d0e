"""Numbers, times and curves as people read them."""

import math
from collections.abc import Sequence
from itertools import pairwise

SPARKS = "▁▂▃▄▅▆▇█"


def duration(seconds: float) -> str:
    """`8s`, `1m 12s`, `3h 05m`, `2d 4h`: two units at most."""
    whole = max(0, round(seconds))
    if whole < 60:
        return f"{whole}s"
    if whole < 3600:
        return f"{whole // 60}m {whole % 60:02d}s"
    if whole < 86400:
        return f"{whole // 3600}h {whole % 3600 // 60:02d}m"
    return f"{whole // 86400}d {whole % 86400 // 3600}h"


def number(value: float) -> str:
    """Four digits that matter: `0.0213`, `2.303`, `98.1`, `2 310`; very small ones as `3.1e-06`."""
    if not math.isfinite(value):
        return str(value)
    size = abs(value)
    if size >= 1000:
        return spaced(round(value))
    if size >= 100:
        return f"{value:.0f}"
    if size >= 10:
        return f"{value:.1f}"
    if size >= 1:
        return f"{value:.3f}"
    if size >= 1e-3 or size == 0:
        return f"{value:.4f}"
    return f"{value:.1e}"


def spaced(amount: int) -> str:
    """A count in groups of three: `12 500`."""
    return f"{amount:,}".replace(",", " ")


def count(amount: int, singular: str, plural: str = "") -> str:
    """`no restarts`, `1 restart`, `2 restarts`."""
    return f"{'no' if amount == 0 else amount} {singular if amount == 1 else plural or singular + 's'}"


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
