"""What a strategy is asked by the loop. As it stands here it is that of one rank alone."""

import contextlib
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from tandem.tasks import Loop, StrategyName
from tandem_trainer.checkpoint.sharding import Stages
from tandem_trainer.data.supply import Share
from tandem_trainer.meter import Busy
from tandem_trainer.models.dropout import Draws
from tandem_trainer.process_group import Group
from tandem_trainer.task import Task

log = logging.getLogger(__name__)

Plan = Mapping[str, str]
"""How tensor parallelism splits the modules of a model: a pattern of names, with * for any part, to one of the words of
tandem_trainer.strategies.tensor."""
Runner = Callable[[int, Share], Tensor]
"""Runs forward and backward pass of this rank's share in a step. Returns its part of the mean loss, a scalar."""
Examples = Callable[[int], Any]
"""Makes a batch of a given number of samples."""


class Strategy:
    """One rank with the whole model."""

    is_shared = False
    """Whether all ranks write into one copy of the weights; then rank 0 alone averages and saves them."""

    def __init__(self, loop: Loop, group: Group) -> None:
        self.loop, self.group = loop, group
        self.devices: tuple[torch.device, ...] = (group.device,)
        """Where this rank computes; batches are on the first."""
        self.dp_rank, self.dp_size = group.rank, group.world_size
        """Data-parallel rank and world size: ranks with one number work on the same samples."""
        self.mesh: dict[str, int] = {"data": group.world_size}
        """Ranks in each dimension, for the manifests of checkpoints."""

    stages: Stages | None = None
    """Where tensors lie, of a model that is cut into stages."""

    def shard(self, model: nn.Module, task: Task[Any], examples: Examples) -> None:
        """Put a model, which is on the CPU and the same on every rank, on the device, split as it will be trained.
        Names stay as they are. Collective, before its optimizer is made.

        Args:
            task: says how its model can be split.
            examples: batches to try the model with.

        Raises:
            ConfigurationError: the model cannot be split like that.
        """
        model.to(self.group.device)

    def wrap(self, model: nn.Module) -> nn.Module:
        """The module to call, once all ranks have the same state."""
        if self.loop.compile:
            # The model and not what is wrapped around it: in DistributedDataParallel's own forward the compiler gives
            # up (torch 2.15), and of a model that is made of torch's modules alone nothing would be compiled at all.
            model.compile()
        return model

    def scaler(self) -> torch.amp.GradScaler:
        """Scales the loss; enabled for float16 alone."""
        return torch.amp.GradScaler(self.group.device.type, enabled=self.loop.precision == "float16")

    def runner(self, task: Task[Any], draws: Draws, busy: Busy, scaler: torch.amp.GradScaler) -> Runner | None:
        """What runs whole shares in the place of the loop; None: the loop runs them, part by part.

        Args:
            draws: what the model's dropout draws from.
            busy: times this rank's own work.
            scaler: scales losses before their backward pass.
        """
        return None

    def synchronised(self, forward: nn.Module, last: bool) -> contextlib.AbstractContextManager[object]:
        """Encloses the forward and backward pass of a part of a batch.

        Args:
            last: whether it is the last one, after which the gradients have to be those of the global batch.
        """
        return contextlib.nullcontext()

    def clip(self, parameters: Sequence[Tensor], most: float) -> Tensor:
        """Scale gradients down to a norm of at most so much. Collective.

        Returns:
            The norm that they had, a scalar.
        """
        return nn.utils.clip_grad_norm_(parameters, most)


DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def mixed_precision(loop: Loop, device: torch.device) -> torch.autocast:
    """In which forward passes on a device are run."""
    return torch.autocast(device.type, dtype=DTYPES[loop.precision], enabled=loop.precision != "float32")


EPSILON = 1e-6
"""As torch's own clip_grad_norm_ has it."""


def clip_parts(gradients: Sequence[Tensor], copies: Sequence[int], most: float, device: torch.device) -> Tensor:
    """Scale gradients, of which each rank holds a part, down to a norm of at most so much. Collective.

    Args:
        gradients: what this rank holds of them.
        copies: how many ranks hold the same, of each.

    Returns:
        The norm that they had, a scalar.
    """
    total = torch.zeros((), dtype=torch.float32, device=device)
    if gradients:
        # Where they are: with cpuOffload that is not the device on which ranks add up.
        norms = torch.stack(torch._foreach_norm(list(gradients), dtype=torch.float32)).square()
        total = (norms / torch.tensor(copies, dtype=torch.float32).to(norms.device)).sum().to(device)
    dist.all_reduce(total)
    norm = total.sqrt()
    if gradients:
        torch._foreach_mul_(list(gradients), (most / (norm + EPSILON)).clamp(max=1.0).to(gradients[0].device))
    return norm


def devices_of(group: Group, strategy: StrategyName) -> tuple[torch.device, ...]:
    """All GPUs of this process, its own one first; the processor where there are none. Says so where there is one."""
    own = group.device
    if own.type == "cuda":
        others = (torch.device("cuda", index) for index in range(torch.cuda.device_count()))
        found = (own, *(other for other in others if other != own))
    else:
        found = (own,)
    if len(found) == 1:
        log.warning("strategy=%s has one device, %s: it trains as one rank with the whole model", strategy, own)
    return found


def prepare(model: nn.Module, loop: Loop, group: Group) -> nn.Module:
    """Do to a model what the configuration asks for, whatever the strategy; names of parameters stay as they are."""
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


def blocks_of(model: nn.Module, least: int | None = None) -> list[nn.Module]:
    """The blocks that a model is made of: the members of its outermost `ModuleList`s and of `Sequential`s with
    parameters in more than one member, in order.

    Args:
        least: instead, each module that has at least this many parameters outside of the blocks within it, innermost
            first.
    """
    return list(_members(model)) if least is None else _of_size(model, least)


def _members(module: nn.Module) -> Iterator[nn.Module]:
    members = [one for one in module.children() if any(True for _ in one.parameters())]
    if isinstance(module, nn.ModuleList) or (isinstance(module, nn.Sequential) and len(members) > 1):
        for member in members:
            # One that only holds others is no block: it has no forward pass.
            yield from _held(member)
    else:
        for child in module.children():
            yield from _members(child)


def _held(module: nn.Module) -> Iterator[nn.Module]:
    if not isinstance(module, nn.ModuleList | nn.ModuleDict):
        yield module
        return
    for child in module.children():
        if any(True for _ in child.parameters()):
            yield from _held(child)


def _of_size(model: nn.Module, least: int) -> list[nn.Module]:
    found: list[nn.Module] = []

    def left(module: nn.Module) -> int:
        """Parameters of a module that are in no block."""
        count = sum(parameter.numel() for parameter in module.parameters(recurse=False))
        count += sum(left(child) for child in module.children())
        # A ModuleList has no forward pass before which anything could be put together.
        if module is model or count < least or isinstance(module, nn.ModuleList | nn.ModuleDict):
            return count
        found.append(module)
        return 0

    left(model)
    return found
