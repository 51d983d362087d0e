"""Lays a model of fake tensors out on the GPUs of one process, as `strategy: dp` and `strategy: model` do.

Used by tandem_trainer.footprint. Under `dp` the first GPU is traced, which holds most: its copy computes its chunk of
the samples, and what the other copies return comes from nowhere. What it takes to add gradients up is a formula of the
planner's.

Under `model` the layers are placed as training places them (tandem_trainer.strategies.model). The devices are those of
`places`: torch knows one CPU, and fake tensors keep its numbers apart. Fake tensors of GPUs would have no backward pass
on a machine without one (torch 2.15).
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only

from tandem_trainer.strategies.model import bring_back, connect, placement


class FirstCopy(nn.Module):
    """The copy of a model on the first of several devices, which gathers what all copies return.

    Args:
        model: takes samples by the first dimension of its inputs, and so do its outputs.
    """

    def __init__(self, model: nn.Module, devices: int) -> None:
        super().__init__()
        self.model, self._devices = model, devices

    def forward(self, *given: Any, **named: Any) -> Any:
        """With the inputs of all copies → the outputs of all copies."""
        mine, named_mine = tree_map_only(Tensor, lambda one: one.chunk(self._devices)[0], (given, named))
        whole, part = _samples((given, named)), _samples((mine, named_mine))
        found = self.model(*mine, **named_mine)
        return tree_map_only(Tensor, lambda one: _Gathered.apply(one, -(-len(one) * whole // part)), found)


class _Gathered(torch.autograd.Function):
    """What gathering makes of one rank's rows: a tensor of the size of all ranks' rows, which begins with them."""

    @staticmethod
    def forward(ctx: Any, own: Tensor, rows: int) -> Tensor:
        """[N, …] → [rows, …]."""
        ctx.own = len(own)
        return own.new_empty((rows, *own.shape[1:]))

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        """The gradient of the first rows."""
        return gradients[0][: ctx.own], None


def places(devices: int) -> list[torch.device]:
    """Devices that stand for GPUs."""
    return [torch.device("cpu"), *(torch.device("cpu", index) for index in range(1, devices))]


def lay_out(model: nn.Module, devices: Sequence[torch.device]) -> None:
    """Put the parts of a model on devices, as `tandem_trainer.strategies.model.split` does. Module.to cannot swap fake
    tensors (torch 2.15).

    Raises:
        ConfigurationError: parts that share a parameter would be on different devices.
    """
    parts = placement(model, devices)
    known: dict[int, tuple[Tensor, Tensor]] = {}

    def moved(one: Tensor, device: torch.device) -> Tensor:
        if id(one) not in known:
            there = one.detach().to(device)
            known[id(one)] = one, nn.Parameter(there, one.requires_grad) if isinstance(one, nn.Parameter) else there
        return known[id(one)][1]

    for part in parts:
        for module in part.module.modules() if part.is_block else [part.module]:
            tables: tuple[dict[str, Any], ...] = module._parameters, module._buffers
            for tensors in tables:
                for name, one in tensors.items():
                    if one is not None:
                        tensors[name] = moved(one, part.device)
    connect(parts)
    bring_back(model, devices[0])


class Moves(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Adds up what goes from one device to another."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.size = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Look at each operation."""
        result = func(*args, **(kwargs or {}))
        if func is torch.ops.aten._to_copy.default and result.device != args[0].device:
            self.size += result.nbytes
        return result


def _samples(inputs: Any) -> int:
    return next(len(one) for one in tree_leaves(inputs) if isinstance(one, Tensor) and one.dim() > 0)
