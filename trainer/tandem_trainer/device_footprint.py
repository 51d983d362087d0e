"""Places a model of fake tensors on the GPUs of one process, as `strategy: dp` and `strategy: model` do.

Used by tandem_trainer.footprint. Under `dp` the first GPU is traced, which holds most: its copy computes its chunk of
the samples, and the outputs of the other copies are empty tensors. The planner has a formula for the sum of gradients.

Under `model` the layers are placed as training places them (tandem_trainer.strategies.model). The devices are those of
`stand_in_devices`: torch knows one CPU, and fake tensors tell its indices apart. Fake tensors of GPUs would have no
backward pass on a machine without one (torch 2.15).
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only

from tandem_trainer.strategies.model import bring_back, connect, placement


class FirstCopy(nn.Module):
    """Copy of a model on the first of several devices, which gathers the outputs of all copies.

    Args:
        model: model whose inputs and outputs have the samples in their first dimension.
        devices: number of devices.
    """

    def __init__(self, model: nn.Module, devices: int) -> None:
        super().__init__()
        self.model, self._devices = model, devices

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Map the inputs of all copies to the outputs of all copies."""
        own_args, own_kwargs = tree_map_only(Tensor, lambda tensor: tensor.chunk(self._devices)[0], (args, kwargs))
        all_samples, own_samples = _samples((args, kwargs)), _samples((own_args, own_kwargs))
        outputs = self.model(*own_args, **own_kwargs)
        return tree_map_only(
            Tensor, lambda tensor: _Gathered.apply(tensor, -(-len(tensor) * all_samples // own_samples)), outputs
        )


class _Gathered(torch.autograd.Function):
    """Gathering of one rank's rows: a tensor of the size of all ranks' rows, which begins with these."""

    @staticmethod
    def forward(ctx: Any, own: Tensor, rows: int) -> Tensor:
        """[N, …] → [rows, …]."""
        ctx.own = len(own)
        return own.new_empty((rows, *own.shape[1:]))

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        """Return the gradient of the first rows."""
        return gradients[0][: ctx.own], None


def stand_in_devices(devices: int) -> list[torch.device]:
    """Return devices that stand for GPUs."""
    return [torch.device("cpu"), *(torch.device("cpu", index) for index in range(1, devices))]


def place_model(model: nn.Module, devices: Sequence[torch.device]) -> None:
    """Place the parts of a model on devices, as `tandem_trainer.strategies.model.split` does. Module.to cannot swap
    fake tensors (torch 2.15).

    Raises:
        ConfigurationError: parts that share a parameter would be on different devices.
    """
    parts = placement(model, devices)
    # Originals with their copies: a tensor with two names is copied once, and no id is used again meanwhile.
    copies: dict[int, tuple[Tensor, Tensor]] = {}

    def copy_to(tensor: Tensor, device: torch.device) -> Tensor:
        if id(tensor) not in copies:
            copy = tensor.detach().to(device)
            copies[id(tensor)] = (
                tensor,
                nn.Parameter(copy, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else copy,
            )
        return copies[id(tensor)][1]

    for part in parts:
        for module in part.module.modules() if part.is_block else [part.module]:
            tables: tuple[dict[str, Any], ...] = module._parameters, module._buffers
            for tensors in tables:
                for name, tensor in tensors.items():
                    if tensor is not None:
                        tensors[name] = copy_to(tensor, part.device)
    connect(parts)
    bring_back(model, devices[0])


class Transfers(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Adds up the bytes that go from one device to another."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.size = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run an operation, and count the bytes that it moves."""
        result = func(*args, **(kwargs or {}))
        if func is torch.ops.aten._to_copy.default and result.device != args[0].device:
            self.size += result.nbytes
        return result


def _samples(inputs: Any) -> int:
    return next(len(leaf) for leaf in tree_leaves(inputs) if isinstance(leaf, Tensor) and leaf.dim() > 0)
