"""What verifying found and what pruning would do, in lines and as JSON."""

from typing import Any

from rich.text import Text

from tandem.formatting import several, size
from tandem_cli.checkpoints.columns import Column, paragraph, table
from tandem_cli.checkpoints.pruning import Doomed, Plan
from tandem_cli.checkpoints.verification import Verdict

OUTCOMES = {"sound": "green", "damaged": "bold red", "unreadable": "bold red", "vanished": "dim"}


def verdict(found: Verdict, width: int | None) -> list[Text]:
    """One checkpoint: a line, and one more for each further fault."""
    if found.outcome == "sound":
        texts = [f"{several(found.files, 'file')}, {size(found.size)}"]
    elif found.outcome == "vanished":
        texts = ["it was deleted meanwhile, as retention does"]
    else:
        texts = list(found.faults)
    columns = [Column(found.name), Column(f"{found.outcome:<10}"), Column("")]
    rows = [[(found.name, ""), (found.outcome.ljust(10), OUTCOMES[found.outcome]), (texts[0], "")]]
    rows += [[("", ""), ("", ""), (text, "")] for text in texts[1:]]
    _, *lines = table(columns, rows, width)
    return lines


def verdict_json(found: Verdict) -> dict[str, Any]:
    """The same for programs."""
    return {
        "name": found.name,
        "outcome": found.outcome,
        "faults": list(found.faults),
        "files": found.files,
        "bytes": found.size,
    }


def plan(found: Plan, width: int | None) -> list[Text]:
    """What would be deleted, and what stays."""
    lines = []
    if found.doomed:
        columns = [Column("TO DELETE"), Column("SIZE", is_right=True), Column("WHY")]
        rows = [[(one.name, "bold"), (size(one.size), ""), (one.why, "dim")] for one in found.doomed]
        lines += [*table(columns, rows, width), Text("")]
    columns = [Column("STAYS"), Column("KEPT FOR")]
    if found.kept:
        lines += [*table(columns, [[(name, ""), (why, "dim")] for name, why in found.kept], width), Text("")]
    total = f"{several(len(found.doomed), 'folder')} to delete, {size(found.size)} to come free"
    lines += paragraph("total", total if found.doomed else "nothing to delete", width, indent=7)
    if found.others:
        lines += paragraph("note", _others(found.others), width, indent=7, style="yellow")
    return lines


def _others(others: tuple[Doomed, ...]) -> str:
    names = ", ".join(one.name for one in others[:3]) + (f" and {len(others) - 3} more" if len(others) > 3 else "")
    return f"{size(sum(one.size for one in others))} more in what does not count ({names}); --all deletes it, too"
