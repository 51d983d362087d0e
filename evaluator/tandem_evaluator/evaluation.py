"""The evaluation of one shard: runs its data through the model, on the CPU, in inference mode."""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tandem.rundir.checkpoint import Manifest
from tandem.rundir.layout import RunDir
from tandem.tasks import ImageClassification, class_names
from tandem_evaluator import gallery
from tandem_evaluator.evaluator_log import say
from tandem_evaluator.result import (
    MAX_WRONG,
    Counted,
    MergedResult,
    ShardResult,
    WrongSample,
    finite_or_none,
    merge,
    shard_samples,
    surest,
)
from tandem_evaluator.scoring import Misfit, Work
from tandem_trainer import data, models
from tandem_trainer.checkpoint.lending import Library
from tandem_trainer.failure import ConfigurationError

MAX_SAMPLES = 256
MAX_NUMBERS = 2**20
"""A batch has at most this many samples, and this many input numbers: activations stay within tens of megabytes for
every image size, and a request to stop is heard within about a second."""


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
        self._batch = max(1, min(MAX_SAMPLES, MAX_NUMBERS // max(1, samples.images[0].numel())))

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


class TaskScoring:
    """Scores a built-in task, in this process.

    Args:
        evaluation: of the job's task.
    """

    def __init__(self, evaluation: Evaluation) -> None:
        self._evaluation, self._library = evaluation, Library()

    def read(self, folder: Path, manifest: Manifest | None) -> dict[str, Tensor]:
        """The weights, read and verified once for all evaluators of a node."""
        assert manifest is not None, "what a script writes in its own way is for a program"
        return self._library.weights(folder, manifest)

    def score(self, read: Mapping[str, Tensor], work: Work, going_on: Callable[[], bool]) -> ShardResult | None:
        """Run the samples of a shard through the model."""
        tally = self._evaluation.run(read, work.shard, work.shards, going_on)
        if tally is None:
            return None
        now = time.time()
        return ShardResult(
            checkpoint=work.reference.name,
            step=work.reference.step,
            generation=work.reference.generation,
            shard=work.shard,
            shards=work.shards,
            samples=tally.samples,
            loss_sum=tally.loss_sum,
            confusion=tally.confusion,
            wrong=tally.wrong,
            validation=counted(tally.held_out),
            note="" if tally.loss_sum is not None else "the loss is not finite",
            seconds=max(0.0, now - work.started),
            evaluator=work.evaluator,
            at=now,
        )

    def read_shard(self, content: Any, work: Work) -> ShardResult:
        """
        Raises:
            ValueError: it is not the result of this shard of our data, for instance because the data set was
                another one when it was made.
        """
        result = ShardResult.read(content)
        if (result.reference, result.shard, result.shards) != (work.reference, work.shard, work.shards):
            raise ValueError("it is the result of another shard")
        evaluation = self._evaluation
        if (result.validation is None) != (evaluation.held_out == 0):
            raise ValueError("it is of a job that holds out other validation data")
        for part, total in ((result, evaluation.total), (result.validation, evaluation.held_out)):
            if part is None:
                continue
            if part.samples != shard_samples(total, work.shard, result.shards):
                raise ValueError(f"it has {part.samples} samples, which is not this shard of {total}")
            if [len(row) for row in part.confusion] != [evaluation.classes] * evaluation.classes:
                raise ValueError(f"its confusion matrix is not that of {evaluation.classes} classes")
            if sum(map(sum, part.confusion)) != part.samples:
                raise ValueError("its confusion matrix does not count its samples")
        return result

    def merge(self, shards: Sequence[ShardResult]) -> MergedResult:
        """The scores of one pass over the whole data."""
        return merge(shards)

    def read_merged(self, content: Any) -> MergedResult:
        """A published result."""
        return MergedResult.read(content)

    def best_changed(self, rundir: RunDir) -> None:
        """Make pictures of what the best checkpoint takes for something else."""
        try:
            gallery.update(rundir, self._evaluation.images, self._evaluation.names)
        except OSError as error:
            # Nothing but pictures: no reason to keep a checkpoint waiting.
            say("no-gallery", why=error)

    def rest(self) -> None:
        """Lend nothing any more."""
        self._library.close()

    def close(self) -> None:
        """Lend nothing any more."""
        self._library.close()


def counted(tally: Tally | None) -> Counted | None:
    """What a shard's result says of validation data."""
    if tally is None:
        return None
    return Counted(samples=tally.samples, loss_sum=tally.loss_sum, confusion=tally.confusion)


def _surest_places(wrong: Tensor, confidence: Tensor) -> list[int]:
    """Where the wrong samples are of which the model is most sure."""
    places = torch.nonzero(wrong).flatten()
    order = confidence[places].nan_to_num().argsort(descending=True, stable=True)
    found: list[int] = places[order[:MAX_WRONG]].tolist()
    return found
