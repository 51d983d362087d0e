"""The list of a run's checkpoints: a table with totals for people, JSON for programs.

`table` wraps the last column; in `listing` each row is one line, and the last column is cut, or left out like any
other.

Texts may come from anywhere: unprintable characters never reach the terminal. A no-break space keeps a number and its
unit on one line; it is written as a plain space, which programs such as awk and people who copy expect.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from textwrap import wrap
from typing import Any

from rich.text import Text

from tandem.confidence import count_tied
from tandem.formatting import count_noun, elapsed, interval, metric_name, one_line, score, size, tied_with
from tandem_cli.checkpoints.inventory import Entry, Inventory

GAP = 2
"""Spaces between columns."""
MIN_WIDTH = 16
"""Minimum width of wrapped text, in characters."""
MIN_LAST_WIDTH = 18
"""Minimum width of the last column; below it another column is left out."""
MIN_LISTED_WIDTH = 24
"""Minimum width of the last column in `listing`, where the rest of it is cut."""


@dataclass(frozen=True)
class Column:
    """Column of a table."""

    title: str
    """Heading."""
    is_right: bool = False
    """Whether it is aligned to the right, as numbers are."""
    rank: int = 0
    """Order in which columns are left out: the highest first; 0 for never."""


Cell = tuple[str, str]
"""Text and its style."""


def table(columns: Sequence[Column], rows: Sequence[Sequence[Cell]], width: int | None) -> list[Text]:
    """Lay out a table, headings first.

    Args:
        width: columns of the terminal; None for unlimited, each row on one line.
    """
    visible = list(range(len(columns)))
    last_width = min(MIN_LAST_WIDTH, _widest(columns, rows, visible[-1]))
    # Leave out columns by rank until the last one has enough room; columns of rank 0 stay.
    while width is not None and _width(columns, rows, visible[:-1]) + last_width > width:
        worst = max(visible[:-1], key=lambda index: columns[index].rank, default=None)
        if worst is None or columns[worst].rank == 0:
            break
        visible.remove(worst)
    return _lines(columns, rows, visible, width)


def listing(columns: Sequence[Column], rows: Sequence[Sequence[Cell]], width: int | None) -> list[Text]:
    """Lay out a table with one line for each row, headings first. Columns without room or content are left out, and
    a row that is still too long is cut."""
    if width is None:
        return table(columns, rows, None)
    last = len(columns) - 1
    needs = [_widest(columns, rows, index) for index in range(len(columns))]
    needs[last] = min(MIN_LISTED_WIDTH, needs[last])
    visible: set[int] = set()
    # The columns that matter most (lowest rank) take their room first.
    for index in sorted(range(len(columns)), key=lambda index: columns[index].rank):
        has_content = any(row[index][0] for row in rows)
        has_room = sum(needs[column] + GAP for column in {*visible, index}) - GAP <= width
        if columns[index].rank == 0 or (has_content and has_room):
            visible.add(index)
    lines = _lines(columns, rows, sorted(visible), None)
    for line in lines:
        line.truncate(width, overflow="ellipsis")
    return lines


def _lines(
    columns: Sequence[Column], rows: Sequence[Sequence[Cell]], visible: Sequence[int], width: int | None
) -> list[Text]:
    widths = {index: _widest(columns, rows, index) for index in visible}
    head = [(column.title, "dim") for column in columns]
    return [line for row in [head, *rows] for line in _row(columns, row, visible, widths, width)]


def paragraph(label: str, text: str, width: int | None, indent: int = 13, style: str = "") -> list[Text]:
    """Lay out a labelled text, wrapped beside its label."""
    parts = _wrapped(text, None if width is None else width - indent - GAP)
    lines = [Text.assemble((f"  {label:<{indent}}", "dim"), (parts[0], style))]
    return lines + [Text.assemble(" " * (indent + GAP), (part, style)) for part in parts[1:]]


def _row(
    columns: Sequence[Column], row: Sequence[Cell], visible: Sequence[int], widths: dict[int, int], width: int | None
) -> list[Text]:
    *leading, last = visible
    line = Text()
    for index in leading:
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
    return [plain(part) for part in wrap(text, max(width, MIN_WIDTH))] or [""]


def plain(text: str) -> str:
    """Make a text fit for one line: without control characters, line breaks and no-break spaces."""
    return one_line(text)


def _width(columns: Sequence[Column], rows: Sequence[Sequence[Cell]], visible: Sequence[int]) -> int:
    return sum(_widest(columns, rows, index) + GAP for index in visible)


def _widest(columns: Sequence[Column], rows: Sequence[Sequence[Cell]], index: int) -> int:
    return max([len(columns[index].title), *(len(row[index][0]) for row in rows)])


STATES = {
    "counts": ("counts", ""),
    "off": ("off the lineage", "yellow"),
    "rewound": ("rewound", "yellow"),
    "unknown": ("lineage unknown", "yellow"),
    "damaged": ("damaged", "bold red"),
    "unreadable": ("unreadable", "bold red"),
    "bad": ("bad", "red"),
    "stale": ("stale", "dim"),
}
"""Word and style for each state."""


def lines(inventory: Inventory, width: int | None) -> list[Text]:
    """Lay out the table, the totals and the faults.

    Args:
        width: columns of the terminal; None if the output is not a terminal.
    """
    columns = [
        Column("NAME"),
        Column("STEP", is_right=True, rank=4),
        Column("GEN", is_right=True, rank=3),
        Column("SIZE", is_right=True, rank=1),
        Column("AGE", is_right=True, rank=1),
        Column(metric_name(inventory.metric).upper(), is_right=True),
        *([Column("95 % INTERVAL", is_right=True, rank=1)] if inventory.has_intervals else []),
        Column("KEPT FOR", rank=2),
        Column("STATE"),
    ]
    rows = [_cells(entry, inventory) for entry in inventory.entries]
    return [*(table(columns, rows, width) if rows else []), *_totals(inventory, width)]


def state(entry: Entry) -> str:
    """Describe a checkpoint's state in words."""
    parts = ["latest" if entry.is_latest else STATES[entry.state][0]]
    parts += ["best"] if entry.is_best else []
    parts += ["final"] if entry.is_final else []
    parts += ["being read"] if entry.readers else []
    return ", ".join(parts) + (f": {entry.why}" if entry.why else "")


def age(entry: Entry, now: float) -> str:
    """Format the time since it was written; a dash if a clock says that this lies in the future."""
    return elapsed(now - entry.written_at) if entry.written_at is not None and entry.written_at <= now + 1 else "–"


def retained_for(entry: Entry) -> str:
    """List the rules that keep a checkpoint."""
    if entry.state != "counts":
        return "–"
    return ", ".join(entry.keep_reasons) or "nothing"


def as_json(inventory: Inventory) -> dict[str, Any]:
    """The inventory as JSON; unknown values are null."""
    return {
        "run": str(inventory.rundir.path),
        "job": inventory.job.metadata.name if inventory.job else None,
        "metric": inventory.metric,
        "checkpoints": [entry_json(entry, inventory.metric) for entry in inventory.entries],
        "temporary": [
            {"name": leftover.name, "bytes": leftover.size, "ageSeconds": round(leftover.age, 3)}
            for leftover in inventory.leftovers
        ],
        "bytes": sum(entry.size or 0 for entry in inventory.entries),
        "freeBytes": inventory.free,
        "faults": list(inventory.faults),
    }


def entry_json(entry: Entry, metric: str) -> dict[str, Any]:
    """One checkpoint as JSON."""
    return {
        "name": entry.name,
        "step": entry.step,
        "generation": entry.generation,
        "bytes": entry.size,
        "createdAt": entry.written_at,
        "state": entry.state,
        "why": entry.why or None,
        "evaluation": entry.evaluation,
        "score": entry.metrics.get(metric),
        "metrics": dict(entry.metrics),
        "intervals": {name: list(ends) for name, ends in entry.intervals.items()},
        "validation": dict(entry.validation) or None,
        "latest": entry.is_latest,
        "best": entry.is_best,
        "final": entry.is_final,
        "keptFor": list(entry.keep_reasons),
        "leases": list(entry.readers),
    }


def _cells(entry: Entry, inventory: Inventory) -> list[Cell]:
    style = STATES[entry.state][1]
    state_style = "bold green" if entry.is_best else "" if entry.is_latest else style
    return [
        (entry.name, "bold" if entry.is_latest else ""),
        (f"{entry.step:,}", ""),
        ("–" if entry.generation is None else str(entry.generation), ""),
        (size(entry.size), ""),
        (age(entry, inventory.now), ""),
        (_score(entry, inventory.metric), "bold green" if entry.is_best else ""),
        *([(_interval(entry, inventory.metric), "dim")] if inventory.has_intervals else []),
        (retained_for(entry), "dim"),
        (state(entry), state_style),
    ]


def _score(entry: Entry, metric: str) -> str:
    if metric in entry.metrics:
        return score(metric, entry.metrics[metric]) + ("*" if entry.is_best else " ")
    return {"waits": "waits ", "begun": "begun ", "skipped": "skipped "}.get(entry.evaluation, "– ")


def _interval(entry: Entry, metric: str) -> str:
    return interval(metric, entry.intervals.get(metric)) or "–"


def _tied(inventory: Inventory) -> str:
    """Say whether the best checkpoint differs from the others by more than chance; empty if it is not known."""
    best = next((entry for entry in inventory.counting if entry.is_best), None)
    if best is None or best.estimate is None:
        return ""
    rivals = [entry.estimate for entry in inventory.counting if entry is not best and entry.estimate is not None]
    count = count_tied(best.estimate, rivals)
    return "" if count is None else f"{best.name} is {tied_with(count)}"


def _totals(inventory: Inventory, width: int | None) -> list[Text]:
    entries = inventory.entries
    if not entries:
        text = f"no checkpoints in {inventory.rundir.checkpoints}"
    else:
        text = f"{count_noun(len(entries), 'checkpoint')}, {_sum(entries)}: {', '.join(_parts(entries))}"
    if inventory.leftovers:
        sizes = size(sum(leftover.size for leftover in inventory.leftovers))
        text += f"; {count_noun(len(inventory.leftovers), 'temporary folder')}, {sizes}"
    if inventory.free is not None:
        text += f"; {size(inventory.free)} free"
    lines = [*paragraph("total", text, width, indent=7)]
    if tied := _tied(inventory):
        lines += paragraph("note", tied, width, indent=7)
    if inventory.lost_best:
        missing = f"the best of the run, {inventory.lost_best}, no longer exists"
        lines += paragraph("note", missing, width, indent=7, style="yellow")
    for fault in inventory.faults:
        lines += paragraph("note", fault, width, indent=7, style="yellow")
    return lines


def _parts(entries: Sequence[Entry]) -> list[str]:
    # Singular and plural, if these differ from the state's word.
    forms = {"counts": ("counts", "count"), "unknown": ("of unknown lineage", "of unknown lineage")}
    parts = []
    for name, (called, _) in STATES.items():
        own = [entry for entry in entries if entry.state == name]
        if own:
            singular, plural = forms.get(name, (called, called))
            parts.append(f"{len(own):,} {singular if len(own) == 1 else plural} ({_sum(own)})")
    return parts


def _sum(entries: Sequence[Entry]) -> str:
    return size(sum(entry.size or 0 for entry in entries))
