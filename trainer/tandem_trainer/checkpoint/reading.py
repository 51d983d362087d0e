"""Read a committed checkpoint: every byte is checked against the manifest before use, and nothing is unpickled."""

from pathlib import Path

from torch import Tensor

from tandem.manifest import WEIGHTS, Broken, Manifest, verified_bytes
from tandem_trainer.checkpoint.format import parse

OPTIMIZER = "state/optimizer.safetensors"
FULL_WEIGHTS = "state/weights.safetensors"
"""In full precision, where those for evaluators have less."""


def read_weights(folder: Path, manifest: Manifest) -> dict[str, Tensor]:
    """The model's state_dict, on the CPU.

    Raises:
        FileNotFoundError: the checkpoint is gone.
        Broken: it is damaged.
    """
    return _read(folder, manifest, WEIGHTS)


def read_full_weights(folder: Path, manifest: Manifest) -> dict[str, Tensor]:
    """The model's state_dict as training had it. Raises as read_weights does."""
    listed = {entry.path for entry in manifest.files}
    return _read(folder, manifest, FULL_WEIGHTS if FULL_WEIGHTS in listed else WEIGHTS)


def read_optimizer(folder: Path, manifest: Manifest) -> dict[str, Tensor]:
    """The optimizer's state, flat: `<parameter>/<key>` to tensor. Raises as read_weights does."""
    return _read(folder, manifest, OPTIMIZER)


def _read(folder: Path, manifest: Manifest, path: str) -> dict[str, Tensor]:
    content = verified_bytes(folder, manifest.entry(path))
    try:
        return parse(content)
    except Broken as error:
        raise Broken(f"{folder.name}/{path}: {error}") from error
