"""The program that evaluates checkpoints of a task of the user's own: `python -m tandem_evaluator.task_program`.

It is a program like any of `evaluators.command`, so a task that crashes, hangs or reports invalid values is handled
like one (tandem_evaluator.program): the checkpoint counts as failed, with a message, and neither the evaluator nor
training is affected. The task's imports and memory are those of this process, not of the evaluator that starts it.

For each shard it runs the test samples `shard`, `shard + shards`, … through `Task.metrics`, and through `Task.loss`
where the metrics do not contain the loss, and reports the combined values of the batches.
"""

import mmap
import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from tandem.evaluation import (
    MAX_METRICS,
    Checkpoint,
    Completions,
    Confusion,
    GeometricMean,
    Histogram,
    Max,
    Mean,
    Min,
    Moments,
    Sum,
    Value,
    added,
    checkpoints,
)
from tandem.job.language_evaluation import Harness
from tandem.job.resource import Evaluators
from tandem.job.tasks import Loop
from tandem.processes.launch import RUN_DIR
from tandem.rundir.checkpoint import digest_of
from tandem.rundir.layout import RunDir
from tandem_evaluator.device import ON_CPU, Compute, compute_of, memory_exceeded
from tandem_trainer.checkpoint.format import parse
from tandem_trainer.checkpoint.state import CheckpointMismatch, load_weights
from tandem_trainer.data.feeding import Reading, read_sample, to_device
from tandem_trainer.data.sampling import has_indices
from tandem_trainer.failure import ConfigurationError
from tandem_trainer.language.completing import Completer, prompts_of
from tandem_trainer.task import Task, checked, name_of, task_in, tensors_of

if TYPE_CHECKING:
    from tandem_evaluator.harness import HarnessTasks

LOSS, COMPLETIONS = "loss", "completions"
MAX_BATCH_SAMPLES = 256
"""Maximum number of samples of a batch, unless the job's micro-batches are smaller."""


class UnusableTask(Exception):  # noqa: N818 - it says what is the case
    """A task reports an invalid metric, or has no usable data; carries a sentence for the user."""


class TaskEvaluation:
    """The model and the test data of a task, created once.

    Args:
        compute: device and precision.
        compares: whether the weights are compared with their checkpoint before they are scored.

    Raises:
        UnusableTask: there is no test data.
    """

    def __init__(
        self,
        task: Task[Any],
        loop: Loop,
        evaluators: Evaluators | None = None,
        compute: Compute = ON_CPU,
        compares: bool = True,
    ) -> None:
        self._task, self._name, self._compute, self._compares = task, name_of(type(task)), compute, compares
        self._data = task.data("test")
        if not has_indices(self._data) or not len(self._data):
            raise UnusableTask(f'{self._name}.data("test") returned no samples to evaluate with')
        model = task.model()
        task.load_frozen(model)
        self._model: nn.Module = compute.placed(model)
        self._tensors = tensors_of(task, self._data)
        self._batch = min(MAX_BATCH_SAMPLES, loop.micro_batch_size or loop.global_batch_size)
        self._reading = Reading(0, 1, loop.seed, collate=task.collate)
        generate = None if evaluators is None else evaluators.generate
        self._generate, self._prompts = generate, [] if generate is None else prompts_of(generate)
        self._harness = None if evaluators is None or evaluators.harness is None else self._tasks(evaluators.harness)

    def run(self, checkpoint: Checkpoint) -> dict[str, Value]:
        """Evaluate one shard; returns its contribution to the metrics of the checkpoint.

        Raises:
            UnusableTask: a metric is invalid.
            CheckpointMismatch: the weights are those of another model.
        """
        with checkpoint.weights.open("rb") as file:
            # Tensors may be changed: these pages are this process's own.
            memory = mmap.mmap(file.fileno(), 0, mmap.MAP_PRIVATE, mmap.PROT_READ | mmap.PROT_WRITE)
        # Before the model gets them: a loader of its own may change the tensors in place.
        checkpoint.scored = digest_of(memoryview(memory)) if self._compares else ""
        load_weights(self._model, parse(memoryview(memory)))
        totals: dict[str, Value] = {}
        loss: Value = Mean.from_samples([])
        with self._compute.context():
            for loaded, samples in self._batches(checkpoint.shard, checkpoint.shards):
                batch = to_device(loaded, self._compute.device)
                metrics = dict(self._metrics(batch))
                mean = self._loss(batch, samples, metrics.pop(LOSS, None))
                for name, value in metrics.items():
                    totals[name] = self._combined(name, totals.get(name), value)
                loss = added([loss, mean])
        if len(totals) >= MAX_METRICS:
            raise UnusableTask(
                f"{self._name}.metrics returned {len(totals)} metrics; at most {MAX_METRICS - 1} are kept"
            )
        if self._harness is not None:
            with self._compute.context():
                totals |= self._harness.run(checkpoint.shard, checkpoint.shards)
            if len(totals) >= MAX_METRICS:
                raise UnusableTask(
                    f"{len(totals)} metrics with those of evaluators.harness.tasks; at most {MAX_METRICS - 1} are "
                    "kept, so name fewer tasks, or run a group of many in a command of yours"
                )
        completions = self._completions(checkpoint.shard, checkpoint.shards)
        return {**totals, LOSS: loss, **({COMPLETIONS: completions} if completions.texts else {})}

    def _tasks(self, settings: Harness) -> "HarnessTasks":
        # The import of the library takes seconds.
        from tandem_evaluator.harness import FIELD, HarnessTasks
        from tandem_trainer.language.fine_tuning import FineTuning

        if not isinstance(self._task, FineTuning):
            raise ConfigurationError(f"{FIELD}: takes models of transformers; set trainer.parameters.pretrained")
        return HarnessTasks(settings, self._model, self._task.tokenizer)

    def _completions(self, shard: int, shards: int) -> Completions:
        """Complete the prompts `shard`, `shard + shards`, …"""
        task, options = self._task, self._generate
        if options is None:
            return Completions([])
        assert isinstance(task, Completer), "only causal-lm takes prompts"
        numbers, texts = range(shard, len(self._prompts), shards), list[str]()
        with self._compute.context():
            for start in range(0, len(numbers), options.batch):
                prompts = {number: self._prompts[number] for number in numbers[start : start + options.batch]}
                texts += task.complete(self._model, prompts, options)
        return Completions([(number, self._prompts[number], text) for number, text in zip(numbers, texts, strict=True)])

    def _batches(self, shard: int, shards: int) -> Iterator[tuple[Any, int]]:
        numbers = range(len(self._data))[shard::shards]
        for start in range(0, len(numbers), self._batch):
            batch_numbers = numbers[start : start + self._batch]
            if self._tensors is not None:
                chosen = torch.tensor(list(batch_numbers))
                yield [tensor[chosen] for tensor in self._tensors], len(batch_numbers)
                continue
            # Random numbers for a sample depend only on the sample: each checkpoint gets the same data.
            samples = [
                self._reading.sample(0, number, lambda number=number: read_sample(self._data, number))  # type: ignore[misc]
                for number in batch_numbers
            ]
            yield self._task.collate(samples), len(batch_numbers)

    def _metrics(self, batch: Any) -> Mapping[str, Any]:
        metrics: Any = self._task.metrics(self._model, batch)
        if not isinstance(metrics, Mapping):
            raise UnusableTask(
                f"{self._name}.metrics returned a {type(metrics).__name__}; return a dictionary of metrics"
            )
        return metrics

    def _loss(self, batch: Any, samples: int, reported: Any) -> Mean:
        """The loss of a batch: the one among its metrics, or else computed by the task in another pass.

        Raises:
            UnusableTask: the reported loss is not a mean over the samples.
        """
        if reported is None:
            return Mean.from_samples(checked(self._task, self._task.loss(self._model, batch), samples))
        place = f"{self._name}.metrics: {LOSS}"
        loss = _plain(place, reported)
        if not isinstance(loss, Mean) or loss.count != samples:
            raise UnusableTask(
                f"{place} of {samples} samples is {_quoted(reported)}; return Mean.from_samples(losses), with one loss "
                "for each"
            )
        return loss

    def _combined(self, name: str, before: Value | None, value: Any) -> Value:
        """A metric of all batches so far, combined with that of another batch.

        Raises:
            UnusableTask: it is not a metric, or not a number, or of another kind than before.
        """
        place = f"{self._name}.metrics: {name}"
        plain_value = _plain(place, value)
        try:
            return plain_value if before is None else added([before, plain_value])
        except ValueError as error:
            raise UnusableTask(f"{place} of two batches: {error}") from None


def _plain(place: str, value: Any) -> Value:
    """A metric with its tensors converted to plain numbers."""
    match value:
        case Mean():
            return Mean(_number(place, value.total), _number(place, value.count), _moments(place, value.moments))
        case GeometricMean():
            total, count = _number(place, value.log_total), _number(place, value.count)
            return GeometricMean(total, count, _moments(place, value.moments))
        case Sum() | Max() | Min():
            return type(value)(_number(place, value.value))
        case Confusion():
            return Confusion(_rows(place, value.counts))
        case Histogram():
            return value
    raise UnusableTask(
        f"{place} is {_quoted(value)}; return Mean(total, count), GeometricMean, Sum, Max, Min, Confusion or "
        "Histogram, which tell how to add up"
    )


def _moments(place: str, moments: Moments | None) -> Moments | None:
    return None if moments is None else Moments(*(_number(place, value) for value in moments))


def _number(place: str, value: Any) -> float:
    try:
        if isinstance(value, bool | str | bytes):
            raise TypeError
        return float(value)
    except (TypeError, ValueError, RuntimeError, OverflowError):
        raise UnusableTask(f"{place} holds {_quoted(value)}, which is not a number") from None


def _rows(place: str, counts: Any) -> Sequence[Sequence[int]]:
    try:
        rows = [[int(count) for count in row] for row in counts]
    except (TypeError, ValueError, RuntimeError, OverflowError):
        rows = []
    if not rows or any(len(row) != len(rows) for row in rows):
        raise UnusableTask(f"{place} holds {_quoted(counts)}, which is not a square matrix of counts")
    return rows


def _quoted(value: Any) -> str:
    if isinstance(value, Tensor) and value.numel() != 1:
        return f"a tensor of the shape {tuple(value.shape)}"
    return " ".join(repr(value).split())[:80]


def main() -> int:
    """Evaluate shards until there are no more. Returns the exit code; the last line printed says what is wrong."""
    try:
        rundir = RunDir(os.environ[RUN_DIR])
        job = rundir.read_job()
        spec, compares = job.spec, job.spec.elasticity.on_corruption != "Off"
        loop, compute = spec.trainer.settings_of_loop, compute_of(spec.evaluation)
        evaluation = TaskEvaluation(task_in(rundir), loop, spec.evaluation, compute, compares)
        for checkpoint in checkpoints():
            checkpoint.report(**evaluation.run(checkpoint))
    except (UnusableTask, ConfigurationError, CheckpointMismatch) as error:
        print(error, file=sys.stderr, flush=True)
        return 1
    except torch.OutOfMemoryError as error:
        print(memory_exceeded(error), file=sys.stderr, flush=True)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
