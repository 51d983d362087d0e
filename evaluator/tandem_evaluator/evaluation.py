"""The evaluation of one shard: runs its data through the model, on the CPU, in inference mode."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tandem.tasks import ImageClassification, class_names
from tandem_evaluator.result import MOST_WRONG, WrongSample, finite_or_none, surest
from tandem_trainer import data, models
from tandem_trainer.failure import ConfigurationError

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
    wrong: list[WrongSample] = field(default_factory=list)
    """Those of which the model is most sure."""
    held_out: "Tally | None" = None
    """Of the same shard of the validation data, where the job holds some out."""


class Evaluation:
    """The task's test and validation data and its model, loaded once for the life of the process.

    Between two checkpoints the model has no weights, and it takes those that were read as its own instead of copying
    them: at its peak an evaluator holds the weights once.
    """

    def __init__(
        self, samples: data.Samples, model: nn.Module, held_out: data.Samples | None = None, data_name: str = ""
    ) -> None:
        """
        Args:
            samples: the test data.
            held_out: the validation data, where the job holds some out.
            data_name: of the data set.
        """
        self._samples, self._held_out, self._model = samples, held_out, model.eval()
        self.images = samples.images
        self.names = class_names(data_name)
        self._shapes = {name: tensor.to("meta") for name, tensor in model.state_dict().items()}
        self._let_go()
        self.total, self.classes = len(samples), samples.classes
        self.held_out = 0 if held_out is None else len(held_out)
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
        held_out = data.load(task.data, "validation") if task.data.validation else None
        model = models.build(task.model, samples.channels, samples.image_size, samples.classes)
        return cls(samples, model, held_out, task.data.name)

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
            tally = self._tally(self._samples, shard, shards, going_on)
            if tally is None or self._held_out is None:
                return tally
            held_out = self._tally(self._held_out, shard, shards, going_on)
            return None if held_out is None else replace(tally, held_out=held_out)
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

    def _tally(self, samples: data.Samples, shard: int, shards: int, going_on: Callable[[], bool]) -> Tally | None:
        images, labels = samples.images[shard::shards], samples.labels[shard::shards]
        predicted = torch.empty_like(labels)
        confidence = torch.empty(len(labels))
        loss = torch.zeros((), dtype=torch.float64)
        with torch.inference_mode():
            for start in range(0, len(labels), self._batch):
                if not going_on():
                    return None
                part = slice(start, start + self._batch)
                logits = self._model(images[part].contiguous())
                predicted[part] = logits.argmax(dim=1)
                confidence[part] = logits.float().softmax(dim=1).amax(dim=1)
                # Summed in double: the sum over a shard must not depend on how the data is split, to 1e-6 at least.
                loss += F.cross_entropy(logits.float(), labels[part], reduction="none").double().sum()
        # Not scikit-learn's confusion_matrix: that refuses a shard without samples, of which there may be some.
        cells = torch.bincount(labels * self.classes + predicted, minlength=self.classes**2)
        wrong = surest(
            WrongSample(
                index=shard + place * shards,
                label=int(labels[place]),
                prediction=int(predicted[place]),
                confidence=round(float(confidence[place].nan_to_num()), 4),
            )
            for place in _surest_places(predicted != labels, confidence)
        )
        return Tally(len(labels), finite_or_none(loss.item()), cells.view(self.classes, self.classes).tolist(), wrong)


def _surest_places(wrong: Tensor, confidence: Tensor) -> list[int]:
    """Where the wrong samples are of which the model is most sure."""
    places = torch.nonzero(wrong).flatten()
    order = confidence[places].nan_to_num().argsort(descending=True, stable=True)
    found: list[int] = places[order[:MOST_WRONG]].tolist()
    return found
