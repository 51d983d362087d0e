"""Layers that are whole on each rank of a tensor group and work there with a part of the values.

The norm of queries in Qwen3 or Gemma 3 is one: its weight is the same for all heads, and each rank has some of the
heads. So the gradient that a rank computes is its heads' part of it. The parts are added up in the backward pass, when
that of any other weight that is whole on all ranks is complete, too: what follows, such as `fully_shard`, accumulation
and clipping, treats them alike.

A plan may lack such a layer, and the loss hardly shows it. So the gradients of weights that are whole are compared in
the first steps of each generation: what the ranks of a tensor group compute of them is the same, or a plan is not
complete. In several steps, for in the very first one some gradients are zero, such as those of LoRA's first matrices.

Rejected: hooks on parameters, as transformers has them. A parameter that `fully_shard` gathers is another object in
each pass, and with several micro-batches sums would be added up again. Weights as DTensors (torch's SequenceParallel):
their gradients stay partial until something redistributes them, which optimizers of local tensors do not.
"""

from collections.abc import Iterable, Sequence
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
STEPS = 10
"""That are looked at. Each costs a collective of three numbers for each weight, and a pass over its gradient."""
FRUITLESS = 100
"""Steps in which there is nothing to look at, until no more is expected."""


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
    """Compares the gradients of weights that are whole on all ranks of a tensor group, in the first steps.

    Args:
        ranks: those that split matrices.
        device: on which they communicate.
    """

    def __init__(self, ranks: dist.ProcessGroup, device: torch.device) -> None:
        self._ranks, self._device = ranks, device
        self._left, self._fruitless = STEPS if dist.get_world_size(ranks) > 1 else 0, 0
        self._noted: dict[int, Tensor] = {}
        """What this rank has of a step, by the id of the weight: [3], on the device."""
        self._direction: Tensor | None = None

    @property
    def is_due(self) -> bool:
        """Whether a step is still to be looked at; the same on all ranks."""
        return self._left > 0

    def look(self, parameters: Iterable[tuple[str, nn.Parameter]]) -> None:
        """Compare the gradients of a step as they are. Collective.

        Args:
            parameters: of a model, with their names.

        Raises:
            ConfigurationError: some differ.
        """
        if not self.is_due:
            return
        whole = [(name, one) for name, one in parameters if one.requires_grad and is_whole(one)]
        self.note(one for _, one in whole)
        self.compare(whole)

    def note(self, weights: Iterable[nn.Parameter]) -> None:
        """Remember what this rank has of those that have gradients, until they are compared."""
        with torch.no_grad():
            self._noted |= {id(one): self._told(one.grad) for one in weights if one.grad is not None}

    def compare(self, whole: Sequence[tuple[str, nn.Parameter]]) -> None:
        """Compare what was noted of a step. Collective.

        Args:
            whole: weights with their names, the same in the same order on all ranks.

        Raises:
            ConfigurationError: some differ.
        """
        if self._found(whole):
            self._left -= 1
            return
        self._fruitless += 1
        if self._fruitless == FRUITLESS:
            self._left = 0

    def _found(self, whole: Sequence[tuple[str, nn.Parameter]]) -> bool:
        """Whether there was something to compare."""
        noted, self._noted = self._noted, {}
        if not whole:
            return False
        missing = torch.zeros(3, device=self._device)
        mine = torch.stack([noted.get(id(one), missing) for _, one in whole])
        # The ranks may not have noted the same: a shape that does not depend on it keeps them together.
        limits = torch.stack([mine, -mine])
        dist.all_reduce(limits, dist.ReduceOp.MAX, group=self._ranks)
        most, least = limits[0], -limits[1]
        # A loss scale that is still too large; or between two steps of the optimizer.
        if not torch.isfinite(limits).all() or not least[:, 2].any():
            return False
        norms = most[:, 0]
        apart = (most - least)[:, :2].amax(1) > APART * norms + NOTHING * norms.max()
        # On some of the ranks alone, as where each has experts of its own.
        apart |= most[:, 2] > least[:, 2]
        if names := [name for (name, _), differs in zip(whole, apart.tolist(), strict=True) if differs]:
            more = f" and {len(names) - 1} more" if len(names) > 1 else ""
            raise ConfigurationError(
                f"the plan for tensorParallel is not complete: each rank has another gradient of {names[0]}{more}, "
                f"between matrices that are split; say {REPLICATED} for the layers there that have weights, or train "
                "without tensorParallel"
            )
        return True

    def _told(self, gradient: Tensor) -> Tensor:
        """[3]: the norm of a gradient, the projection of its beginning on a fixed direction, and 1: it is there."""
        values = here(gradient).flatten()
        # With cpuOffload gradients are elsewhere.
        some = values[:PROJECTED].to(self._device, torch.float32)
        if self._direction is None or len(self._direction) < len(some):
            self._direction = torch.cos(torch.arange(len(some), dtype=torch.float32, device=self._device))
        norm = torch.linalg.vector_norm(values, dtype=torch.float32).to(self._device)
        # As long as a vector of signs, so that both numbers are of one size.
        projection = some.dot(self._direction[: len(some)]) * 2**0.5
        return torch.stack([norm, projection, torch.ones_like(norm)])


def is_whole(parameter: Tensor) -> bool:
    """Whether each rank of a tensor group has all of it, or the same part of its rows; and not none of it."""
    return not (parameter.is_meta or _is_split(parameter))


def _is_split(parameter: Tensor) -> bool:
    """Whether the ranks of a tensor group hold parts of it."""
    if not isinstance(parameter, DTensor):
        return False
    names = parameter.device_mesh.mesh_dim_names or ()
    return any(
        name == "tensor" and not placement.is_replicate()
        for name, placement in zip(names, parameter.placements, strict=True)
    )
