"""The computation: one shard of the evaluation data through the model, on the processor, in inference mode."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tandem.tasks import ImageClassification
from tandem_evaluator.result import finite_or_none
from tandem_trainer import data, models
from tandem_trainer.mistake import ConfigurationError

MOST_SAMPLES = 256
MOST_NUMBERS = 2**20
"""A batch has at most so many samples, and so many input numbers: activations stay within tens of megabytes for every
image size, and a request to stop is heard within about a second."""


class Misfit(Exception):  # noqa: N818 - it is a state of the checkpoint, and reads as one
    """Weights that are not those of the job's model."""


@dataclass(frozen=True)
class Tally:
    """What a pass over one shard counted."""

    samples: int
    """Samples seen."""
    loss_sum: float | None
    """Sum of their cross entropies, nats; None if it is not finite."""
    confusion: list[list[int]]
    """[classes, classes]: samples of class i (row) that were taken for class j (column)."""


class Evaluation:
    """The task's evaluation data and its model, loaded once for the life of the process.

    Between two checkpoints the model has no weights, and it takes those that were read as its own instead of copying
    them: at its peak an evaluator holds the weights once.
    """

    def __init__(self, samples: data.Samples, model: nn.Module) -> None:
        self._samples, self._model = samples, model.eval()
        self._shapes = {name: tensor.to("meta") for name, tensor in model.state_dict().items()}
        self._let_go()
        self.total, self.classes = len(samples), samples.classes
        self._batch = max(1, min(MOST_SAMPLES, MOST_NUMBERS // max(1, samples.images[0].numel())))

    @classmethod
    def load(cls, task: ImageClassification) -> "Evaluation":
        """
        Raises:
            ConfigurationError: the data is not there, or the model does not suit it.
        """
        samples = data.load(task.data, "test")
        if not len(samples):
            raise ConfigurationError(f"{task.data.name} has no test samples; the evaluators need at least one")
        return cls(samples, models.build(task.model, samples.channels, samples.image_size, samples.classes))

    def run(
        self, weights: Mapping[str, Tensor], shard: int, shards: int, going_on: Callable[[], bool] = lambda: True
    ) -> Tally | None:
        """Evaluate the samples `shard`, `shard + shards`, …

        Args:
            weights: the model's state_dict; used as they are, and let go again.
            going_on: asked before each batch.

        Returns:
            None if `going_on` said no.

        Raises:
            Misfit: the weights are not those of this model.
        """
        try:
            self._take(weights)
            return self._tally(shard, shards, going_on)
        finally:
            self._let_go()

    def _take(self, weights: Mapping[str, Tensor]) -> None:
        # In the model's own types: weights may have been rounded for the way.
        fitting = {
            name: tensor.to(self._shapes[name].dtype) if name in self._shapes else tensor
            for name, tensor in weights.items()
        }
        try:
            self._model.load_state_dict(fitting, assign=True)
        except RuntimeError as error:
            detail = " ".join(str(error).split())
            raise Misfit(f"its weights are not those of the job's model: {detail[:300]}") from error

    def _let_go(self) -> None:
        self._model.load_state_dict(self._shapes, assign=True)

    def _tally(self, shard: int, shards: int, going_on: Callable[[], bool]) -> Tally | None:
        images, labels = self._samples.images[shard::shards], self._samples.labels[shard::shards]
        predicted = torch.empty_like(labels)
        loss = torch.zeros((), dtype=torch.float64)
        with torch.inference_mode():
            for start in range(0, len(labels), self._batch):
                if not going_on():
                    return None
                part = slice(start, start + self._batch)
                logits = self._model(images[part].contiguous())
                predicted[part] = logits.argmax(dim=1)
                # Summed in double: the sum over a shard must not depend on how the data is split, to 1e-6 at least.
                loss += F.cross_entropy(logits.float(), labels[part], reduction="none").double().sum()
        # Not scikit-learn's confusion_matrix: that refuses a shard without samples, of which there may be some.
        cells = torch.bincount(labels * self.classes + predicted, minlength=self.classes**2)
        return Tally(len(labels), finite_or_none(loss.item()), cells.view(self.classes, self.classes).tolist())
