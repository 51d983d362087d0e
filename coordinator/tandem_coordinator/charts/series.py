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
    """Some values in a row."""

    x: float
    """Of the first."""
    low: float
    high: float
    total: float
    count: int
    """How many; 0: the line is broken here."""

    @property
    def mean(self) -> float | None:
        """Of its values."""
        return self.total / self.count if self.count else None


class Series:
    """Values over something that ascends, in at most `most` buckets."""

    def __init__(self, most: int = MAX_BUCKETS) -> None:
        self._most, self._width = most, 1
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
        if len(self._buckets) > self._most:
            self._merge()

    def cut(self, after: float) -> list[Point]:
        """Take away what begins after a place, and return the means of that."""
        keep = len(self._buckets)
        while keep and self._buckets[keep - 1].x > after:
            keep -= 1
        gone = self._buckets[keep:]
        del self._buckets[keep:]
        return [(bucket.x, bucket.mean) for bucket in gone]

    def means(self) -> list[Point]:
        """The mean of each bucket."""
        return [(bucket.x, bucket.mean) for bucket in self._buckets]

    def smoothed(self, share: float = 0.02, least: int = 5) -> list[Point]:
        """Means over a window of so large a share of the whole around each bucket; it does not reach over a gap."""
        half = max(least, int(len(self._buckets) * share)) // 2
        found: list[Point] = []
        for stretch in _stretches(self._buckets):
            totals, counts = [0.0], [0]
            for bucket in stretch:
                totals.append(totals[-1] + bucket.total)
                counts.append(counts[-1] + bucket.count)
            for index, bucket in enumerate(stretch):
                first, last = max(0, index - half), min(len(stretch), index + half + 1)
                found.append((bucket.x, (totals[last] - totals[first]) / (counts[last] - counts[first])))
            found.append((stretch[-1].x, None))
        return found[:-1]

    def envelope(self) -> list[Point]:
        """The lowest and the highest value of each bucket, as a zigzag to draw."""
        found: list[Point] = []
        for bucket in self._buckets:
            if not bucket.count:
                found.append((bucket.x, None))
            elif bucket.count == 1:
                found.append((bucket.x, bucket.low))
            else:
                found += [(bucket.x, bucket.low), (bucket.x, bucket.high)]
        return found

    def _merge(self) -> None:
        """Two neighbours become one; a gap stays one."""
        merged: list[Bucket] = []
        for stretch in _stretches(self._buckets):
            if merged:
                merged.append(Bucket(stretch[0].x, 0.0, 0.0, 0.0, 0))
            for one, other in zip(stretch[::2], [*stretch[1::2], None], strict=False):
                merged.append(one if other is None else _joined(one, other))
        # A series that is nothing but gaps is cut at its beginning: there is nothing left to merge.
        self._buckets = merged[-self._most :]
        self._width *= 2


def shorten(points: Iterable[Point], most: int) -> list[Point]:
    """At most about `most` points, the lowest and the highest of each stretch among them."""
    points = list(points)
    if len(points) <= most:
        return points
    size = -(-2 * len(points) // most)
    found: list[Point] = []
    for first in range(0, len(points), size):
        stretch = points[first : first + size]
        good = [(x, y) for x, y in stretch if y is not None]
        if not good:
            found.append((stretch[0][0], None))
            continue
        chosen = {min(good, key=lambda point: point[1]), max(good, key=lambda point: point[1])}
        found += sorted(chosen)
    return found


def _stretches(buckets: list[Bucket]) -> list[list[Bucket]]:
    """The buckets between gaps."""
    found: list[list[Bucket]] = [[]]
    for bucket in buckets:
        if bucket.count:
            found[-1].append(bucket)
        elif found[-1]:
            found.append([])
    return [stretch for stretch in found if stretch]


def _joined(one: Bucket, other: Bucket) -> Bucket:
    return replace(
        one,
        low=min(one.low, other.low),
        high=max(one.high, other.high),
        total=one.total + other.total,
        count=one.count + other.count,
    )
