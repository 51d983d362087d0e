"""The norm of the gradients, measured now and then, for the training log.

It is looked at where an optimizer is about to take its step, so that a loop of the user's own need not say anything:
what has been clipped by then is measured clipped. A reading costs one pass over the gradients; with one in
INTERVAL_SECONDS that is little beside steps of any length. Its value stays on the device until the log is written, for
which the losses are waited for anyway.
"""

import time
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils import get_total_norm

INTERVAL_SECONDS = 0.5
"""As often as the training log says how fast training is."""


class GradientNorm:
    """Measures on one rank. Gradients are those of the global batch there, which the ranks have averaged."""

    def __init__(self) -> None:
        self._measured: Tensor | None = None
        self._due = 0.0

    def follow(self, optimizer: torch.optim.Optimizer) -> None:
        """Look at the gradients of an optimizer before its steps."""
        # What wraps an optimizer may be one by name alone.
        if isinstance(optimizer, torch.optim.Optimizer):
            optimizer.register_step_pre_hook(self._before_step)

    @property
    def is_due(self) -> bool:
        """Whether a reading is wanted of this step."""
        return time.monotonic() >= self._due

    def tell(self, norm: Tensor) -> None:
        """Take over what was measured for another purpose, such as clipping."""
        self._measured, self._due = norm.detach(), time.monotonic() + INTERVAL_SECONDS

    def take(self) -> Tensor | None:
        """The newest reading, which counts once, a scalar that may still be being computed; None if there is none."""
        measured, self._measured = self._measured, None
        return measured

    def _before_step(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        if not self.is_due:
            return
        norm = _norm(parameter.grad for group in optimizer.param_groups for parameter in group["params"])
        if norm is not None:
            # Fused optimizers take a scaled gradient, and its scale with it.
            scale = getattr(optimizer, "grad_scale", None)
            self.tell(norm if scale is None else norm / scale)


def _norm(gradients: Iterable[Tensor | None]) -> Tensor | None:
    """Of plain tensors alone: the norm of a sharded one is a collective, and ranks would wait for each other."""
    found = [gradient for gradient in gradients if gradient is not None]
    if not found or any(type(one) is not Tensor or one.layout != torch.strided for one in found):
        return None
    return get_total_norm(found)
