"""Initial weights of a run, from another run, a checkpoint, a model's folder or a file (`loop.initialWeights`).

By default only weights are loaded: the optimizer, the schedule, the steps and the data start anew.
`loop.initialOptimizer` also loads the state of a checkpoint's optimizer, and the position in the schedule. A file of
torch.save is read with `weights_only=True`, which makes tensors and runs no code.
"""

import pickle
from collections.abc import Callable, Mapping
from pathlib import Path

import torch
import xxhash
from torch import Tensor, nn

from tandem.rundir.checkpoint import Broken, Manifest
from tandem.rundir.durable import is_transient
from tandem.rundir.initial_weights import TORCH, WeightFiles, locate_weights
from tandem.rundir.layout import RunDir
from tandem.rundir.lineage import Origin
from tandem_trainer.checkpoint.format import parse
from tandem_trainer.checkpoint.reader import read_contents, read_full_weights
from tandem_trainer.checkpoint.state import CheckpointMismatch, load_weights
from tandem_trainer.checkpoint.train_state import Contents
from tandem_trainer.failure import ConfigurationError, UnusableInput
from tandem_trainer.process_group import Group

FIELD = "initialWeights"
NESTED = ("model_state_dict", "state_dict", "model")
"""Names under which people store the weights beside other things."""
WRAPPED = "module."
"""Prefix that DistributedDataParallel puts before each name."""


def load_initial(
    model: nn.Module, path: Path, group: Group, take_over: Callable[[Contents, Manifest], None] | None = None
) -> Origin:
    """Load initial weights into a model. Collective: rank 0 decides which checkpoint of a run it is.

    Args:
        model: model to load the weights into.
        path: run directory, checkpoint, folder of a model, or file.
        group: ranks of the generation.
        take_over: loads more of the checkpoint than weights. Then the weights are the trained ones, and not their
            average.

    Returns:
        Where the weights come from.

    Raises:
        UnusableInput: the path does not exist, or cannot be read.
        ConfigurationError: it holds weights of another model.
        OSError: the disk fails.
    """
    try:
        located = locate_weights(Path(group.tell({"path": str(_choose(path))})["path"]))
        weights, digest, contents = _read(located, is_whole=take_over is not None)
    except FileNotFoundError as error:
        raise UnusableInput(f"{FIELD} {path} cannot be read: {error.strerror}: {error.filename}") from error
    except OSError as error:
        if is_transient(error):
            raise
        raise UnusableInput(f"{FIELD} {path} cannot be read: {error.strerror}") from error
    except (ValueError, Broken) as error:
        raise UnusableInput(f"{FIELD} {path}: {error}") from error
    try:
        load_weights(model, _renamed_for(model, weights))
        if take_over is not None and contents is not None and located.checkpoint is not None:
            take_over(contents, located.checkpoint)
    except CheckpointMismatch as error:
        raise ConfigurationError(f"{FIELD} {path}: {error}") from error
    manifest = located.checkpoint
    return Origin(
        path=str(located.path.absolute()),
        checkpoint=manifest.reference if manifest else None,
        job=_job_name(located.path.parent.parent) if manifest else None,
        digest=manifest.digest if manifest else digest,
    )


def _choose(path: Path) -> Path:
    """Choose a checkpoint if the path is a run; errors are for all ranks to find."""
    try:
        return locate_weights(path).path if path.is_dir() else path
    except (OSError, ValueError):
        return path


def _read(located: WeightFiles, is_whole: bool) -> tuple[dict[str, Tensor], str | None, Contents | None]:
    """Read the tensors by name, a digest of the files if there is one, and on request the whole checkpoint.

    Raises:
        ValueError, Broken: the files are damaged, or of another kind.
    """
    if is_whole:
        if located.checkpoint is None:
            raise ValueError("this is not a checkpoint, so there is no optimizer for initialOptimizer to take over")
        contents = read_contents(located.path, located.checkpoint)
        return dict(contents.weights), None, contents
    if located.checkpoint is not None:
        return read_full_weights(located.path, located.checkpoint), None, None
    tensors: dict[str, Tensor] = {}
    digest = xxhash.xxh3_128()
    for file in located.files:
        content = bytearray(file.read_bytes())
        digest.update(content)
        tensors |= _read_torch(file) if content.startswith(TORCH) else parse(memoryview(content))
    return tensors, f"xxh3:{digest.hexdigest()}", None


def _read_torch(file: Path) -> dict[str, Tensor]:
    try:
        content = torch.load(file, map_location="cpu", weights_only=True)
    except pickle.UnpicklingError as error:
        raise ValueError(
            "this file of torch.save holds more than tensors, numbers and texts, and code in it is never run; save the "
            "state_dict alone"
        ) from error
    except (RuntimeError, EOFError) as error:
        raise ValueError(f"this is not a readable file of torch.save: {error}") from error
    for name in NESTED:
        if isinstance(content, Mapping) and isinstance(content.get(name), Mapping):
            content = content[name]
            break
    if not isinstance(content, Mapping) or not all(isinstance(value, Tensor) for value in content.values()):
        raise ValueError(f"this file of torch.save holds no state_dict, at its top or as {' or '.join(NESTED)}")
    return {str(name): tensor for name, tensor in content.items()}


def _renamed_for(model: nn.Module, weights: dict[str, Tensor]) -> dict[str, Tensor]:
    """Rename weights as the model's state has them."""
    if weights and all(name.startswith(WRAPPED) for name in weights):
        weights = {name.removeprefix(WRAPPED): tensor for name, tensor in weights.items()}
    # A tensor that the model has under two names, such as tied embeddings, is in its state once.
    first: dict[int, str] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        first_name = first.setdefault(id(parameter), name)
        if first_name == name or name not in weights:
            continue
        tensor = weights.pop(name)
        if not torch.equal(weights.setdefault(first_name, tensor), tensor):
            raise CheckpointMismatch(f"{first_name} and {name} are one tensor in the model, and differ there")
    return weights


def _job_name(run: Path) -> str | None:
    try:
        return RunDir(run).read_job().metadata.name
    except (OSError, ValueError):
        return None
