"""The built-in task: images of ten classes."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import Subset, TensorDataset

from tandem.evaluation import Confusion
from tandem.job.tasks import ImageParameters
from tandem_trainer.data import Samples, load
from tandem_trainer.failure import ConfigurationError
from tandem_trainer.meter import per_sample
from tandem_trainer.models import build
from tandem_trainer.task import Split, Task


class ImageTask(Task[ImageParameters]):
    """Image classifier, trained with the cross entropy."""

    def __init__(self, config: ImageParameters) -> None:
        super().__init__(config)
        self._loaded: dict[Split, Samples] = {}

    def model(self) -> nn.Module:
        """Build the model that the configuration names, in the size of the images."""
        samples = self._samples("train")
        return build(self.config.model, samples.channels, samples.image_size, samples.classes)

    def data(self, split: Split) -> Any:
        """Return images and labels; of the training data, the slice that the job trains on."""
        samples = self._samples(split)
        dataset = TensorDataset(samples.images, samples.labels)
        if split == "test":
            return dataset
        start, end = slice_of(self.config, len(samples))
        return Subset(dataset, range(start, end))

    def loss(self, model: nn.Module, batch: Any) -> Tensor:
        """Compute the cross entropies. [samples], float32."""
        images, labels = batch
        return F.cross_entropy(model(images).float(), labels, reduction="none")

    def loss_sum(self, model: nn.Module, batch: Any, samples: int) -> Tensor:
        """Compute the sum of the cross entropies by one kernel. Scalar, float32."""
        images, labels = batch
        return F.cross_entropy(model(images).float(), labels, reduction="sum")

    def metrics(self, model: nn.Module, batch: Any) -> dict[str, Confusion]:
        """Compute the confusion matrix. The evaluators of this task add more by themselves, such as the single images
        shown (tandem_evaluator.evaluation)."""
        images, labels = batch
        classes = self._samples("test").classes
        predicted = model(images).argmax(dim=1)
        cells = torch.bincount(labels * classes + predicted, minlength=classes**2)
        return {"confusion": Confusion(cells.view(classes, classes).tolist())}

    def flops_per_sample(self) -> float:
        """Operations of a training step for one sample, counted on the model."""
        samples = self._samples("train")
        return per_sample(self.config, samples.channels, samples.image_size, samples.classes)

    def _samples(self, split: Split) -> Samples:
        if split not in self._loaded:
            self._loaded[split] = load(self.config.data, split)
        return self._loaded[split]


def slice_of(config: ImageParameters, samples: int) -> tuple[int, int]:
    """Return the first training sample of the slice, and the one after its last.

    Raises:
        ConfigurationError: the data set has no such slice.
    """
    start, end = config.data.start or 0, config.data.end or samples
    if end > samples or start >= end:
        fields = f"data.start {start} and data.end {end}" if config.data.end else f"data.start {start}"
        raise ConfigurationError(f"{fields} is not a slice of {config.data.name}, which has {samples} training samples")
    return start, end
