"""Layers that are whole on each rank of a tensor group and work there with a part of the values.

The norm of queries in Qwen3 or Gemma 3 is one: its weight is the same for all heads, and each rank has some of the
heads. So the gradient that a rank computes is its heads' part of it. The parts are added up in the backward pass, when
that of any other weight that is whole on all ranks is complete, too: what follows, such as `fully_shard`, accumulation
and clipping, treats them alike.

Rejected: hooks on parameters, as transformers has them. A parameter that `fully_shard` gathers is another object in
each pass, and with several micro-batches sums would be added up again. Weights as DTensors (torch's SequenceParallel):
their gradients stay partial until something redistributes them, which optimizers of local tensors do not.
"""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn


def add_up_gradients(module: nn.Module, group: dist.ProcessGroup) -> None:
    """Have the gradients of a module's own parameters be the sum over the ranks of a group."""

    # Hooks and not methods: a copy of the module has them, and they are told of which one is called.
    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def before(called: nn.Module, given: Any) -> None:
        weights = {name: one for name, one in called._parameters.items() if one is not None and one.requires_grad}
        vars(called)["_replicated"] = weights
        for name, one in weights.items():
            called._parameters[name] = _AddedUp.apply(one, group)

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def after(called: nn.Module, given: Any, found: Any) -> None:
        called._parameters.update(vars(called).pop("_replicated"))

    module.register_forward_pre_hook(before)
    # Also where the forward pass raises: an out-of-memory error is no reason to keep them.
    module.register_forward_hook(after, always_call=True)


class _AddedUp(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, weight: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        return weight.view_as(weight)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        whole = gradient.contiguous().clone()
        dist.all_reduce(whole, group=ctx.group)
        return whole, None
