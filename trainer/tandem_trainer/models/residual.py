"""torchvision's residual networks, fitted to the data."""

from torch import nn
from torchvision.models import resnet18 as torchvision_resnet18

SMALL_IMAGE = 64
"""Below this many pixels the stride-2 stem and its pooling would leave nothing to convolve (He et al. 2015, 4.2)."""


def resnet18(channels: int, image_size: int, classes: int) -> nn.Module:
    """ResNet-18 with random weights. Small images get a 3×3 stem of stride 1 without pooling."""
    model: nn.Module = torchvision_resnet18(weights=None, num_classes=classes)
    if image_size < SMALL_IMAGE:
        model.conv1 = nn.Conv2d(channels, 64, 3, padding=1, bias=False)
        model.maxpool = nn.Identity()
    elif channels != 3:
        model.conv1 = nn.Conv2d(channels, 64, 7, stride=2, padding=3, bias=False)
    return model
