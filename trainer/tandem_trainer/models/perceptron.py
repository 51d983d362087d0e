"""Fully connected networks."""

from collections import OrderedDict

from torch import nn


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
