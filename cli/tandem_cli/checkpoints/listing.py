"""The list of a run's checkpoints: a table with totals for people, JSON for programs.

list each row is one line: the last column is cut, or left out as any other.

Texts may come from anywhere: what is not printable never reaches the terminal. A no-break space keeps a number and its
unit on one line and is then written as a plain one, which programs like awk and people who copy expect.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from textwrap import wrap
from typing import Any

from rich.text import Text

from tandem.formatting import elapsed, metric_name, one_line, score, several, size
from tandem_cli.checkpoints.inventory import Entry, Inventory

GAP = 2
MIN = 16
"""Characters that a text is wrapped to, at least."""
MIN_LAST = 18
"""Characters of the last column that are worth leaving another column out."""
MIN_LISTED = 24
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
    least = min(MIN_LAST, _widest(columns, rows, shown[-1]))
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
    needs[last] = min(MIN_LISTED, needs[last])
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
    return [plain(part) for part in wrap(text, max(width, MIN))] or [""]


def plain(text: str) -> str:
    """A text as it may stand in a line: without control characters, line breaks and no-break spaces."""
    return one_line(text)


def _width(columns: Sequence[Column], rows: Sequence[Sequence[Cell]], shown: Sequence[int]) -> int:
    return sum(_widest(columns, rows, index) + GAP for index in shown)


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
"""How each state is called, and its style."""


def lines(inventory: Inventory, width: int | None) -> list[Text]:
    """The table, the totals, and what could not be read.

    Args:
        width: of the terminal; None: of anything else.
    """
    columns = [
        Column("NAME"),
        Column("STEP", is_right=True, rank=4),
        Column("GEN", is_right=True, rank=3),
        Column("SIZE", is_right=True, rank=1),
        Column("AGE", is_right=True, rank=1),
        Column(metric_name(inventory.metric).upper(), is_right=True),
        Column("KEPT FOR", rank=2),
        Column("STATE"),
    ]
    rows = [_cells(entry, inventory) for entry in inventory.entries]
    return [*(table(columns, rows, width) if rows else []), *_totals(inventory, width)]


def state(entry: Entry) -> str:
    """What a checkpoint is good for, in words."""
    words = ["latest" if entry.is_latest else STATES[entry.state][0]]
    words += ["best"] if entry.is_best else []
    words += ["final"] if entry.is_final else []
    words += ["being read"] if entry.readers else []
    return ", ".join(words) + (f": {entry.why}" if entry.why else "")


def age(entry: Entry, now: float) -> str:
    """How long ago it was written; a dash where a clock says that it has not been yet."""
    return elapsed(now - entry.at) if entry.at is not None and entry.at <= now + 1 else "–"


def kept(entry: Entry) -> str:
    """Why it is kept."""
    if entry.state != "counts":
        return "–"
    return ", ".join(entry.kept) or "nothing"


def as_json(inventory: Inventory) -> dict[str, Any]:
    """For programs. What is not known is null."""
    return {
        "run": str(inventory.rundir.path),
        "job": inventory.job.metadata.name if inventory.job else None,
        "metric": inventory.metric,
        "checkpoints": [entry_json(entry, inventory.metric) for entry in inventory.entries],
        "temporary": [
            {"name": left.name, "bytes": left.size, "ageSeconds": round(left.age, 3)} for left in inventory.leftovers
        ],
        "bytes": sum(entry.size or 0 for entry in inventory.entries),
        "freeBytes": inventory.free,
        "faults": list(inventory.faults),
    }


def entry_json(entry: Entry, metric: str) -> dict[str, Any]:
    """One checkpoint for programs."""
    return {
        "name": entry.name,
        "step": entry.step,
        "generation": entry.generation,
        "bytes": entry.size,
        "createdAt": entry.at,
        "state": entry.state,
        "why": entry.why or None,
        "evaluation": entry.evaluation,
        "score": entry.metrics.get(metric),
        "metrics": dict(entry.metrics),
        "validation": dict(entry.validation) or None,
        "latest": entry.is_latest,
        "best": entry.is_best,
        "final": entry.is_final,
        "keptFor": list(entry.kept),
        "leases": list(entry.readers),
    }


def _cells(entry: Entry, inventory: Inventory) -> list[Cell]:
    style = STATES[entry.state][1]
    shown = "bold green" if entry.is_best else "" if entry.is_latest else style
    return [
        (entry.name, "bold" if entry.is_latest else ""),
        (f"{entry.step:,}", ""),
        ("–" if entry.generation is None else str(entry.generation), ""),
        (size(entry.size), ""),
        (age(entry, inventory.now), ""),
        (_score(entry, inventory.metric), "bold green" if entry.is_best else ""),
        (kept(entry), "dim"),
        (state(entry), shown),
    ]


def _score(entry: Entry, metric: str) -> str:
    if metric in entry.metrics:
        return score(metric, entry.metrics[metric]) + ("*" if entry.is_best else " ")
    return {"waits": "waits ", "begun": "begun ", "skipped": "skipped "}.get(entry.evaluation, "– ")


def _totals(inventory: Inventory, width: int | None) -> list[Text]:
    entries = inventory.entries
    if not entries:
        text = f"no checkpoints in {inventory.rundir.checkpoints}"
    else:
        text = f"{several(len(entries), 'checkpoint')}, {_sum(entries)}: {', '.join(_parts(entries))}"
    if inventory.leftovers:
        sizes = size(sum(left.size for left in inventory.leftovers))
        text += f"; {several(len(inventory.leftovers), 'temporary folder')}, {sizes}"
    if inventory.free is not None:
        text += f"; {size(inventory.free)} free"
    found = [*paragraph("total", text, width, indent=7)]
    if inventory.lost_best:
        gone = f"the best of the run, {inventory.lost_best}, is not there any more"
        found += paragraph("note", gone, width, indent=7, style="yellow")
    for fault in inventory.faults:
        found += paragraph("note", fault, width, indent=7, style="yellow")
    return found


def _parts(entries: Sequence[Entry]) -> list[str]:
    words = {"counts": ("counts", "count"), "unknown": ("of unknown lineage", "of unknown lineage")}
    parts = []
    for name, (called, _) in STATES.items():
        own = [entry for entry in entries if entry.state == name]
        if own:
            one, more = words.get(name, (called, called))
            parts.append(f"{len(own):,} {one if len(own) == 1 else more} ({_sum(own)})")
    return parts


def _sum(entries: Sequence[Entry]) -> str:
    return size(sum(entry.size or 0 for entry in entries))
