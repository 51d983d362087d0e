"""The differences between two checkpoints: their manifests, and the results of `tensor_diff`, which needs numpy."""

import math
from dataclasses import dataclass
from typing import Any, Literal

from rich.text import Text

from tandem.formatting import count_noun, size
from tandem.rundir.checkpoint import DataPosition, Manifest
from tandem_cli.checkpoints.listing import Cell, Column, paragraph, table

Change = Literal["added", "removed", "reshaped", "retyped", "different", "equal"]


@dataclass(frozen=True)
class TensorDifference:
    """Difference of one tensor."""

    name: str
    """Name of the tensor."""
    change: Change
    """Kind of change. `added`: only the second checkpoint has it. `retyped`: its dtype differs; values are compared
    all the same."""
    before: str = ""
    """Dtype and shape in the first, such as `F32 [64, 10]`."""
    after: str = ""
    """Dtype and shape in the second."""
    largest: float | None = None
    """Largest absolute difference of two elements; None if no numbers were compared."""
    relative: float | None = None
    """L2 norm of the difference over that of the first; None if the first is all zeros."""
    not_finite: tuple[int, int] = (0, 0)
    """Elements that are NaN or infinite in the first and in the second; excluded from both measures."""


@dataclass(frozen=True)
class FileDifference:
    """Difference of one file."""

    path: str
    """Path inside the checkpoint."""
    change: Change
    """Kind of change of the whole file."""
    tensors: tuple[TensorDifference, ...] = ()
    """Its tensors in the order of the first; empty if all are equal or only one checkpoint has the file."""
    bytes_before: int | None = None
    """Size in the first."""
    bytes_after: int | None = None
    """Size in the second."""


@dataclass(frozen=True)
class Fact:
    """Value of the manifests that differs."""

    label: str
    """Name of the value."""
    before: str
    """Value in the first."""
    after: str
    """Value in the second."""


def facts(before: Manifest, after: Manifest) -> list[Fact]:
    """List the values of the manifests that differ, except for files and the loop's own small state."""
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
    return [Fact(label, first, second) for label, (first, second) in pairs.items() if first != second]


def position(data: DataPosition | None) -> str:
    """Format a position in the data order."""
    return f"epoch {data.epoch}, sample {data.cursor:,}, seed {data.seed}" if data else "–"


def _mesh(mesh: dict[str, int]) -> str:
    return " × ".join(f"{name} {size}" for name, size in mesh.items()) or "–"


NOTES = {
    "added": "only in B",
    "removed": "only in A",
    "reshaped": "other shape",
    "retyped": "other dtype",
    "different": "",
    "equal": "equal",
}
"""Note for each kind of change."""


@dataclass(frozen=True)
class Contrast:
    """Differences of two checkpoints."""

    before: str
    """A: its name, with its run if the checkpoints are of two runs."""
    after: str
    """B, likewise."""
    facts: tuple[Fact, ...]
    """Values of the manifests that differ."""
    files: tuple[FileDifference, ...]
    """Files of both."""


def lines(contrast: Contrast, limit: int, with_state: bool, width: int | None) -> list[Text]:
    """Lay out the differences.

    Args:
        limit: tensors of each file that are listed; the others are counted.
        with_state: whether the tensors of the resumable state are listed, too.
    """
    if not contrast.facts and all(file.change == "equal" for file in contrast.files):
        return [Text("A and B are equal to the bit")]
    columns = [Column(""), Column("A"), Column("B")]
    head: list[list[Cell]] = [[("", ""), (contrast.before, "bold"), (contrast.after, "bold")]]
    rows = [[(fact.label, "dim"), (fact.before, ""), (fact.after, "")] for fact in contrast.facts]
    text_lines = table(columns, [*head, *rows], width)
    for file in contrast.files:
        is_listed = with_state or not file.path.startswith("state/")
        text_lines += [Text(""), *_file(file, limit if is_listed else 0, width)]
    return text_lines


def as_json(contrast: Contrast) -> dict[str, Any]:
    """The differences as JSON; measures that do not exist are null."""
    return {
        "a": contrast.before,
        "b": contrast.after,
        "facts": {fact.label: {"a": fact.before, "b": fact.after} for fact in contrast.facts},
        "files": [
            {
                "path": file.path,
                "change": file.change,
                "bytes": {"a": file.bytes_before, "b": file.bytes_after},
                "tensors": [_tensor_json(tensor) for tensor in file.tensors],
            }
            for file in contrast.files
        ],
    }


def _file(file: FileDifference, limit: int, width: int | None) -> list[Text]:
    head = Text(file.path, "bold")
    if file.change in ("added", "removed"):
        return [head.append(f"  {NOTES[file.change]}", "yellow")]
    if file.change == "equal":
        return [head.append("  equal", "green").append(f", {size(file.bytes_before)}")]
    if not file.tensors:
        return [head.append("  different", "yellow")]
    differing = sorted((tensor for tensor in file.tensors if tensor.change != "equal"), key=_rank)
    equal = len(file.tensors) - len(differing)
    counts = f"  {count_noun(len(file.tensors), 'tensor')}: {len(differing)} different, {equal} equal"
    head.append(counts, "" if differing else "green")
    columns = [
        Column("TENSOR"),
        Column("SHAPE", rank=1),
        Column("LARGEST", is_right=True),
        Column("RELATIVE", is_right=True),
        Column("NOTE"),
    ]
    rows = [_row(tensor) for tensor in differing[:limit]]
    lines = [head, *(table(columns, rows, width) if rows else [])]
    if limit == 0 and differing:
        lines += paragraph("", "--state lists them", width, indent=0)
    elif len(differing) > limit:
        lines += paragraph("", f"and {len(differing) - limit} more; --most lists more", width, indent=0)
    return lines


def _rank(tensor: TensorDifference) -> tuple[bool, float]:
    """Sort key that puts what differs most first: tensors without a measure, then by the relative difference."""
    measured = tensor.change in ("different", "retyped")
    return measured, -(math.inf if tensor.relative is None else tensor.relative)


def _row(tensor: TensorDifference) -> list[Cell]:
    notes = [NOTES[tensor.change]] if NOTES[tensor.change] else []
    shape = tensor.before or tensor.after
    if tensor.change in ("reshaped", "retyped"):
        notes = [f"{NOTES[tensor.change]}: B has {tensor.after}"]
    if any(tensor.not_finite):
        notes.append(f"not finite: {tensor.not_finite[0]:,} in A, {tensor.not_finite[1]:,} in B")
    return [
        (tensor.name, ""),
        (shape, "dim"),
        (_measure(tensor.largest), ""),
        (_measure(tensor.relative), ""),
        ("; ".join(notes), "yellow"),
    ]


def _measure(value: float | None) -> str:
    return "–" if value is None else f"{value:.3g}"


def _tensor_json(tensor: TensorDifference) -> dict[str, Any]:
    return {
        "name": tensor.name,
        "change": tensor.change,
        "a": tensor.before or None,
        "b": tensor.after or None,
        "largest": tensor.largest,
        "relative": tensor.relative,
        "notFinite": {"a": tensor.not_finite[0], "b": tensor.not_finite[1]},
    }
