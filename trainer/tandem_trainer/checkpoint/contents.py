"""What goes into a checkpoint, and into which of its files.

`weights.safetensors` is what evaluators read and what is exported. Where that is not what training goes on with (it is
rounded, or an average over steps), training has files of its own.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from tandem.manifest import WEIGHTS

OPTIMIZER = "state/optimizer.safetensors"
FULL_WEIGHTS = "state/weights.safetensors"
"""The weights as training had them."""
AVERAGE = "state/average.safetensors"
"""Averaged weights in full precision, where those for evaluators have less."""
OTHERS = "state/others.safetensors"
"""Tensors of whatever else the run keeps."""

Tensors = Mapping[str, Tensor]


@dataclass(frozen=True)
class Contents:
    """Everything that a run resumes. The tensors of a running job alias the live ones."""

    weights: Tensors
    """The model's state_dict."""
    optimizer: Tensors
    """The optimizer's tensors as `<parameter>/<key>`."""
    others: Tensors = field(default_factory=dict)
    """Tensors of everything else."""
    average: Tensors | None = None
    """Weights averaged over steps, which are evaluated in the place of the others; None where there are none."""
    loop: dict[str, Any] = field(default_factory=dict)
    """Small state, as JSON."""

    @property
    def evaluated(self) -> Tensors:
        """The weights for evaluators and for export."""
        return self.weights if self.average is None else self.average

    def files(self, rounds: bool) -> dict[str, Tensors]:
        """For each file its tensors.

        Args:
            rounds: the weights for evaluators are rounded to bfloat16; here still as they are.
        """
        files = {WEIGHTS: self.evaluated, OPTIMIZER: self.optimizer}
        if self.others:
            files[OTHERS] = self.others
        if rounds or self.average is not None:
            files[FULL_WEIGHTS] = self.weights
        if rounds and self.average is not None:
            files[AVERAGE] = self.average
        return files


def rounded(weights: Tensors) -> dict[str, Tensor]:
    """Shapes and types of weights whose floating-point numbers are rounded to bfloat16; without their values."""
    return {
        name: torch.empty_like(
            tensor, device="meta", dtype=torch.bfloat16 if tensor.is_floating_point() else tensor.dtype
        )
        for name, tensor in weights.items()
    }
