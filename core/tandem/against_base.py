"""Scores beside those of the base model, and whether training makes them worse.

A model that is fine-tuned begins good. So the question is not only which checkpoint is the best, but whether it is
better than what was there before. Only scores on the same data are compared, each as evaluators report it.

Training counts as worse when the newest CHECKPOINTS evaluated checkpoints are all worse than the base model by the
metric that decides: one or two may be, while the learning rate still rises. Once training is over, all that were
evaluated count, be they fewer.
"""

from collections.abc import Iterable, Mapping, Sequence

from tandem.formatting import change, metric_name, score
from tandem.rundir import catalog, evaluations
from tandem.rundir.evaluations import Best, Goal
from tandem.rundir.layout import RunDir
from tandem.status import CheckpointRef, Compared, Score

CHECKPOINTS = 3
"""In a row, the newest last."""
MAX_COUNT = 16
"""Metrics that are compared."""


def compared(base: Mapping[str, float], scores: Mapping[str, float], metric: str) -> list[Compared]:
    """Each metric of the base model beside that of a checkpoint, the one that decides first.

    Args:
        base: the scores of the base model.
        scores: those of the checkpoint; empty while there is none.
    """
    names = sorted(base, key=lambda name: name != metric)[:MAX_COUNT]
    return [Compared(metric=name, base=base[name], value=scores.get(name)) for name in names]


def is_worse(base: float, value: float, goal: Goal) -> bool:
    """Whether a score is worse than that of the base model."""
    return value < base if goal == "Maximize" else value > base


def worse(base: Mapping[str, float], newest: Sequence[Score], goal: Goal, is_over: bool) -> int:
    """How many checkpoints in a row, of the newest, are worse than the base model, CHECKPOINTS at most; 0 while these
    are too few to tell.

    Args:
        newest: the newest evaluated checkpoints, in any order, at most CHECKPOINTS.
        is_over: whether no more are trained.
    """
    needed = min(CHECKPOINTS, len(newest)) if is_over else CHECKPOINTS
    count = sum(one.metric in base and is_worse(base[one.metric], one.value, goal) for one in newest)
    return count if needed and count >= needed else 0


def of_run(rundir: RunDir, best: Best | None, metric: str) -> list[Compared]:
    """The metrics of a run's base model beside those of its best checkpoint; empty where no base model is evaluated."""
    base = catalog.base(rundir)
    if base is None:
        return []
    scores: Mapping[str, float] = {}
    if best is not None and best.step is not None and best.generation is not None:
        reference = CheckpointRef(name=best.name, step=best.step, generation=best.generation)
        scores = evaluations.scores(catalog.merged_result(rundir, reference))
    return compared(base[0].metrics, scores, metric)


def told(found: Iterable[Compared]) -> str:
    """For a line: `perplexity 1,265 → 1.896 (−99.9 %), loss 7.143`."""
    return ", ".join(_told(one) for one in found)


def _told(one: Compared) -> str:
    base = f"{metric_name(one.metric)} {score(one.metric, one.base)}"
    if one.value is None:
        return base
    return f"{base} → {score(one.metric, one.value)} ({change(one.metric, one.base, one.value)})"


def sentence(base: Mapping[str, float], newest: Sequence[Score]) -> str:
    """What is said of the checkpoints that are worse: the metric of the newest, and of the base model."""
    last = max(newest, key=lambda one: one.step)
    who = "evaluated checkpoint is" if len(newest) == 1 else f"{len(newest)} evaluated checkpoints are"
    return (
        f"the last {who} worse than the base model: {metric_name(last.metric)} "
        f"{score(last.metric, last.value)} at step {last.step:,}, {score(last.metric, base[last.metric])} of the base"
    )
