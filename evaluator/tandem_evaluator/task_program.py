"""The program that evaluates checkpoints of a task of the user's own: `python -m tandem_evaluator.task_program`.

It is a program like any of `evaluators.command`, so a task that crashes, hangs or reports nonsense is dealt with as one
(tandem_evaluator.program): the checkpoint counts as failed, with a sentence, and neither the evaluator nor training is
harmed. The process has the task's imports and its memory; the evaluator that starts it has not.

For each shard it runs the test samples `shard`, `shard + shards`, … through `Task.metrics`, and through `Task.loss`
where the metrics do not bring the loss, and reports what the batches add up to.
"""

import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from safetensors.torch import load_file
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
    Sum,
    Value,
    added,
    checkpoints,
)
from tandem.job import Evaluators
from tandem.language_evaluation import Harness
from tandem.launch import RUN_DIR
from tandem.rundir.layout import RunDir
from tandem.tasks import Loop
from tandem_trainer.checkpoint.state import DoesNotFit, load_weights
from tandem_trainer.data.feeding import Reading
from tandem_trainer.data.sampling import has_indices
from tandem_trainer.failure import ConfigurationError
from tandem_trainer.language.completing import Completer, prompts_of
from tandem_trainer.task import Task, name_of, task_in, tensors_of

if TYPE_CHECKING:
    from tandem_evaluator.harness import HarnessTasks

LOSS, COMPLETIONS = "loss", "completions"
MAX_SAMPLES = 256
"""Of a batch, unless the job's micro-batches are smaller."""


class Unusable(Exception):  # noqa: N818 - it says what is the case
    """What a task reports is no metric, or its data no data; carries a sentence for the user."""


class TaskEvaluation:
    """The model and the test data of a task, made once.

    Raises:
        Unusable: there is no test data.
    """

    def __init__(self, task: Task[Any], loop: Loop, evaluators: Evaluators | None = None) -> None:
        self._task, self._name = task, name_of(type(task))
        self._data = task.data("test")
        if not has_indices(self._data) or not len(self._data):
            raise Unusable(f'{self._name}.data("test") returned no samples to evaluate with')
        self._model: nn.Module = task.model().eval()
        task.load_frozen(self._model)
        self._tensors = tensors_of(task, self._data)
        self._batch = min(MAX_SAMPLES, loop.micro_batch_size or loop.global_batch_size)
        self._reading = Reading(0, 1, loop.seed, collate=task.collate)
        generate = None if evaluators is None else evaluators.generate
        self._generate, self._prompts = generate, [] if generate is None else prompts_of(generate)
        self._harness = None if evaluators is None or evaluators.harness is None else self._tasks(evaluators.harness)

    def run(self, checkpoint: Checkpoint) -> dict[str, Value]:
        """What one shard adds to the metrics of a checkpoint.

        Raises:
            Unusable: a metric is none.
            DoesNotFit: the weights are those of another model.
        """
        load_weights(self._model, load_file(checkpoint.weights))
        totals: dict[str, Value] = {}
        loss: Value = Mean(0.0, 0)
        with torch.inference_mode():
            for batch, samples in self._batches(checkpoint.shard, checkpoint.shards):
                found = dict(self._metrics(batch))
                mean = self._loss(batch, samples, found.pop(LOSS, None))
                for name, value in found.items():
                    totals[name] = self._added(name, totals.get(name), value)
                loss = added([loss, mean])
        if len(totals) >= MAX_METRICS:
            raise Unusable(f"{self._name}.metrics returned {len(totals)} metrics; at most {MAX_METRICS - 1} are kept")
        if self._harness is not None:
            totals |= self._harness.run(checkpoint.shard, checkpoint.shards)
            if len(totals) >= MAX_METRICS:
                raise Unusable(
                    f"{len(totals)} metrics with those of evaluators.harness.tasks; at most {MAX_METRICS - 1} are "
                    "kept, so name fewer tasks, or run a group of many in a command of yours"
                )
        written = self._completions(checkpoint.shard, checkpoint.shards)
        return {**totals, LOSS: loss, **({COMPLETIONS: written} if written.texts else {})}

    def _tasks(self, settings: Harness) -> "HarnessTasks":
        # Imports a library for seconds.
        from tandem_evaluator.harness import FIELD, HarnessTasks
        from tandem_trainer.language.fine_tuning import FineTuning

        if not isinstance(self._task, FineTuning):
            raise ConfigurationError(f"{FIELD}: takes models of transformers; set trainer.parameters.pretrained")
        return HarnessTasks(settings, self._model, self._task.tokenizer)

    def _completions(self, shard: int, shards: int) -> Completions:
        """What the model writes for the prompts `shard`, `shard + shards`, …"""
        task, options = self._task, self._generate
        if options is None:
            return Completions([])
        assert isinstance(task, Completer), "only causal-lm takes prompts"
        mine = range(shard, len(self._prompts), shards)
        with torch.inference_mode():
            texts = [task.complete(self._model, self._prompts[number], number, options) for number in mine]
        return Completions([(number, self._prompts[number], text) for number, text in zip(mine, texts, strict=True)])

    def _batches(self, shard: int, shards: int) -> Iterator[tuple[Any, int]]:
        numbers = range(len(self._data))[shard::shards]
        for start in range(0, len(numbers), self._batch):
            mine = numbers[start : start + self._batch]
            if self._tensors is not None:
                chosen = torch.tensor(list(mine))
                yield [tensor[chosen] for tensor in self._tensors], len(mine)
                continue
            # What is drawn while a sample is read follows from the sample: each checkpoint gets the same data.
            samples = [self._reading.sample(0, number, lambda number=number: self._data[number]) for number in mine]  # type: ignore[misc]
            yield self._task.collate(samples), len(mine)

    def _metrics(self, batch: Any) -> Mapping[str, Any]:
        found: Any = self._task.metrics(self._model, batch)
        if not isinstance(found, Mapping):
            raise Unusable(f"{self._name}.metrics returned a {type(found).__name__}; return a dictionary of metrics")
        return found

    def _loss(self, batch: Any, samples: int, given: Any) -> Mean:
        """The loss of a batch: the one among its metrics, or else the task is asked, and computes the batch again.

        Raises:
            Unusable: the one that is given is no mean over the samples.
        """
        if given is None:
            return Mean(self._task.loss_sum(self._model, batch, samples).double().item(), samples)
        place = f"{self._name}.metrics: {LOSS}"
        found = _plain(place, given)
        if not isinstance(found, Mean) or found.count != samples:
            raise Unusable(f"{place} of {samples} samples is {_shown(given)}; return Mean(sum of losses, {samples})")
        return found

    def _added(self, name: str, before: Value | None, value: Any) -> Value:
        """A metric of the batches so far and of another one.

        Raises:
            Unusable: it is no metric, or no number, or not the same one as before.
        """
        place = f"{self._name}.metrics: {name}"
        found = _plain(place, value)
        try:
            return found if before is None else added([before, found])
        except ValueError as error:
            raise Unusable(f"{place} of two batches: {error}") from None


def _plain(place: str, value: Any) -> Value:
    """A metric with plain numbers in it."""
    match value:
        case Mean():
            return Mean(_number(place, value.total), _number(place, value.count))
        case GeometricMean():
            return GeometricMean(_number(place, value.log_total), _number(place, value.count))
        case Sum() | Max() | Min():
            return type(value)(_number(place, value.value))
        case Confusion():
            return Confusion(_rows(place, value.counts))
        case Histogram():
            return value
    raise Unusable(
        f"{place} is {_shown(value)}; return Mean(total, count), GeometricMean, Sum, Max, Min, Confusion or Histogram, "
        "which tell how to add up"
    )


def _number(place: str, value: Any) -> float:
    try:
        if isinstance(value, bool | str | bytes):
            raise TypeError
        return float(value)
    except (TypeError, ValueError, RuntimeError, OverflowError):
        raise Unusable(f"{place} holds {_shown(value)}, which is not a number") from None


def _rows(place: str, counts: Any) -> Sequence[Sequence[int]]:
    try:
        rows = [[int(count) for count in row] for row in counts]
    except (TypeError, ValueError, RuntimeError, OverflowError):
        rows = []
    if not rows or any(len(row) != len(rows) for row in rows):
        raise Unusable(f"{place} holds {_shown(counts)}, which is not a square matrix of counts")
    return rows


def _shown(value: Any) -> str:
    if isinstance(value, Tensor) and value.numel() != 1:
        return f"a tensor of the shape {tuple(value.shape)}"
    return " ".join(repr(value).split())[:80]


def main() -> int:
    """Evaluate shards until there are no more. Returns the exit code; the last line printed says what is wrong."""
    try:
        rundir = RunDir(os.environ[RUN_DIR])
        job = rundir.read_job()
        evaluation = TaskEvaluation(task_in(rundir), job.spec.trainer.settings_of_loop, job.spec.evaluation)
        for checkpoint in checkpoints():
            checkpoint.report(**evaluation.run(checkpoint))
    except (Unusable, ConfigurationError, DoesNotFit) as error:
        print(error, file=sys.stderr, flush=True)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
