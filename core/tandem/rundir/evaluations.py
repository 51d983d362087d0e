"""The evaluation files: their names, the progress that they record, and the rule of the best checkpoint.

A checkpoint of generation 7 has `g000007.shard-0-of-2.json` for each shard, then `g000007.json`, the merged result; or
`g000007.skipped.json`, the note that nobody evaluates it; or `g000007.failed.json`, the note that the user's program
cannot evaluate it. Each is created once and never replaced. A merged result counts whatever other files exist.

The deciding scores are those on the validation data, where the job holds some out: a checkpoint that is selected by the
test data scores better on it than on any other. Of equal scores the one with the lower loss is better, and then the
earlier one, which needed less training. A checkpoint without a finite loss on either data has no rank, whatever its
other scores. A program of the user's need not report a loss; then the score alone decides.
"""

import re
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NamedTuple

from pydantic import ValidationError

from tandem.confidence import Estimate, Interval
from tandem.evaluation import Completions, Histogram
from tandem.job.resource import DistributedTrainingJob
from tandem.job.tasks import GOALS
from tandem.model import Count, Model, Number, PlainName, Text, finite
from tandem.rundir.durable import create_json, list_folder, read_json_or_none
from tandem.rundir.layout import RunDir
from tandem.wire.status import CheckpointRef

Fate = Literal["merged", "skipped", "begun", "waits"]
"""Progress of an evaluation. `begun`: some shards are evaluated, but not all."""

PASSED_OVER = "a newer checkpoint was there before its turn came"
"""Reason for which a checkpoint is skipped under the policy `Latest`."""
_LAST_WORD = re.compile(r"^g(\d{6,15})(\.skipped|\.failed)?\.json$")
_SHARD = re.compile(r"^g(\d{6,15})\.shard-\d+-of-\d+\.json$")


class FinalFile(NamedTuple):
    """A final file of an evaluation: the merged result of a checkpoint, or the note that it is skipped or cannot be
    evaluated."""

    path: Path
    generation: int
    """The generation that wrote the checkpoint."""
    is_note: bool
    is_failure: bool = False
    """Whether it notes that the checkpoint cannot be evaluated: nobody tries again."""


def parse_final_file(path: Path) -> FinalFile | None:
    """Parse the name of a final file; None for any other file."""
    match = _LAST_WORD.match(path.name)
    return FinalFile(path, int(match[1]), bool(match[2]), match[2] == ".failed") if match else None


class Best(Model):
    """The content of best.json, for people: nothing is decided by it. `rank` decides which checkpoint is the best."""

    name: PlainName
    """The checkpoint's name."""
    step: Count = None
    generation: Count = None
    metric: Text = None
    """The metric by which it is the best."""
    value: Number = None
    """The value of that metric on the test data."""
    low: Number = None
    high: Number = None
    """Its 95 % confidence interval; None if it is not known."""
    tied: Count = None
    """Number of other checkpoints whose deciding score does not differ by more than chance; None if it is not known."""


def best(rundir: RunDir) -> Best | None:
    """The best checkpoint as recorded by evaluators; None while there is none."""
    try:
        return Best.read(read_json_or_none(rundir.best_file))
    except ValidationError:
        return None


def folder(rundir: RunDir, reference: CheckpointRef) -> Path:
    """The folder with the evaluation files of a checkpoint."""
    return rundir.evaluations / reference.name


def shard_name(reference: CheckpointRef, shard: int, shards: int) -> str:
    """File name of the result of one shard."""
    return f"g{reference.generation:06d}.shard-{shard}-of-{shards}.json"


def merged_name(reference: CheckpointRef) -> str:
    """File name of the merged result."""
    return f"g{reference.generation:06d}.json"


def merged_file(rundir: RunDir, reference: CheckpointRef) -> Path:
    """Path of the merged result of a checkpoint, which need not exist."""
    return folder(rundir, reference) / merged_name(reference)


def skipped_name(reference: CheckpointRef) -> str:
    """File name of the note that a checkpoint was skipped."""
    return f"g{reference.generation:06d}.skipped.json"


def failed_name(reference: CheckpointRef) -> str:
    """File name of the note that the user's program cannot evaluate a checkpoint."""
    return f"g{reference.generation:06d}.failed.json"


def record_failed_evaluation(rundir: RunDir, reference: CheckpointRef, reason: str) -> bool:
    """Record that the user's program cannot evaluate a checkpoint. Returns False if that is recorded already.

    Raises:
        OSError: the note cannot be written.
    """
    return _note(rundir, reference, failed_name(reference), f"its evaluation failed: {reason}")


def record_skipped_evaluation(rundir: RunDir, reference: CheckpointRef, reason: str) -> bool:
    """Record that a checkpoint is skipped. Returns False if that is recorded already.

    Raises:
        OSError: the note cannot be written.
    """
    return _note(rundir, reference, skipped_name(reference), reason)


def _note(rundir: RunDir, reference: CheckpointRef, name: str, reason: str) -> bool:
    target = folder(rundir, reference)
    target.mkdir(parents=True, exist_ok=True)
    return create_json(target / name, {"why": reason, "at": time.time()}, durable=False)


def evaluation_progress(rundir: RunDir, reference: CheckpointRef) -> Fate:
    """The progress of the evaluation of a checkpoint."""
    names = {path.name for path in list_folder(folder(rundir, reference))}
    if merged_name(reference) in names:
        return "merged"
    if names & {skipped_name(reference), failed_name(reference)}:
        return "skipped"
    shards = (match for name in names if (match := _SHARD.match(name)))
    return "begun" if any(int(match[1]) == reference.generation for match in shards) else "waits"


BASE = CheckpointRef(name="base", step=0, generation=0)
"""The base model (`parameters.pretrained`), evaluated as checkpoints are. It is not a checkpoint: nothing resumes from
it, and it never becomes the best."""

Goal = Literal["Maximize", "Minimize"]

METRICS, VALIDATION = "metrics", "validation"
"""Keys of a merged result: the scores on the test data, and the results on the validation data with scores of their
own."""
INTERVALS = "intervals"
"""Key of a merged result, and of its part on the validation data: the confidence intervals of its scores."""
HISTOGRAMS = "histograms"
"""Key of a program's merged result: histograms of values, for people only."""
COMPLETIONS = "completions"
"""Key of a merged result: completions of prompts by a language model, for people only."""
LOSS = "loss"


@dataclass(frozen=True, order=True)
class Rank:
    """The rank of a checkpoint among others: the smallest is the best."""

    score: float
    """The metric, negative where more is better."""
    loss: float
    """The loss on the same data; 0 where none is reported."""
    step: int
    """The checkpoint's step."""
    generation: int
    """The generation that wrote it."""


def direction(job: DistributedTrainingJob | None, metric: str) -> Goal:
    """Whether a higher or a lower value of a metric is better."""
    return job.spec.evaluation.direction if job else GOALS.get(metric, "Maximize")


def deciding_scores(result: Mapping[str, Any]) -> dict[str, float]:
    """The scores that rank a merged result: the finite ones, by metric."""
    tested = scores(result)
    if LOSS not in tested and LOSS in _metrics(result):
        return {}
    if not isinstance(result.get(VALIDATION), Mapping):
        return tested
    validated = held_out(result)
    return validated if LOSS in validated or LOSS not in _metrics(result[VALIDATION]) else {}


def held_out(result: Mapping[str, Any]) -> dict[str, float]:
    """The finite scores of a merged result on the validation data, by metric; empty where no data is held out."""
    part = result.get(VALIDATION)
    return scores(part) if isinstance(part, Mapping) else {}


def scores(part: Mapping[str, Any]) -> dict[str, float]:
    """The finite scores of a merged result, or of its part on the validation data, by metric."""
    values = {str(name): finite(value) for name, value in _metrics(part).items()}
    return {name: value for name, value in values.items() if value is not None}


def intervals(part: Mapping[str, Any]) -> dict[str, Interval]:
    """The confidence intervals in a merged result, or in its part on the validation data, by metric; damaged ones are
    skipped."""
    source = part.get(INTERVALS)
    intervals = {}
    for name, ends in source.items() if isinstance(source, Mapping) else ():
        numbers = [finite(end) for end in ends] if isinstance(ends, list) else []
        if len(numbers) == 2 and numbers[0] is not None and numbers[1] is not None and numbers[0] <= numbers[1]:
            intervals[str(name)] = Interval(numbers[0], numbers[1])
    return intervals


def deciding_estimates(result: Mapping[str, Any]) -> dict[str, Estimate]:
    """The scores that rank a merged result, each with its confidence interval."""
    part = result[VALIDATION] if isinstance(result.get(VALIDATION), Mapping) else result
    ends = intervals(part)
    return {name: Estimate(value, ends.get(name)) for name, value in deciding_scores(result).items()}


def histograms(result: Mapping[str, Any]) -> dict[str, Histogram]:
    """The histograms of a merged result by name; damaged ones are skipped."""
    histograms = {}
    source = result.get(HISTOGRAMS)
    for name, bins in source.items() if isinstance(source, Mapping) else ():
        with suppress(ValueError, TypeError, KeyError):
            histograms[str(name)] = Histogram(bins["counts"], bins["edges"])
    return histograms


def completions(result: Mapping[str, Any]) -> Completions:
    """The completions in a merged result; damaged ones are skipped."""
    source = result.get(COMPLETIONS)
    texts = []
    for completion in source if isinstance(source, list) else ():
        with suppress(TypeError, KeyError):
            if (
                isinstance(completion["prompt"], str)
                and isinstance(completion["text"], str)
                and isinstance(completion["number"], int)
            ):
                texts.append((completion["number"], completion["prompt"], completion["text"]))
    with suppress(ValueError):
        return Completions(texts)
    return Completions([])


def _metrics(part: Mapping[str, Any]) -> Mapping[str, Any]:
    source = part.get(METRICS)
    return source if isinstance(source, Mapping) else {}


def rank(scores: Mapping[str, float], metric: str, goal: Goal, step: int, generation: int | None) -> Rank | None:
    """The rank of a checkpoint; None where it cannot become the best.

    Args:
        scores: its deciding scores (`deciding_scores`).
    """
    if metric not in scores:
        return None
    value = scores[metric]
    return Rank(-value if goal == "Maximize" else value, scores.get(LOSS, 0.0), step, generation or 0)
