"""Data parallelism: every rank holds the whole model, and gradients are averaged during the backward pass.

https://pytorch.org/docs/stable/notes/ddp.html
"""

import contextlib
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook
from torch.nn.parallel import DistributedDataParallel

from tandem.job import tasks
from tandem.job.tasks import Loop
from tandem_trainer.group_model import WITHOUT_SYNC
from tandem_trainer.process_group import Group
from tandem_trainer.strategies.strategy import Strategy

POWER_SGD_RANK = 2
"""Rank of the two matrices that approximate a gradient (https://arxiv.org/abs/1905.13727 finds 2 to lose nothing)."""
POWER_SGD_FIRST_STEPS = 2
"""Number of first steps whose gradients are not compressed: DistributedDataParallel plans its buckets in the first."""


class Ddp(Strategy):
    """DistributedDataParallel with the options of the job."""

    is_replicated = True

    def __init__(self, loop: Loop, group: Group) -> None:
        super().__init__(loop, group)
        self._options = loop.ddp or tasks.DdpSettings()
        self._is_recorded = not self._options.static_graph
        self._is_interruptible = False

    def allow_interrupts(self) -> None:
        self._is_interruptible = True

    def carry_loss(self) -> None:
        self.carrier = nn.Parameter(torch.zeros((), device=self.group.device))

    def wrap(self, model: nn.Module) -> nn.Module:
        forward = DistributedDataParallel(
            super().wrap(model) if self.carrier is None else WithCarrier(super().wrap(model), self.carrier),
            device_ids=[self.group.device] if self.group.device.type == "cuda" else None,
            gradient_as_bucket_view=True,
            bucket_cap_mb=self._options.bucket_megabytes,
            **(WITHOUT_SYNC if self._is_interruptible else {}),
            static_graph=self._options.static_graph,
        )
        match self._options.compression:
            case "none" if self._is_interruptible:
                forward.register_comm_hook(self.group, interruptible_hook)
            case "float16":
                forward.register_comm_hook(None, default_hooks.fp16_compress_hook)
            case "bfloat16":
                forward.register_comm_hook(None, default_hooks.bf16_compress_hook)
            case "powerSGD":
                assert dist.group.WORLD is not None
                state = powerSGD_hook.PowerSGDState(
                    process_group=dist.group.WORLD,
                    matrix_approximation_rank=POWER_SGD_RANK,
                    start_powerSGD_iter=POWER_SGD_FIRST_STEPS,
                    random_seed=self.loop.seed,
                )
                forward.register_comm_hook(state, powerSGD_hook.powerSGD_hook)
        return forward

    def synchronised(self, forward: nn.Module, last: bool) -> contextlib.AbstractContextManager[object]:
        assert isinstance(forward, DistributedDataParallel)
        if last:
            self._is_recorded = True
            return contextlib.nullcontext()
        # DistributedDataParallel records a static graph with its collectives in the first step (torch 2.15), so they
        # must run then. Gradients that are averaged again with the next part keep the same average.
        return forward.no_sync() if self._is_recorded else contextlib.nullcontext()


def interruptible_hook(group: Group, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:  # type: ignore[name-defined]
    """Average a bucket of gradients as DistributedDataParallel does without a hook, such that `Group.interrupt` frees
    the backward pass that waits for it."""
    gradients = bucket.buffer().div_(group.world_size)
    assert dist.group.WORLD is not None
    work = dist.group.WORLD.allreduce([gradients])
    return group.guarded(work.get_future(), gradients)


class WithCarrier(nn.Module):
    """A model with one more parameter, whose gradient is averaged over the ranks with those of the model."""

    def __init__(self, model: nn.Module, carrier: nn.Parameter) -> None:
        super().__init__()
        self.model, self.carrier = model, carrier

    def forward(self, *inputs: Any, **options: Any) -> Any:
        """Call the model."""
        return self.model(*inputs, **options)
