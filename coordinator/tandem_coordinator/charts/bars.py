"""Histograms as bars, as SVG text, and as a line of text."""

from bisect import bisect_left
from collections.abc import Mapping
from itertools import accumulate

from tandem.evaluation import Histogram
from tandem.formatting import count_noun, truncate_end
from tandem_coordinator.charts.chart import Viewport
from tandem_coordinator.charts.drawing import framed, line, rectangle, text, ticks, word

MAX_COUNT = 6
"""Maximum number of histograms that are drawn; of more, the first ones."""
MAX_COLUMNS = 3
"""Maximum number of histograms side by side."""
GAP, TITLE, HEIGHT, BELOW = 36.0, 38.0, 110.0, 30.0
"""Pixels between two histograms, for the lines above the bars, for the bars, and for the words below."""
MAX_LENGTH = 32
"""Maximum length of a name, in characters."""
BLOCKS = "▁▂▃▄▅▆▇█"
MAX_BLOCKS = 32
"""Maximum number of blocks in a line of text."""


def draw(
    name: str, title: str, description: str, histograms: Mapping[str, Histogram], viewport: Viewport
) -> str | None:
    """Draw all histograms as one svg element; returns None if there are none.

    Args:
        name: prefix of the ids in it.
        title: what it is.
        description: what it shows, for those who do not see it.
        histograms: by heading.
    """
    selected = list(histograms.items())[:MAX_COUNT]
    if not selected:
        return None
    across = 1 if viewport.narrow else min(MAX_COLUMNS, max(2, len(selected)))
    width = (viewport.width - GAP * (across - 1)) / across
    parts: list[str] = []
    for index, (label, histogram) in enumerate(selected):
        x_left, top = index % across * (width + GAP), index // across * (TITLE + HEIGHT + BELOW)
        parts += _bars(label, histogram, x_left, top, width)
    rows = -(-len(selected) // across)
    return framed(name, title, description, parts, viewport.width, rows * (TITLE + HEIGHT + BELOW))


def describe(histogram: Histogram) -> str:
    """Describe a histogram in a line of text: the number of values, the range of its bins, and quantiles, to the width
    of a bin."""
    values = sum(_counts(histogram))
    low, high = word(_edges(histogram)[0], "number"), word(_edges(histogram)[-1], "number")
    if not values:
        return f"no values from {low} to {high}"
    middle, high_share = (f"{quantile(histogram, share):.3g}" for share in (0.5, 0.9))
    return f"{count_noun(values, 'value')} from {low} to {high}, median {middle}, 90 % below {high_share}"


def sparkline(histogram: Histogram) -> str:
    """Draw a histogram as a line of text: one block for each bin, higher for more values; of many bins, neighbours
    share one."""
    counts = _counts(histogram)
    size = -(-len(counts) // MAX_BLOCKS)
    counts = [sum(counts[start : start + size]) for start in range(0, len(counts), size)]
    highest = max(counts) or 1
    return "".join(" " if not count else BLOCKS[-(-count * len(BLOCKS) // highest) - 1] for count in counts)


def quantile(histogram: Histogram, share: float) -> float:
    """Estimate the value below which that share of the values lies, as if those of a bin were spread evenly over it.

    Args:
        histogram: with at least one value.
        share: 0 to 1.
    """
    counts, edges = _counts(histogram), _edges(histogram)
    sums = list(accumulate(counts))
    target = share * sums[-1]
    place = min(bisect_left(sums, target), len(counts) - 1)
    inside = (target - (sums[place] - counts[place])) / counts[place] if counts[place] else 0.0
    return edges[place] + inside * (edges[place + 1] - edges[place])


def _bars(label: str, histogram: Histogram, x_left: float, top: float, width: float) -> list[str]:
    counts, edges = _counts(histogram), _edges(histogram)
    low, high, highest = edges[0], edges[-1], max(counts) or 1
    y0, foot = top + TITLE, top + TITLE + HEIGHT
    label = truncate_end(label, MAX_LENGTH)
    parts = [
        text(x_left, top + 13, label, "ink", bold=True),
        text(x_left, top + 29, describe(histogram), "muted", size=11),
    ]
    for index, count in enumerate(counts):
        x = x_left + _share(edges[index], low, high) * width
        right = x_left + _share(edges[index + 1], low, high) * width
        if count:
            # A bin with a single value among millions still shows.
            height = max(1.0, count / highest * (foot - y0))
            parts.append(
                rectangle(x, foot - height, max(0.5, right - x - min(1.0, (right - x) / 5)), height, "evaluator")
            )
    parts.append(line(x_left, foot, x_left + width, foot, "line"))
    for tick in ticks(low, high, max(2, int(width / 90))):
        x = x_left + _share(tick, low, high) * width
        parts += [line(x, foot, x, foot + 4, "line"), text(x, foot + 17, word(tick, "number"), "muted", "middle")]
    return parts


def _share(value: float, low: float, high: float) -> float:
    # Halves: the difference of two large floats may be infinite.
    return (value / 2 - low / 2) / (high / 2 - low / 2)


def _counts(histogram: Histogram) -> list[int]:
    return [int(count) for count in histogram.counts]  # type: ignore[call-overload]


def _edges(histogram: Histogram) -> list[float]:
    return [float(edge) for edge in histogram.edges]
