"""The built-in models for images: convolutional, fully connected, and torchvision's residual network."""

from collections import OrderedDict

from torch import nn

from tandem_trainer.failure import ConfigurationError

SMALL_IMAGE = 64
"""Below this many pixels nothing is left after the stride-2 stem and its pooling ("Deep residual learning", 4.2)."""


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


def simple_net(channels: int, image_size: int, classes: int) -> nn.Module:
    """Two hidden layers of 256 with dropout 0.2; 784-256-256-10 on 28×28 images."""
    return nn.Sequential(
        OrderedDict(
            hidden=nn.Sequential(
                nn.Flatten(),
                nn.Linear(channels * image_size * image_size, 256),
                nn.ReLU(),
                nn.Dropout(0.2),
                nn.Linear(256, 256),
                nn.ReLU(),
                nn.Dropout(0.2),
            ),
            classifier=nn.Linear(256, classes),
        )
    )


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
