"""Read a committed checkpoint: every byte is checked against the manifest before use, and nothing is unpickled."""

from pathlib import Path

from torch import Tensor

from tandem.manifest import WEIGHTS, Broken, Manifest, verified_bytes
from tandem_trainer.checkpoint.contents import AVERAGE, FULL_WEIGHTS, OPTIMIZER, OTHERS, Contents
from tandem_trainer.checkpoint.format import parse

AVERAGED = "averaged"
"""In the manifest's `loop`: the weights for evaluators are an average over steps."""


def read_weights(folder: Path, manifest: Manifest) -> dict[str, Tensor]:
    """The weights that are evaluated and exported, a state_dict on the CPU.

    Raises:
        FileNotFoundError: the checkpoint is gone.
        Broken: it is damaged.
    """
    return _read(folder, manifest, WEIGHTS)


def read_full_weights(folder: Path, manifest: Manifest) -> dict[str, Tensor]:
    """The same weights in full precision. Raises as read_weights does."""
    if manifest.loop.get(AVERAGED):
        return _read(folder, manifest, AVERAGE if AVERAGE in _listed(manifest) else WEIGHTS)
    return _trained_weights(folder, manifest)


def read_contents(folder: Path, manifest: Manifest) -> Contents:
    """Everything that a run resumes. Raises as read_weights does."""
    return Contents(
        weights=_trained_weights(folder, manifest),
        optimizer=_read(folder, manifest, OPTIMIZER),
        others=_read(folder, manifest, OTHERS) if OTHERS in _listed(manifest) else {},
        average=read_full_weights(folder, manifest) if manifest.loop.get(AVERAGED) else None,
        loop=manifest.loop,
    )


def _trained_weights(folder: Path, manifest: Manifest) -> dict[str, Tensor]:
    return _read(folder, manifest, FULL_WEIGHTS if FULL_WEIGHTS in _listed(manifest) else WEIGHTS)


def _listed(manifest: Manifest) -> set[str]:
    return {entry.path for entry in manifest.files}


def _read(folder: Path, manifest: Manifest, path: str) -> dict[str, Tensor]:
    content = verified_bytes(folder, manifest.entry(path))
    try:
        return parse(content)
    except Broken as error:
        raise Broken(f"{folder.name}/{path}: {error}") from error
