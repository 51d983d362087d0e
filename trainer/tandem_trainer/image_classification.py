"""The built-in task: images of ten classes."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import Subset, TensorDataset

from tandem.evaluation import Confusion
from tandem.tasks import ImageClassification
from tandem_trainer.data import Samples, load
from tandem_trainer.failure import ConfigurationError
from tandem_trainer.meter import per_sample
from tandem_trainer.models import build
from tandem_trainer.task import Split, Task


class ImageTask(Task[ImageClassification]):
    """Learns the class of an image, with the cross entropy for a loss."""

    def __init__(self, config: ImageClassification) -> None:
        super().__init__(config)
        self._loaded: dict[Split, Samples] = {}

    def model(self) -> nn.Module:
        """The model that the configuration names, as large as the images ask for."""
        samples = self._samples("train")
        return build(self.config.model, samples.channels, samples.image_size, samples.classes)

    def data(self, split: Split) -> Any:
        """Images and labels; of the training data the slice that the job trains on."""
        samples = self._samples(split)
        whole = TensorDataset(samples.images, samples.labels)
        if split == "test":
            return whole
        start, end = slice_of(self.config, len(samples))
        return Subset(whole, range(start, end))

    def loss(self, model: nn.Module, batch: Any) -> Tensor:
        """Cross entropies. [samples], float32."""
        images, labels = batch
        return F.cross_entropy(model(images).float(), labels, reduction="none")

    def loss_sum(self, model: nn.Module, batch: Any, samples: int) -> Tensor:
        """Their sum, by one kernel. Scalar, float32."""
        images, labels = batch
        return F.cross_entropy(model(images).float(), labels, reduction="sum")

    def metrics(self, model: nn.Module, batch: Any) -> dict[str, Confusion]:
        """The confusion matrix. The evaluators of this task count more of it by themselves, such as what is shown of
        single images (tandem_evaluator.evaluation)."""
        images, labels = batch
        classes = self._samples("test").classes
        predicted = model(images).argmax(dim=1)
        cells = torch.bincount(labels * classes + predicted, minlength=classes**2)
        return {"confusion": Confusion(cells.view(classes, classes).tolist())}

    def flops_per_sample(self) -> float:
        """Counted on the model."""
        samples = self._samples("train")
        return per_sample(self.config, samples.channels, samples.image_size, samples.classes)

    def _samples(self, split: Split) -> Samples:
        if split not in self._loaded:
            self._loaded[split] = load(self.config.data, split)
        return self._loaded[split]


def slice_of(config: ImageClassification, samples: int) -> tuple[int, int]:
    """The first training sample and the one after the last.

    Raises:
        ConfigurationError: the data set has no such slice.
    """
    start, end = config.data.start or 0, config.data.end or samples
    if end > samples or start >= end:
        asked = f"data.start {start} and data.end {end}" if config.data.end else f"data.start {start}"
        raise ConfigurationError(f"{asked} is no slice of {config.data.name}, which has {samples} training samples")
    return start, end
