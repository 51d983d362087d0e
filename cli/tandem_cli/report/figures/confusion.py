"""The confusion matrix of the best checkpoint, and the F1 score of each class."""

import numpy as np

from tandem.formatting import truncate_end
from tandem_cli.report.by_class import names_of_classes
from tandem_cli.report.run import Floats, Ints, RunData
from tandem_coordinator.charts.chart import Viewport
from tandem_coordinator.charts.drawing import LETTER, framed, line, rectangle, text, ticks

MAX_LABELLED = 20
"""Classes up to which each cell has room for a number."""

MAX_CELLS = 64
"""Classes up to which each cell is drawn; of more, neighbours share one."""

MAX_BARS = 20
"""Classes with a bar; of more classes the worst are shown."""

TITLE, GAP, FOOT = 24.0, 36.0, 24.0
MAX_NAME_LENGTH = 14
"""Length of a class's name beside an axis, in characters."""


def draw(name: str, title: str, description: str, run: RunData, style: Viewport) -> str | None:
    """Draw the matrix beside the scores (narrow: above them), as an SVG element. None without an evaluation that has
    either.

    Args:
        name: prefix of the ids in it.
        title: title of the drawing.
        description: description for readers who cannot see it.
    """
    evaluation = run.best.evaluation if run.best else None
    if evaluation is None or not (len(evaluation.confusion) or len(evaluation.per_class_f1)):
        return None
    count = sum(bool(len(scores)) for scores in (evaluation.confusion, evaluation.per_class_f1))
    across = 1 if style.narrow else count
    width = (style.width - GAP * (across - 1)) / across
    names = names_of_classes(run, max(len(evaluation.confusion), len(evaluation.per_class_f1)))
    parts: list[str] = []
    x0 = top = bottom = 0.0
    if len(evaluation.confusion):
        elements, bottom = _matrix(evaluation.confusion, names, x0, top, width)
        parts += elements
        x0, top = (0.0, bottom + GAP / 2) if style.narrow else (width + GAP, 0.0)
    if len(evaluation.per_class_f1):
        elements, foot = _f1(evaluation.per_class_f1, names, x0, top, width)
        parts += elements
        bottom = max(bottom, foot)
    return framed(name, title, description, parts, style.width, bottom)


def _label_width(names: list[str]) -> float:
    """Pixels that the names need beside an axis."""
    return LETTER * min(MAX_NAME_LENGTH, max(len(name) for name in names)) + 14


def _short(name: str) -> str:
    return truncate_end(name, MAX_NAME_LENGTH)


def _matrix(confusion: Ints, names: list[str], outer_left: float, top: float, width: float) -> tuple[list[str], float]:
    """Draw a square for each cell: strong on the diagonal, and wrong predictions emphasized so that one in a hundred
    is visible."""
    classes = len(confusion)
    label_width = _label_width(names) if classes <= MAX_LABELLED else 40.0
    side = min(width - label_width, 330.0)
    x0, y0 = outer_left + label_width, top + TITLE
    parts = [text(outer_left, top + 13, "Confusion (rows: truth, columns: answer)", "ink", bold=True)]
    share = confusion / np.maximum(1, confusion.sum(axis=1, keepdims=True))
    cells = share if classes <= MAX_CELLS else _coarse(share)
    cell = side / len(cells)
    room = min(1.0, 0.06 * cell)
    for row in range(len(cells)):
        for column in range(len(cells)):
            value = float(cells[row, column])
            color = "grid" if not value else "trainer" if row == column else "alert"
            strength = round(max(0.15, value**0.5), 2) if value else 1.0
            if value or classes <= MAX_CELLS:
                x, y = x0 + column * cell + room / 2, y0 + row * cell + room / 2
                parts.append(rectangle(x, y, cell - room, cell - room, color, strength))  # type: ignore[arg-type]
    if classes <= MAX_LABELLED:
        size = 11.0 if confusion.max() < 1000 and classes <= 12 else 9.0
        for truth, answer in np.argwhere(confusion > 0).tolist():
            color = "paper" if share[truth, answer] > 0.5 else "ink"
            x, y = x0 + (answer + 0.5) * cell, y0 + (truth + 0.5) * cell + 4
            count = f"{confusion[truth, answer]:,}"
            parts.append(text(x, y, count, color, "middle", bold=truth != answer, size=size))  # type: ignore[arg-type]
    return [*parts, *(_ticks(names, x0, y0, side))], y0 + side + _foot(names)


def _coarse(share: Floats) -> Floats:
    """Reduce the matrix to as many cells as have room, each the maximum of its neighbours."""
    size = -(-len(share) // MAX_CELLS)
    count = -(-len(share) // size)
    padded = np.zeros((count * size, count * size))
    padded[: len(share), : len(share)] = share
    coarse: Floats = padded.reshape(count, size, count, size).max(axis=(1, 3))
    return coarse


def _foot(names: list[str]) -> float:
    long = len(names) <= MAX_LABELLED and max(len(name) for name in names) > 3
    return _label_width(names) * 0.75 + 8 if long else FOOT


def _ticks(names: list[str], x0: float, y0: float, side: float) -> list[str]:
    classes = len(names)
    if classes <= MAX_LABELLED:
        marks = list(enumerate(names))
    else:
        marks = [(int(value), f"{value:,.0f}") for value in ticks(0, classes - 1, 6, whole=True)]
    long = classes <= MAX_LABELLED and max(len(name) for name in names) > 3
    parts = []
    for place, name in marks:
        middle = (place + 0.5) * side / classes
        parts.append(text(x0 - 7, y0 + middle + 4, _short(name), "muted", "end"))
        if long:
            position = f"{x0 + middle + 4:.1f} {y0 + side + 12:.1f}"
            word = text(0, 0, _short(name), "muted", "end")
            parts.append(f'<g transform="translate({position}) rotate(-45)">{word}</g>')
        else:
            parts.append(text(x0 + middle, y0 + side + 16, name, "muted", "middle"))
    return parts


def _f1(f1: Floats, names: list[str], outer_left: float, top: float, width: float) -> tuple[list[str], float]:
    """Draw a line with a dot for each class."""
    order = np.arange(len(f1))
    title = "F1 of each class"
    if len(f1) > MAX_BARS:
        order = np.argsort(np.nan_to_num(f1, nan=-1.0), kind="stable")[:MAX_BARS]
        title = f"F1, the {MAX_BARS} worst of {len(f1)} classes"
    values = np.nan_to_num(f1[order])
    low = 0.0 if values.min() < 0.6 else float(np.floor(values.min() * 20 - 0.5) / 20)
    label_width, row = _label_width([names[index] for index in order]), 330.0 / max(10, len(order))
    x0, y0, length = outer_left + label_width, top + TITLE, width - label_width - 52
    bottom = y0 + row * len(order)
    parts = [text(outer_left, top + 13, title, "ink", bold=True)]
    for value in ticks(low, 1.0, 5):
        x = x0 + (value - low) / (1 - low) * length
        parts += [line(x, y0, x, bottom, "grid"), text(x, bottom + 17, f"{100 * value:g} %", "muted", "middle")]
    for place, (index, value) in enumerate(zip(order.tolist(), values.tolist(), strict=True)):
        x, y = x0 + (value - low) / (1 - low) * length, y0 + (place + 0.5) * row
        parts += [
            line(x0, y, x, y, "evaluator", 1.4, ' stroke-opacity="0.35"'),
            f'<circle cx="{x:.1f}" cy="{y:.1f}" r="4" fill="var(--evaluator)"/>',
            text(x + 9, y + 4, f"{100 * value:.1f}", "ink"),
            text(x0 - 7, y + 4, _short(names[index]), "muted", "end"),
        ]
    return [*parts, line(x0, bottom, x0 + length, bottom, "line")], bottom + FOOT
