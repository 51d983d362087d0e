"""Which of several evaluated checkpoints is the best: one rule for evaluators, retention, the coordinator and reports.

The scores that decide are those on the validation data, where the job holds some out: what is chosen by the test data
looks better on it than on anything else. Of equals the one with the lower loss is the better, and then the earlier
one, which has been trained less for the same score. What has no finite loss, on either data, has no rank, whatever its
other scores.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from tandem.job import DistributedTrainingJob
from tandem.model import finite
from tandem.tasks import GOALS

Goal = Literal["Maximize", "Minimize"]

METRICS, VALIDATION = "metrics", "validation"
"""In a merged result: the scores on the test data; and what is known of the validation data, with scores of its own."""
LOSS = "loss"


@dataclass(frozen=True, order=True)
class Rank:
    """Where a checkpoint stands among others: the smallest is the best."""

    score: float
    """The metric, negative where more is better."""
    loss: float
    """Of the same data."""
    step: int
    """The checkpoint's step."""
    generation: int
    """The generation that wrote it."""


def direction(job: DistributedTrainingJob | None, metric: str) -> Goal:
    """Which way a metric is better."""
    return job.spec.evaluation.direction if job else GOALS.get(metric, "Maximize")


def deciding(result: Mapping[str, Any]) -> dict[str, float]:
    """The scores by which a merged result is compared with others: those that are numbers, by metric."""
    tested = _scores(result)
    if not isinstance(result.get(VALIDATION), Mapping):
        return tested
    return held_out(result) if LOSS in tested else {}


def held_out(result: Mapping[str, Any]) -> dict[str, float]:
    """The scores of a merged result on the validation data: those that are numbers, by metric; none where no data is
    held out."""
    part = result.get(VALIDATION)
    return _scores(part) if isinstance(part, Mapping) else {}


def _scores(part: Mapping[str, Any]) -> dict[str, float]:
    source = part.get(METRICS)
    found = {str(name): finite(value) for name, value in source.items()} if isinstance(source, Mapping) else {}
    return {name: value for name, value in found.items() if value is not None}


def rank(scores: Mapping[str, float], metric: str, goal: Goal, step: int, generation: int | None) -> Rank | None:
    """The rank of a checkpoint; None where it cannot become the best.

    Args:
        scores: what `deciding` has found in its result.
    """
    if metric not in scores or LOSS not in scores:
        return None
    value = scores[metric]
    return Rank(-value if goal == "Maximize" else value, scores[LOSS], step, generation or 0)
