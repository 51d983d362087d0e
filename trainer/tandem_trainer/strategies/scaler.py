"""Loss scaling under float16, where ranks hold gradients of different weights.

A step whose gradients overflow is skipped, and the scale is halved. Each stage of a pipeline sees only its own
gradients. So the ranks exchange what they found before any of them decides: all take the same steps, with the same
scale.
"""

from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from tandem_trainer.optimizers import by_mesh


class AgreedScaler(torch.amp.GradScaler):
    """Gradient scaler that detects an overflow if any rank of the group has one. Collective, once for each optimizer in
    a step."""

    def _unscale_grads_(
        self, optimizer: torch.optim.Optimizer, inv_scale: Tensor, found_inf: Tensor, allow_fp16: bool
    ) -> dict[torch.device, Tensor]:
        """Unscale gradients as torch does, which calls this both before clipping and before a step."""
        # torch processes all gradients of a device at once, but its fused operation accepts only those of one mesh.
        groups = by_mesh(parameter for group in optimizer.param_groups for parameter in group["params"])
        by_device: dict[torch.device, Tensor] = {}
        for group in groups:
            single_group: Any = SimpleNamespace(param_groups=[group])
            for device, overflow in super()._unscale_grads_(single_group, inv_scale, found_inf, allow_fp16).items():
                by_device[device] = torch.maximum(by_device[device], overflow) if device in by_device else overflow
        # A rank without gradients has found nothing, but takes part for the result of the others.
        overflow_here = by_device.get(found_inf.device, found_inf)
        dist.all_reduce(overflow_here, op=dist.ReduceOp.MAX)
        return {**by_device, found_inf.device: overflow_here}
