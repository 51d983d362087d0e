"""The differences between two checkpoints: their manifests, and the results of `tensor_diff`, which needs numpy."""

import math
from dataclasses import dataclass
from typing import Any, Literal

from rich.text import Text

from tandem.formatting import several, size
from tandem.rundir.checkpoint import DataPosition, Manifest
from tandem_cli.checkpoints.listing import Cell, Column, paragraph, table

Change = Literal["added", "removed", "reshaped", "retyped", "different", "equal"]


@dataclass(frozen=True)
class TensorDifference:
    """One tensor in both."""

    name: str
    """Its name."""
    change: Change
    """`added`: only the second has it. `retyped`: of another dtype; its values are compared all the same."""
    before: str = ""
    """Dtype and shape in the first, as `F32 [64, 10]`."""
    after: str = ""
    """The same in the second."""
    largest: float | None = None
    """The largest absolute difference of two elements; None where no numbers were compared."""
    relative: float | None = None
    """L2 norm of the difference over that of the first; None where the first is all zeros."""
    not_finite: tuple[int, int] = (0, 0)
    """Elements that are NaN or infinite in the first and in the second; left out of both measures."""


@dataclass(frozen=True)
class FileDifference:
    """One file in both."""

    path: str
    """Its path inside the checkpoint."""
    change: Change
    """What became of it as a whole."""
    tensors: tuple[TensorDifference, ...] = ()
    """Its tensors in the order of the first; empty where all are equal or the file is in one checkpoint only."""
    bytes_before: int | None = None
    """Its size in the first."""
    bytes_after: int | None = None
    """Its size in the second."""


@dataclass(frozen=True)
class Fact:
    """Something that the manifests say differently."""

    label: str
    """What."""
    before: str
    """In the first."""
    after: str
    """In the second."""


def facts(before: Manifest, after: Manifest) -> list[Fact]:
    """What the manifests say differently, but for their files and the loop's own small state."""
    pairs = {
        "step": (f"{before.step:,}", f"{after.step:,}"),
        "generation": (str(before.generation), str(after.generation)),
        "parent": (before.parent or "–", after.parent or "–"),
        "data": (position(before.data), position(after.data)),
        "world size": (str(before.world_size), str(after.world_size)),
        "mesh": (_mesh(before.mesh), _mesh(after.mesh)),
        "format": (str(before.format), str(after.format)),
    }
    for name in sorted({*before.versions, *after.versions}):
        pairs[f"{name} version"] = (before.versions.get(name, "–"), after.versions.get(name, "–"))
    return [Fact(label, one, other) for label, (one, other) in pairs.items() if one != other]


def position(data: DataPosition | None) -> str:
    """Where the data order stands, in words."""
    return f"epoch {data.epoch}, sample {data.cursor:,}, seed {data.seed}" if data else "–"


def _mesh(mesh: dict[str, int]) -> str:
    return " × ".join(f"{name} {size}" for name, size in mesh.items()) or "–"


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
        Column("MAX_SIZE", is_right=True),
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
