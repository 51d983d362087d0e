"""Rows of text in columns that fit a terminal: columns that matter least are left out first, the last one wraps. In a
list each row is one line: the last column is cut, or left out as any other.

Texts may come from anywhere: what is not printable never reaches the terminal. A no-break space keeps a number and its
unit on one line and is then written as a plain one, which programs like awk and people who copy expect.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from textwrap import wrap

from rich.text import Text

from tandem.printable import one_line

GAP = 2
LEAST = 16
"""Characters that a text is wrapped to, at least."""
LEAST_LAST = 18
"""Characters of the last column that are worth leaving another column out."""
LEAST_LISTED = 24
"""The same in a list, where the rest of it is not shown."""


@dataclass(frozen=True)
class Column:
    """One column."""

    title: str
    """Its heading."""
    is_right: bool = False
    """Whether it is aligned to the right, as numbers are."""
    rank: int = 0
    """The higher, the sooner it is left out; 0: never."""


Cell = tuple[str, str]
"""Text and its style."""


def table(columns: Sequence[Column], rows: Sequence[Sequence[Cell]], width: int | None) -> list[Text]:
    """The lines of a table, headings first.

    Args:
        width: of the terminal; None: as wide as it gets, each row on one line.
    """
    shown = list(range(len(columns)))
    least = min(LEAST_LAST, _widest(columns, rows, shown[-1]))
    while width is not None and _width(columns, rows, shown[:-1]) + least > width:
        worst = max(shown[:-1], key=lambda index: columns[index].rank, default=None)
        if worst is None or columns[worst].rank == 0:
            break
        shown.remove(worst)
    return _lines(columns, rows, shown, width)


def listing(columns: Sequence[Column], rows: Sequence[Sequence[Cell]], width: int | None) -> list[Text]:
    """The lines of a table with one line for each row, headings first. What has no room or is empty is left out, and a
    row that is still too long loses its end."""
    if width is None:
        return table(columns, rows, None)
    last = len(columns) - 1
    needs = [_widest(columns, rows, index) for index in range(len(columns))]
    needs[last] = min(LEAST_LISTED, needs[last])
    shown: set[int] = set()
    for index in sorted(range(len(columns)), key=lambda index: columns[index].rank):
        told = any(row[index][0] for row in rows)
        has_room = sum(needs[one] + GAP for one in {*shown, index}) - GAP <= width
        if columns[index].rank == 0 or (told and has_room):
            shown.add(index)
    lines = _lines(columns, rows, sorted(shown), None)
    for line in lines:
        line.truncate(width, overflow="ellipsis")
    return lines


def _lines(
    columns: Sequence[Column], rows: Sequence[Sequence[Cell]], shown: Sequence[int], width: int | None
) -> list[Text]:
    widths = {index: _widest(columns, rows, index) for index in shown}
    head = [(column.title, "dim") for column in columns]
    return [line for row in [head, *rows] for line in _row(columns, row, shown, widths, width)]


def paragraph(label: str, text: str, width: int | None, indent: int = 13, style: str = "") -> list[Text]:
    """A labelled text, wrapped beside its label."""
    parts = _wrapped(text, None if width is None else width - indent - GAP)
    lines = [Text.assemble((f"  {label:<{indent}}", "dim"), (parts[0], style))]
    return lines + [Text.assemble(" " * (indent + GAP), (part, style)) for part in parts[1:]]


def _row(
    columns: Sequence[Column], row: Sequence[Cell], shown: Sequence[int], widths: dict[int, int], width: int | None
) -> list[Text]:
    *most, last = shown
    line = Text()
    for index in most:
        text, style = row[index]
        pad = " " * (widths[index] - len(text))
        line.append(pad if columns[index].is_right else "").append(plain(text), style)
        line.append("" if columns[index].is_right else pad).append(" " * GAP)
    start = len(line.plain)
    first, *more = _wrapped(row[last][0], None if width is None else width - start)
    line.append(first, row[last][1])
    line.rstrip()
    return [line, *(Text.assemble(" " * start, (part, row[last][1])) for part in more)]


def _wrapped(text: str, width: int | None) -> list[str]:
    if width is None or len(text) <= width:
        return [plain(text)]
    return [plain(part) for part in wrap(text, max(width, LEAST))] or [""]


def plain(text: str) -> str:
    """A text as it may stand in a line: without control characters, line breaks and no-break spaces."""
    return one_line(text)


def _width(columns: Sequence[Column], rows: Sequence[Sequence[Cell]], shown: Sequence[int]) -> int:
    return sum(_widest(columns, rows, index) + GAP for index in shown)


def _widest(columns: Sequence[Column], rows: Sequence[Sequence[Cell]], index: int) -> int:
    return max([len(columns[index].title), *(len(row[index][0]) for row in rows)])
