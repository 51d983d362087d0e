"""One split of a data set, whole in memory."""

from dataclasses import dataclass
from typing import Literal

from torch import Tensor

Split = Literal["train", "validation", "test"]
"""`validation`: what the job holds out of the training data."""


@dataclass(frozen=True)
class Samples:
    """One split of a data set."""

    images: Tensor
    """[N, channels, size, size], float32, normalised."""
    labels: Tensor
    """[N], int64."""
    classes: int
    """Number of different labels."""

    def __len__(self) -> int:
        return len(self.labels)

    @property
    def channels(self) -> int:
        """Image channels."""
        return self.images.shape[1]

    @property
    def image_size(self) -> int:
        """Height and width, pixels."""
        return self.images.shape[2]
