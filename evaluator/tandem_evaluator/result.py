"""The results that evaluators publish, of one shard and merged for a checkpoint: of a built-in task, and of a program
of the user's own.

A shard carries counts, not scores: how many samples of class i were predicted as class j, and the sum of their losses.
Counts add up exactly, in any order and for any split, so the merged scores are those of one pass over the whole data;
scores themselves (a mean of F1 values, say) could not be merged like that. A program specifies with each of its metrics
how shards are merged (tandem.evaluation).
"""

import math
from collections.abc import Iterable, Sequence
from typing import Annotated, Any, Literal, Self

import numpy as np
from pydantic import Field, model_validator

from tandem.confidence import Interval, Z, mean_interval, share_interval
from tandem.evaluation import (
    MAX_BINS,
    MAX_CLASSES,
    MAX_COMPLETION,
    MAX_COMPLETIONS,
    MAX_EXPONENT,
    MAX_METRICS,
    MAX_PROMPT,
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
)
from tandem.formatting import count_noun
from tandem.model import MetricName, Model, WholeNumber
from tandem.rundir.evaluations import INTERVALS, LOSS, METRICS, VALIDATION
from tandem.wire.status import CheckpointRef

Count = Annotated[int, Field(ge=0)]
MomentSums = Annotated[list[float], Field(min_length=8, max_length=8)] | None
"""The fields of tandem.evaluation.Moments."""
Ends = Annotated[list[float], Field(min_length=2, max_length=2)]
"""The two ends of a confidence interval."""
Intervals = dict[MetricName, Ends]
"""95 % confidence intervals by metric, of those that have one (tandem.confidence)."""

MAX_WRONG = 24
"""Maximum number of misclassified samples in a result: enough to look at, and a few hundred bytes."""
MIN_SAMPLES_OF_CLASS = 20
"""Minimum number of samples for each class, on average, for the interval of macro F1: with ten, 95 % would be 90 %."""
NOT_FINITE = "the loss is not finite, so this checkpoint cannot become the best one"


class WrongSample(Model):
    """A misclassified sample."""

    index: Count
    """Index in the test data, from 0."""
    label: Count
    """True class."""
    prediction: Count
    """Predicted class."""
    confidence: Annotated[float, Field(ge=0, le=1)]
    """Probability of the predicted class."""


class ValidationCounts(Model):
    """Counts of a shard of the validation data."""

    samples: Count
    """Samples seen."""
    loss_sum: float | None
    """Sum of their cross entropies, nats; None if it is not finite."""
    loss_moments: MomentSums = None
    """Sums for the confidence interval of the loss; None if it is not finite."""
    confusion: list[list[Count]]
    """Confusion matrix, as that of the test data."""


class Result(Model):
    """Common fields of all results."""

    checkpoint: str
    """The checkpoint's name."""
    step: Count
    """Its step."""
    generation: Count
    """The generation that wrote it."""
    note: str = ""
    """A remark that readers of the scores need; absent if there is none."""
    weights: str = ""
    """Digest of the weights that were scored; absent where a program of the user's own reads them."""

    @property
    def reference(self) -> CheckpointRef:
        """The checkpoint."""
        return CheckpointRef(name=self.checkpoint, step=self.step, generation=self.generation)

    def to_json(self) -> dict[str, Any]:
        """The JSON form. Unlike `dump` it keeps a null, which stands for a number that is not finite or not defined."""
        body = self.model_dump(mode="json", by_alias=True)
        if body.get(VALIDATION, body) is None:
            del body[VALIDATION]
        for part in (body, body.get(VALIDATION, {})):
            for name in ("note", "weights", INTERVALS, "lossMoments"):
                if name in part and part[name] in ("", {}, None):
                    del part[name]
        return body


class Shard(Result):
    """One shard of the evaluation data under one checkpoint."""

    shard: Count
    """Number of the shard; it has the samples `shard`, `shard + shards`, `shard + 2 * shards`, …"""
    shards: Annotated[int, Field(ge=1)]
    """Number of shards."""
    seconds: Annotated[float, Field(ge=0)]
    """Time from the claim to the result."""
    evaluator: str
    """Name of the evaluator process."""
    at: float
    """Time of completion, seconds since the epoch."""


class Merged(Result):
    """The evaluation of one checkpoint."""

    metrics: Any
    """Its scores."""
    intervals: Intervals = {}
    """Their confidence intervals."""
    started_at: float
    """Start of the first shard, seconds since the epoch."""
    finished_at: float
    """End of the last shard, seconds since the epoch."""

    @property
    def scores(self) -> dict[str, float | None]:
        """Its scores by metric; None for what is not finite or not defined."""
        scores: dict[str, float | None] = self.to_json()[METRICS]
        return scores


class ShardResult(Shard):
    """The result of a shard for a built-in task."""

    samples: Count
    """Evaluation samples seen."""
    confusion: list[list[Count]]
    """Samples of class i (row) that were predicted as class j (column)."""
    wrong: Annotated[list[WrongSample], Field(max_length=MAX_WRONG)] = []
    """The misclassified samples with the highest confidence."""
    loss_sum: float | None
    """Sum of the samples' cross entropies, nats; None if it is not finite."""
    loss_moments: MomentSums = None
    """Sums for the confidence interval of the loss; None if it is not finite."""
    validation: ValidationCounts | None = None
    """Counts of the same shard of the validation data, if the job holds some out."""


class Metrics(Model):
    """The scores of a checkpoint."""

    loss: float | None
    """Mean cross entropy, nats; None if it is not finite."""
    accuracy: float
    """Share of correctly classified samples."""
    macro_f1: float
    """Mean of the classes' F1 scores."""


class Validation(Model):
    """The scores of one checkpoint on the validation data, which decides whether it is the best."""

    samples: Count
    """Samples seen."""
    metrics: Metrics
    """Its scores."""
    intervals: Intervals = {}
    """Their confidence intervals."""


class MergedResult(Merged):
    """The evaluation of one checkpoint of a built-in task."""

    samples: Count
    """Evaluation samples seen."""
    confusion: list[list[Count]]
    """Samples of class i (row) that were predicted as class j (column)."""
    wrong: Annotated[list[WrongSample], Field(max_length=MAX_WRONG)] = []
    """The misclassified samples with the highest confidence."""
    metrics: Metrics
    """Its scores on the test data."""
    validation: Validation | None = None
    """Its scores on the validation data, if the job holds some out."""
    per_class_f1: list[float | None]
    """F1 of each class; None for one that neither occurs nor is ever predicted."""


class Bins(Model):
    """A histogram that the user's program reports."""

    counts: Annotated[list[Count], Field(max_length=MAX_BINS)]
    """Values between one edge and the next."""
    edges: Annotated[list[float], Field(max_length=MAX_BINS + 1)]
    """Edges of the bins, ascending."""

    @model_validator(mode="after")
    def _is_histogram(self) -> Self:
        self.value()
        return self

    def value(self) -> Histogram:
        """The histogram as the program reported it."""
        return Histogram(self.counts, self.edges)


class MetricPart(Model):
    """Contribution of one shard to a metric of the user's program."""

    reducer: Literal["mean", "geometricMean", "sum", "max", "min"]
    """Reduction over shards."""
    value: float | None
    """Sum over the samples for `mean`, sum of their logarithms for `geometricMean`. None if it is not finite."""
    count: Annotated[float, Field(ge=0)] = 1.0
    """Number of samples of a mean, or the sum of their weights."""
    moments: MomentSums = None
    """Sums for the confidence interval of a mean."""

    def plain(self) -> Value:
        """The value as the program reported it, with NaN for one that is not finite."""
        value = math.nan if self.value is None else self.value
        moments = _moments(self.moments)
        match self.reducer:
            case "mean":
                return Mean(value, self.count, moments)
            case "geometricMean":
                return GeometricMean(value, self.count, moments)
            case "sum":
                return Sum(value)
            case "max":
                return Max(value)
            case "min":
                return Min(value)


class Completion(Model):
    """The completion of a prompt by a language model."""

    number: Count
    """Index of the prompt among all prompts, from 0."""
    prompt: Annotated[str, Field(max_length=MAX_PROMPT)]
    """The prompt."""
    text: Annotated[str, Field(max_length=MAX_COMPLETION)]
    """The completion, without the prompt."""


class ProgramShard(Shard):
    """The result of a shard, as the user's program has reported it."""

    metrics: Annotated[dict[MetricName, MetricPart], Field(max_length=MAX_METRICS)]
    """Metrics by name."""
    confusion: Annotated[list[list[WholeNumber]], Field(max_length=MAX_CLASSES)] | None = None
    """Samples of class i (row) that were predicted as class j (column), if the program reports them."""
    histograms: Annotated[dict[MetricName, Bins], Field(max_length=MAX_METRICS)] = {}
    """Histograms by name, if the program reports them."""
    completions: Annotated[list[Completion], Field(max_length=MAX_COMPLETIONS)] = []
    """Completions of prompts by a language model, if the program reports them."""

    @model_validator(mode="after")
    def _is_square(self) -> Self:
        if self.confusion and any(len(row) != len(self.confusion) for row in self.confusion):
            raise ValueError("a confusion matrix has as many columns as rows")
        if not self.metrics and not self.confusion:
            scoreless = [name for name in ("histograms", "completions") if getattr(self, name)]
            context = f" beside its {' and '.join(scoreless)}, which have no score" if scoreless else ""
            raise ValueError(f"a report has at least one metric{context}")
        return self

    def values(self) -> dict[str, Value]:
        """Contribution to each metric, except for the confusion matrix."""
        parts = {name: part.plain() for name, part in self.metrics.items()}
        return {**parts, **{name: bins.value() for name, bins in self.histograms.items()}}


class ProgramResult(Merged):
    """The evaluation of one checkpoint by the user's program."""

    metrics: dict[MetricName, float | None]
    """Its scores; None for what is not finite."""
    confusion: list[list[Count]] | None = None
    """Samples of class i (row) that were predicted as class j (column), if the program reports them."""
    per_class_f1: list[float | None] | None = None
    """F1 of each class, if there is a confusion matrix."""
    histograms: dict[MetricName, Bins] | None = None
    """Histograms by name, with counts (`counts`) and edges (`edges`) of their bins, if the program reports them."""
    completions: list[Completion] | None = None
    """Completions of a language model, in the order of the prompts, if the program reports them."""


def shard_samples(total: int, shard: int, shards: int) -> int:
    """Number of samples of a shard, out of `total`."""
    return len(range(shard, total, shards))


def finite_or_none(value: float) -> float | None:
    """A finite value, or None: JSON cannot express NaN and infinity."""
    return value if math.isfinite(value) else None


def merge(results: Sequence[ShardResult]) -> MergedResult:
    """Merge the shards of one checkpoint. The order of `results` does not matter, not even to the last bit.

    Args:
        results: every shard of one split, once.
    """
    results = sorted(results, key=lambda result: result.shard)
    first = results[0]
    assert [result.shard for result in results] == list(range(first.shards))
    assert len({(result.checkpoint, result.generation, result.shards) for result in results}) == 1

    samples, confusion, metrics, per_class_f1 = _totals(results)
    held_out = [result.validation for result in results if result.validation is not None]
    validation, deciding_metrics = None, metrics
    if len(held_out) == len(results):
        count, held_out_confusion, deciding_metrics, _ = _totals(held_out)
        validation = Validation(
            samples=count, metrics=deciding_metrics, intervals=_intervals(held_out, held_out_confusion)
        )
    wrong = [sample for result in results for sample in result.wrong]
    return MergedResult(
        checkpoint=first.checkpoint,
        step=first.step,
        generation=first.generation,
        weights=first.weights,
        samples=samples,
        confusion=confusion.tolist(),
        wrong=surest(wrong),
        note="" if all(scores.loss is not None for scores in (metrics, deciding_metrics)) else NOT_FINITE,
        metrics=metrics,
        intervals=_intervals(results, confusion),
        validation=validation,
        per_class_f1=per_class_f1,
        started_at=min(result.at - result.seconds for result in results),
        finished_at=max(result.at for result in results),
    )


def merge_program(results: Sequence[ProgramShard], metric: str) -> ProgramResult:
    """Merge the shards of one checkpoint of the user's program, in any order.

    Args:
        results: every shard of one split, once.
        metric: the metric that decides which checkpoint is the best.
    """
    results = sorted(results, key=lambda result: result.shard)
    first = results[0]
    notes: list[str] = []
    metrics: dict[str, float | None] = {}
    intervals: Intervals = {}
    histograms: dict[str, Bins] = {}
    values = [result.values() for result in results]
    for name in dict.fromkeys(name for shard_values in values for name in shard_values):
        combined = _combined(name, [shard_values[name] for shard_values in values if name in shard_values], notes)
        if isinstance(combined, Histogram):
            histograms[name] = Bins.model_validate(combined.wire()["histogram"])
        else:
            metrics[name] = None if combined is None else _score(combined)
            if isinstance(combined, Mean | GeometricMean) and metrics[name] is not None:
                intervals |= _by_name(name, mean_interval(combined))
    matrices: list[Value] = [Confusion(result.confusion) for result in results if result.confusion]
    confusion: list[list[int]] | None = None
    per_class_f1 = None
    if matrices and isinstance(combined := _combined("its confusion matrix", matrices, notes), Confusion):
        counts = np.array(combined.counts, dtype=np.int64)
        if counts.any():
            confusion = counts.tolist()
            accuracy, macro_f1, per_class_f1 = scores(counts)
            metrics = {"accuracy": accuracy, "macroF1": macro_f1, **metrics}
            intervals = {**_confusion_intervals(counts), **intervals}
        else:
            notes.append("its confusion matrix is empty")
    if metric in histograms:
        notes.append(f"evaluators.metric names {metric}, a histogram, which has no score, so no checkpoint is the best")
    elif metric not in metrics:
        notes.append(f"the program reports no {metric}, which evaluators.metric names, so no checkpoint is the best")
    if metrics.get(LOSS, 0.0) is None:
        notes.append(NOT_FINITE)
    return ProgramResult(
        checkpoint=first.checkpoint,
        step=first.step,
        generation=first.generation,
        weights=first.weights,
        metrics=metrics,
        intervals=intervals,
        confusion=confusion,
        per_class_f1=per_class_f1,
        histograms=histograms or None,
        completions=_completions(results, notes) or None,
        note="; ".join(notes),
        started_at=min(result.at - result.seconds for result in results),
        finished_at=max(result.at for result in results),
    )


def _completions(results: Sequence[ProgramShard], notes: list[str]) -> list[Completion]:
    """Completions of all shards, by their numbers."""
    by_number: dict[int, Completion] = {}
    for result in results:
        for completion in result.completions:
            by_number.setdefault(completion.number, completion)
    if (count := sum(len(result.completions) for result in results)) > len(by_number):
        notes.append(
            f"two shards completed {count_noun(count - len(by_number), 'prompt')}; one text of each is left out"
        )
    if len(by_number) > MAX_COMPLETIONS:
        notes.append(f"{count_noun(len(by_number), 'prompt')} were completed; {MAX_COMPLETIONS} are kept")
    return [by_number[number] for number in sorted(by_number)[:MAX_COMPLETIONS]]


def _combined(name: str, values: Sequence[Value], notes: list[str]) -> Value | None:
    """Combine one metric of all shards; None, with a note, if they do not add up."""
    try:
        return added(values)
    except ValueError as error:
        notes.append(f"{name} of two shards: {error}")
        return None


def _score(value: Value) -> float | None:
    """The final value of a metric over all shards; None if it is not finite."""
    match value:
        case Mean():
            total, count = float(value.total), float(value.count)
            return finite_or_none(total / count) if count else None
        case GeometricMean():
            total, count = float(value.log_total), float(value.count)
            mean = total / count if count else math.nan
            return finite_or_none(math.exp(mean) if mean <= MAX_EXPONENT else math.inf)
        case Sum() | Max() | Min():
            return finite_or_none(float(value.value))
    raise AssertionError


def surest(wrong: Iterable[WrongSample]) -> list[WrongSample]:
    """The misclassified samples with the highest confidence."""
    return sorted(wrong, key=lambda sample: (-sample.confidence, sample.index))[:MAX_WRONG]


def _totals(parts: Sequence[ShardResult | ValidationCounts]) -> tuple[int, np.ndarray, Metrics, list[float | None]]:
    """Samples, confusion matrix, scores, and the F1 of each class, over all shards."""
    samples = sum(part.samples for part in parts)
    sums = [part.loss_sum for part in parts]
    loss = None if None in sums else finite_or_none(sum(value for value in sums if value is not None) / samples)
    confusion = sum(np.array(part.confusion, dtype=np.int64) for part in parts)
    assert isinstance(confusion, np.ndarray)
    accuracy, macro_f1, per_class_f1 = scores(confusion)
    return samples, confusion, Metrics(loss=loss, accuracy=accuracy, macro_f1=macro_f1), per_class_f1


def _intervals(parts: Sequence[ShardResult | ValidationCounts], confusion: np.ndarray) -> Intervals:
    """The confidence intervals of the scores, over all shards."""
    means = [Mean(part.loss_sum or 0.0, part.samples, _moments(part.loss_moments)) for part in parts]
    loss = added(means)
    assert isinstance(loss, Mean)
    return {**_confusion_intervals(confusion), **_by_name(LOSS, mean_interval(loss))}


def _confusion_intervals(confusion: np.ndarray) -> Intervals:
    accuracy, macro_f1 = accuracy_interval(confusion), macro_f1_interval(confusion)
    return {**_by_name("accuracy", accuracy), **_by_name("macroF1", macro_f1)}


def _moments(sums: MomentSums) -> Moments | None:
    return None if sums is None else Moments(*sums)


def accuracy_interval(confusion: np.ndarray) -> Interval | None:
    """The confidence interval of the accuracy.

    Args:
        confusion: [classes, classes] counts.
    """
    return share_interval(int(np.trace(confusion)), int(confusion.sum()))


def macro_f1_interval(confusion: np.ndarray) -> Interval | None:
    """The confidence interval of the mean F1 of the classes; None without a mistake, or with few samples of a class.

    The variance is that of a smooth function of multinomial counts, taken to the logit, which keeps the ends between 0
    and 1. (Takahashi et al. 2022, https://doi.org/10.1007/s10489-021-02635-5)

    Args:
        confusion: [classes, classes] counts.
    """
    totals = (confusion.sum(axis=0) + confusion.sum(axis=1)).astype(float)
    present = totals > 0
    classes, samples = int(present.sum()), int(confusion.sum())
    if samples < MIN_SAMPLES_OF_CLASS * classes or samples == np.trace(confusion):
        return None
    inverse = np.divide(1.0, totals, out=np.zeros_like(totals), where=present)
    f1 = 2 * np.diag(confusion) * inverse
    # The derivative of the mean by the count of each cell. Weighted by the counts its sum is 0.
    weighted = f1 * inverse
    gradient = (np.diag(2 * inverse) - weighted[:, None] - weighted[None, :]) / classes
    mean, variance = float(f1.sum()) / classes, float((confusion * gradient**2).sum())
    if not 0.0 < mean < 1.0:
        return None
    center, half = math.log(mean / (1 - mean)), Z * math.sqrt(variance) / (mean * (1 - mean))
    low, high = (1 / (1 + math.exp(-end)) for end in (center - half, center + half))
    return Interval(min(low, mean), max(high, mean))


def _by_name(name: str, interval: Interval | None) -> Intervals:
    return {} if interval is None else {name: list(interval)}


def scores(confusion: np.ndarray) -> tuple[float, float, list[float | None]]:
    """Compute accuracy, macro F1 and the F1 of each class with scikit-learn: each cell is one pair of classes with its
    count as weight. A class that neither occurs nor is predicted has no F1, and the mean leaves it out, as
    scikit-learn's does.

    Args:
        confusion: [classes, classes] counts, not all 0.
    """
    # The import takes a second and more, which programs without a confusion matrix need not wait for.
    from sklearn.metrics import accuracy_score, f1_score

    classes = np.arange(len(confusion))
    true, predicted = np.repeat(classes, len(classes)), np.tile(classes, len(classes))
    weights = confusion.ravel()
    f1_scores = f1_score(true, predicted, labels=classes, average=None, sample_weight=weights, zero_division=np.nan)
    macro = f1_score(true, predicted, labels=classes, average="macro", sample_weight=weights, zero_division=np.nan)
    accuracy = accuracy_score(true, predicted, sample_weight=weights)
    return float(accuracy), float(macro), [finite_or_none(float(value)) for value in f1_scores]
