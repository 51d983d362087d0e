"""Reads a committed checkpoint. Every byte is verified against the manifest before use, and nothing is unpickled."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from torch import Tensor

from tandem.rundir.checkpoint import WEIGHTS, Broken, Manifest, verified_bytes
from tandem_trainer.checkpoint.file_names import (
    AVERAGE,
    AVERAGED,
    FULL_WEIGHTS,
    NAMES_OF_TREES,
    OBJECT_TENSORS,
    OPTIMIZER,
    TREES,
)
from tandem_trainer.checkpoint.format import parse
from tandem_trainer.checkpoint.node_memory import FileMemory
from tandem_trainer.checkpoint.train_state import Contents

FileBytes = Callable[[str], memoryview]
"""Function that returns the verified content of a file of the checkpoint."""


def read_weights(folder: Path, manifest: Manifest) -> dict[str, Tensor]:
    """Read the weights that are evaluated and exported, as a state_dict on the CPU.

    Raises:
        FileNotFoundError: the checkpoint is gone.
        Broken: it is damaged.
    """
    return _tensors(manifest, _from_disk(folder, manifest), WEIGHTS)


def read_full_weights(folder: Path, manifest: Manifest) -> dict[str, Tensor]:
    """Read the weights that are evaluated in full precision. Raises as read_weights does."""
    return _full_weights(manifest, _from_disk(folder, manifest))


def read_contents(folder: Path, manifest: Manifest) -> Contents:
    """Read the complete train state into this process's own memory. Raises as read_weights does."""
    return _contents(manifest, _from_disk(folder, manifest))


def contents_in(memory: FileMemory, manifest: Manifest) -> Contents:
    """Build the complete train state from memory that holds the files.

    Raises:
        Broken: a file is not a safetensors file, or its trees are not valid JSON.
    """
    return _contents(manifest, memory.file, release=memory.release)


def _contents(manifest: Manifest, file: FileBytes, **more: Any) -> Contents:
    return Contents(
        weights=_trained_weights(manifest, file),
        optimizer=_tensors(manifest, file, OPTIMIZER),
        others=_tensors(manifest, file, OBJECT_TENSORS) if OBJECT_TENSORS in _file_paths(manifest) else {},
        average=_full_weights(manifest, file) if manifest.loop.get(AVERAGED) else None,
        loop=manifest.loop | _trees(manifest, file),
        **more,
    )


def _full_weights(manifest: Manifest, file: FileBytes) -> dict[str, Tensor]:
    if manifest.loop.get(AVERAGED):
        return _tensors(manifest, file, AVERAGE if AVERAGE in _file_paths(manifest) else WEIGHTS)
    return _trained_weights(manifest, file)


def _trained_weights(manifest: Manifest, file: FileBytes) -> dict[str, Tensor]:
    return _tensors(manifest, file, FULL_WEIGHTS if FULL_WEIGHTS in _file_paths(manifest) else WEIGHTS)


def _file_paths(manifest: Manifest) -> set[str]:
    return {entry.path for entry in manifest.files}


def _trees(manifest: Manifest, file: FileBytes) -> dict[str, Any]:
    if TREES not in _file_paths(manifest):
        return {}
    try:
        trees = json.loads(bytes(file(TREES)))
    except (ValueError, RecursionError) as error:
        raise Broken(f"{manifest.name}/{TREES} is not JSON: {error}") from error
    if not isinstance(trees, dict) or not trees.keys() <= set(NAMES_OF_TREES):
        raise Broken(f"{manifest.name}/{TREES} holds something else than it should")
    return trees


def _from_disk(folder: Path, manifest: Manifest) -> FileBytes:
    return lambda path: verified_bytes(folder, manifest.entry(path))


def _tensors(manifest: Manifest, file: FileBytes, path: str) -> dict[str, Tensor]:
    content = file(manifest.entry(path).path)
    try:
        return parse(content)
    except Broken as error:
        raise Broken(f"{manifest.name}/{path}: {error}") from error
