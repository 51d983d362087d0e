"""All checkpoints of a run: a table with totals for people, and the same as JSON for programs."""

from collections.abc import Sequence
from typing import Any

from rich.text import Text

from tandem.formatting import elapsed, metric_name, score, several, size
from tandem_cli.checkpoints.columns import Cell, Column, paragraph, table
from tandem_cli.checkpoints.inventory import Entry, Inventory

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
    rows = [_row(entry, inventory) for entry in inventory.entries]
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


def _row(entry: Entry, inventory: Inventory) -> list[Cell]:
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
