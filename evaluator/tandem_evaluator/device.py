"""The device on which an evaluator process computes: its share of the GPUs of its pod, or the CPU.

A job asks for GPUs in `evaluators.resources`. The processes of a pod divide them: each sees its own only, and so does
the program that it starts. Without GPUs, where torch cannot use those that there are, and in a pod that stands in for
one that waits for its GPUs, evaluators compute on CPUs.

A built-in model stays on its GPU from checkpoint to checkpoint: the tensors of the next one are copied into those that
it has, one after the other. So neither the GPU nor the machine ever holds a second model, and nothing is loaded,
compiled or allocated anew.
"""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Literal

import torch
from torch import nn

from tandem.job.resource import Evaluators
from tandem.processes.launch import VISIBLE_GPUS
from tandem_trainer.failure import ConfigurationError

UNUSABLE = (
    "evaluators.resources has GPUs, and torch cannot use any here: it may be a build for CPUs, or the driver too old"
)


@dataclass(frozen=True)
class Compute:
    """A device, and the precision in which a model is held and computed on it."""

    device: torch.device
    precision: Literal["float32", "bfloat16"] = "float32"

    @property
    def is_gpu(self) -> bool:
        """Whether the device is a GPU."""
        return self.device.type != "cpu"

    def placed(self, model: nn.Module) -> nn.Module:
        """Move a model to the device, in evaluation mode.

        With bfloat16 its matrices are rounded, and vectors stay as they are: norms and biases take no memory, and some
        kernels take vectors of float32 only.
        """
        if self.precision == "bfloat16":
            for parameter in model.parameters():
                if parameter.is_floating_point() and parameter.dim() > 1:
                    parameter.data = parameter.data.to(torch.bfloat16)
        return model.eval().to(self.device)

    @contextmanager
    def context(self) -> Iterator[None]:
        """The context of forward passes."""
        is_lower = self.precision == "bfloat16"
        with torch.inference_mode(), torch.autocast(self.device.type, dtype=torch.bfloat16, enabled=is_lower):
            yield


ON_CPU = Compute(torch.device("cpu"))


def compute_of(evaluators: Evaluators) -> Compute:
    """The device and the precision of this process, whose GPUs are chosen (`preparation.choose_gpus`).

    Raises:
        ConfigurationError: it has a GPU that torch cannot use, and the job does not allow CPUs instead.
    """
    precision = evaluators.precision
    if not os.environ.get(VISIBLE_GPUS):
        return Compute(torch.device("cpu"), precision)
    if torch.cuda.is_available():
        return Compute(torch.device("cuda", 0), precision)
    if evaluators.fallback == "CPU":
        print(f"{UNUSABLE}; evaluating on CPUs (fallback)", flush=True)
        return Compute(torch.device("cpu"), precision)
    raise ConfigurationError(f"{UNUSABLE}; or set evaluators.fallback to CPU")


def memory_exceeded(error: Exception) -> str:
    """The reason why a checkpoint cannot be evaluated on this GPU, in a sentence.

    Args:
        error: torch's OutOfMemoryError.
    """
    detail = ", ".join(" ".join(str(error).split()).split(". ")[:2])
    return f"the GPU of the evaluator has too little memory: {detail}; precision: bfloat16 halves that of the weights"
