"""The evaluation files: their names, the progress that they record, and the rule of the best checkpoint.

Of generation 7: `g000007.shard-0-of-2.json` for each part, then `g000007.json`, the merged result; or
`g000007.skipped.json`, the note that nobody evaluates it; or `g000007.failed.json`, the note that the user's program
cannot. Each is created once and never replaced. A merged result counts whatever else is there.

The scores that decide are those on the validation data, where the job holds some out: what is chosen by the test data
looks better on it than on anything else. Of equals the one with the lower loss is the better, and then the earlier
one, which has been trained less for the same score. What has no finite loss, on either data, has no rank, whatever its
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

from tandem.evaluation import Completions, Histogram
from tandem.job import DistributedTrainingJob
from tandem.model import Count, Model, Number, PlainName, Text, finite
from tandem.rundir.durable import create_json, listed, read_json_or_none
from tandem.rundir.layout import RunDir
from tandem.status import CheckpointRef
from tandem.tasks import GOALS

Fate = Literal["merged", "skipped", "begun", "waits"]
"""`begun`: a part is there, and the rest is not."""

_LAST_WORD = re.compile(r"^g(\d{6,15})(\.skipped|\.failed)?\.json$")
_SHARD = re.compile(r"^g(\d{6,15})\.shard-\d+-of-\d+\.json$")


class LastWord(NamedTuple):
    """A file that says that nothing more will come: the merged result of a checkpoint, or the note that it is passed
    over or cannot be evaluated."""

    path: Path
    generation: int
    """That wrote the checkpoint."""
    is_note: bool
    is_failure: bool = False
    """A note that the checkpoint cannot be evaluated: nobody tries again."""


def last_word(path: Path) -> LastWord | None:
    """What a file is by its name; None for every other one."""
    match = _LAST_WORD.match(path.name)
    return LastWord(path, int(match[1]), bool(match[2]), match[2] == ".failed") if match else None


class Best(Model):
    """What best.json says, for people: nobody decides by it. `rank` says which checkpoint is the best."""

    name: PlainName
    """The checkpoint's."""
    step: Count = None
    generation: Count = None
    metric: Text = None
    """By which it is the best."""
    value: Number = None
    """Of that metric, on the test data."""


def best(rundir: RunDir) -> Best | None:
    """The best checkpoint, as evaluators have said; None while there is none."""
    try:
        return Best.read(read_json_or_none(rundir.best_file))
    except ValidationError:
        return None


def folder(rundir: RunDir, reference: CheckpointRef) -> Path:
    """Where the evaluation files of a checkpoint are."""
    return rundir.evaluations / reference.name


def shard_name(reference: CheckpointRef, shard: int, shards: int) -> str:
    """File name of a shard's result."""
    return f"g{reference.generation:06d}.shard-{shard}-of-{shards}.json"


def merged_name(reference: CheckpointRef) -> str:
    """File name of the merged result."""
    return f"g{reference.generation:06d}.json"


def merged_file(rundir: RunDir, reference: CheckpointRef) -> Path:
    """The merged result of a checkpoint, which may not be there yet."""
    return folder(rundir, reference) / merged_name(reference)


def skipped_name(reference: CheckpointRef) -> str:
    """File name of the note that a checkpoint was passed over."""
    return f"g{reference.generation:06d}.skipped.json"


def failed_name(reference: CheckpointRef) -> str:
    """File name of the note that the user's program cannot evaluate a checkpoint."""
    return f"g{reference.generation:06d}.failed.json"


def fail(rundir: RunDir, reference: CheckpointRef, why: str) -> bool:
    """Record that the user's program cannot evaluate a checkpoint. False if that is recorded already.

    Raises:
        OSError: the disk does not take it.
    """
    return _note(rundir, reference, failed_name(reference), f"its evaluation failed: {why}")


def skip(rundir: RunDir, reference: CheckpointRef, why: str) -> bool:
    """Record that a checkpoint is passed over. False if that is recorded already.

    Raises:
        OSError: the disk does not take it.
    """
    return _note(rundir, reference, skipped_name(reference), why)


def _note(rundir: RunDir, reference: CheckpointRef, name: str, why: str) -> bool:
    target = folder(rundir, reference)
    target.mkdir(parents=True, exist_ok=True)
    return create_json(target / name, {"why": why, "at": time.time()}, durable=False)


def fate(rundir: RunDir, reference: CheckpointRef) -> Fate:
    """How far the evaluation of a checkpoint is."""
    names = {path.name for path in listed(folder(rundir, reference))}
    if merged_name(reference) in names:
        return "merged"
    if names & {skipped_name(reference), failed_name(reference)}:
        return "skipped"
    parts = (match for name in names if (match := _SHARD.match(name)))
    return "begun" if any(int(match[1]) == reference.generation for match in parts) else "waits"


BASE = CheckpointRef(name="base", step=0, generation=0)
"""The model that training began with (`parameters.pretrained`), evaluated as checkpoints are. It is none: nothing is
resumed from it, and it never becomes the best."""

Goal = Literal["Maximize", "Minimize"]

METRICS, VALIDATION = "metrics", "validation"
"""In a merged result: the scores on the test data; and what is known of the validation data, with scores of its own."""
HISTOGRAMS = "histograms"
"""In a merged result of a program: how often values lie in which bin, for people alone."""
COMPLETIONS = "completions"
"""In a merged result: what a language model wrote for prompts, for people alone."""
LOSS = "loss"


@dataclass(frozen=True, order=True)
class Rank:
    """Where a checkpoint stands among others: the smallest is the best."""

    score: float
    """The metric, negative where more is better."""
    loss: float
    """Of the same data; 0 where none is reported."""
    step: int
    """The checkpoint's step."""
    generation: int
    """The generation that wrote it."""


def direction(job: DistributedTrainingJob | None, metric: str) -> Goal:
    """Which way a metric is better."""
    return job.spec.evaluation.direction if job else GOALS.get(metric, "Maximize")


def deciding(result: Mapping[str, Any]) -> dict[str, float]:
    """The scores by which a merged result is compared with others: those that are numbers, by metric."""
    tested = scores(result)
    if LOSS not in tested and LOSS in _metrics(result):
        return {}
    if not isinstance(result.get(VALIDATION), Mapping):
        return tested
    validated = held_out(result)
    return validated if LOSS in validated or LOSS not in _metrics(result[VALIDATION]) else {}


def held_out(result: Mapping[str, Any]) -> dict[str, float]:
    """The scores of a merged result on the validation data: those that are numbers, by metric; none where no data is
    held out."""
    part = result.get(VALIDATION)
    return scores(part) if isinstance(part, Mapping) else {}


def scores(part: Mapping[str, Any]) -> dict[str, float]:
    """The scores of a merged result, or of its part on the validation data: those that are numbers, by metric."""
    found = {str(name): finite(value) for name, value in _metrics(part).items()}
    return {name: value for name, value in found.items() if value is not None}


def histograms(result: Mapping[str, Any]) -> dict[str, Histogram]:
    """The histograms of a merged result by name; what is damaged is none."""
    found = {}
    source = result.get(HISTOGRAMS)
    for name, bins in source.items() if isinstance(source, Mapping) else ():
        with suppress(ValueError, TypeError, KeyError):
            found[str(name)] = Histogram(bins["counts"], bins["edges"])
    return found


def completions(result: Mapping[str, Any]) -> Completions:
    """What a language model wrote for prompts, of a merged result; what is damaged is none."""
    source = result.get(COMPLETIONS)
    texts = []
    for one in source if isinstance(source, list) else ():
        with suppress(TypeError, KeyError):
            if isinstance(one["prompt"], str) and isinstance(one["text"], str) and isinstance(one["number"], int):
                texts.append((one["number"], one["prompt"], one["text"]))
    with suppress(ValueError):
        return Completions(texts)
    return Completions([])


def _metrics(part: Mapping[str, Any]) -> Mapping[str, Any]:
    source = part.get(METRICS)
    return source if isinstance(source, Mapping) else {}


def rank(scores: Mapping[str, float], metric: str, goal: Goal, step: int, generation: int | None) -> Rank | None:
    """The rank of a checkpoint; None where it cannot become the best.

    Args:
        scores: what `deciding` has found in its result.
    """
    if metric not in scores:
        return None
    value = scores[metric]
    return Rank(-value if goal == "Maximize" else value, scores.get(LOSS, 0.0), step, generation or 0)
