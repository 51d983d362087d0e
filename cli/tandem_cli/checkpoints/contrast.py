"""Two checkpoints side by side: what their manifests say differently, and how much their tensors differ."""

import math
from dataclasses import dataclass
from typing import Any

from rich.text import Text

from tandem.formatting import several, size
from tandem_cli.checkpoints.columns import Cell, Column, paragraph, table
from tandem_cli.checkpoints.difference import Fact, FileDifference, TensorDifference

WORDS = {
    "added": "only in B",
    "removed": "only in A",
    "reshaped": "other shape",
    "retyped": "other dtype",
    "different": "",
    "equal": "equal",
}


@dataclass(frozen=True)
class Contrast:
    """Two checkpoints."""

    before: str
    """A: its name, with its run if they are of two runs."""
    after: str
    """B, in the same way."""
    facts: tuple[Fact, ...]
    """What their manifests say differently."""
    files: tuple[FileDifference, ...]
    """Their files."""


def lines(found: Contrast, most: int, with_state: bool, width: int | None) -> list[Text]:
    """All of it.

    Args:
        most: tensors of each file that are listed; the rest is counted.
        with_state: whether the tensors of the resumable state are listed, too.
    """
    if not found.facts and all(file.change == "equal" for file in found.files):
        return [Text("A and B are equal to the bit")]
    columns = [Column(""), Column("A"), Column("B")]
    head: list[list[Cell]] = [[("", ""), (found.before, "bold"), (found.after, "bold")]]
    told = [[(fact.label, "dim"), (fact.before, ""), (fact.after, "")] for fact in found.facts]
    shown = table(columns, [*head, *told], width)
    for file in found.files:
        is_listed = with_state or not file.path.startswith("state/")
        shown += [Text(""), *_file(file, most if is_listed else 0, width)]
    return shown


def as_json(found: Contrast) -> dict[str, Any]:
    """For programs. Measures that there are not are null."""
    return {
        "a": found.before,
        "b": found.after,
        "facts": {fact.label: {"a": fact.before, "b": fact.after} for fact in found.facts},
        "files": [
            {
                "path": file.path,
                "change": file.change,
                "bytes": {"a": file.bytes_before, "b": file.bytes_after},
                "tensors": [_tensor_json(tensor) for tensor in file.tensors],
            }
            for file in found.files
        ],
    }


def _file(file: FileDifference, most: int, width: int | None) -> list[Text]:
    head = Text(file.path, "bold")
    if file.change in ("added", "removed"):
        return [head.append(f"  {WORDS[file.change]}", "yellow")]
    if file.change == "equal":
        return [head.append("  equal", "green").append(f", {size(file.bytes_before)}")]
    if not file.tensors:
        return [head.append("  different", "yellow")]
    differing = sorted((one for one in file.tensors if one.change != "equal"), key=_rank)
    equal = len(file.tensors) - len(differing)
    counted = f"  {several(len(file.tensors), 'tensor')}: {len(differing)} different, {equal} equal"
    head.append(counted, "" if differing else "green")
    columns = [
        Column("TENSOR"),
        Column("SHAPE", rank=1),
        Column("LARGEST", is_right=True),
        Column("RELATIVE", is_right=True),
        Column("NOTE"),
    ]
    rows = [_row(tensor) for tensor in differing[:most]]
    found = [head, *(table(columns, rows, width) if rows else [])]
    if most == 0 and differing:
        found += paragraph("", "--state lists them", width, indent=0)
    elif len(differing) > most:
        found += paragraph("", f"and {len(differing) - most} more; --most lists more", width, indent=0)
    return found


def _rank(one: TensorDifference) -> tuple[bool, float]:
    """What differs most first: what has no measure, then by the relative difference."""
    measured = one.change in ("different", "retyped")
    return measured, -(math.inf if one.relative is None else one.relative)


def _row(one: TensorDifference) -> list[Cell]:
    notes = [WORDS[one.change]] if WORDS[one.change] else []
    shape = one.before or one.after
    if one.change in ("reshaped", "retyped"):
        notes = [f"{WORDS[one.change]}: B has {one.after}"]
    if any(one.not_finite):
        notes.append(f"not finite: {one.not_finite[0]:,} in A, {one.not_finite[1]:,} in B")
    return [
        (one.name, ""),
        (shape, "dim"),
        (_measure(one.largest), ""),
        (_measure(one.relative), ""),
        ("; ".join(notes), "yellow"),
    ]


def _measure(value: float | None) -> str:
    return "–" if value is None else f"{value:.3g}"


def _tensor_json(one: TensorDifference) -> dict[str, Any]:
    return {
        "name": one.name,
        "change": one.change,
        "a": one.before or None,
        "b": one.after or None,
        "largest": one.largest,
        "relative": one.relative,
        "notFinite": {"a": one.not_finite[0], "b": one.not_finite[1]},
    }
