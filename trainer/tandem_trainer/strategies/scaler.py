"""The scale of the loss under float16, where ranks hold gradients of different weights.

A step whose gradient has overflown is left out, and the scale is halved. Each stage of a pipeline sees its own
gradients alone. So what one has found is told to all before any of them decides: all take the same steps, with the same
scale.
"""

from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from tandem_trainer.optimizers import by_mesh


class AgreedScaler(torch.amp.GradScaler):
    """Finds an overflow where any rank of the group does. Collective, once for each optimizer in a step."""

    def _unscale_grads_(
        self, optimizer: torch.optim.Optimizer, inv_scale: Tensor, found_inf: Tensor, allow_fp16: bool
    ) -> dict[torch.device, Tensor]:
        """As torch's, which asks it both before it clips and before a step."""
        # torch asks for all gradients of a device at once, and takes those of one mesh alone.
        groups = by_mesh(one for group in optimizer.param_groups for one in group["params"])
        found: dict[torch.device, Tensor] = {}
        for group in groups:
            of_one: Any = SimpleNamespace(param_groups=[group])
            for device, one in super()._unscale_grads_(of_one, inv_scale, found_inf, allow_fp16).items():
                found[device] = torch.maximum(found[device], one) if device in found else one
        # A rank none of whose weights has a gradient has found nothing, and is told by the others.
        mine = found.get(found_inf.device, found_inf)
        dist.all_reduce(mine, op=dist.ReduceOp.MAX)
        return {**found, found_inf.device: mine}
