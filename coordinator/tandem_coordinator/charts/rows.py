"""Processor use as rows: one bar for each process, filled to its busy cores, with its mean or newest value."""

from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from math import ceil
from typing import Literal

from tandem.formatting import truncate_end
from tandem_coordinator.charts.chart import Axis, Points, Role, Viewport
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

ROW_HEIGHT, ROW_GAP, CAPTION_HEIGHT = 24.0, 6.0, 22.0
"""Pixels of a row, between two rows, and of a heading."""
MAX_POINTS, MIN_POINTS = 3000, 60
"""Maximum number of points of all rows together, and minimum of each: a page of many processes is sent again and
again."""
MAX_LENGTH = 60
"""Maximum length of a name that comes from a run, in characters."""
MARGIN_LEFT_WIDE, MARGIN_LEFT_NARROW, MARGIN_RIGHT = 128.0, 98.0, 86.0


@dataclass(frozen=True, kw_only=True)
class Row:
    """One process."""

    label: str
    color: Role
    points: Points
    """Busy cores (of a GPU: its busy share) over time; each value is that since the one before."""
    value_text: str
    """Text at its right end."""
    unit: Literal["cores", "share"] = "cores"
    """Unit of its values."""
    alert: str = ""
    """Warning about the process; empty if there is none. Its name is then in the colour of warnings, with this text
    next to it."""


@dataclass(frozen=True, kw_only=True)
class Rows:
    """Processes of one kind."""

    caption: str
    rows: tuple[Row, ...]


def draw(
    name: str,
    title: str,
    description: str,
    groups: Sequence[Rows],
    marks: Sequence[float],
    axis: Axis,
    viewport: Viewport,
) -> str:
    """Draw all groups as one svg element, over one time axis.

    Args:
        name: prefix of the ids in it.
        marks: when checkpoints were committed.
    """
    x_left = MARGIN_LEFT_NARROW if viewport.narrow else MARGIN_LEFT_WIDE
    width = viewport.width - x_left - MARGIN_RIGHT
    time = across(axis)
    points = min(int(width), max(MIN_POINTS, MAX_POINTS // max(1, sum(len(group.rows) for group in groups))))
    parts: list[str] = []
    y = 0.0
    for group in groups:
        color = group.rows[0].color if group.rows else "muted"
        parts.append(text(0, y + CAPTION_HEIGHT - 8, group.caption, color, bold=True, size=11))
        y += CAPTION_HEIGHT
        for row in group.rows:
            parts += _row(row, time, x_left, y, width, points)
            y += ROW_HEIGHT + ROW_GAP
    if marks:
        parts += _lane(marks, time, x_left, y, width)
        y += ROW_HEIGHT
    parts += time_axis(axis, x_left, width, y)
    group_parts = [opened(axis, x_left, width, 0.0, y), *parts, "</g>"]
    return framed(name, title, description, group_parts, viewport.width, y + 26.0 + FOOT)


def _row(row: Row, time: Scale, x_left: float, top: float, width: float, points: int) -> list[str]:
    measured = [value for _, value in row.points if value is not None]
    max_value = max(1.0, ceil(max(measured, default=0.0) - 0.15))
    letters = int((x_left - 8) / 6.6)
    label = truncate_end(row.label, letters)
    bottom = top + ROW_HEIGHT
    up = Scale(0.0, max_value)
    return [
        f'<g class="panel row" data-title="{escape(row.label[:MAX_LENGTH])}" data-unit="{row.unit}" '
        f'data-plot="{top + 2:g} {ROW_HEIGHT - 2:g}" data-foot="0" data-top="{max_value:g}">',
        text(x_left - 8, bottom - 8, label, "alert" if row.alert else "ink", "end", bold=bool(row.alert)),
        text(
            x_left + width + 7, bottom - 8, row.alert or row.value_text, "alert" if row.alert else row.color, bold=True
        ),
        line(x_left, bottom, x_left + width, bottom, "line", 0.7),
        f'<g class="plot"><g class="curves" {matrix(time, x_left, width, up, bottom, ROW_HEIGHT - 2)}>'
        f'<g class="curve" data-kind="stairs" data-label="" data-color="{row.color}">',
        *_filled(row, time, up, points),
        "</g></g></g></g>",
    ]


def _filled(row: Row, time: Scale, up: Scale, points: int) -> list[str]:
    """Draw the whole row as one path: up at the beginning of each stretch, along its values, down again at its end."""
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
            # While the level stays, only its last end counts.
            if is_up and height == level:
                steps[-1] = f"H{place}"
            else:
                steps += [f"V{height}", f"H{place}"]
            is_up, level = True, height
        before = place
    steps += ["V0Z"] if is_up else []
    path = "".join(steps)
    return [f'<path{VALUES} d="{path}" fill="var(--{row.color})" fill-opacity="0.72"/>'] if path else []


def _lane(marks: Sequence[float], time: Scale, x_left: float, top: float, width: float) -> list[str]:
    y = top + ROW_HEIGHT / 2
    parts = [
        text(x_left - 8, y + 4, "checkpoints", "checkpoint", "end"),
        line(x_left, y, x_left + width, y, "line", 0.7),
    ]
    occupied: set[int] = set()
    for mark in marks:
        x = x_left + time.place(mark) * width
        if int(x / 3) in occupied:
            continue
        occupied.add(int(x / 3))
        diamond = '<path d="M0 -5l4 5l-4 5l-4 -5Z" fill="var(--checkpoint)"/>'
        parts.append(f'<g class="mark" data-x="{mark:.7g}" transform="translate({x:.1f} {y:.1f})">{diamond}</g>')
    return parts
