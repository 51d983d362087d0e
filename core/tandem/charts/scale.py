"""From numbers to places on an axis, and to the words beside it."""

import math
from collections.abc import Iterable
from dataclasses import dataclass

from tandem.charts.chart import Panel, Unit

STEPS = (1.0, 2.0, 2.5, 5.0, 10.0)
"""Distances between ticks, times a power of ten."""
LOGARITHMIC_FROM = 30.0
"""A factor between the lowest and the highest value."""
MOSTLY, DECADES = 0.9, 8
"""So many of the values have to be above 0: a loss that is 0 now and then stands at the foot. And no more than so many
powers of ten are shown."""
LARGEST = 1e300
"""Of larger values the range would be no number."""
MARGIN = 0.07
"""Free room above and below values, as a share of their range."""


@dataclass(frozen=True)
class Scale:
    """An axis of values from `low` to `high`."""

    low: float
    high: float
    logarithmic: bool = False

    def place(self, value: float) -> float:
        """Where a value stands, 0 at `low` and 1 at `high`; what lies outside stands at the edge."""
        if self.logarithmic:
            if value <= 0:
                return 0.0
            share = math.log(value / self.low) / math.log(self.high / self.low)
        else:
            share = (value - self.low) / (self.high - self.low)
        return min(1.0, max(0.0, share))

    @property
    def foot(self) -> float:
        """Where it begins, as `height` says it."""
        return self.height(self.low)

    @property
    def top(self) -> float:
        """Where it ends, as `height` says it."""
        return self.height(self.high)

    def height(self, value: float) -> float:
        """The value, or its logarithm to the base 10: places on the axis are linear in it. What lies outside stands at
        the edge."""
        inside = min(self.high, max(self.low, value))
        return math.log10(inside) if self.logarithmic else inside

    def ticks(self, most: int, whole: bool = False) -> list[float]:
        """Round values inside the scale, at most so many."""
        if not self.logarithmic:
            return ticks(self.low, self.high, most, whole)
        factors = ((1.0,), (1.0, 3.0), (1.0, 2.0, 5.0))
        first, last = math.floor(math.log10(self.low)), math.ceil(math.log10(self.high))
        found: list[float] = []
        for chosen in factors:
            tried = [factor * 10.0**power for power in range(first, last + 1) for factor in chosen]
            tried = [value for value in tried if self.low <= value <= self.high]
            if len(tried) > most and found:
                break
            found = tried
        return found if len(found) <= most else found[:: math.ceil(len(found) / most)]


def of_values(values: Iterable[float], panel: Panel) -> Scale:
    """The scale of a panel that all finite values fit into."""
    good = [min(LARGEST, max(-LARGEST, value)) for value in values if math.isfinite(value)]
    low, high = (min(good), max(good)) if good else (0.0, 1.0)
    above = [value for value in good if value > 0]
    if panel.may_be_logarithmic and len(above) > MOSTLY * len(good):
        lowest = max(min(above), high / 10**DECADES)
        if high > LOGARITHMIC_FROM * lowest:
            return Scale(lowest / 1.15, high * 1.15, logarithmic=True)
    if panel.from_zero:
        return Scale(0.0, high * (1 + 2 * MARGIN) if high > 0 else 1.0)
    room = (high - low) * MARGIN or abs(high) * MARGIN or 1.0
    return Scale(low - room, high + room)


def ticks(low: float, high: float, most: int, whole: bool = False) -> list[float]:
    """Round values from low to high, as many as there is room for, at most `most`."""
    length = high - low
    if not (length > 0 and math.isfinite(length)):
        return [low]
    power = math.floor(math.log10(length / max(1, most)))
    for exponent in range(power, power + 4):
        for step in STEPS:
            distance = step * 10.0**exponent
            if whole and (distance < 1 or distance != int(distance)):
                continue
            first = math.ceil(low / distance - 1e-9)
            last = math.floor(high / distance + 1e-9)
            if last - first + 1 <= most:
                return [round(number * distance, 12) for number in range(first, last + 1)]
    return [low]


def word(value: float, unit: Unit) -> str:
    """A value as it stands beside an axis."""
    if unit == "share":
        return f"{100 * value:.4g} %"
    if value and (abs(value) >= 1e7 or abs(value) < 1e-4):
        return f"{value:.2g}"
    if abs(value) >= 1000 or value == int(value):
        return f"{value:,.0f}"
    return f"{value:.6g}"
