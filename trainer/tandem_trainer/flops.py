"""What a sample costs in floating-point operations, and how many a GPU can do: together they are the MFU.

Counted as in the PaLM paper (arXiv 2204.02311, appendix B): forward and backward pass once, nothing that is computed
again, over the peak of the GPU's data sheet. Only where both are well defined: a built-in model in a precision that
runs on tensor cores, on a GPU that is listed here. In float32, convolutions may or may not use TF32.
"""

import re
from typing import NamedTuple

import torch
from torch import Tensor, nn

from tandem.tasks import ImageClassification
from tandem_trainer.data import Samples
from tandem_trainer.models import build

PEAKS: tuple[tuple[str, float], ...] = (
    (r"\bB200\b", 2250e12),
    (r"\bH200\b", 989e12),
    (r"\bH100 PCIe\b", 756e12),
    (r"\bH100 NVL\b", 835e12),
    (r"\bH100\b", 989e12),
    (r"\bA100\b", 312e12),
    (r"\bL40S\b", 362e12),
    (r"\bL4\b", 121e12),
    (r"\bA40\b", 149.7e12),
    (r"\bA10\b", 125e12),
)
"""By a part of the name that CUDA gives a GPU, the first that fits: operations a second in bfloat16 or float16, dense,
from NVIDIA's data sheets."""


class Cost(NamedTuple):
    """None where it is not well defined."""

    flops_per_sample: float | None = None
    """Of a training step."""
    peak_flops: float | None = None
    """Of one GPU, a second."""


def cost_of(config: ImageClassification, samples: Samples, device: torch.device) -> Cost:
    """What training on these samples costs."""
    if device.type != "cuda" or config.precision == "float32":
        return Cost()
    most = peak(torch.cuda.get_device_name(device))
    if most is None:
        return Cost()
    return Cost(per_sample(config, samples.channels, samples.image_size, samples.classes), most)


def peak(name: str) -> float | None:
    """Operations a second of the GPU of this name; None if it is not known."""
    return next((most for pattern, most in PEAKS if re.search(pattern, name)), None)


def per_sample(config: ImageClassification, channels: int, image_size: int, classes: int) -> float:
    """Operations of the forward and the backward pass for one sample, a multiplication and an addition being two. The
    backward pass counts twice the forward pass: once for the gradient of weights, once for that of inputs.

    Draws random numbers: seed after it.
    """
    # Not torch's FlopCounterMode, nor the meta device: their first use imports for 3.6 and 1.8 s. A test compares them.
    model = build(config.model, channels, image_size, classes).eval()
    image = torch.zeros(1, channels, image_size, image_size)
    counted: list[int] = []

    def count(module: nn.Module, given: object, out: Tensor) -> None:
        assert isinstance(module, nn.Conv2d | nn.Linear)
        # Each output is a sum of as many products as the weight has elements for it.
        counted.append(2 * out.numel() * module.weight[0].numel())

    for module in model.modules():
        if isinstance(module, nn.Conv2d | nn.Linear):
            module.register_forward_hook(count)
    with torch.no_grad():
        model(image)
    return 3.0 * sum(counted)
