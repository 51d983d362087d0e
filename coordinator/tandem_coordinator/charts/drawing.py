"""Charts as SVG text.

Every colour is a CSS variable of `chart`, everything that comes from a run is escaped, and no element
has a style of its own: a page may forbid inline styles altogether. A drawing has no more points than pixels have a use
for, however long the series is.

A curve's path is written in the values that it shows, of a logarithmic axis in their logarithms, and a matrix takes
them to pixels. So `charts.js`, which both pages run, reads exact values off the drawing and enlarges a part of it by
another matrix, and needs no second copy of the points. What it looks for are the classes and the `data-` attributes.
"""

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from html import escape
from itertools import pairwise

from tandem_coordinator.charts.chart import Axis, Band, Chart, Curve, Look, Panel, Point, Role, Unit
from tandem_coordinator.charts.series import shorten

STEPS = (1.0, 2.0, 2.5, 5.0, 10.0)
"""Distances between ticks, times a power of ten."""
LOGARITHMIC_FROM = 30.0
"""A factor between the lowest and the highest value."""
MOSTLY, DECADES = 0.9, 8
"""The share of values that must be above 0, as a loss may be 0 now and then, which is drawn at the foot; and the most
powers of ten that are shown."""
MAX_SIZE = 1e300
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
        """At most `most` round values inside the scale."""
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
    good = [min(MAX_SIZE, max(-MAX_SIZE, value)) for value in values if math.isfinite(value)]
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


LEFT, RIGHT, GAP = 50.0, 12.0, 36.0
"""Pixels beside a panel, for the words of its axis, and between columns."""
TITLE, LEGEND, REASONS, BELOW, FOOT = 20.0, 17.0, 28.0, 26.0, 20.0
"""Pixels of the lines around a panel: its title, a line of its legend, of the reasons, its ticks, the axis' name."""
SMALL = 12.0
"""Size of the type."""
LETTER = 6.3
"""Pixels that a letter of that size takes, about."""
MAX_POINTS_A_PIXEL = 1.5
MAX_BANDS = 300
"""More are a smear; the tables have them all."""
MIN_DIGITS, FINENESS = 5, 5000
"""Fewest digits of a value in a path; enough that two neighbouring pixels of its axis differ."""
MAX_PAUSES = 12
"""More have no line."""
DOTTED = ' stroke-dasharray="1 3"'
DASHED = ' stroke-dasharray="6 3"'
STEADY = ' vector-effect="non-scaling-stroke"'
"""A line under a matrix has its width in pixels."""


def draw(name: str, title: str, description: str, charts: Sequence[Chart], look: Look) -> str:
    """One svg element with all charts: side by side, or on a narrow screen below each other.

    Args:
        name: prefix of the ids in it; each drawing of a page needs its own.
        title: what it is.
        description: what it shows, for those who do not see it.
    """
    parts: list[str] = []
    across = 1 if look.narrow else max(1, len(charts))
    width = (look.width - GAP * (across - 1)) / across
    height = 0.0
    for index, chart in enumerate(charts):
        left = (width + GAP) * index if across > 1 else 0.0
        top = 0.0 if across > 1 else height
        drawn, bottom = _chart(chart, left, top, width, look)
        parts += drawn
        height = max(height, bottom)
    return framed(name, title, description, parts, look.width, height)


def framed(name: str, title: str, description: str, parts: Sequence[str], width: float, height: float) -> str:
    """An svg element around its parts, with words for those who do not see it."""
    told = f'<title id="{name}-title">{escape(title)}</title><desc id="{name}-desc">{escape(description)}</desc>'
    return (
        f'<svg viewBox="0 0 {_at(width)} {_at(height)}" role="img" aria-labelledby="{name}-title {name}-desc" '
        f'font-size="{SMALL:g}">{told}{"".join(parts)}</svg>'
    )


def text(
    x: float, y: float, words: str, color: Role, anchor: str = "start", bold: bool = False, size: float = SMALL
) -> str:  # fmt: skip
    """A line of words."""
    more = (' font-weight="600"' if bold else "") + (f' text-anchor="{anchor}"' if anchor != "start" else "")
    more += f' font-size="{size:g}"' if size != SMALL else ""
    return f'<text x="{_at(x)}" y="{_at(y)}" fill="var(--{color})"{more}>{escape(words)}</text>'


def line(x1: float, y1: float, x2: float, y2: float, color: Role, width: float = 1.0, more: str = "") -> str:
    """A straight line."""
    return (
        f'<path d="M{_at(x1)} {_at(y1)}L{_at(x2)} {_at(y2)}" stroke="var(--{color})" '
        f'stroke-width="{width:g}" fill="none"{more}/>'
    )


def rectangle(x: float, y: float, width: float, height: float, color: Role, strength: float = 1.0) -> str:
    """A filled rectangle."""
    return (
        f'<rect x="{_at(x)}" y="{_at(y)}" width="{_at(max(0.0, width))}" height="{_at(max(0.0, height))}" '
        f'fill="var(--{color})" fill-opacity="{strength:g}"/>'
    )


def time_axis(axis: Axis, left: float, width: float, y: float) -> list[str]:
    """Ticks below, and the axis' name."""
    shown = across(axis)
    found = ['<g class="ticks">']
    for tick in shown.ticks(max(2, int(width / 90)), axis.whole):
        x = left + shown.place(tick) * width
        found.append(line(x, y, x, y + 4, "line"))
        found.append(text(x, y + 17, word(tick, "number"), "muted", "middle"))
    return [*found, "</g>", text(left + width / 2, y + 17 + FOOT - 3, _with_pauses(axis), "muted", "middle")]


def _with_pauses(axis: Axis) -> str:
    """The axis' name, and what was cut out of it: words in the plot would cover what is drawn there."""
    lengths = [length for place, length in axis.pauses if axis.low <= place <= axis.high]
    if not lengths:
        return axis.label
    told = ", ".join(lengths[:2]) + (f" and {len(lengths) - 2} more" if lengths[2:] else "")
    return f"{axis.label} · dotted: {'pauses' if lengths[1:] else 'a pause'} of {told}"


def across(axis: Axis) -> Scale:
    """The scale of an x axis."""
    return Scale(axis.low, axis.high if axis.high > axis.low else axis.low + 1.0)


def opened(axis: Axis, left: float, width: float, top: float, bottom: float) -> str:
    """The beginning of a chart's group, with what `charts.js` has to know of its x axis."""
    shown = across(axis)
    return (
        f'<g class="chart" data-axis="{escape(axis.label)}" data-low="{_exact(shown.low)}" '
        f'data-high="{_exact(shown.high)}" data-whole="{int(axis.whole)}" '
        f'data-plot="{_at(left)} {_at(width)} {_at(top)} {_at(bottom)}">'
    )


def matrix(across: Scale, left: float, width: float, up: Scale | None, bottom: float, height: float) -> str:
    """The transform from values to pixels. Without a scale for y, y is in pixels already."""
    x = width / (across.high - across.low)
    y = -height / (up.top - up.foot) if up is not None else 1.0
    down = bottom - up.foot * y if up is not None else 0.0
    return f'transform="matrix({_exact(x)} 0 0 {_exact(y)} {_exact(left - across.low * x)} {_exact(down)})"'


def digits(low: float, high: float) -> int:
    """Significant digits in which values between two have to be written."""
    length, most = high - low, max(abs(low), abs(high))
    if not (length > 0 and math.isfinite(length / most)):
        return MIN_DIGITS
    return min(12, max(MIN_DIGITS, math.ceil(math.log10(most / length * FINENESS))))


def _chart(chart: Chart, left: float, top: float, width: float, look: Look) -> tuple[list[str], float]:
    parts: list[str] = []
    y = top
    for panel in chart.panels:
        drawn, y = _panel(panel, chart.axis, left, y, width, look)
        parts += drawn
        if panel is not chart.panels[-1]:
            y += 12.0
    parts += time_axis(chart.axis, left + LEFT, width - LEFT - RIGHT, y)
    begin = opened(chart.axis, left + LEFT, width - LEFT - RIGHT, top + TITLE, y)
    return [begin, *parts, "</g>"], y + BELOW + FOOT


class _Frame:
    """The plot of one panel: from values to pixels."""

    def __init__(self, axis: Axis, values: Scale, left: float, top: float, width: float, height: float) -> None:
        self.left, self.top, self.width, self.height = left, top, width, height
        self.across = across(axis)
        self.up = values
        self._x_digits = digits(self.across.low, self.across.high)
        self._y_digits = digits(values.foot, values.top)

    @property
    def right(self) -> float:
        return self.left + self.width

    @property
    def bottom(self) -> float:
        return self.top + self.height

    def x(self, value: float) -> float:
        return self.left + self.across.place(value) * self.width

    def y(self, value: float) -> float:
        return self.bottom - self.up.place(value) * self.height

    def written(self, x: float, y: float) -> str:
        """A point as it stands in a path, which `matrix` takes to its place."""
        return f"{self.across.height(x):.{self._x_digits}g} {self.up.height(y):.{self._y_digits}g}"

    def matrix(self, only_x: bool = False) -> str:
        """The transform of what is written in values."""
        up = None if only_x else self.up
        return matrix(self.across, self.left, self.width, up, self.bottom, self.height)


def _panel(
    panel: Panel, axis: Axis, left: float, top: float, width: float, look: Look
) -> tuple[list[str], float]:  # fmt: skip
    y = top + TITLE
    head = [text(left, y - 5, panel.title, "ink", bold=True)]
    if panel.aside:
        head.append(text(left + width - RIGHT, y - 5, panel.aside, "checkpoint", "end", bold=True))
    legend, y = _legend(panel, left, y, width)
    reasons = any(band.words for band in panel.bands)
    y += REASONS if reasons else 4.0
    values = (value for curve in panel.curves for _, value in curve.points if value is not None)
    frame = _Frame(
        axis, of_values(values, panel), left + LEFT, y, width - LEFT - RIGHT, look.panel_height * panel.height
    )
    shaded, reasons_ = _bands(panel.bands, frame)
    stops = [_upright(place, frame, "muted", 0.9, DOTTED) for place, _ in axis.pauses[:MAX_PAUSES]]
    marks = [mark for curve in panel.curves for mark in _stars(curve, frame)]
    marks += [_mark(frame.x(place), frame.bottom - 7, place, None, CROSS) for place in panel.flags[-200:]]
    curves = [part for curve in panel.curves if curve.kind != "star" for part in _curve(curve, frame)]
    parts = [
        f'<g class="panel" data-title="{escape(panel.title)}" data-unit="{panel.unit}" '
        f'data-plot="{_at(frame.top)} {_at(frame.height)}" data-foot="{_exact(frame.up.foot)}" '
        f'data-top="{_exact(frame.up.top)}" data-log="{int(frame.up.logarithmic)}" '
        f'data-zero="{int(panel.from_zero)}">',
        *head,
        *legend,
        *_grid(panel, frame),
        '<g class="plot">',
        *([f'<g class="across" {frame.matrix(only_x=True)}>', *stops, *shaded, "</g>"] if stops or shaded else ()),
        *([f'<g class="curves" {frame.matrix()}>', *curves, "</g>"] if curves else ()),
        "</g>",
        *reasons_,
        *marks,
        "</g>",
    ]
    return parts, frame.bottom


def _legend(panel: Panel, left: float, y: float, width: float) -> tuple[list[str], float]:
    """Its entries in as many lines as they need."""
    entries: dict[str, str] = {}
    for curve in panel.curves:
        if curve.label and curve.points:
            entries.setdefault(curve.label, f"var(--{curve.color})")
    strengths = {curve.label: max(0.35, curve.strength) for curve in panel.curves}
    dashed = {curve.label for curve in panel.curves if curve.dashed}
    if panel.flags and panel.flag:
        entries[panel.flag] = "var(--alert)"
    if not entries:
        return [], y
    parts, x = [], left
    y += LEGEND - 3
    for label, color in entries.items():
        length = 22 + LETTER * len(label) + 14
        if x > left and x + length > left + width:
            x, y = left, y + LEGEND
        parts.append(
            f'<path d="M{_at(x)} {_at(y - 4)}h16" stroke="{color}" stroke-width="2.5" '
            f'stroke-opacity="{strengths.get(label, 1.0):g}"{DASHED if label in dashed else ""}/>'
        )
        parts.append(text(x + 22, y, label, "muted"))
        x += length
    return parts, y + 4


def _grid(panel: Panel, frame: _Frame) -> list[str]:
    parts = ['<g class="ticks">']
    most = max(2, min(6, int(frame.height / 26)))
    for tick in frame.up.ticks(most, whole=panel.unit == "count"):
        y = frame.y(tick)
        parts.append(line(frame.left, y, frame.right, y, "grid"))
        parts.append(text(frame.left - 7, y + 4, word(tick, panel.unit), "muted", "end"))
    return [*parts, "</g>", line(frame.left, frame.bottom, frame.right, frame.bottom, "line")]


def _bands(bands: Sequence[Band], frame: _Frame) -> tuple[list[str], list[str]]:
    """What is shaded in the plot, and the words above."""
    shaded, told = [], []
    free = frame.left
    for band in bands[-MAX_BANDS:]:
        begin, end = frame.across.height(band.begin), frame.across.height(band.end)
        shaded.append(
            f'<rect x="{_exact(begin)}" y="{_at(frame.top)}" width="{_exact(max(0.0, end - begin))}" '
            f'height="{_at(frame.height)}" fill="var(--alert)" fill-opacity="0.13"/>'
        )
        shaded.append(_upright(end, frame, "alert", 0.7, ' stroke-opacity="0.55"'))
        room = LETTER * 0.9 * max((len(word) for word in band.words), default=0)
        at = frame.x(end)
        late = at + room > frame.right
        start = at - room if late else at
        if not band.words or start < free:
            continue
        free = start + room + LETTER
        lines = [
            text(0, -12 * (len(band.words[:2]) - 1 - index), word, "alert", "end" if late else "start", size=11)
            for index, word in enumerate(band.words[:2])
        ]
        told.append(_mark(at, frame.top - 4, end, None, "".join(lines)))
    return shaded, told


def _upright(place: float, frame: _Frame, color: Role, width: float, more: str) -> str:
    """A line from the foot of the plot to its top, at a value of x."""
    return (
        f'<path d="M{_exact(place)} {_at(frame.top)}v{_at(frame.height)}" stroke="var(--{color})" '
        f'stroke-width="{width:g}" fill="none"{more}{STEADY}/>'
    )


def _mark(x: float, y: float, value_x: float, height: float | None, drawn: str) -> str:
    """Something that keeps its shape and stands at a value of x, and of y where it has one."""
    up = "" if height is None else f' data-y="{_exact(height)}"'
    return f'<g class="mark" data-x="{_exact(value_x)}"{up} transform="translate({_at(x)} {_at(y)})">{drawn}</g>'


def _stars(curve: Curve, frame: _Frame) -> Iterator[str]:
    if curve.kind == "star":
        for x, y in curve.points:
            if y is not None:
                yield _mark(frame.x(x), frame.y(y), x, frame.up.height(y), STAR)


def _curve(curve: Curve, frame: _Frame) -> Iterator[str]:
    points = shorten(curve.points, max(20, int(frame.width * MAX_POINTS_A_PIXEL)))
    color = f"var(--{curve.color})"
    yield f'<g class="curve" data-kind="{curve.kind}" data-label="{escape(curve.label)}" data-color="{curve.color}">'
    for run in _unbroken(points):
        corners = _stairs(run) if curve.kind == "stairs" else run
        path = "M" + "L".join(frame.written(x, y) for x, y in corners)
        if curve.filled and len(corners) > 1:
            foot = f"L{frame.written(corners[-1][0], 0.0)}L{frame.written(corners[0][0], 0.0)}Z"
            yield f'<path d="{path}{foot}" fill="{color}" fill-opacity="0.13"/>'
        is_dotted = curve.kind == "dots" or len(corners) == 1
        if curve.width and len(corners) > 1:
            faint = f' stroke-opacity="{curve.strength:g}"' if curve.strength < 1 else ""
            dashed = DASHED if curve.dashed else ""
            yield (
                f'<path{"" if is_dotted else VALUES} d="{path}" stroke="{color}" stroke-width="{curve.width:g}"'
                f'{faint}{dashed} fill="none" stroke-linejoin="round"{STEADY}/>'
            )
        if is_dotted:
            # Dots of one colour are one path of lines without length, whose round ends are the dots.
            dots = "".join(f"M{frame.written(x, y)}h0" for x, y in run)
            yield (
                f'<path{VALUES} d="{dots}" stroke="{color}" stroke-width="5.5" stroke-linecap="round" '
                f'fill="none"{STEADY}/>'
            )
    yield "</g>"


def _unbroken(points: Sequence[Point]) -> Iterator[list[tuple[float, float]]]:
    run: list[tuple[float, float]] = []
    for x, y in points:
        if y is None:
            if run:
                yield run
            run = []
        else:
            run.append((x, y))
    if run:
        yield run


def _stairs(run: list[tuple[float, float]]) -> list[tuple[float, float]]:
    found = run[:1]
    for (_, before), (x, y) in pairwise(run):
        found += [(x, before), (x, y)]
    return found


STAR = (
    '<path d="M0 -8'
    + "".join(
        f"l{dx:g} {dy:g}"
        for dx, dy in (
            *((2.1, 4.6), (5.0, 0.5), (-3.8, 3.3), (1.1, 4.9), (-4.4, -2.6)),
            *((-4.4, 2.6), (1.1, -4.9), (-3.8, -3.3), (5.0, -0.5)),
        )
    )
    + 'Z" fill="var(--checkpoint)" stroke="var(--paper)" stroke-width="0.8"/>'
)
CROSS = '<path d="M-3.5 -3.5l7 7m0 -7l-7 7" stroke="var(--alert)" stroke-width="1.6" fill="none"/>'
VALUES = ' class="values"'
"""What `charts.js` reads the values of a curve from."""


def _at(value: float) -> str:
    """A coordinate to a tenth of a pixel."""
    return f"{value:.1f}".removesuffix(".0")


def _exact(value: float) -> str:
    """A number that is no pixel."""
    return f"{value:.10g}"
