"""Kernels of the package liger-kernel (https://arxiv.org/abs/2410.10989) in a model of transformers, for GPUs.

Used are those for norms, rotary embeddings and gated layers. The loss stays Tandem's own, chunk by chunk: it has the
losses of single tokens, and frozen weights below it (docs/decisions/0044-lora.md).
"""

from importlib.util import find_spec
from typing import Any

from torch import nn

from tandem.processes import distribution
from tandem_trainer.failure import ConfigurationError

FIELD = "spec.trainer.parameters.kernels"
EXTRA = "kernels"
LOSSES = {"cross_entropy": False, "fused_linear_cross_entropy": False}
"""Kernels of losses, which are not used."""


def liger(model: nn.Module, kind: str) -> None:
    """Make a model use these kernels. The functions of transformers for this kind of model are replaced in the whole
    process.

    Args:
        model: model on its device.
        kind: type of the model in transformers.

    Raises:
        ConfigurationError: the model is not on a GPU, the package is not installed, or it has no kernels for such a
            model.
    """
    device = next(model.parameters()).device
    if device.type != "cuda":
        raise ConfigurationError(
            f"{FIELD}: liger is for GPUs, and this rank trains on a {device.type}; leave kernels out"
        )
    install(model, kind)


def install(model: nn.Module, kind: str) -> None:
    """Make a model use these kernels, on any device."""
    if find_spec("liger_kernel") is None:
        raise ConfigurationError(
            f"{FIELD}: liger needs the package liger-kernel, which is not installed "
            f"({distribution.install_command(EXTRA)})"
        )
    from liger_kernel.transformers import _apply_liger_kernel_to_instance
    from liger_kernel.transformers.monkey_patch import MODEL_TYPE_TO_APPLY_LIGER_FN

    supported: dict[str, Any] = MODEL_TYPE_TO_APPLY_LIGER_FN
    if kind not in supported:
        raise ConfigurationError(f"{FIELD}: liger has no kernels for models of type {kind}; leave kernels out")
    _apply_liger_kernel_to_instance(model=model, **LOSSES)
