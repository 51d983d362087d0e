"""The built-in models, each sized to its data.

All take images of shape [N, channels, size, size], float32, and return logits of shape [N, classes].
"""

from collections.abc import Callable

from torch import nn

from tandem_trainer.models.vision import baby_cnn, cnn, resnet18, simple_net

BUILDERS: dict[str, Callable[[int, int, int], nn.Module]] = {
    "cnn": cnn,
    "baby-cnn": baby_cnn,
    "simple-net": simple_net,
    "resnet-18": resnet18,
}


def build(name: str, channels: int, image_size: int, classes: int) -> nn.Module:
    """Build a model with fresh weights, on the CPU.

    Args:
        name: a key of BUILDERS.
        channels: image channels.
        image_size: height and width, pixels.
        classes: number of logits.
    """
    return BUILDERS[name](channels, image_size, classes)
