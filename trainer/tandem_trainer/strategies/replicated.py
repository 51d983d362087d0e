"""Layers that each rank of a tensor group holds in full and applies to a part of the values.

The norm of queries in Qwen3 or Gemma 3 is one: its weight is the same for all heads, and each rank has some of the
heads. So the gradient that a rank computes is only its heads' part. The parts are summed in the backward pass, when the
gradient of any other replicated weight is complete, too: later code, such as `fully_shard`, accumulation and clipping,
treats them alike.

A plan may lack such a layer, and the loss hardly shows it. So the gradients of replicated weights are compared in the
first steps of each generation: the ranks of a tensor group must compute the same, or the plan is incomplete. Several
steps are compared, because in the very first one some gradients are zero, such as those of LoRA's first matrices.

Rejected: hooks on parameters, as in transformers: a parameter that `fully_shard` gathers is another object in each
pass, and with several micro-batches sums would be summed again. Weights as DTensors (torch's SequenceParallel): their
gradients stay partial until something redistributes them, and optimizers of local tensors do not.
"""

from collections.abc import Iterable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from tandem_trainer.checkpoint.sharding import to_local
from tandem_trainer.failure import ConfigurationError
from tandem_trainer.strategies.tensor import REPLICATED
from tandem_trainer.uncompiled import uncompiled

MAX_DIFFERENCE = 0.05
"""Maximum difference between ranks, relative to the norm of a gradient. Ranks that each have a part of a gradient
differ by more; ranks that have all of it differ at most by the rounding of sums in bfloat16."""
MAX_PROJECTED = 2**20
"""Number of elements of a gradient that are projected; the table of an embedding is too large for another copy."""
NEGLIGIBLE = 1e-5
"""Difference, relative to the norm of the largest gradient, that counts as zero with rounding errors."""
COMPARED_STEPS = 10
"""Number of steps that are compared. Each costs a collective of three numbers for each weight, and a pass over its
gradient."""
MAX_EMPTY_STEPS = 100
"""Number of steps without anything to compare after which the comparison ends."""


def sum_gradients(module: nn.Module, group: dist.ProcessGroup) -> None:
    """Make the gradients of a module's own parameters the sum over the ranks of a group."""

    # Hooks and not methods: a copy of the module has them, too, and they are passed the module that is called.
    @uncompiled
    def before(layer: nn.Module, inputs: Any) -> None:
        weights = {
            name: parameter
            for name, parameter in layer._parameters.items()
            if parameter is not None and parameter.requires_grad
        }
        vars(layer)["_replicated"] = weights
        for name, parameter in weights.items():
            layer._parameters[name] = _SumOverRanks.apply(parameter, group)

    @uncompiled
    def after(layer: nn.Module, inputs: Any, outputs: Any) -> None:
        layer._parameters.update(vars(layer).pop("_replicated"))

    module.register_forward_pre_hook(before)
    # Also if the forward pass raises: after an out-of-memory error the parameters must be restored, too.
    module.register_forward_hook(after, always_call=True)


class _SumOverRanks(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, weight: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        return weight.view_as(weight)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        total = gradient.contiguous().clone()
        dist.all_reduce(total, group=ctx.group)
        return total, None


class GradientComparison:
    """Compares the gradients of weights that all ranks of a tensor group hold in full, in the first steps.

    Args:
        ranks: process group of the ranks that split matrices.
        device: device on which they communicate.
    """

    def __init__(self, ranks: dist.ProcessGroup, device: torch.device) -> None:
        self._ranks, self._device = ranks, device
        self._remaining_steps, self._empty_steps = COMPARED_STEPS if dist.get_world_size(ranks) > 1 else 0, 0
        self._records: dict[int, Tensor] = {}
        """Summary of this rank's gradient of each weight in a step, by the weight's id: [3], on the device."""
        self._direction: Tensor | None = None

    @property
    def is_due(self) -> bool:
        """Whether more steps are to be compared; the same on all ranks."""
        return self._remaining_steps > 0

    def check(self, parameters: Iterable[tuple[str, nn.Parameter]]) -> None:
        """Compare the current gradients of a step. Collective.

        Args:
            parameters: parameters of a model, with their names.

        Raises:
            ConfigurationError: some gradients differ.
        """
        if not self.is_due:
            return
        replicated = [
            (name, parameter) for name, parameter in parameters if parameter.requires_grad and is_replicated(parameter)
        ]
        self.record(parameter for _, parameter in replicated)
        self.compare(replicated)

    def record(self, weights: Iterable[nn.Parameter]) -> None:
        """Record a summary of the gradients that this rank has, until they are compared."""
        with torch.no_grad():
            self._records |= {id(weight): self._summary(weight.grad) for weight in weights if weight.grad is not None}

    def compare(self, replicated: Sequence[tuple[str, nn.Parameter]]) -> None:
        """Compare the recorded gradients of a step. Collective.

        Args:
            replicated: weights with their names, the same in the same order on all ranks.

        Raises:
            ConfigurationError: some gradients differ.
        """
        if self._compare(replicated):
            self._remaining_steps -= 1
            return
        self._empty_steps += 1
        if self._empty_steps == MAX_EMPTY_STEPS:
            self._remaining_steps = 0

    def _compare(self, replicated: Sequence[tuple[str, nn.Parameter]]) -> bool:
        """Return whether there was something to compare."""
        records, self._records = self._records, {}
        if not replicated:
            return False
        missing = torch.zeros(3, device=self._device)
        local = torch.stack([records.get(id(weight), missing) for _, weight in replicated])
        # Ranks may have recorded different weights. The shape does not depend on that, so the collective matches.
        limits = torch.stack([local, -local])
        # One collective gives both: the maximum of x and, negated, of -x the minimum.
        dist.all_reduce(limits, dist.ReduceOp.MAX, group=self._ranks)
        highest, lowest = limits[0], -limits[1]
        # Nothing to compare: the loss scale is still too large, or this is between two steps of the optimizer.
        if not torch.isfinite(limits).all() or not lowest[:, 2].any():
            return False
        norms = highest[:, 0]
        differing = (highest - lowest)[:, :2].amax(1) > MAX_DIFFERENCE * norms + NEGLIGIBLE * norms.max()
        # Only some of the ranks have a gradient, as where each has experts of its own.
        differing |= highest[:, 2] > lowest[:, 2]
        if names := [name for (name, _), differs in zip(replicated, differing.tolist(), strict=True) if differs]:
            more = f" and {len(names) - 1} more" if len(names) > 1 else ""
            raise ConfigurationError(
                f"the plan for tensorParallel is incomplete: the ranks have different gradients of {names[0]}{more}, "
                f"between matrices that are split; add the style {REPLICATED} for the layers there that have weights, "
                "or train without tensorParallel"
            )
        return True

    def _summary(self, gradient: Tensor) -> Tensor:
        """Summarize a gradient: its norm, the projection of its beginning on a fixed direction, and 1 for present,
        [3]."""
        values = to_local(gradient).flatten()
        # With cpuOffload gradients are not on this device.
        beginning = values[:MAX_PROJECTED].to(self._device, torch.float32)
        if self._direction is None or len(self._direction) < len(beginning):
            self._direction = torch.cos(torch.arange(len(beginning), dtype=torch.float32, device=self._device))
        norm = torch.linalg.vector_norm(values, dtype=torch.float32).to(self._device)
        # Scaled to the length of a vector of signs, so that norm and projection are of similar size.
        projection = beginning.dot(self._direction[: len(beginning)]) * 2**0.5
        return torch.stack([norm, projection, torch.ones_like(norm)])


def is_replicated(parameter: Tensor) -> bool:
    """Return whether each rank of a tensor group has all of a parameter, or the same part of its rows, but not none of
    it."""
    return not (parameter.is_meta or _is_split(parameter))


def _is_split(parameter: Tensor) -> bool:
    """Return whether the ranks of a tensor group hold different parts of a parameter."""
    if not isinstance(parameter, DTensor):
        return False
    names = parameter.device_mesh.mesh_dim_names or ()
    return any(
        name == "tensor" and not placement.is_replicate()
        for name, placement in zip(names, parameter.placements, strict=True)
    )
