"""torchvision's residual networks, fitted to the data."""

from torch import nn

SMALL_IMAGE = 64
"""Below this many pixels nothing is left after the stride-2 stem and its pooling ("Deep residual learning", 4.2)."""


def resnet18(channels: int, image_size: int, classes: int) -> nn.Module:
    """ResNet-18 with random weights. Small images get a 3×3 stem of stride 1 without pooling."""
    # Importing torchvision takes longer than importing torch (3.2 s beside 2.0 s, measured on two busy cores), and
    # every recovery would pay for it.
    import torchvision.models

    model: nn.Module = torchvision.models.resnet18(weights=None, num_classes=classes)
    if image_size < SMALL_IMAGE:
        model.conv1 = nn.Conv2d(channels, 64, 3, padding=1, bias=False)
        model.maxpool = nn.Identity()
    elif channels != 3:
        model.conv1 = nn.Conv2d(channels, 64, 7, stride=2, padding=3, bias=False)
    return model
