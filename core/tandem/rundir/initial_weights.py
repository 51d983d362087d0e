"""The weights that a run begins with: `initialWeights` names a file, a run, a checkpoint or a model."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from tandem.rundir.checkpoint import FILE, WEIGHTS, Broken, Manifest
from tandem.rundir.durable import read_json
from tandem.rundir.layout import RunDir

MODEL = "model.safetensors"
INDEX = "model.safetensors.index.json"
"""Index of a transformers model in several files: the file of each tensor."""

TORCH = (b"PK\x03\x04", b"\x80\x02")
"""First bytes of files written by torch.save, and by torch before 1.6."""


@dataclass(frozen=True)
class WeightFiles:
    """Files with initial weights."""

    path: Path
    """The file, or the folder of the checkpoint or model. It denotes the same weights later, when a run directory has
    newer checkpoints."""
    files: Sequence[Path]
    """The files that contain the tensors; for a checkpoint, the weights file for evaluators."""
    checkpoint: Manifest | None = None
    """Manifest of the checkpoint that the tensors belong to."""


def locate_weights(path: Path) -> WeightFiles:
    """Find the weights that a path denotes.

    Args:
        path: a file; a run directory, which denotes its newest checkpoint on the lineage; a checkpoint in one; or a
            folder with a model, as transformers and `tandem checkpoints export` write it.

    Raises:
        ValueError: the path denotes no weights. The message names the path and the problem.
        OSError: it cannot be read.
    """
    if not path.is_dir():
        return WeightFiles(path, [path])
    if (path / FILE).exists():
        return _checkpoint_weights(path)
    run = RunDir(path)
    if run.checkpoints.is_dir():
        newest = next(iter(run.committed()), None)
        if newest is None:
            raise ValueError(f"{path} has no checkpoint that counts")
        return _checkpoint_weights(run.checkpoint(newest.name))
    if (path / INDEX).exists():
        return WeightFiles(path, _shards(path))
    if (path / MODEL).exists():
        return WeightFiles(path, [path / MODEL])
    raise ValueError(f"{path} is no run directory, no checkpoint, and no folder with {MODEL}")


def is_torch_file(file: Path) -> bool:
    """Whether a file was written by torch.save. Raises OSError."""
    with file.open("rb") as opened:
        return opened.read(4).startswith(TORCH)


def _checkpoint_weights(folder: Path) -> WeightFiles:
    try:
        manifest = Manifest.load(folder)
        manifest.entry(WEIGHTS)
    except Broken as error:
        raise ValueError(f"{folder} is damaged: {error}") from error
    return WeightFiles(folder, [folder / WEIGHTS], manifest)


def _shards(folder: Path) -> list[Path]:
    content = read_json(folder / INDEX)
    names = content.get("weight_map") if isinstance(content, dict) else None
    if not isinstance(names, dict) or not names or any(Path(str(name)).name != name for name in names.values()):
        raise ValueError(f"{folder / INDEX} does not say which files hold the tensors")
    return [folder / name for name in sorted(set(names.values()))]
