"""Where the weights lie that a run begins with: `initialWeights` names a file, a run, a checkpoint or a model."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from tandem.rundir.checkpoint import FILE, WEIGHTS, Broken, Manifest
from tandem.rundir.durable import read_json
from tandem.rundir.layout import RunDir

MODEL = "model.safetensors"
INDEX = "model.safetensors.index.json"
"""Of a model of transformers in several files: which tensor is in which of them."""

TORCH = (b"PK\x03\x04", b"\x80\x02")
"""How files of torch.save begin, and those of torch before 1.6."""


@dataclass(frozen=True)
class Located:
    """Where the tensors are."""

    path: Path
    """The file, or the folder of the checkpoint or of the model: it stands for the very same weights later, where a run
    directory gets other checkpoints."""
    files: Sequence[Path]
    """The files that hold them. Of a checkpoint the one for evaluators."""
    checkpoint: Manifest | None = None
    """The checkpoint that they are of."""


def locate(path: Path) -> Located:
    """Find the weights that a path stands for.

    Args:
        path: a file; a run directory, whose newest checkpoint that counts is meant; a checkpoint in one; or a folder
            with a model, as transformers and `tandem checkpoints export` write it.

    Raises:
        ValueError: there is nothing of that kind; says what there is. Names the path.
        OSError: it cannot be read.
    """
    if not path.is_dir():
        return Located(path, [path])
    if (path / FILE).exists():
        return _of(path)
    run = RunDir(path)
    if run.checkpoints.is_dir():
        newest = next(iter(run.committed()), None)
        if newest is None:
            raise ValueError(f"{path} has no checkpoint that counts")
        return _of(run.checkpoint(newest.name))
    if (path / INDEX).exists():
        return Located(path, _shards(path))
    if (path / MODEL).exists():
        return Located(path, [path / MODEL])
    raise ValueError(f"{path} is no run directory, no checkpoint, and no folder with {MODEL}")


def is_of_torch(file: Path) -> bool:
    """Whether torch.save wrote a file. Raises OSError."""
    with file.open("rb") as opened:
        return opened.read(4).startswith(TORCH)


def _of(folder: Path) -> Located:
    try:
        manifest = Manifest.load(folder)
        manifest.entry(WEIGHTS)
    except Broken as error:
        raise ValueError(f"{folder} is damaged: {error}") from error
    return Located(folder, [folder / WEIGHTS], manifest)


def _shards(folder: Path) -> list[Path]:
    content = read_json(folder / INDEX)
    names = content.get("weight_map") if isinstance(content, dict) else None
    if not isinstance(names, dict) or not names or any(Path(str(name)).name != name for name in names.values()):
        raise ValueError(f"{folder / INDEX} does not say which files hold the tensors")
    return [folder / name for name in sorted(set(names.values()))]
