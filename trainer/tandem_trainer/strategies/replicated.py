"""Layers that are whole on each rank of a tensor group and work there with a part of the values.

The norm of queries in Qwen3 or Gemma 3 is one: its weight is the same for all heads, and each rank has some of the
heads. So the gradient that a rank computes is its heads' part of it. The parts are added up in the backward pass, when
that of any other weight that is whole on all ranks is complete, too: what follows, such as `fully_shard`, accumulation
and clipping, treats them alike.

A plan may lack such a layer, and the loss hardly shows it. So the gradients of weights that are whole are compared once
for each generation: what the ranks of a tensor group compute of them is the same, or a plan is not complete.

Rejected: hooks on parameters, as transformers has them. A parameter that `fully_shard` gathers is another object in
each pass, and with several micro-batches sums would be added up again. Weights as DTensors (torch's SequenceParallel):
their gradients stay partial until something redistributes them, which optimizers of local tensors do not.
"""

from collections.abc import Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from tandem_trainer.checkpoint.sharding import here
from tandem_trainer.failure import ConfigurationError
from tandem_trainer.strategies.tensor import REPLICATED

APART = 0.05
"""Of the norm of a gradient: ranks that each have a part of it differ by more, those that have all of it by the
rounding of sums in bfloat16 at the most."""
PROJECTED = 2**20
"""Numbers: the table of an embedding is too large to be held once more."""
NOTHING = 1e-5
"""Of the norm of the largest gradient: less is zero but for rounding."""


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


class Comparison:
    """Compares the gradients of weights that are whole on all ranks of a tensor group, until it could once.

    Args:
        ranks: those that split matrices.
        device: on which they communicate.
    """

    def __init__(self, ranks: dist.ProcessGroup, device: torch.device) -> None:
        self._ranks, self._device, self._is_due = ranks, device, dist.get_world_size(ranks) > 1

    def look(self, parameters: Iterable[tuple[str, nn.Parameter]]) -> None:
        """Compare those of a step. Collective.

        Args:
            parameters: of a model, with their names.

        Raises:
            ConfigurationError: some differ.
        """
        if not self._is_due:
            return
        whole = [(name, one) for name, one in parameters if one.grad is not None and not _is_split(one)]
        if not whole:
            self._is_due = False
            return
        with torch.no_grad():
            # With cpuOffload gradients are elsewhere.
            mine = torch.stack([_told(one.grad) for _, one in whole if one.grad is not None]).to(self._device)
        most, least = mine.clone(), mine.clone()
        dist.all_reduce(most, dist.ReduceOp.MAX, group=self._ranks)
        dist.all_reduce(least, dist.ReduceOp.MIN, group=self._ranks)
        if not torch.isfinite(most).all() or not torch.isfinite(least).all():
            return  # A loss scale that is still too large.
        self._is_due = False
        norms = most[:, 0]
        apart = (most - least).amax(1) > APART * norms + NOTHING * norms.max()
        if names := [name for (name, _), differs in zip(whole, apart.tolist(), strict=True) if differs]:
            more = f" and {len(names) - 1} more" if len(names) > 1 else ""
            raise ConfigurationError(
                f"the plan for tensorParallel is not complete: each rank has another gradient of {names[0]}{more}, "
                f"between matrices that are split; say {REPLICATED} for the layers there that have weights, or train "
                "without tensorParallel"
            )


def _told(gradient: Tensor) -> Tensor:
    """[2]: the norm of a gradient, and the projection of its beginning on a fixed direction."""
    values = here(gradient).flatten()
    some = values[:PROJECTED].float()
    direction = torch.cos(torch.arange(len(some), dtype=torch.float32, device=some.device))
    # As long as a vector of signs, so that both numbers are of one size.
    return torch.stack([torch.linalg.vector_norm(values, dtype=torch.float32), some.dot(direction) * 2**0.5])


def _is_split(parameter: Tensor) -> bool:
    """Whether the ranks of a tensor group hold parts of it."""
    if not isinstance(parameter, DTensor):
        return False
    names = parameter.device_mesh.mesh_dim_names or ()
    return any(
        name == "tensor" and not placement.is_replicate()
        for name, placement in zip(names, parameter.placements, strict=True)
    )
