"""Small convolutional networks for small images."""

from collections import OrderedDict

from torch import nn

from tandem_trainer.errors import ConfigurationError


def cnn(channels: int, image_size: int, classes: int) -> nn.Module:
    """Two 3×3 convolutions (32, 64), pooling, dropout ¼, a hidden layer of 128, dropout ½.

    28×28 images give the 9216 features of the classic FashionMNIST example.
    """
    side = (image_size - 4) // 2
    if side < 1:
        raise ConfigurationError(f"model cnn needs images of at least 6×6 pixels, not {image_size}×{image_size}")
    return nn.Sequential(
        OrderedDict(
            features=nn.Sequential(
                nn.Conv2d(channels, 32, 3),
                nn.ReLU(),
                nn.Conv2d(32, 64, 3),
                nn.ReLU(),
                nn.MaxPool2d(2),
                nn.Dropout(0.25),
                nn.Flatten(),
            ),
            classifier=nn.Sequential(
                nn.Linear(64 * side * side, 128),
                nn.ReLU(),
                nn.Dropout(0.5),
                nn.Linear(128, classes),
            ),
        )
    )


def baby_cnn(channels: int, image_size: int, classes: int) -> nn.Module:
    """Two 3×3 convolutions (8, 16) with pooling after each, and one linear layer: a few thousand weights."""
    side = image_size // 4
    return nn.Sequential(
        OrderedDict(
            features=nn.Sequential(
                nn.Conv2d(channels, 8, 3, padding=1),
                nn.ReLU(),
                nn.MaxPool2d(2),
                nn.Conv2d(8, 16, 3, padding=1),
                nn.ReLU(),
                nn.MaxPool2d(2),
                nn.Flatten(),
            ),
            classifier=nn.Linear(16 * side * side, classes),
        )
    )
