"""The resumable state of a model and its optimizer as two flat dictionaries of named tensors.

Names are those of the parameters, never positions in a list, so that a checkpoint does not depend on the order in which
an optimizer was given its parameters, on the wrapper around the model, or on the number of ranks.
"""

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from tandem.manifest import Broken


def weights(model: nn.Module) -> dict[str, Tensor]:
    """The model's parameters and buffers by name; they alias the live tensors."""
    return dict(model.state_dict())


def optimizer_state(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    """The optimizer's tensors as `<parameter>/<key>`; they alias the live tensors."""
    flat: dict[str, Tensor] = {}
    for name, parameter in model.named_parameters():
        for key, value in optimizer.state.get(parameter, {}).items():
            flat[f"{name}/{key}"] = value if isinstance(value, Tensor) else torch.tensor(value)
    return flat


def load_weights(model: nn.Module, state: Mapping[str, Tensor]) -> None:
    """Put weights into a model of the same shape.

    Raises:
        Broken: a tensor is missing, of another shape, or there is one too many.
    """
    try:
        model.load_state_dict(dict(state), strict=True)
    except RuntimeError as error:
        raise Broken(f"the weights do not fit the model: {error}") from error


def load_optimizer_state(model: nn.Module, optimizer: torch.optim.Optimizer, flat: Mapping[str, Tensor]) -> None:
    """Put the optimizer's tensors back; device and dtype follow each parameter as torch's own loading does.

    Raises:
        Broken: the state belongs to a parameter that the model does not have.
    """
    index = {name: number for number, (name, _) in enumerate(model.named_parameters())}
    states: dict[int, dict[str, Tensor]] = {}
    for path, tensor in flat.items():
        name, _, key = path.rpartition("/")
        if name not in index:
            raise Broken(f"the optimizer's state knows a parameter {name!r} that the model does not have")
        states.setdefault(index[name], {})[key] = tensor
    optimizer.load_state_dict({"state": states, "param_groups": optimizer.state_dict()["param_groups"]})
