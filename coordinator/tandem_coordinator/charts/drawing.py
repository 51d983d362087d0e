"""Charts as SVG text.

Every colour is a CSS variable of `chart`, everything that comes from a run is escaped, and no element
has a style of its own: a page may forbid inline styles altogether. A drawing has no more points than pixels have a use
for, however long the series is.

A curve's path is written in the values that it shows, of a logarithmic axis in their logarithms, and a matrix takes
them to pixels. So `charts.js`, which both pages run, reads exact values off the drawing and enlarges a part of it by
another matrix, and needs no second copy of the points. It finds them by the classes and the `data-` attributes.
"""

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from html import escape
from itertools import pairwise

from tandem_coordinator.charts.chart import Axis, Band, Chart, Curve, Panel, Point, Role, Unit, Viewport
from tandem_coordinator.charts.series import shorten

STEPS = (1.0, 2.0, 2.5, 5.0, 10.0)
"""Distances between ticks, to be multiplied by a power of ten."""
MIN_POSITIVE_SHARE, MAX_DECADES = 0.9, 8
"""Share of values that must be above 0, as a loss may be 0 now and then, which is drawn at the foot; and the maximum
number of powers of ten that are shown."""
MAX_MAGNITUDE = 1e300
"""Magnitude to which values are limited: the range of larger ones would not be finite."""
MARGIN = 0.07
"""Free space above and below values, as a share of their range."""


@dataclass(frozen=True)
class Scale:
    """An axis of values from `low` to `high`."""

    low: float
    high: float
    logarithmic: bool = False

    def place(self, value: float) -> float:
        """Position of a value, 0 at `low` and 1 at `high`; values outside are placed at the edge."""
        if self.logarithmic:
            if value <= 0:
                return 0.0
            share = math.log(value / self.low) / math.log(self.high / self.low)
        else:
            share = (value - self.low) / (self.high - self.low)
        return min(1.0, max(0.0, share))

    @property
    def foot(self) -> float:
        """Lower end of the axis, in units of `height`."""
        return self.height(self.low)

    @property
    def top(self) -> float:
        """Upper end of the axis, in units of `height`."""
        return self.height(self.high)

    def height(self, value: float) -> float:
        """The value, or its logarithm to the base 10: positions on the axis are linear in it. Values outside are placed
        at the edge."""
        inside = min(self.high, max(self.low, value))
        return math.log10(inside) if self.logarithmic else inside

    def ticks(self, max_count: int, whole: bool = False) -> list[float]:
        """Choose at most `max_count` round values inside the scale."""
        if not self.logarithmic:
            return ticks(self.low, self.high, max_count, whole)
        factors = ((1.0,), (1.0, 3.0), (1.0, 2.0, 5.0))
        first, last = math.floor(math.log10(self.low)), math.ceil(math.log10(self.high))
        chosen_values: list[float] = []
        for multiples in factors:
            candidates = [factor * 10.0**power for power in range(first, last + 1) for factor in multiples]
            candidates = [value for value in candidates if self.low <= value <= self.high]
            if len(candidates) > max_count and chosen_values:
                break
            chosen_values = candidates
        return (
            chosen_values
            if len(chosen_values) <= max_count
            else chosen_values[:: math.ceil(len(chosen_values) / max_count)]
        )


def of_values(values: Iterable[float], panel: Panel) -> Scale:
    """The scale of a panel that all finite values fit into."""
    good = [min(MAX_MAGNITUDE, max(-MAX_MAGNITUDE, value)) for value in values if math.isfinite(value)]
    low, high = (min(good), max(good)) if good else (0.0, 1.0)
    positive = [value for value in good if value > 0]
    if panel.logarithmic_above is not None and len(positive) > MIN_POSITIVE_SHARE * len(good):
        lowest = max(min(positive), high / 10**MAX_DECADES)
        if high > panel.logarithmic_above * lowest:
            return Scale(lowest / 1.15, high * 1.15, logarithmic=True)
    if panel.from_zero:
        return Scale(0.0, high * (1 + 2 * MARGIN) if high > 0 else 1.0)
    room = (high - low) * MARGIN or abs(high) * MARGIN or 1.0
    return Scale(low - room, high + room)


def ticks(low: float, high: float, max_count: int, whole: bool = False) -> list[float]:
    """Choose round values from low to high, as many as there is room for, at most `max_count`."""
    length = high - low
    if not (length > 0 and math.isfinite(length)):
        return [low]
    power = math.floor(math.log10(length / max(1, max_count)))
    for exponent in range(power, power + 4):
        for step in STEPS:
            distance = step * 10.0**exponent
            if whole and (distance < 1 or distance != int(distance)):
                continue
            first = math.ceil(low / distance - 1e-9)
            last = math.floor(high / distance + 1e-9)
            if last - first + 1 <= max_count:
                return [round(number * distance, 12) for number in range(first, last + 1)]
    return [low]


def word(value: float, unit: Unit) -> str:
    """Format a value for an axis."""
    if unit == "share":
        return f"{100 * value:.4g} %"
    if value and (abs(value) >= 1e7 or abs(value) < 1e-4):
        return f"{value:.2g}"
    if abs(value) >= 1000 or value == int(value):
        return f"{value:,.0f}"
    return f"{value:.6g}"


MARGIN_LEFT, MARGIN_RIGHT, GAP = 50.0, 12.0, 36.0
"""Pixels beside a panel, for the labels of its axis, and between columns."""
TITLE_HEIGHT, LEGEND_HEIGHT, REASONS_HEIGHT, TICKS_HEIGHT, FOOT = 20.0, 17.0, 28.0, 26.0, 20.0
"""Pixels of the lines around a panel: its title, a line of its legend, of the reasons, its ticks, the axis' name."""
SMALL = 12.0
"""Font size, in pixels."""
LETTER = 6.3
"""Average width of a letter of that size, in pixels."""
MAX_POINTS_PER_PIXEL = 1.5
MAX_BANDS = 300
"""Maximum number of bands: more would be a smear; the tables list all."""
MIN_DIGITS, DIGITS_RESOLUTION = 5, 5000
"""Minimum number of digits of a value in a path; and the resolution at which two neighbouring pixels of its axis
differ."""
MAX_PAUSES = 12
"""Maximum number of pauses that are drawn as lines."""
DOTTED = ' stroke-dasharray="1 3"'
DASHED = ' stroke-dasharray="6 3"'
STEADY = ' vector-effect="non-scaling-stroke"'
"""Attribute by which a line under a matrix has its width in pixels."""


def draw(name: str, title: str, description: str, charts: Sequence[Chart], viewport: Viewport) -> str:
    """Draw all charts as one svg element: side by side, or on a narrow screen below each other.

    Args:
        name: prefix of the ids in it; each drawing of a page needs its own.
        title: what it is.
        description: what it shows, for those who do not see it.
    """
    parts: list[str] = []
    across = 1 if viewport.narrow else max(1, len(charts))
    width = (viewport.width - GAP * (across - 1)) / across
    height = 0.0
    for index, chart in enumerate(charts):
        x_left = (width + GAP) * index if across > 1 else 0.0
        top = 0.0 if across > 1 else height
        elements, bottom = _chart(chart, x_left, top, width, viewport)
        parts += elements
        height = max(height, bottom)
    return framed(name, title, description, parts, viewport.width, height)


def framed(name: str, title: str, description: str, parts: Sequence[str], width: float, height: float) -> str:
    """Wrap parts in an svg element, with a title and a description for those who do not see it."""
    labels = f'<title id="{name}-title">{escape(title)}</title><desc id="{name}-desc">{escape(description)}</desc>'
    return (
        f'<svg viewBox="0 0 {_pixels(width)} {_pixels(height)}" role="img" aria-labelledby="{name}-title {name}-desc" '
        f'font-size="{SMALL:g}">{labels}{"".join(parts)}</svg>'
    )


def text(
    x: float, y: float, content: str, color: Role, anchor: str = "start", bold: bool = False, size: float = SMALL
) -> str:  # fmt: skip
    """Draw a line of text."""
    attributes = (' font-weight="600"' if bold else "") + (f' text-anchor="{anchor}"' if anchor != "start" else "")
    attributes += f' font-size="{size:g}"' if size != SMALL else ""
    return f'<text x="{_pixels(x)}" y="{_pixels(y)}" fill="var(--{color})"{attributes}>{escape(content)}</text>'


def line(x1: float, y1: float, x2: float, y2: float, color: Role, width: float = 1.0, attributes: str = "") -> str:
    """Draw a straight line."""
    return (
        f'<path d="M{_pixels(x1)} {_pixels(y1)}L{_pixels(x2)} {_pixels(y2)}" stroke="var(--{color})" '
        f'stroke-width="{width:g}" fill="none"{attributes}/>'
    )


def rectangle(x: float, y: float, width: float, height: float, color: Role, strength: float = 1.0) -> str:
    """Draw a filled rectangle."""
    return (
        f'<rect x="{_pixels(x)}" y="{_pixels(y)}" width="{_pixels(max(0.0, width))}" '
        f'height="{_pixels(max(0.0, height))}" fill="var(--{color})" fill-opacity="{strength:g}"/>'
    )


def time_axis(axis: Axis, x_left: float, width: float, y: float) -> list[str]:
    """Draw the ticks of a time axis, and its name."""
    scale = across(axis)
    elements = ['<g class="ticks">']
    for tick in scale.ticks(max(2, int(width / 90)), axis.whole):
        x = x_left + scale.place(tick) * width
        elements.append(line(x, y, x, y + 4, "line"))
        elements.append(text(x, y + 17, word(tick, "number"), "muted", "middle"))
    return [*elements, "</g>", text(x_left + width / 2, y + 17 + FOOT - 3, _with_pauses(axis), "muted", "middle")]


def _with_pauses(axis: Axis) -> str:
    """The axis' name, and the pauses that were cut out of it: text in the plot would cover what is drawn there."""
    lengths = [length for position, length in axis.pauses if axis.low <= position <= axis.high]
    if not lengths:
        return axis.label
    pauses = ", ".join(lengths[:2]) + (f" and {len(lengths) - 2} more" if lengths[2:] else "")
    return f"{axis.label} · dotted: {'pauses' if lengths[1:] else 'a pause'} of {pauses}"


def across(axis: Axis) -> Scale:
    """The scale of an x axis."""
    return Scale(axis.low, axis.high if axis.high > axis.low else axis.low + 1.0)


def opened(axis: Axis, x_left: float, width: float, top: float, bottom: float) -> str:
    """Open a chart's group, with the attributes of its x axis that `charts.js` reads."""
    scale = across(axis)
    return (
        f'<g class="chart" data-axis="{escape(axis.label)}" data-low="{_number(scale.low)}" '
        f'data-high="{_number(scale.high)}" data-whole="{int(axis.whole)}" '
        f'data-plot="{_pixels(x_left)} {_pixels(width)} {_pixels(top)} {_pixels(bottom)}">'
    )


def matrix(across: Scale, x_left: float, width: float, up: Scale | None, bottom: float, height: float) -> str:
    """The transform from values to pixels. Without a scale for y, y is in pixels already."""
    x = width / (across.high - across.low)
    y = -height / (up.top - up.foot) if up is not None else 1.0
    down = bottom - up.foot * y if up is not None else 0.0
    return f'transform="matrix({_number(x)} 0 0 {_number(y)} {_number(x_left - across.low * x)} {_number(down)})"'


def digits(low: float, high: float) -> int:
    """Number of significant digits for values between two others."""
    length, magnitude = high - low, max(abs(low), abs(high))
    if not (length > 0 and math.isfinite(length / magnitude)):
        return MIN_DIGITS
    return min(12, max(MIN_DIGITS, math.ceil(math.log10(magnitude / length * DIGITS_RESOLUTION))))


def _chart(chart: Chart, x_left: float, top: float, width: float, viewport: Viewport) -> tuple[list[str], float]:
    parts: list[str] = []
    y = top
    for panel in chart.panels:
        elements, y = _panel(panel, chart.axis, x_left, y, width, viewport)
        parts += elements
        if panel is not chart.panels[-1]:
            y += 12.0
    parts += time_axis(chart.axis, x_left + MARGIN_LEFT, width - MARGIN_LEFT - MARGIN_RIGHT, y)
    begin = opened(chart.axis, x_left + MARGIN_LEFT, width - MARGIN_LEFT - MARGIN_RIGHT, top + TITLE_HEIGHT, y)
    return [begin, *parts, "</g>"], y + TICKS_HEIGHT + FOOT


class _Frame:
    """The plot of one panel, which converts values to pixels."""

    def __init__(self, axis: Axis, values: Scale, x_left: float, top: float, width: float, height: float) -> None:
        self.x_left, self.top, self.width, self.height = x_left, top, width, height
        self.across = across(axis)
        self.up = values
        self._x_digits = digits(self.across.low, self.across.high)
        self._y_digits = digits(values.foot, values.top)

    @property
    def right(self) -> float:
        return self.x_left + self.width

    @property
    def bottom(self) -> float:
        return self.top + self.height

    def x(self, value: float) -> float:
        return self.x_left + self.across.place(value) * self.width

    def y(self, value: float) -> float:
        return self.bottom - self.up.place(value) * self.height

    def written(self, x: float, y: float) -> str:
        """Format a point for a path, which `matrix` takes to its position."""
        return f"{self.across.height(x):.{self._x_digits}g} {self.up.height(y):.{self._y_digits}g}"

    def matrix(self, only_x: bool = False) -> str:
        """The transform of a path that is written in values."""
        up = None if only_x else self.up
        return matrix(self.across, self.x_left, self.width, up, self.bottom, self.height)


def _panel(
    panel: Panel, axis: Axis, x_left: float, top: float, width: float, viewport: Viewport
) -> tuple[list[str], float]:  # fmt: skip
    y = top + TITLE_HEIGHT
    head = [text(x_left, y - 5, panel.title, "ink", bold=True)]
    if panel.note:
        head.append(text(x_left + width - MARGIN_RIGHT, y - 5, panel.note, "checkpoint", "end", bold=True))
    legend, y = _legend(panel, x_left, y, width)
    reasons = any(band.words for band in panel.bands)
    y += REASONS_HEIGHT if reasons else 4.0
    values = (value for curve in panel.curves for _, value in curve.points if value is not None)
    frame = _Frame(
        axis,
        of_values(values, panel),
        x_left + MARGIN_LEFT,
        y,
        width - MARGIN_LEFT - MARGIN_RIGHT,
        viewport.panel_height * panel.height,
    )
    shaded, reason_labels = _bands(panel.bands, frame)
    stops = [_upright(place, frame, "muted", 0.9, DOTTED) for place, _ in axis.pauses[:MAX_PAUSES]]
    marks = [mark for curve in panel.curves for mark in _stars(curve, frame)]
    marks += [_mark(frame.x(place), frame.bottom - 7, place, None, CROSS) for place in panel.flags[-200:]]
    curves = [part for curve in panel.curves if curve.kind != "star" for part in _curve(curve, frame)]
    parts = [
        f'<g class="panel" data-title="{escape(panel.title)}" data-unit="{panel.unit}" '
        f'data-plot="{_pixels(frame.top)} {_pixels(frame.height)}" data-foot="{_number(frame.up.foot)}" '
        f'data-top="{_number(frame.up.top)}" data-log="{int(frame.up.logarithmic)}" '
        f'data-zero="{int(panel.from_zero)}">',
        *head,
        *legend,
        *_grid(panel, frame),
        '<g class="plot">',
        *([f'<g class="across" {frame.matrix(only_x=True)}>', *stops, *shaded, "</g>"] if stops or shaded else ()),
        *([f'<g class="curves" {frame.matrix()}>', *curves, "</g>"] if curves else ()),
        "</g>",
        *reason_labels,
        *marks,
        "</g>",
    ]
    return parts, frame.bottom


def _legend(panel: Panel, x_left: float, y: float, width: float) -> tuple[list[str], float]:
    """Draw the legend, in as many lines as its entries need."""
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
    parts, x = [], x_left
    y += LEGEND_HEIGHT - 3
    for label, color in entries.items():
        length = 22 + LETTER * len(label) + 14
        if x > x_left and x + length > x_left + width:
            x, y = x_left, y + LEGEND_HEIGHT
        parts.append(
            f'<path d="M{_pixels(x)} {_pixels(y - 4)}h16" stroke="{color}" stroke-width="2.5" '
            f'stroke-opacity="{strengths.get(label, 1.0):g}"{DASHED if label in dashed else ""}/>'
        )
        parts.append(text(x + 22, y, label, "muted"))
        x += length
    return parts, y + 4


def _grid(panel: Panel, frame: _Frame) -> list[str]:
    parts = ['<g class="ticks">']
    max_ticks = max(2, min(6, int(frame.height / 26)))
    for tick in frame.up.ticks(max_ticks, whole=panel.unit == "count"):
        y = frame.y(tick)
        parts.append(line(frame.x_left, y, frame.right, y, "grid"))
        parts.append(text(frame.x_left - 7, y + 4, word(tick, panel.unit), "muted", "end"))
    return [*parts, "</g>", line(frame.x_left, frame.bottom, frame.right, frame.bottom, "line")]


def _bands(bands: Sequence[Band], frame: _Frame) -> tuple[list[str], list[str]]:
    """Draw the shaded bands in the plot, and the labels above."""
    shaded, labels = [], []
    free = frame.x_left
    for band in bands[-MAX_BANDS:]:
        begin, end = frame.across.height(band.begin), frame.across.height(band.end)
        shaded.append(
            f'<rect x="{_number(begin)}" y="{_pixels(frame.top)}" width="{_number(max(0.0, end - begin))}" '
            f'height="{_pixels(frame.height)}" fill="var(--alert)" fill-opacity="0.13"/>'
        )
        shaded.append(_upright(end, frame, "alert", 0.7, ' stroke-opacity="0.55"'))
        room = LETTER * 0.9 * max((len(word) for word in band.words), default=0)
        x = frame.x(end)
        is_late = x + room > frame.right
        start = x - room if is_late else x
        if not band.words or start < free:
            continue
        free = start + room + LETTER
        lines = [
            text(0, -12 * (len(band.words[:2]) - 1 - index), word, "alert", "end" if is_late else "start", size=11)
            for index, word in enumerate(band.words[:2])
        ]
        labels.append(_mark(x, frame.top - 4, end, None, "".join(lines)))
    return shaded, labels


def _upright(position: float, frame: _Frame, color: Role, width: float, attributes: str) -> str:
    """Draw a line from the foot of the plot to its top, at a value of x."""
    return (
        f'<path d="M{_number(position)} {_pixels(frame.top)}v{_pixels(frame.height)}" stroke="var(--{color})" '
        f'stroke-width="{width:g}" fill="none"{attributes}{STEADY}/>'
    )


def _mark(x: float, y: float, value_x: float, height: float | None, shape: str) -> str:
    """Draw a shape of constant size at a value of x, and of y if given."""
    up = "" if height is None else f' data-y="{_number(height)}"'
    return (
        f'<g class="mark" data-x="{_number(value_x)}"{up} transform="translate({_pixels(x)} {_pixels(y)})">{shape}</g>'
    )


def _stars(curve: Curve, frame: _Frame) -> Iterator[str]:
    if curve.kind == "star":
        for x, y in curve.points:
            if y is not None:
                yield _mark(frame.x(x), frame.y(y), x, frame.up.height(y), STAR)


def _curve(curve: Curve, frame: _Frame) -> Iterator[str]:
    points = shorten(curve.points, max(20, int(frame.width * MAX_POINTS_PER_PIXEL)))
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
    corners = run[:1]
    for (_, before), (x, y) in pairwise(run):
        corners += [(x, before), (x, y)]
    return corners


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
"""Class of the paths from which `charts.js` reads the values of a curve."""


def _pixels(value: float) -> str:
    """Format a coordinate to a tenth of a pixel."""
    return f"{value:.1f}".removesuffix(".0")


def _number(value: float) -> str:
    """Format a number that is no coordinate."""
    return f"{value:.10g}"
