"""Data parallelism: every rank holds the whole model, and gradients are averaged during the backward pass.

https://pytorch.org/docs/stable/notes/ddp.html
"""

import contextlib

import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook
from torch.nn.parallel import DistributedDataParallel

from tandem.job import tasks
from tandem.job.tasks import Loop
from tandem_trainer.process_group import Group
from tandem_trainer.strategies.strategy import Strategy

POWER_SGD_RANK = 2
"""Rank of the two matrices that approximate a gradient (https://arxiv.org/abs/1905.13727 finds 2 to lose nothing)."""
POWER_SGD_FIRST_STEPS = 2
"""Number of first steps whose gradients are not compressed: DistributedDataParallel plans its buckets in the first."""


class Ddp(Strategy):
    """DistributedDataParallel with the options of the job."""

    def __init__(self, loop: Loop, group: Group) -> None:
        super().__init__(loop, group)
        self._options = loop.ddp or tasks.DdpSettings()
        self._is_recorded = not self._options.static_graph

    def wrap(self, model: nn.Module) -> nn.Module:
        forward = DistributedDataParallel(
            super().wrap(model),
            device_ids=[self.group.device] if self.group.device.type == "cuda" else None,
            gradient_as_bucket_view=True,
            bucket_cap_mb=self._options.bucket_megabytes,
            static_graph=self._options.static_graph,
        )
        match self._options.compression:
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
