"""The state of modules as named tensors. A state is checked against the module before it is loaded.

Names are those of the parameters and buffers as the user wrote the model, never positions in a list, so that a
checkpoint does not depend on the wrapper around the model, on whether it is compiled, or on the number of ranks.
"""

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DataParallel, DistributedDataParallel

from tandem.architectures import plain
from tandem.errors import enumerated
from tandem_trainer.errors import ConfigurationError

MOST_DIFFERENCES = 6
"""In a sentence for people."""


class DoesNotFit(ConfigurationError):  # noqa: N818 - it is what is the case
    """A sound checkpoint and the script that is to go on from it do not belong together; says in what they differ."""

    reason = "CheckpointDoesNotFit"


def unwrapped(module: nn.Module) -> nn.Module:
    """The module that the user wrote, out of what parallelism and the compiler have put around it."""
    while True:
        if isinstance(module, DistributedDataParallel | DataParallel):
            module = module.module
        elif isinstance(inner := getattr(module, "_orig_mod", None), nn.Module):
            module = inner
        else:
            return module


def weights(model: nn.Module) -> dict[str, Tensor]:
    """The model's parameters and buffers by name; they alias the live tensors."""
    return {plain(name): value for name, value in model.state_dict().items() if isinstance(value, Tensor)}


def extra_state(model: nn.Module) -> dict[str, Any]:
    """What modules keep beside tensors (`get_extra_state`), by name."""
    return {plain(name): value for name, value in model.state_dict().items() if not isinstance(value, Tensor)}


def buffers(model: nn.Module) -> frozenset[str]:
    """Names of the tensors that are not learned, whether or not they belong to the state."""
    return frozenset(plain(name) for name, _ in model.named_buffers(remove_duplicate=False))


def check_weights(model: nn.Module, state: Mapping[str, Tensor], extra: Iterable[str] = ()) -> None:
    """See whether weights belong to a model; nothing is changed.

    Raises:
        DoesNotFit: a tensor is missing, of another shape, or there is one too many.
    """
    here = weights(model)
    there = {plain(name): tensor for name, tensor in state.items()}
    shapes = [
        f"{name} is {list(there[name].shape)} there and {list(tensor.shape)} here"
        for name, tensor in here.items()
        if name in there and there[name].shape != tensor.shape
    ]
    known = here.keys() | extra_state(model).keys()
    refuse("the weights do not fit the model", there.keys() | set(extra), known, shapes)


def load_weights(model: nn.Module, state: Mapping[str, Tensor], extra: Mapping[str, Any] | None = None) -> None:
    """Put weights, and what modules keep beside them, into a model.

    Raises:
        DoesNotFit: they belong to another one; the model is as it was.
    """
    check_weights(model, state, extra or {})
    there = {plain(name): value for name, value in [*state.items(), *(extra or {}).items()]}
    try:
        model.load_state_dict({name: there[plain(name)] for name in model.state_dict()}, strict=True)
    except (KeyError, ValueError, TypeError) as error:
        # A module's own way to load; torch's says what does not fit with a RuntimeError, as a device does that fails.
        raise DoesNotFit(f"the weights do not fit the model: {error!r}") from error


def refuse(what: str, there: Iterable[str], here: Iterable[str], more: Iterable[str] = ()) -> None:
    """
    Args:
        there: names that the checkpoint has.
        here: names that the script has.
        more: other differences, as sentences.

    Raises:
        DoesNotFit: there is a difference.
    """
    there, here = set(there), set(here)
    differences = list(more)
    if missing := sorted(here - there):
        differences.append(f"the checkpoint lacks {enumerated(missing)}")
    if surplus := sorted(there - here):
        differences.append(f"the script lacks {enumerated(surplus)}")
    if differences:
        raise DoesNotFit(f"{what}: {'; '.join(differences[:MOST_DIFFERENCES])}")


def own(tensor: Tensor, device: torch.device) -> Tensor:
    """The same values in memory of their own, on a device."""
    return tensor.clone() if device.type == "cpu" else tensor.to(device)
