"""Evaluate checkpoints with a program of your own, beside training (`evaluators.command`).

    from safetensors.torch import load_file
    from tandem.evaluation import Mean, checkpoints

    for checkpoint in checkpoints():
        model.load_state_dict(load_file(checkpoint.weights))
        samples = test_data[checkpoint.shard :: checkpoint.shards]
        checkpoint.report(accuracy=Mean.from_samples(model(sample).argmax() == label for sample, label in samples))

An evaluator process starts the program, passes it one shard of one checkpoint after another, and publishes its reports.
The program claims no shard, waits for nothing and writes no file of the run: it may crash or be killed at any time, and
its shard is evaluated again.

**Two ways, one protocol.** The first shard is in the variables below, and its report may be a file. So a program
without Tandem is run once for each shard, and ends: it reads the variables and writes the JSON. A program that calls
`checkpoints()` gets the same first shard from the variables; it then stays alive, reads further shards as lines of JSON
from one pipe, and writes its reports to another. The end of the first pipe is the end of the work.

    TANDEM_CHECKPOINT           the folder of the checkpoint
    TANDEM_CHECKPOINT_WEIGHTS   its weights, a safetensors file whose checksums were verified
    TANDEM_CHECKPOINT_STEP      its step
    TANDEM_SHARD, TANDEM_SHARDS the shard of the evaluation data, from 0, and the number of shards
    TANDEM_REPORT               the file to write the report to: `{"accuracy": {"mean": [right, count]}}`
    TANDEM_CHANNEL              descriptors of the two pipes, for further shards and for reports

**Metrics are additive.** A shard reports not a score but its terms, with the reduction over the shards (`Mean`,
`GeometricMean`, `Sum`, `Max`, `Min`, `Confusion`, `Histogram`, `Completions`). A plain number is the mean of the
shards. `added` implements the reductions: batches of a shard and shards of a checkpoint are combined by it alone.

Rejected: calling a function of the user's (its imports, its device, its memory and its crash would be the evaluator's),
a server that the program queries over HTTP (a port and a client where two pipes are enough), standard output as the
channel (any library may print).
"""

import json
import math
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any, ClassVar, NamedTuple, Self, SupportsFloat

CHECKPOINT = "TANDEM_CHECKPOINT"
WEIGHTS = "TANDEM_CHECKPOINT_WEIGHTS"
STEP = "TANDEM_CHECKPOINT_STEP"
SHARD = "TANDEM_SHARD"
SHARDS = "TANDEM_SHARDS"
REPORT = "TANDEM_REPORT"
CHANNEL = "TANDEM_CHANNEL"

MAX_METRICS = 64
"""Maximum number of metrics in a report."""
MAX_CLASSES = 1000
"""Maximum number of rows of a confusion matrix."""
MAX_BINS = 256
"""Maximum number of bins of a histogram."""
MAX_COUNT = 2**63
"""Maximum count of a bin."""
MAX_COMPLETIONS = 64
"""Maximum number of prompts in a report."""
MAX_PROMPT, MAX_COMPLETION = 2_000, 8_000
"""Maximum lengths of a prompt and of its completion, in characters; a longer one is truncated."""
MAX_REPORT_BYTES = 2**23
"""Maximum size of a report in JSON: a confusion matrix of a thousand classes takes up to 7 MB."""
MAX_EXPONENT = 709.0
"""Largest exponent of e whose power fits into float64, rounded down."""


class Moments(NamedTuple):
    """Sums over the samples of a mean, from which its confidence interval follows (tandem.confidence);
    `Mean.from_samples` computes them. `t` is the total of a sample, `w` its count: `ttw` is the sum of t · t · w.

    A sample is what was drawn by itself: a text, not each of its tokens, which depend on each other.
    """

    samples: SupportsFloat
    """Number of samples."""
    tt: SupportsFloat
    tw: SupportsFloat
    ww: SupportsFloat
    ttt: SupportsFloat
    ttw: SupportsFloat
    tww: SupportsFloat
    www: SupportsFloat


@dataclass(frozen=True)
class Mean:
    """A mean over samples: over all shards it is the sum of totals divided by the sum of counts."""

    total: SupportsFloat
    """The sum over the samples of this shard."""
    count: SupportsFloat
    """Number of samples, or the sum of their weights."""
    moments: Moments | None = field(default=None, repr=False)
    """Sums for the confidence interval; None: the score has none."""

    @classmethod
    def from_samples(cls, totals: Iterable[SupportsFloat], counts: Iterable[SupportsFloat] | None = None) -> Self:
        """The mean of samples, with what its confidence interval needs.

        Args:
            totals: the value of each sample of this shard, such as its loss, or 1 where it is right and 0 where not; a
                list, or a tensor or array of one dimension. Of samples with parts, the sum over the parts.
            counts: number of parts of each sample, or its weight; None: 1 for each.
        """
        return cls(*_sums(totals, counts))

    def wire(self) -> dict[str, Any]:
        """The JSON form."""
        return {"mean": [_number(self.total), _number(self.count)], **_moments(self.moments)}


@dataclass(frozen=True)
class GeometricMean:
    """A geometric mean over samples: `exp(total / count)` over all shards. Perplexity is the geometric mean of the
    inverse probabilities of tokens, whose logarithm is the loss in nats."""

    log_total: SupportsFloat
    """The sum of natural logarithms over the samples of this shard."""
    count: SupportsFloat
    """Number of samples, or the sum of their weights."""
    moments: Moments | None = field(default=None, repr=False)
    """Sums for the confidence interval, of the logarithms; None: the score has none."""

    @classmethod
    def from_samples(cls, log_totals: Iterable[SupportsFloat], counts: Iterable[SupportsFloat] | None = None) -> Self:
        """The geometric mean of samples, with what its confidence interval needs; arguments as for a mean, of
        logarithms."""
        return cls(*_sums(log_totals, counts))

    def wire(self) -> dict[str, Any]:
        """The JSON form."""
        return {"geometricMean": [_number(self.log_total), _number(self.count)], **_moments(self.moments)}


@dataclass(frozen=True)
class _Single:
    value: SupportsFloat
    """The value of this shard."""
    reducer: ClassVar[str]

    def wire(self) -> dict[str, Any]:
        """The JSON form."""
        return {self.reducer: _number(self.value)}


class Sum(_Single):
    """A sum over samples."""

    reducer = "sum"


class Max(_Single):
    """The largest value of any shard."""

    reducer = "max"


class Min(_Single):
    """The smallest value of any shard."""

    reducer = "min"


@dataclass(frozen=True)
class Confusion:
    """A confusion matrix, from which `accuracy` and `macroF1` are computed, and which the report shows. At most one in
    a report."""

    counts: Sequence[Sequence[int]]
    """[classes, classes]: number of samples of class i (row) that are predicted as class j (column)."""

    def wire(self) -> dict[str, Any]:
        """The JSON form."""
        return {"confusion": [[int(count) for count in row] for row in self.counts]}


@dataclass(frozen=True)
class Histogram:
    """A histogram, which the report and the live page show as bars. It has no score, so it does not decide which
    checkpoint is the best. The arguments are the results of `numpy.histogram` and `torch.histogram`:

        Histogram(*torch.histogram(errors, edges))

    Raises:
        ValueError: a count is no whole number, or the edges do not ascend, or there are too many.
    """

    counts: Sequence[SupportsFloat]
    """[bins]: number of values between one edge and the next."""
    edges: Sequence[SupportsFloat]
    """[bins + 1]: edges of the bins, ascending; the same in each batch and shard. At most 256 bins."""

    def __post_init__(self) -> None:
        bins = len(self.counts)
        if not 0 < bins <= MAX_BINS:
            raise ValueError(f"a histogram has 1 to {MAX_BINS} bins, not {bins:,}")
        if len(self.edges) != bins + 1:
            raise ValueError(f"a histogram of {bins} bins has {bins + 1} edges, not {len(self.edges):,}")
        edges = [_number(edge) for edge in self.edges]
        finite = [edge for edge in edges if edge is not None]
        if len(finite) < len(edges) or any(lower >= upper for lower, upper in pairwise(finite)):
            raise ValueError("the edges of a histogram are finite, and each is larger than the one before")
        object.__setattr__(self, "counts", tuple(_count(count) for count in self.counts))
        object.__setattr__(self, "edges", tuple(float(edge) for edge in finite))

    def wire(self) -> dict[str, Any]:
        """The JSON form."""
        return {"histogram": {"counts": list(self.counts), "edges": list(self.edges)}}


@dataclass(frozen=True)
class Completions:
    """Completions of prompts by a language model. The report and the live page show them beside those of other
    checkpoints. They have no score, so they do not decide which checkpoint is the best. At most one in a report.

    Raises:
        ValueError: there are too many, or two have the same number.
    """

    texts: Sequence[tuple[int, str, str]]
    """Number of the prompt among all prompts, from 0; the prompt; and its completion. At most 64 over all shards."""

    def __post_init__(self) -> None:
        if len(self.texts) > MAX_COMPLETIONS:
            raise ValueError(f"a report has at most {MAX_COMPLETIONS} completions, not {len(self.texts)}")
        completions: dict[int, tuple[int, str, str]] = {}
        for number, prompt, text in self.texts:
            if number in completions:
                raise ValueError(f"prompt {number} was completed twice")
            completions[number] = int(number), truncate_text(prompt, MAX_PROMPT), truncate_text(text, MAX_COMPLETION)
        object.__setattr__(self, "texts", tuple(completions[number] for number in sorted(completions)))

    def wire(self) -> dict[str, Any]:
        """The JSON form."""
        return {"completions": [list(completion) for completion in self.texts]}


def truncate_text(text: str, max_length: int) -> str:
    """The text, truncated to `max_length` characters. A character that UTF-8 cannot encode becomes a question mark."""
    truncated = text if len(text) <= max_length else text[: max_length - 1] + "…"
    return truncated.encode(errors="replace").decode()


Value = Mean | GeometricMean | Sum | Max | Min | Confusion | Histogram | Completions


def added(values: Sequence[Value]) -> Value:
    """Reduce the values of one metric over batches or shards. The result does not depend on their order, not even in
    the last bit.

    Args:
        values: at least one, with plain numbers in them. A value that is not finite makes the result NaN or infinite.

    Raises:
        ValueError: they are of different kinds, or of different classes or bins.
    """
    first = values[0]
    for value in values:
        if type(value) is not type(first):
            raise ValueError(f"a {type(first).__name__} and a {type(value).__name__} do not add up")
    match first:
        case Mean():
            totals = _total(value.total for value in values)  # type: ignore[union-attr]
            counts = _total(value.count for value in values)  # type: ignore[union-attr]
            return Mean(totals, counts, _added_moments([value.moments for value in values]))  # type: ignore[union-attr]
        case GeometricMean():
            totals = _total(value.log_total for value in values)  # type: ignore[union-attr]
            counts = _total(value.count for value in values)  # type: ignore[union-attr]
            return GeometricMean(totals, counts, _added_moments([value.moments for value in values]))  # type: ignore[union-attr]
        case Sum():
            return Sum(_total(value.value for value in values))  # type: ignore[union-attr]
        case Max():
            return Max(_extreme(max, [float(value.value) for value in values]))  # type: ignore[union-attr]
        case Min():
            return Min(_extreme(min, [float(value.value) for value in values]))  # type: ignore[union-attr]
        case Confusion():
            matrices = [value.counts for value in values]  # type: ignore[union-attr]
            if len(sizes := {len(matrix) for matrix in matrices}) > 1:
                raise ValueError(f"confusion matrices of {' and '.join(map(str, sorted(sizes)))} classes do not add up")
            return Confusion([[sum(cell) for cell in zip(*rows, strict=True)] for rows in zip(*matrices, strict=True)])
        case Histogram():
            return _histogram(values)  # type: ignore[arg-type]
        case Completions():
            return Completions([text for value in values for text in value.texts])  # type: ignore[union-attr]
    raise AssertionError


def _histogram(values: Sequence[Histogram]) -> Histogram:
    first = values[0]
    for value in values:
        if value.edges != first.edges:
            edges = (f"{len(bins.edges)} from {bins.edges[0]:g} to {bins.edges[-1]:g}" for bins in (first, value))
            raise ValueError(f"histograms of different edges do not add up ({' and '.join(edges)}); use fixed edges")
    return Histogram([sum(counts) for counts in zip(*(value.counts for value in values), strict=True)], first.edges)


def _sums(totals: Iterable[SupportsFloat], counts: Iterable[SupportsFloat] | None) -> tuple[float, float, Moments]:
    values = _floats(totals)
    weights = [1.0] * len(values) if counts is None else _floats(counts)
    pairs = list(zip(values, weights, strict=True))
    # Products, not powers: `**` raises OverflowError where a product is infinite.
    products = [(t * t, t * w, w * w, t * t * t, t * t * w, t * (w * w), w * w * w) for t, w in pairs]
    sums = [_total(column) for column in zip(*products, strict=True)] or [0.0] * 7
    return _total(values), _total(weights), Moments(len(pairs), *sums)


def _floats(values: Any) -> list[float]:
    # Converted as a whole: a tensor of many values is slow to iterate over.
    return [float(value) for value in (values.tolist() if hasattr(values, "tolist") else values)]


def _added_moments(moments: Sequence[Moments | None]) -> Moments | None:
    complete = [part for part in moments if part is not None]
    return Moments(*map(_total, zip(*complete, strict=True))) if len(complete) == len(moments) else None


def _moments(moments: Moments | None) -> dict[str, Any]:
    numbers = [] if moments is None else [_number(value) for value in moments]
    return {"moments": numbers} if numbers and None not in numbers else {}


def _total(values: Iterable[SupportsFloat]) -> float:
    numbers = [float(value) for value in values]
    try:
        return math.fsum(numbers)
    except (OverflowError, ValueError):
        # fsum refuses infinite intermediate sums, and infinities of both signs: the sum is infinite, or NaN.
        return sum(numbers)


def _extreme(reduce: Callable[[list[float]], float], values: list[float]) -> float:
    """The largest or the smallest value; NaN if one of them is."""
    return math.nan if any(map(math.isnan, values)) else reduce(values)


@dataclass
class Checkpoint:
    """One shard of the evaluation data for one checkpoint."""

    folder: Path
    """Folder of the checkpoint; read-only."""
    weights: Path
    """Its weights: a safetensors file whose checksums have just been verified."""
    step: int
    """Training step of the checkpoint."""
    shard: int
    """Shard of the evaluation data, from 0: the samples `shard`, `shard + shards`, …"""
    shards: int
    """Number of shards."""
    _reports: int | None = field(default=None, repr=False)
    is_reported: bool = field(default=False, repr=False)
    scored: str = field(default="", repr=False)
    """Digest of the weights as the program has read them (tandem.rundir.checkpoint.digest_of); empty if it is not
    compared with that of the checkpoint."""

    def report(self, **metrics: Value | SupportsFloat) -> None:
        """Report the terms of this shard in the checkpoint's metrics. Once for each checkpoint.

        Args:
            metrics: by name: `Mean`, `GeometricMean`, `Sum`, `Max`, `Min`, `Confusion`, `Histogram` or `Completions`;
                a plain number is the mean of the shards.

        Raises:
            TypeError: a value is no number.
            ValueError: there is no metric, there are too many, or this checkpoint was reported before.
        """
        if self.is_reported:
            raise ValueError(f"step {self.step} was reported already; call report once for each checkpoint")
        if not 0 < len(metrics) <= MAX_METRICS:
            raise ValueError(f"a report has 1 to {MAX_METRICS} metrics, not {len(metrics)}")
        body = {name: _wire(name, value) for name, value in metrics.items()}
        self.is_reported = True
        if self._reports is None:
            print(json.dumps({"step": self.step, "metrics": body}), flush=True)
        else:
            _write(self._reports, {"metrics": body} | ({"weights": self.scored} if self.scored else {}))


def checkpoints() -> Iterator[Checkpoint]:
    """The checkpoints to evaluate, one shard at a time, until training is over and everything is evaluated.

    To try a program by hand, set TANDEM_CHECKPOINT to the folder of a checkpoint: it gets this one, and reports are
    printed.

    Raises:
        RuntimeError: no evaluator started this program, or the last checkpoint was not reported.
    """
    if not os.environ.get(CHECKPOINT):
        raise RuntimeError(
            f"checkpoints() works in a program that evaluators.command starts; to try it by hand, set {CHECKPOINT} to "
            "the folder of a checkpoint, such as runs/digits/checkpoints/step-000000500"
        )
    work, reports = _channel()
    message: Mapping[str, Any] = {
        "folder": os.environ[CHECKPOINT],
        "weights": os.environ.get(WEIGHTS) or str(Path(os.environ[CHECKPOINT]) / "weights.safetensors"),
        "step": int(os.environ.get(STEP) or _step_in(os.environ[CHECKPOINT])),
        "shard": int(os.environ.get(SHARD) or 0),
        "shards": int(os.environ.get(SHARDS) or 1),
    }
    lines = iter(()) if work is None else os.fdopen(work, encoding="utf-8", closefd=False)
    if reports is not None:
        _write(reports, {"stays": True})
    while True:
        checkpoint = Checkpoint(
            Path(message["folder"]),
            Path(message["weights"]),
            message["step"],
            message["shard"],
            message["shards"],
            reports,
        )
        yield checkpoint
        if not checkpoint.is_reported:
            raise RuntimeError(
                f"step {checkpoint.step} was not reported; call checkpoint.report(…) for each checkpoint"
            )
        line = next(iter(lines), "")
        if not line:
            return
        message = json.loads(line)


def _channel() -> tuple[int | None, int | None]:
    """Descriptors of the pipes, for shards and for reports; None where nobody listens. Child processes of this program
    do not inherit them."""
    text = os.environ.pop(CHANNEL, "")
    if not text:
        return None, None
    work, reports = (int(part) for part in text.split(","))
    for descriptor in (work, reports):
        os.set_inheritable(descriptor, False)
    return work, reports


def _step_in(folder: str) -> int:
    digits = Path(folder).name.rpartition("-")[2]
    return int(digits) if digits.isdecimal() else 0


def _wire(name: str, value: Value | SupportsFloat) -> dict[str, Any]:
    try:
        return value.wire() if isinstance(value, Value) else {"mean": [_number(value), 1]}
    except (TypeError, ValueError) as error:
        raise TypeError(f"{name} is {value!r}, which is no number: {error}") from error


def _number(value: SupportsFloat) -> int | float | None:
    """The JSON form of a number: None if it is not finite. A tensor or array of one element is a number, too."""
    if isinstance(value, bool | str | bytes):
        raise TypeError(f"{value!r} is a {type(value).__name__}")
    if isinstance(value, int):
        return value
    number = float(value)
    return number if math.isfinite(number) else None


def _count(value: SupportsFloat) -> int:
    number = _number(value)
    if number is None or not 0 <= number <= MAX_COUNT or number != int(number):
        raise ValueError(f"{value!r} in a histogram is no count of values")
    return int(number)


def _write(descriptor: int, message: Mapping[str, Any]) -> None:
    content = json.dumps(message).encode() + b"\n"
    while content:
        content = content[os.write(descriptor, content) :]
