"""A sweep: one job with several settings, each a trial. A file of the command line; the operator does not know it.

The job's `evaluators.metric` ranks the trials, as it ranks the checkpoints of each.
"""

from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field

from tandem.job.resource import Metadata
from tandem.model import Model, Rule

SWEEP_KIND = "Sweep"
MAX_TRIALS = 10_000
MAX_DIMENSIONS = 64


def _is_scalar(value: Any) -> bool:
    return isinstance(value, str | bool | int | float)


class Dimension(Model):
    """The values that a field of the job can have: `values`, or a range from `low` to `high`."""

    values: Annotated[list[Any], Field(min_length=1, max_length=1_000)] | None = None
    """Values to choose from: texts, numbers, true or false."""
    low: float | None = None
    """Lowest number."""
    high: float | None = None
    """Highest number, included."""
    log: bool = False
    """Whether the logarithm is drawn evenly, for learning rates and the like."""
    step: Annotated[float, Field(gt=0)] | None = None
    """Distance between the numbers of a range. Default: 1 for a whole number, none for others."""

    rules: ClassVar[tuple[Rule, ...]] = (
        Rule(
            lambda d: (d.values is None) != (d.low is None and d.high is None),
            "",
            "give either values, or low and high",
        ),
        Rule(lambda d: (d.low is None) == (d.high is None), "", "a range has low and high", "high"),
        Rule(lambda d: d.low is None or d.high is None or d.low < d.high, "", "low must be less than high", "low"),
        Rule(lambda d: not d.log or d.low is None or d.low > 0, "", "a logarithmic range begins above 0", "low"),
        Rule(lambda d: not (d.log and d.step), "", "a logarithmic range has no step", "step"),
        Rule(lambda d: d.values is None or not (d.log or d.step), "", "log and step belong to low and high"),
        Rule(
            lambda d: d.values is None or all(map(_is_scalar, d.values)),
            "",
            "values are texts, numbers, true or false",
            "values",
        ),
        Rule(
            lambda d: d.values is None or len({repr(value) for value in d.values}) == len(d.values),
            "",
            "each value stands once",
            "values",
        ),
    )


class PrunerSpec(Model):
    """The rule that stops trials early, by the scores of their checkpoints."""

    name: Literal["asha", "promotion", "median", "none"] = "asha"
    """`asha`: asynchronous successive halving, of the trials that reach `minSteps`, `minSteps × factor`, … the best
    `1 / factor` continue. `promotion`: the same, but trials pause with a checkpoint, and continue once they are among
    the best. `median`: a trial stops if it is worse than the median of the earlier ones at its step.
    `none`: each trial continues to its end."""
    min_steps: Annotated[int, Field(ge=1)] | None = None
    """Steps before which no trial is stopped. Default: `checkpoint.everySteps` of the job."""
    factor: Annotated[int, Field(ge=2, le=100)] = 3
    """Reduction factor of `asha` and `promotion`."""


class SweepBudget(Model):
    """The end of a sweep."""

    trials: Annotated[int, Field(ge=1, le=MAX_TRIALS)] = 20
    """Number of trials; those that fail are replaced and do not count."""
    hours: Annotated[float, Field(gt=0)] | None = None
    """Hours after which running trials are stopped; pauses of the sweep do not count."""
    cost: Annotated[float, Field(gt=0)] | None = None
    """Cost of all trials after which running ones are stopped; needs `prices` in the job."""


class SweepSpec(Model):
    """A job, the fields that vary, and the choice of their values."""

    job: Annotated[str, Field(min_length=1, max_length=4_096)]
    """Path of the job's manifest, relative to this file."""
    space: Annotated[dict[str, Dimension], Field(min_length=1, max_length=MAX_DIMENSIONS)]
    """The fields that vary, by their paths as in `--set`: `trainer.loop.optimizer.learningRate`."""
    sampler: Literal["tpe", "random", "grid"] = "tpe"
    """Sampler of Optuna that chooses values. `tpe` learns from earlier trials; `grid` takes every combination of
    `values`, and of ranges that have a `step`."""
    pruner: PrunerSpec = PrunerSpec()
    """The rule that stops trials early."""
    budget: SweepBudget = SweepBudget()
    """The end of the sweep."""
    workers: Annotated[int, Field(ge=1)] | None = None
    """Maximum number of workers of all running trials together. Default: those of one trial."""
    seed: Annotated[int, Field(ge=0, le=2**31)] = 0
    """Seed of the sampler."""


class Sweep(Model):
    """Trials of a job with different settings; scores of their checkpoints stop the worse ones."""

    api_version: Literal["tandem.dev/v1alpha1"]
    """Always tandem.dev/v1alpha1."""
    kind: Literal["Sweep"]
    """Always Sweep."""
    metadata: Metadata
    """Name of the sweep; its trials are called NAME-0, NAME-1, …"""
    spec: SweepSpec
    """The sweep."""
