"""A series that grows for weeks in bounded memory.

Values are gathered in buckets of equally many; when there are too many buckets, neighbours become one, so that a run of
a minute is shown value by value and one of a month in stretches of minutes. A bucket keeps its lowest and its highest
value: a single spike in a million stays visible, which it would not in means or in every thousandth value.
"""

from collections.abc import Iterable
from dataclasses import dataclass, replace
from math import isfinite

from tandem_coordinator.charts.chart import Point

MAX_BUCKETS = 1000


@dataclass(frozen=True, slots=True)
class Bucket:
    """Some consecutive values."""

    x: float
    """Position of the first value."""
    low: float
    high: float
    total: float
    count: int
    """Number of values; 0: the line is broken here."""

    @property
    def mean(self) -> float | None:
        """Mean of its values; None if it has none."""
        return self.total / self.count if self.count else None


class Series:
    """Values over an ascending position, in at most `max_buckets` buckets."""

    def __init__(self, max_buckets: int = MAX_BUCKETS) -> None:
        self._max_buckets, self._width = max_buckets, 1
        self._buckets: list[Bucket] = []

    def __len__(self) -> int:
        return len(self._buckets)

    @property
    def last(self) -> Bucket | None:
        """The newest bucket."""
        return self._buckets[-1] if self._buckets else None

    def add(self, x: float, y: float | None) -> None:
        """Add a value. None, or a number that is not finite, breaks the line."""
        if y is None or not isfinite(y):
            if self._buckets and self._buckets[-1].count:
                self._buckets.append(Bucket(x, 0.0, 0.0, 0.0, 0))
            return
        last = self.last
        if last is not None and 0 < last.count < self._width:
            self._buckets[-1] = Bucket(
                last.x, min(last.low, y), max(last.high, y), last.total + y, last.count + 1
            )  # fmt: skip
            return
        self._buckets.append(Bucket(x, y, y, y, 1))
        if len(self._buckets) > self._max_buckets:
            self._merge()

    def cut(self, after: float) -> list[Point]:
        """Remove the buckets that begin after a position; returns their means."""
        keep = len(self._buckets)
        while keep and self._buckets[keep - 1].x > after:
            keep -= 1
        removed = self._buckets[keep:]
        del self._buckets[keep:]
        return [(bucket.x, bucket.mean) for bucket in removed]

    def means(self) -> list[Point]:
        """The mean of each bucket."""
        return [(bucket.x, bucket.mean) for bucket in self._buckets]

    def smoothed(self) -> list[Point]:
        """Means over a window around each bucket, a fiftieth of all and at least five; it does not cross a gap."""
        half = max(5, len(self._buckets) // 50) // 2
        means: list[Point] = []
        for stretch in _stretches(self._buckets):
            totals, counts = [0.0], [0]
            for bucket in stretch:
                totals.append(totals[-1] + bucket.total)
                counts.append(counts[-1] + bucket.count)
            for index, bucket in enumerate(stretch):
                first, last = max(0, index - half), min(len(stretch), index + half + 1)
                means.append((bucket.x, (totals[last] - totals[first]) / (counts[last] - counts[first])))
            means.append((stretch[-1].x, None))
        return means[:-1]

    def envelope(self) -> list[Point]:
        """The lowest and the highest value of each bucket, as a zigzag to draw."""
        zigzag: list[Point] = []
        for bucket in self._buckets:
            if not bucket.count:
                zigzag.append((bucket.x, None))
            elif bucket.count == 1:
                zigzag.append((bucket.x, bucket.low))
            else:
                zigzag += [(bucket.x, bucket.low), (bucket.x, bucket.high)]
        return zigzag

    def _merge(self) -> None:
        """Merge each two neighbours into one; a gap stays a gap."""
        merged: list[Bucket] = []
        for stretch in _stretches(self._buckets):
            if merged:
                merged.append(Bucket(stretch[0].x, 0.0, 0.0, 0.0, 0))
            for first, second in zip(stretch[::2], [*stretch[1::2], None], strict=False):
                merged.append(first if second is None else _joined(first, second))
        # A series that is nothing but gaps is cut at its beginning: there is nothing left to merge.
        self._buckets = merged[-self._max_buckets :]
        self._width *= 2


def shorten(points: Iterable[Point], max_points: int) -> list[Point]:
    """Shorten a curve to about `max_points` points, among them the lowest and the highest of each stretch."""
    points = list(points)
    if len(points) <= max_points:
        return points
    size = -(-2 * len(points) // max_points)
    shortened: list[Point] = []
    for first in range(0, len(points), size):
        stretch = points[first : first + size]
        good = [(x, y) for x, y in stretch if y is not None]
        if not good:
            shortened.append((stretch[0][0], None))
            continue
        chosen = {min(good, key=lambda point: point[1]), max(good, key=lambda point: point[1])}
        shortened += sorted(chosen)
    return shortened


def _stretches(buckets: list[Bucket]) -> list[list[Bucket]]:
    """The buckets between gaps."""
    stretches: list[list[Bucket]] = [[]]
    for bucket in buckets:
        if bucket.count:
            stretches[-1].append(bucket)
        elif stretches[-1]:
            stretches.append([])
    return [stretch for stretch in stretches if stretch]


def _joined(first: Bucket, second: Bucket) -> Bucket:
    return replace(
        first,
        low=min(first.low, second.low),
        high=max(first.high, second.high),
        total=first.total + second.total,
        count=first.count + second.count,
    )
