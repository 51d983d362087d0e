"""The interface between the training loop and a strategy. The base class is the strategy of one rank alone."""

import contextlib
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from tandem.job.tasks import Loop, StrategyName
from tandem_trainer.checkpoint.sharding import StagePlacement
from tandem_trainer.data.supply import Share
from tandem_trainer.meter import Stopwatch
from tandem_trainer.models.dropout import Draws
from tandem_trainer.process_group import Group
from tandem_trainer.task import Task

log = logging.getLogger(__name__)

Plan = Mapping[str, str]
"""Plan of tensor parallelism: from a pattern of module names, in which * matches any part, to a style of
tandem_trainer.strategies.tensor."""
Runner = Callable[[int, Share], Tensor]
"""Function that runs forward and backward pass of this rank's share in a step, and returns its part of the mean loss, a
scalar."""
Examples = Callable[[int], Any]
"""Function that makes a batch of a given number of samples."""


class Strategy:
    """One rank with the whole model."""

    is_shared = False
    """Whether all ranks write into one copy of the weights; then only rank 0 averages and saves them."""

    is_replicated = False
    """Whether several ranks each hold the whole model, and average their gradients."""

    def __init__(self, loop: Loop, group: Group) -> None:
        self.loop, self.group = loop, group
        self.devices: tuple[torch.device, ...] = (group.device,)
        """Devices on which this rank computes; batches are on the first."""
        self.dp_rank, self.dp_size = group.rank, group.world_size
        """Data-parallel rank and world size; ranks with equal `dp_rank` work on the same samples."""
        self.mesh: dict[str, int] = {"data": group.world_size}
        """Number of ranks in each dimension, for the manifests of checkpoints."""

    carrier: nn.Parameter | None = None
    """Scalar parameter whose gradient after a step is the mean loss of the global batch, if it is carried."""

    def allow_interrupts(self) -> None:
        """Make backward passes raise when the group is interrupted. Call it before `wrap`."""

    def carry_loss(self) -> None:
        """Have the mean loss of the global batch travel with the gradients, if possible, so that each rank knows it as
        soon as a step is taken. Call it before `wrap`. It costs four bytes, and no collective."""

    stages: StagePlacement | None = None
    """Placement of the tensors, if the model is cut into pipeline stages."""

    def shard(self, model: nn.Module, task: Task[Any], examples: Examples) -> None:
        """Move a model, which is on the CPU and the same on every rank, to the device, split as it will be trained.

        Names of parameters do not change. Collective; must be called before the optimizer is created.

        Args:
            task: defines how its model can be split.
            examples: makes batches to trace the model with.

        Raises:
            ConfigurationError: the model cannot be split in this way.
        """
        model.to(self.group.device)

    def wrap(self, model: nn.Module) -> nn.Module:
        """Return the module to call, once all ranks have the same state."""
        # After a regroup it is compiled already.
        if self.loop.compile and model._compiled_call_impl is None:
            # Compile the model and not the wrapper: in DistributedDataParallel's own forward the compiler gives
            # up (torch 2.15), and of a model that is made of torch's modules alone nothing would be compiled at all.
            model.compile()
        return model

    def scaler(self) -> torch.amp.GradScaler:
        """Create the scaler of the loss; it is only enabled for float16."""
        return torch.amp.GradScaler(self.group.device.type, enabled=self.loop.precision == "float16")

    def runner(self, task: Task[Any], draws: Draws, busy: Stopwatch, scaler: torch.amp.GradScaler) -> Runner | None:
        """Return a function that runs whole shares instead of the loop; None if the loop runs them, part by part.

        Args:
            draws: source of the random numbers for the model's dropout.
            busy: measures this rank's own work.
            scaler: scales losses before their backward pass.
        """
        return None

    def synchronised(self, forward: nn.Module, last: bool) -> contextlib.AbstractContextManager[object]:
        """Return a context for the forward and backward pass of a part of a batch.

        Args:
            last: whether it is the last part, after which the gradients must be those of the global batch.
        """
        return contextlib.nullcontext()

    def clip(self, parameters: Sequence[Tensor], max_norm: float) -> Tensor:
        """Clip the norm of gradients. Collective.

        Returns:
            The norm before clipping, a scalar.
        """
        return nn.utils.clip_grad_norm_(parameters, max_norm)


DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def mixed_precision(loop: Loop, device: torch.device) -> torch.autocast:
    """Return the autocast context for forward passes on a device."""
    return torch.autocast(device.type, dtype=DTYPES[loop.precision], enabled=loop.precision != "float32")


CLIP_EPSILON = 1e-6
"""Value that torch's clip_grad_norm_ adds to the norm."""


def clip_parts(gradients: Sequence[Tensor], copies: Sequence[int], max_norm: float, device: torch.device) -> Tensor:
    """Clip the norm of gradients of which each rank holds a part. Collective.

    Args:
        gradients: this rank's parts.
        copies: number of ranks that hold the same part, for each gradient.

    Returns:
        The norm before clipping, a scalar.
    """
    total = torch.zeros((), dtype=torch.float32, device=device)
    if gradients:
        # On the gradients' device: with cpuOffload that is not the device on which ranks sum.
        norms = torch.stack(torch._foreach_norm(list(gradients), dtype=torch.float32)).square()
        # A part that several ranks hold would be counted once by each of them.
        total = (norms / torch.tensor(copies, dtype=torch.float32).to(norms.device)).sum().to(device)
    dist.all_reduce(total)
    norm = total.sqrt()
    if gradients:
        torch._foreach_mul_(list(gradients), (max_norm / (norm + CLIP_EPSILON)).clamp(max=1.0).to(gradients[0].device))
    return norm


def devices_of(group: Group, strategy: StrategyName) -> tuple[torch.device, ...]:
    """Return all GPUs of this process, its own one first; the CPU if there is none. Warns if there is one device
    only."""
    own = group.device
    if own.type == "cuda":
        peers = (torch.device("cuda", index) for index in range(torch.cuda.device_count()))
        devices = (own, *(other for other in peers if other != own))
    else:
        devices = (own,)
    if len(devices) == 1:
        log.warning("strategy=%s has one device, %s: it trains as one rank with the whole model", strategy, own)
    return devices


def prepare(model: nn.Module, loop: Loop, group: Group) -> nn.Module:
    """Apply the options of the job that are independent of the strategy to a model; names of parameters do not
    change."""
    if loop.sync_batch_norm:
        if group.device.type == "cuda" and group.world_size > 1:
            model = nn.SyncBatchNorm.convert_sync_batchnorm(model)  # type: ignore[no-untyped-call]
        elif group.rank == 0:
            log.warning("setting=syncBatchNorm ignored: it needs more than one rank, on GPUs")
    if loop.activation_checkpointing:
        for block in blocks_of(model) or model.children():
            if any(True for _ in block.parameters()):
                block.forward = partial(checkpoint, block.forward, use_reentrant=False)
    return model


def blocks_of(model: nn.Module, min_parameters: int | None = None) -> list[nn.Module]:
    """Return the blocks that a model is made of: the members of its outermost `ModuleList`s, and of `Sequential`s with
    parameters in more than one member, in order.

    Args:
        min_parameters: minimum number of parameters; if set, return instead each module with at least as many outside
        of the
            blocks within it, innermost first.
    """
    return list(_members(model)) if min_parameters is None else _of_size(model, min_parameters)


def _members(module: nn.Module) -> Iterator[nn.Module]:
    members = [child for child in module.children() if any(True for _ in child.parameters())]
    if isinstance(module, nn.ModuleList) or (isinstance(module, nn.Sequential) and len(members) > 1):
        for member in members:
            # A pure container is not a block: it has no forward pass.
            yield from _callable_modules(member)
    else:
        for child in module.children():
            yield from _members(child)


def _callable_modules(module: nn.Module) -> Iterator[nn.Module]:
    if not isinstance(module, nn.ModuleList | nn.ModuleDict):
        yield module
        return
    for child in module.children():
        if any(True for _ in child.parameters()):
            yield from _callable_modules(child)


def _of_size(model: nn.Module, min_parameters: int) -> list[nn.Module]:
    blocks: list[nn.Module] = []

    def count_outside(module: nn.Module) -> int:
        """Count the parameters of a module that are in no block."""
        count = sum(parameter.numel() for parameter in module.parameters(recurse=False))
        count += sum(count_outside(child) for child in module.children())
        # A ModuleList has no forward pass, before which its weights could be gathered.
        if module is model or count < min_parameters or isinstance(module, nn.ModuleList | nn.ModuleDict):
            return count
        blocks.append(module)
        return 0

    count_outside(model)
    return blocks
