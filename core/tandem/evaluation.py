"""Evaluate checkpoints with a program of your own, beside training (`evaluators.command`).

    from safetensors.torch import load_file
    from tandem.evaluation import Mean, checkpoints

    for checkpoint in checkpoints():
        model.load_state_dict(load_file(checkpoint.weights))
        right = 0
        mine = test_data[checkpoint.shard :: checkpoint.shards]
        for sample, label in mine:
            right += int(model(sample).argmax() == label)
        checkpoint.report(accuracy=Mean(right, len(mine)))

An evaluator process starts the program, gives it one shard of one checkpoint after the other, and publishes what it
reports. The program claims nothing, waits for nothing and writes no file of the run: it may crash or be killed at any
time, and its shard is evaluated again.

**Two ways, one protocol.** The first shard stands in the variables below, and its report may be a file. So a program
that knows nothing of Tandem is run once for each shard, and ends: it reads the variables and writes the JSON. One that
calls `checkpoints()` gets the same first shard from the variables; it then stays alive, reads further shards as lines
of JSON from one pipe, and writes its reports to another. The end of the first pipe is the end of the work.

    TANDEM_CHECKPOINT           the folder of the checkpoint
    TANDEM_CHECKPOINT_WEIGHTS   its weights, a safetensors file whose checksums were verified
    TANDEM_CHECKPOINT_STEP      its step
    TANDEM_SHARD, TANDEM_SHARDS which part of the evaluation data, from 0, and how many parts there are
    TANDEM_REPORT               the file to write the report to: `{"accuracy": {"mean": [right, count]}}`
    TANDEM_CHANNEL              descriptors of the two pipes, of further shards and of reports

**Metrics are sums that add up.** A shard reports no score but what scores are made of, with the way to put the shards
together (`Mean`, `GeometricMean`, `Sum`, `Max`, `Min`, `Confusion`, `Histogram`, `Completions`). A plain number is the
mean of the shards. `added` is that way: batches of a shard and shards of a checkpoint are put together by it alone.

Rejected: a function of the user's that is called (its imports, its device and its memory would be the evaluator's, and
its crash, too), a server that the program asks over HTTP (a port and a client for what two pipes do), standard output
as the channel (any library may print).
"""

import json
import math
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any, ClassVar, SupportsFloat

CHECKPOINT = "TANDEM_CHECKPOINT"
WEIGHTS = "TANDEM_CHECKPOINT_WEIGHTS"
STEP = "TANDEM_CHECKPOINT_STEP"
SHARD = "TANDEM_SHARD"
SHARDS = "TANDEM_SHARDS"
REPORT = "TANDEM_REPORT"
CHANNEL = "TANDEM_CHANNEL"

MAX_METRICS = 64
"""Of one report."""
MAX_CLASSES = 1000
"""Rows of a confusion matrix."""
MAX_BINS = 256
"""Of a histogram."""
MAX_COUNT = 2**63
"""Of a bin."""
MAX_COMPLETIONS = 64
"""Prompts of a report."""
MAX_PROMPT, MAX_COMPLETION = 2_000, 8_000
"""Characters of a prompt and of what a model wrote for it; a longer one is cut."""
MAX_REPORT_BYTES = 2**23
"""Of a report in JSON: a confusion matrix of a thousand classes takes up to 7 MB."""


@dataclass(frozen=True)
class Mean:
    """A mean over samples: of all shards together it is the sum of totals divided by the sum of counts."""

    total: SupportsFloat
    """The sum over the samples of this shard."""
    count: SupportsFloat
    """How many samples there were, or the sum of their weights."""

    def wire(self) -> dict[str, Any]:
        """Its form in JSON."""
        return {"mean": [_number(self.total), _number(self.count)]}


@dataclass(frozen=True)
class GeometricMean:
    """A mean over samples that multiplies: `exp(total / count)` of all shards together. Perplexity is that of how
    improbable each token was, with its loss in nats as the logarithm."""

    log_total: SupportsFloat
    """The sum over the samples of this shard of the natural logarithms."""
    count: SupportsFloat
    """How many samples there were, or the sum of their weights."""

    def wire(self) -> dict[str, Any]:
        """Its form in JSON."""
        return {"geometricMean": [_number(self.log_total), _number(self.count)]}


@dataclass(frozen=True)
class _Single:
    value: SupportsFloat
    """That of this shard."""
    reducer: ClassVar[str]

    def wire(self) -> dict[str, Any]:
        """Its form in JSON."""
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
    """[classes, classes]: samples of class i (row) that were taken for class j (column)."""

    def wire(self) -> dict[str, Any]:
        """Its form in JSON."""
        return {"confusion": [[int(count) for count in row] for row in self.counts]}


@dataclass(frozen=True)
class Histogram:
    """How many values lie in each bin, which the report and the live page show as bars. It has no score, so it decides
    nothing. The arguments are what `numpy.histogram` and `torch.histogram` return:

        Histogram(*torch.histogram(errors, edges))

    Raises:
        ValueError: a count is no whole number, or the edges do not ascend, or there are too many.
    """

    counts: Sequence[SupportsFloat]
    """[bins]: values between one edge and the next."""
    edges: Sequence[SupportsFloat]
    """[bins + 1]: where the bins begin and end, ascending; the same in each batch and shard. At most 256 bins."""

    def __post_init__(self) -> None:
        bins = len(self.counts)
        if not 0 < bins <= MAX_BINS:
            raise ValueError(f"a histogram has 1 to {MAX_BINS} bins, not {bins:,}")
        if len(self.edges) != bins + 1:
            raise ValueError(f"a histogram of {bins} bins has {bins + 1} edges, not {len(self.edges):,}")
        edges = [_number(edge) for edge in self.edges]
        finite = [edge for edge in edges if edge is not None]
        if len(finite) < len(edges) or any(left >= right for left, right in pairwise(finite)):
            raise ValueError("the edges of a histogram are finite, and each is larger than the one before")
        object.__setattr__(self, "counts", tuple(_count(count) for count in self.counts))
        object.__setattr__(self, "edges", tuple(float(edge) for edge in finite))

    def wire(self) -> dict[str, Any]:
        """Its form in JSON."""
        return {"histogram": {"counts": list(self.counts), "edges": list(self.edges)}}


@dataclass(frozen=True)
class Completions:
    """What a language model wrote for prompts. The report and the live page show it beside what other checkpoints
    wrote for the same ones. It has no score, so it decides nothing. At most one in a report.

    Raises:
        ValueError: there are too many, or two have the same number.
    """

    texts: Sequence[tuple[int, str, str]]
    """For each prompt: its number among all prompts, from 0; the prompt; and what the model wrote. Of all shards
    together at most 64."""

    def __post_init__(self) -> None:
        if len(self.texts) > MAX_COMPLETIONS:
            raise ValueError(f"a report has at most {MAX_COMPLETIONS} completions, not {len(self.texts)}")
        found: dict[int, tuple[int, str, str]] = {}
        for number, prompt, text in self.texts:
            if number in found:
                raise ValueError(f"prompt {number} was completed twice")
            found[number] = int(number), cut(prompt, MAX_PROMPT), cut(text, MAX_COMPLETION)
        object.__setattr__(self, "texts", tuple(found[number] for number in sorted(found)))

    def wire(self) -> dict[str, Any]:
        """Its form in JSON."""
        return {"completions": [list(one) for one in self.texts]}


def cut(text: str, most: int) -> str:
    """The text, cut to `most` characters. What UTF-8 cannot encode becomes a question mark."""
    whole = text if len(text) <= most else text[: most - 1] + "…"
    return whole.encode(errors="replace").decode()


Value = Mean | GeometricMean | Sum | Max | Min | Confusion | Histogram | Completions


def added(values: Sequence[Value]) -> Value:
    """Put values of one metric together, of batches or of shards. Their order does not show, not even in the last bit.

    Args:
        values: at least one, with plain numbers in them. What is not finite makes the result NaN or infinite.

    Raises:
        ValueError: they are of different kinds, or of different classes or bins.
    """
    first = values[0]
    for value in values:
        if type(value) is not type(first):
            raise ValueError(f"a {type(first).__name__} and a {type(value).__name__} do not add up")
    match first:
        case Mean():
            return Mean(_total(value.total for value in values), _total(value.count for value in values))  # type: ignore[union-attr]
        case GeometricMean():
            logarithms = _total(value.log_total for value in values)  # type: ignore[union-attr]
            return GeometricMean(logarithms, _total(value.count for value in values))  # type: ignore[union-attr]
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
            return Completions([one for value in values for one in value.texts])  # type: ignore[union-attr]
    raise AssertionError


def _histogram(values: Sequence[Histogram]) -> Histogram:
    first = values[0]
    for value in values:
        if value.edges != first.edges:
            edges = (f"{len(one.edges)} from {one.edges[0]:g} to {one.edges[-1]:g}" for one in (first, value))
            raise ValueError(f"histograms of different edges do not add up ({' and '.join(edges)}); use fixed edges")
    return Histogram([sum(counts) for counts in zip(*(value.counts for value in values), strict=True)], first.edges)


def _total(values: Iterable[SupportsFloat]) -> float:
    numbers = [float(value) for value in values]
    try:
        return math.fsum(numbers)
    except (OverflowError, ValueError):
        # fsum refuses what is infinite in between, and infinities of both signs: the sum is infinite, or NaN.
        return sum(numbers)


def _extreme(of: Callable[[list[float]], float], values: list[float]) -> float:
    """The largest or the smallest one; NaN if one of them is."""
    return math.nan if any(map(math.isnan, values)) else of(values)


@dataclass
class Checkpoint:
    """One shard of the evaluation data under one checkpoint."""

    folder: Path
    """The checkpoint, to be read and never changed."""
    weights: Path
    """Its weights: a safetensors file whose checksums were verified just now."""
    step: int
    """The training step after which it was taken."""
    shard: int
    """Which part of the evaluation data to take, from 0: the samples `shard`, `shard + shards`, …"""
    shards: int
    """How many parts there are."""
    _reports: int | None = field(default=None, repr=False)
    is_reported: bool = field(default=False, repr=False)

    def report(self, **metrics: Value | SupportsFloat) -> None:
        """Report what this shard adds to the checkpoint's metrics. Once for each checkpoint.

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
            _write(self._reports, {"metrics": body})


def checkpoints() -> Iterator[Checkpoint]:
    """The checkpoints to evaluate, one shard at a time, until training is over and all is evaluated.

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
    """Descriptors of the pipes, of shards and of reports; None where nobody listens. Programs that this one starts do
    not take them for theirs."""
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
    """A number as JSON has it: None for what is not finite. A tensor or array of one element is one, too."""
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
