"""What differs between two checkpoints, as values, and what their manifests alone tell."""

from dataclasses import dataclass
from typing import Literal

from tandem.rundir.checkpoint import DataPosition, Manifest

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
