"""The evaluation of one shard: runs its data through the model, on the CPU, in inference mode."""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tandem.evaluation import Mean
from tandem.job.tasks import ImageParameters, class_names
from tandem.rundir.checkpoint import Manifest
from tandem.rundir.layout import RunDir
from tandem_evaluator import gallery
from tandem_evaluator.device import ON_CPU, Compute, memory_exceeded
from tandem_evaluator.evaluator_log import log_event
from tandem_evaluator.result import (
    MAX_WRONG,
    MergedResult,
    ShardResult,
    ValidationCounts,
    WrongSample,
    finite_or_none,
    merge,
    shard_samples,
    surest,
)
from tandem_evaluator.scoring import UnusableCheckpoint, Work
from tandem_trainer import data, models
from tandem_trainer.checkpoint.lending import Library
from tandem_trainer.failure import ConfigurationError

MAX_SAMPLES = 256
MAX_VALUES = 2**20
"""Maximum samples and maximum input values of a batch: activations stay within tens of megabytes for every image size,
and a stop takes effect within about a second."""
GPU_BATCHES = 8
"""Batches of this size that a GPU computes at once."""


@dataclass(frozen=True)
class Tally:
    """Counts of a pass over one shard."""

    samples: int
    """Samples seen."""
    loss_sum: float | None
    """Sum of their cross entropies, nats; None if it is not finite."""
    loss_moments: list[float] | None
    """Sums for their confidence interval; None if it is not finite."""
    confusion: list[list[int]]
    """[classes, classes]: samples of class i (row) that were predicted as class j (column)."""
    wrong: list[WrongSample] = field(default_factory=list)
    """The misclassified samples with the highest confidence."""
    held_out: "Tally | None" = None
    """Counts of the same shard of the validation data, if the job holds some out."""


class Evaluation:
    """The task's test and validation data and its model, loaded once for the life of the process.

    On a CPU the model has no weights between two checkpoints, and it adopts the tensors that were read instead of
    copying them: at its peak an evaluator holds the weights once. On a GPU they are copied into the model's own.
    """

    def __init__(
        self,
        samples: data.Samples,
        model: nn.Module,
        held_out: data.Samples | None = None,
        data_name: str = "",
        compute: Compute = ON_CPU,
    ) -> None:
        """
        Args:
            samples: the test data.
            held_out: the validation data, if the job holds some out.
            data_name: name of the data set.
            compute: device and precision.
        """
        self._samples, self._held_out, self._model = samples, held_out, compute.placed(model)
        self._compute = compute
        self.images = samples.images
        self.names = class_names(data_name)
        self._shapes = {name: tensor.to("meta") for name, tensor in model.state_dict().items()}
        self._drop_weights()
        self.total, self.classes = len(samples), samples.classes
        self.held_out = 0 if held_out is None else len(held_out)
        batches = GPU_BATCHES if compute.is_gpu else 1
        self._batch = max(1, batches * min(MAX_SAMPLES, MAX_VALUES // max(1, samples.images[0].numel())))

    @classmethod
    def load(cls, task: ImageParameters, compute: Compute = ON_CPU) -> "Evaluation":
        """
        Raises:
            ConfigurationError: the data does not exist, or the model does not fit it.
        """
        samples = data.load(task.data, "test")
        if not len(samples):
            raise ConfigurationError(f"{task.data.name} has no test samples; the evaluators need at least one")
        held_out = data.load(task.data, "validation") if task.data.validation else None
        model = models.build(task.model, samples.channels, samples.image_size, samples.classes)
        return cls(samples, model, held_out, task.data.name, compute)

    def run(
        self, weights: Mapping[str, Tensor], shard: int, shards: int, should_continue: Callable[[], bool] = lambda: True
    ) -> Tally | None:
        """Evaluate the samples `shard`, `shard + shards`, …

        Args:
            weights: the model's state_dict; on a CPU its tensors are used without a copy, and released afterwards.
            should_continue: called before each batch.

        Returns:
            None if `should_continue` returned False.

        Raises:
            UnusableCheckpoint: the weights are not those of this model, or the GPU has too little memory.
        """
        try:
            self._take(weights)
            tally = self._tally(self._samples, shard, shards, should_continue)
            if tally is None or self._held_out is None:
                return tally
            held_out = self._tally(self._held_out, shard, shards, should_continue)
            return None if held_out is None else replace(tally, held_out=held_out)
        except torch.OutOfMemoryError as error:
            raise UnusableCheckpoint(memory_exceeded(error)) from error
        finally:
            self._drop_weights()

    def _take(self, weights: Mapping[str, Tensor]) -> None:
        # Convert to the model's own dtypes: weights may have been rounded for the transfer. A copy converts by itself.
        copies = self._compute.is_gpu
        fitting = {
            name: tensor if copies or name not in self._shapes else tensor.to(self._shapes[name].dtype)
            for name, tensor in weights.items()
        }
        try:
            self._model.load_state_dict(fitting, assign=not copies)
        except RuntimeError as error:
            detail = " ".join(str(error).split())
            raise UnusableCheckpoint(f"its weights are not those of the job's model: {detail[:300]}") from error

    def _drop_weights(self) -> None:
        if not self._compute.is_gpu:
            self._model.load_state_dict(self._shapes, assign=True)

    def _tally(
        self, samples: data.Samples, shard: int, shards: int, should_continue: Callable[[], bool]
    ) -> Tally | None:
        images, labels = samples.images[shard::shards], samples.labels[shard::shards]
        predicted = torch.empty_like(labels)
        confidence = torch.empty(len(labels))
        losses = torch.empty(len(labels))
        with self._compute.context():
            for start in range(0, len(labels), self._batch):
                if not should_continue():
                    return None
                part = slice(start, start + self._batch)
                # The scores of a batch follow from its logits, on the CPU on any device.
                logits = self._model(images[part].contiguous().to(self._compute.device)).float().cpu()
                predicted[part] = logits.argmax(dim=1)
                confidence[part] = logits.softmax(dim=1).amax(dim=1)
                losses[part] = F.cross_entropy(logits, labels[part], reduction="none")
        # Not scikit-learn's confusion_matrix, which refuses a shard without samples, and such shards exist.
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
        # Summed in double precision: the sum over a shard must not depend on the split of the data, to 1e-6 at least.
        loss = Mean.from_samples(losses)
        return Tally(
            samples=len(labels),
            loss_sum=finite_or_none(float(loss.total)),
            loss_moments=loss.wire().get("moments"),
            confusion=cells.view(self.classes, self.classes).tolist(),
            wrong=wrong,
        )


class TaskScoring:
    """Scores a built-in task in this process.

    Args:
        evaluation: model and data of the job's task.
        compares: whether the weights are compared with their checkpoint after they were scored.
    """

    def __init__(self, evaluation: Evaluation, compares: bool = True) -> None:
        self._evaluation, self._library, self._compares = evaluation, Library(), compares

    def read(self, folder: Path, manifest: Manifest | None) -> dict[str, Tensor]:
        """The weights, read and verified once for all evaluators of a node."""
        assert manifest is not None, "what a script writes in its own way is for a program"
        return self._library.weights(folder, manifest)

    def score(self, read: Mapping[str, Tensor], work: Work, should_continue: Callable[[], bool]) -> ShardResult | None:
        """Run the samples of a shard through the model."""
        tally = self._evaluation.run(read, work.shard, work.shards, should_continue)
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
            loss_moments=tally.loss_moments,
            confusion=tally.confusion,
            wrong=tally.wrong,
            validation=validation_counts(tally.held_out),
            weights=self._library.digest() if self._compares else "",
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
        """Parse a published result."""
        return MergedResult.read(content)

    def best_changed(self, rundir: RunDir) -> None:
        """Update the pictures of the samples that the best checkpoint misclassifies."""
        try:
            gallery.update(rundir, self._evaluation.images, self._evaluation.names)
        except OSError as error:
            # The pictures are optional: no reason to delay a checkpoint.
            log_event("no-gallery", why=error)

    def idle(self) -> None:
        """Stop lending weights to other evaluators."""
        self._library.close()

    def close(self) -> None:
        """Stop lending weights to other evaluators."""
        self._library.close()


def validation_counts(tally: Tally | None) -> ValidationCounts | None:
    """The counts of validation data in a shard's result."""
    if tally is None:
        return None
    return ValidationCounts(
        samples=tally.samples,
        loss_sum=tally.loss_sum,
        loss_moments=tally.loss_moments,
        confusion=tally.confusion,
    )


def _surest_places(wrong: Tensor, confidence: Tensor) -> list[int]:
    """Indices of the misclassified samples with the highest confidence."""
    places = torch.nonzero(wrong).flatten()
    order = confidence[places].nan_to_num().argsort(descending=True, stable=True)
    indices: list[int] = places[order[:MAX_WRONG]].tolist()
    return indices
