"""Charts as SVG text.

Every colour is a CSS variable of `tandem.charts.palette`, everything that comes from a run is escaped, and no element
has a style of its own: a page may forbid inline styles altogether. A drawing has no more points than pixels have a use
for, however long the series is.
"""

from collections.abc import Iterator, Sequence
from html import escape
from itertools import pairwise

from tandem.charts import scale
from tandem.charts.chart import Axis, Band, Chart, Curve, Look, Panel, Point
from tandem.charts.palette import Role
from tandem.charts.scale import Scale
from tandem.charts.series import shorten

LEFT, RIGHT, GAP = 50.0, 12.0, 36.0
"""Pixels beside a panel, for the words of its axis, and between columns."""
TITLE, LEGEND, REASONS, BELOW, FOOT = 20.0, 17.0, 28.0, 26.0, 20.0
"""Pixels of the lines around a panel: its title, a line of its legend, of the reasons, its ticks, the axis' name."""
SMALL = 12.0
"""Size of the type."""
LETTER = 6.3
"""Pixels that a letter of that size takes, about."""
MOST_POINTS_A_PIXEL = 1.5
MOST_BANDS = 300
"""More are a smear; the tables have them all."""


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
    shown = Scale(axis.low, axis.high if axis.high > axis.low else axis.low + 1.0)
    found = []
    for tick in shown.ticks(max(2, int(width / 90)), axis.whole):
        x = left + shown.place(tick) * width
        found.append(line(x, y, x, y + 4, "line"))
        found.append(text(x, y + 17, scale.word(tick, "number"), "muted", "middle"))
    return [*found, text(left + width / 2, y + 17 + FOOT - 3, axis.label, "muted", "middle")]


def _chart(chart: Chart, left: float, top: float, width: float, look: Look) -> tuple[list[str], float]:
    parts: list[str] = []
    y = top
    for panel in chart.panels:
        drawn, y = _panel(panel, chart.axis, left, y, width, look)
        parts += drawn
        if panel is not chart.panels[-1]:
            y += 12.0
    parts += time_axis(chart.axis, left + LEFT, width - LEFT - RIGHT, y)
    return parts, y + BELOW + FOOT


class _Frame:
    """The plot of one panel: from values to pixels."""

    def __init__(self, axis: Axis, values: Scale, left: float, top: float, width: float, height: float) -> None:
        self.left, self.top, self.width, self.height = left, top, width, height
        self.across = Scale(axis.low, axis.high if axis.high > axis.low else axis.low + 1.0)
        self.up = values

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


def _panel(
    panel: Panel, axis: Axis, left: float, top: float, width: float, look: Look
) -> tuple[list[str], float]:  # fmt: skip
    y = top + TITLE
    parts = [text(left, y - 5, panel.title, "ink", bold=True)]
    if panel.aside:
        parts.append(text(left + width - RIGHT, y - 5, panel.aside, "checkpoint", "end", bold=True))
    legend, y = _legend(panel, left, y, width)
    reasons = any(band.words for band in panel.bands)
    y += REASONS if reasons else 4.0
    values = (value for curve in panel.curves for _, value in curve.points if value is not None)
    frame = _Frame(
        axis, scale.of_values(values, panel), left + LEFT, y, width - LEFT - RIGHT, look.panel_height * panel.height
    )
    parts += legend
    parts += _grid(panel, frame)
    parts += _pauses(axis, frame)
    parts += _bands(panel.bands, frame)
    for curve in panel.curves:
        parts += _curve(curve, frame)
    parts += [_cross(frame.x(place), frame.bottom - 7) for place in panel.flags[-200:]]
    return parts, frame.bottom


def _legend(panel: Panel, left: float, y: float, width: float) -> tuple[list[str], float]:
    """Its entries in as many lines as they need."""
    entries: dict[str, str] = {}
    for curve in panel.curves:
        if curve.label and curve.points:
            entries.setdefault(curve.label, f"var(--{curve.color})")
    strengths = {curve.label: max(0.35, curve.strength) for curve in panel.curves}
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
            f'stroke-opacity="{strengths.get(label, 1.0):g}"/>'
        )
        parts.append(text(x + 22, y, label, "muted"))
        x += length
    return parts, y + 4


def _grid(panel: Panel, frame: _Frame) -> list[str]:
    parts = []
    most = max(2, min(6, int(frame.height / 26)))
    for tick in frame.up.ticks(most, whole=panel.unit == "count"):
        y = frame.y(tick)
        parts.append(line(frame.left, y, frame.right, y, "grid"))
        parts.append(text(frame.left - 7, y + 4, scale.word(tick, panel.unit), "muted", "end"))
    return [*parts, line(frame.left, frame.bottom, frame.right, frame.bottom, "line")]


def _pauses(axis: Axis, frame: _Frame) -> Iterator[str]:
    for place, words in axis.pauses[:12]:
        x = frame.x(place)
        yield line(x, frame.top, x, frame.bottom, "muted", 0.9, ' stroke-dasharray="1 3"')
        yield text(x + 3, frame.bottom - 5, f"{words} pause", "muted", size=10)


def _bands(bands: Sequence[Band], frame: _Frame) -> Iterator[str]:
    free = frame.left
    for band in bands[-MOST_BANDS:]:
        begin, end = frame.x(band.begin), frame.x(band.end)
        yield rectangle(begin, frame.top, end - begin, frame.height, "alert", 0.13)
        yield line(end, frame.top, end, frame.bottom, "alert", 0.7, ' stroke-opacity="0.55"')
        room = LETTER * 0.9 * max((len(word) for word in band.words), default=0)
        late = end + room > frame.right
        start = end - room if late else end
        if not band.words or start < free:
            continue
        free = start + room + LETTER
        for index, word in enumerate(band.words[:2]):
            y = frame.top - 4 - 12 * (len(band.words[:2]) - 1 - index)
            yield text(end, y, word, "alert", "end" if late else "start", size=11)


def _curve(curve: Curve, frame: _Frame) -> Iterator[str]:
    points = shorten(curve.points, max(20, int(frame.width * MOST_POINTS_A_PIXEL)))
    placed = [(frame.x(x), None if y is None else frame.y(y)) for x, y in points]
    color = f"var(--{curve.color})"
    if curve.kind == "star":
        yield from (_star(x, y) for x, y in placed if y is not None)
        return
    for run in _unbroken(placed):
        path = _stairs(run) if curve.kind == "stairs" else run
        if curve.filled and len(path) > 1:
            foot = f"L{_at(path[-1][0])} {_at(frame.bottom)}L{_at(path[0][0])} {_at(frame.bottom)}Z"
            yield f'<path d="{_path(path)}{foot}" fill="{color}" fill-opacity="0.13"/>'
        if curve.width and len(path) > 1:
            faint = f' stroke-opacity="{curve.strength:g}"' if curve.strength < 1 else ""
            yield (
                f'<path d="{_path(path)}" stroke="{color}" stroke-width="{curve.width:g}"{faint} fill="none" '
                'stroke-linejoin="round"/>'
            )
        if curve.kind == "dots" or len(path) == 1:
            # Dots of one colour are one path of lines without length, whose round ends are the dots.
            dots = "".join(f"M{_at(x)} {_at(y)}h0" for x, y in run)
            yield f'<path d="{dots}" stroke="{color}" stroke-width="5.5" stroke-linecap="round" fill="none"/>'


def _unbroken(placed: Sequence[Point]) -> Iterator[list[tuple[float, float]]]:
    run: list[tuple[float, float]] = []
    for x, y in placed:
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


def _path(points: Sequence[tuple[float, float]]) -> str:
    return "M" + "L".join(f"{_at(x)} {_at(y)}" for x, y in points)


def _cross(x: float, y: float) -> str:
    return (
        f'<path d="M{_at(x - 3.5)} {_at(y - 3.5)}l7 7m0 -7l-7 7" stroke="var(--alert)" stroke-width="1.6" fill="none"/>'
    )


def _star(x: float, y: float) -> str:
    corners = "".join(
        f"l{dx:g} {dy:g}"
        for dx, dy in (
            *((2.1, 4.6), (5.0, 0.5), (-3.8, 3.3), (1.1, 4.9), (-4.4, -2.6)),
            *((-4.4, 2.6), (1.1, -4.9), (-3.8, -3.3), (5.0, -0.5)),
        )
    )
    path = f"M{_at(x)} {_at(y - 8)}{corners}Z"
    return f'<path d="{path}" fill="var(--checkpoint)" stroke="var(--paper)" stroke-width="0.8"/>'


def _at(value: float) -> str:
    """A coordinate to a tenth of a pixel."""
    return f"{value:.1f}".removesuffix(".0")
