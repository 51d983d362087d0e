"""Comparison of checkpoints with the base model, and the check whether training makes it worse.

A fine-tuned model starts from a good one. So the question is not only which checkpoint is the best, but whether it is
better than the base model. Only scores on the same data are compared, as evaluators report them.

Training counts as worse when the newest CHECKPOINTS evaluated checkpoints are all worse than the base model by the
deciding metric: one or two may be, while the learning rate still rises. Once training is over, all evaluated
checkpoints count, even if they are fewer.
"""

from collections.abc import Iterable, Mapping, Sequence

from tandem.formatting import change, metric_name, score
from tandem.rundir import catalog, evaluations
from tandem.rundir.evaluations import Best, Goal
from tandem.rundir.layout import RunDir
from tandem.wire.status import CheckpointRef, Compared, Score

MIN_WORSE_CHECKPOINTS = 3
"""Number of newest evaluated checkpoints that must all be worse."""
MAX_COUNT = 16
"""Maximum number of metrics to compare."""


def compare_with_base(base: Mapping[str, float], scores: Mapping[str, float], metric: str) -> list[Compared]:
    """The metrics of the base model and of a checkpoint, the deciding one first.

    Args:
        base: the scores of the base model.
        scores: the scores of the checkpoint; empty while there is none.
    """
    names = sorted(base, key=lambda name: name != metric)[:MAX_COUNT]
    return [Compared(metric=name, base=base[name], value=scores.get(name)) for name in names]


def is_worse(base: float, value: float, goal: Goal) -> bool:
    """Whether a score is worse than that of the base model."""
    return value < base if goal == "Maximize" else value > base


def count_worse(base: Mapping[str, float], newest: Sequence[Score], goal: Goal, is_over: bool) -> int:
    """Number of newest checkpoints that are all worse than the base model, at most CHECKPOINTS; 0 if they are too few
    to decide, or not all worse.

    Args:
        newest: the newest evaluated checkpoints, in any order, at most CHECKPOINTS.
        is_over: whether training has ended.
    """
    needed = min(MIN_WORSE_CHECKPOINTS, len(newest)) if is_over else MIN_WORSE_CHECKPOINTS
    count = sum(
        checkpoint.metric in base and is_worse(base[checkpoint.metric], checkpoint.value, goal) for checkpoint in newest
    )
    return count if needed and count >= needed else 0


def compare_best_with_base(rundir: RunDir, best: Best | None, metric: str) -> list[Compared]:
    """The metrics of a run's base model and of its best checkpoint; empty where no base model is evaluated."""
    base = catalog.read_base_result(rundir)
    if base is None:
        return []
    scores: Mapping[str, float] = {}
    if best is not None and best.step is not None and best.generation is not None:
        reference = CheckpointRef(name=best.name, step=best.step, generation=best.generation)
        scores = evaluations.scores(catalog.merged_result(rundir, reference))
    return compare_with_base(base[0].metrics, scores, metric)


def format_comparisons(comparisons: Iterable[Compared]) -> str:
    """Format comparisons in one line: `perplexity 1,265 → 1.896 (−99.9 %), loss 7.143`."""
    return ", ".join(map(_formatted, comparisons))


def _formatted(comparison: Compared) -> str:
    metric, base = comparison.metric, comparison.base
    before = f"{metric_name(metric)} {score(metric, base)}"
    if comparison.value is None:
        return before
    return f"{before} → {score(metric, comparison.value)} ({change(metric, base, comparison.value)})"


def worse_than_base_message(base: Mapping[str, float], newest: Sequence[Score]) -> str:
    """Message about the checkpoints that are worse: the metric of the newest, and of the base model."""
    last = max(newest, key=lambda checkpoint: checkpoint.step)
    subject = "evaluated checkpoint is" if len(newest) == 1 else f"{len(newest)} evaluated checkpoints are"
    return (
        f"the last {subject} worse than the base model: {metric_name(last.metric)} "
        f"{score(last.metric, last.value)} at step {last.step:,}, {score(last.metric, base[last.metric])} of the base"
    )
