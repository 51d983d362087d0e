"""The weights that a run begins with, of another run, a checkpoint, a model's folder or a file (`loop.initialWeights`).

By default weights alone: the optimizer, the schedule, the steps and the data begin anew. `loop.initialOptimizer` takes
the state of a checkpoint's optimizer over, too, and the position in the schedule. A file of torch.save is read with
`weights_only=True`, which makes tensors and runs no code.
"""

import pickle
from collections.abc import Callable, Mapping
from pathlib import Path

import torch
import xxhash
from torch import Tensor, nn

from tandem.rundir.checkpoint import Broken, Manifest
from tandem.rundir.durable import may_pass
from tandem.rundir.initial_weights import TORCH, Located, locate
from tandem.rundir.layout import RunDir
from tandem.rundir.lineage import Origin
from tandem_trainer.checkpoint.format import parse
from tandem_trainer.checkpoint.reader import read_contents, read_full_weights
from tandem_trainer.checkpoint.state import DoesNotFit, load_weights
from tandem_trainer.checkpoint.train_state import Contents
from tandem_trainer.failure import ConfigurationError, UnusableInput
from tandem_trainer.process_group import Group

FIELD = "initialWeights"
NESTED = ("model_state_dict", "state_dict", "model")
"""Under which of these names people keep the weights beside other things."""
WRAPPED = "module."
"""What DistributedDataParallel puts before each name."""


def load_initial(
    model: nn.Module, path: Path, group: Group, take_over: Callable[[Contents, Manifest], None] | None = None
) -> Origin:
    """Put weights from elsewhere into a model. Collective: the first rank says which checkpoint of a run it is.

    Args:
        take_over: takes more of the checkpoint than weights, which are those that were trained then, and not their
            average.

    Returns:
        Where they come from.

    Raises:
        UnusableInput: there is nothing, or nothing that can be read.
        ConfigurationError: it holds other weights.
        OSError: the disk fails.
    """
    try:
        found = locate(Path(group.tell({"path": str(_chosen(path))})["path"]))
        weights, digest, contents = _read(found, is_whole=take_over is not None)
    except FileNotFoundError as error:
        raise UnusableInput(f"{FIELD} {path} cannot be read: {error.strerror}: {error.filename}") from error
    except OSError as error:
        if may_pass(error):
            raise
        raise UnusableInput(f"{FIELD} {path} cannot be read: {error.strerror}") from error
    except (ValueError, Broken) as error:
        raise UnusableInput(f"{FIELD} {path}: {error}") from error
    try:
        load_weights(model, _as_named(model, weights))
        if take_over is not None and contents is not None and found.checkpoint is not None:
            take_over(contents, found.checkpoint)
    except DoesNotFit as error:
        raise ConfigurationError(f"{FIELD} {path}: {error}") from error
    manifest = found.checkpoint
    return Origin(
        path=str(found.path.absolute()),
        checkpoint=manifest.reference if manifest else None,
        job=_job(found.path.parent.parent) if manifest else None,
        digest=manifest.digest if manifest else digest,
    )


def _chosen(path: Path) -> Path:
    """One checkpoint, where a run is named; mistakes are for all ranks to find."""
    try:
        return locate(path).path if path.is_dir() else path
    except (OSError, ValueError):
        return path


def _read(found: Located, is_whole: bool) -> tuple[dict[str, Tensor], str | None, Contents | None]:
    """Tensors by name, a digest of the file where there is one, and all of a checkpoint if it is asked for.

    Raises:
        ValueError, Broken: the files are damaged, or are something else.
    """
    if is_whole:
        if found.checkpoint is None:
            raise ValueError("this is no checkpoint, so there is no optimizer for initialOptimizer to take over")
        contents = read_contents(found.path, found.checkpoint)
        return dict(contents.weights), None, contents
    if found.checkpoint is not None:
        return read_full_weights(found.path, found.checkpoint), None, None
    tensors: dict[str, Tensor] = {}
    digest = xxhash.xxh3_128()
    for file in found.files:
        content = bytearray(file.read_bytes())
        digest.update(content)
        tensors |= _of_torch(file) if content.startswith(TORCH) else parse(memoryview(content))
    return tensors, f"xxh3:{digest.hexdigest()}", None


def _of_torch(file: Path) -> dict[str, Tensor]:
    try:
        content = torch.load(file, map_location="cpu", weights_only=True)
    except pickle.UnpicklingError as error:
        raise ValueError(
            "this file of torch.save holds more than tensors, numbers and texts, and code in it is never run; save the "
            "state_dict alone"
        ) from error
    except (RuntimeError, EOFError) as error:
        raise ValueError(f"this is no file of torch.save that can be read: {error}") from error
    for name in NESTED:
        if isinstance(content, Mapping) and isinstance(content.get(name), Mapping):
            content = content[name]
            break
    if not isinstance(content, Mapping) or not all(isinstance(one, Tensor) for one in content.values()):
        raise ValueError(f"this file of torch.save holds no state_dict, at its top or as {' or '.join(NESTED)}")
    return {str(name): tensor for name, tensor in content.items()}


def _as_named(model: nn.Module, weights: dict[str, Tensor]) -> dict[str, Tensor]:
    """Weights under the names that the model's state has."""
    if weights and all(name.startswith(WRAPPED) for name in weights):
        weights = {name.removeprefix(WRAPPED): tensor for name, tensor in weights.items()}
    # A tensor that the model has under two names, such as tied embeddings, is in its state once.
    first: dict[int, str] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        known = first.setdefault(id(parameter), name)
        if known == name or name not in weights:
            continue
        tensor = weights.pop(name)
        if not torch.equal(weights.setdefault(known, tensor), tensor):
            raise DoesNotFit(f"{known} and {name} are one tensor in the model, and differ there")
    return weights


def _job(run: Path) -> str | None:
    try:
        return RunDir(run).read_job().metadata.name
    except (OSError, ValueError):
        return None
