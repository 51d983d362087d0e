"""Processor use as rows: one bar for each process, filled to its busy cores, with its mean or newest value."""

from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from math import ceil
from typing import Literal

from tandem.formatting import shortened
from tandem_coordinator.charts.chart import Axis, Look, Points, Role
from tandem_coordinator.charts.drawing import (
    FOOT,
    VALUES,
    Scale,
    across,
    digits,
    framed,
    line,
    matrix,
    opened,
    text,
    time_axis,
)
from tandem_coordinator.charts.series import shorten

ROW, SPACE, CAPTION = 24.0, 6.0, 22.0
"""Pixels of a row, between two, and of a heading."""
MAX_POINTS, MIN_POINTS = 3000, 60
"""Of all rows together, and of each: a page of many processes is sent again and again."""
MAX_LENGTH = 60
"""Characters of a name that comes from a run."""
LEFT_WIDE, LEFT_NARROW, RIGHT = 128.0, 98.0, 86.0


@dataclass(frozen=True, kw_only=True)
class Row:
    """One process."""

    label: str
    color: Role
    points: Points
    """Busy cores (of a GPU: its busy share) over time, each since the one before."""
    beside: str
    """What stands at its right end."""
    unit: Literal["cores", "share"] = "cores"
    """How a value of it is read."""
    alert: str = ""
    """What is wrong with it, if something is: its name is then in the colour of warnings, and this beside it."""


@dataclass(frozen=True, kw_only=True)
class Rows:
    """Processes of one kind."""

    caption: str
    rows: tuple[Row, ...]


def draw(
    name: str, title: str, description: str, groups: Sequence[Rows], marks: Sequence[float], axis: Axis, look: Look
) -> str:
    """One svg element with all groups over one axis of time.

    Args:
        name: prefix of the ids in it.
        marks: when checkpoints were committed.
    """
    left = LEFT_NARROW if look.narrow else LEFT_WIDE
    width = look.width - left - RIGHT
    time = across(axis)
    points = min(int(width), max(MIN_POINTS, MAX_POINTS // max(1, sum(len(group.rows) for group in groups))))
    parts: list[str] = []
    y = 0.0
    for group in groups:
        color = group.rows[0].color if group.rows else "muted"
        parts.append(text(0, y + CAPTION - 8, group.caption, color, bold=True, size=11))
        y += CAPTION
        for row in group.rows:
            parts += _row(row, time, left, y, width, points)
            y += ROW + SPACE
    if marks:
        parts += _lane(marks, time, left, y, width)
        y += ROW
    parts += time_axis(axis, left, width, y)
    whole = [opened(axis, left, width, 0.0, y), *parts, "</g>"]
    return framed(name, title, description, whole, look.width, y + 26.0 + FOOT)


def _row(row: Row, time: Scale, left: float, top: float, width: float, points: int) -> list[str]:
    known = [value for _, value in row.points if value is not None]
    most = max(1.0, ceil(max(known, default=0.0) - 0.15))
    letters = int((left - 8) / 6.6)
    label = shortened(row.label, letters)
    bottom = top + ROW
    up = Scale(0.0, most)
    return [
        f'<g class="panel row" data-title="{escape(row.label[:MAX_LENGTH])}" data-unit="{row.unit}" '
        f'data-plot="{top + 2:g} {ROW - 2:g}" data-foot="0" data-top="{most:g}">',
        text(left - 8, bottom - 8, label, "alert" if row.alert else "ink", "end", bold=bool(row.alert)),
        text(left + width + 7, bottom - 8, row.alert or row.beside, "alert" if row.alert else row.color, bold=True),
        line(left, bottom, left + width, bottom, "line", 0.7),
        f'<g class="plot"><g class="curves" {matrix(time, left, width, up, bottom, ROW - 2)}>'
        f'<g class="curve" data-kind="stairs" data-label="" data-color="{row.color}">',
        *_filled(row, time, up, points),
        "</g></g></g></g>",
    ]


def _filled(row: Row, time: Scale, up: Scale, points: int) -> list[str]:
    """One path for the whole row: up at the beginning of each stretch, along its values, down again at its end."""
    steps: list[str] = []
    before = ""
    is_up, level = False, ""
    exactly = digits(time.low, time.high)
    for x, value in shorten(row.points, points):
        place = f"{time.height(x):.{exactly}g}"
        if value is None:
            steps += ["V0Z"] if is_up else []
            before, is_up, level = "", False, ""
            continue
        height = f"{up.height(value):.3g}"
        if before:
            if not is_up:
                steps.append(f"M{before} 0")
            # Of a level that goes on, the last end counts.
            if is_up and height == level:
                steps[-1] = f"H{place}"
            else:
                steps += [f"V{height}", f"H{place}"]
            is_up, level = True, height
        before = place
    steps += ["V0Z"] if is_up else []
    path = "".join(steps)
    return [f'<path{VALUES} d="{path}" fill="var(--{row.color})" fill-opacity="0.72"/>'] if path else []


def _lane(marks: Sequence[float], time: Scale, left: float, top: float, width: float) -> list[str]:
    y = top + ROW / 2
    parts = [text(left - 8, y + 4, "checkpoints", "checkpoint", "end"), line(left, y, left + width, y, "line", 0.7)]
    seen: set[int] = set()
    for mark in marks:
        x = left + time.place(mark) * width
        if int(x / 3) in seen:
            continue
        seen.add(int(x / 3))
        diamond = '<path d="M0 -5l4 5l-4 5l-4 -5Z" fill="var(--checkpoint)"/>'
        parts.append(f'<g class="mark" data-x="{mark:.7g}" transform="translate({x:.1f} {y:.1f})">{diamond}</g>')
    return parts
