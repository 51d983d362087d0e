"""Verdicts of a benchmark on its goals, and its exit code. Pure.

A goal is met, missed, or not judged: the run was too short or the machine too noisy. A benchmark ends with 0 only if
every goal that it states is met:

    0   all goals are met
    1   a goal is missed, or a measurement failed
    3   a goal could not be judged, and none is missed (2 is the command line's)
"""

import math
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import Enum

CONFIDENCE = 0.95
MIN_VALUES = 5
"""Minimum number of measurements for a verdict."""


class Outcome(Enum):
    """Outcome of a goal."""

    MET = "met"
    MISSED = "missed"
    UNJUDGED = "not judged"


EXIT_CODES = {Outcome.MET: 0, Outcome.MISSED: 1, Outcome.UNJUDGED: 3}


@dataclass(frozen=True)
class Verdict:
    """Outcome of one goal, and the reason."""

    outcome: Outcome
    goal: str
    reason: str

    def __str__(self) -> str:
        return f"{self.outcome.value}: {self.goal}: {self.reason}"


def exit_code(verdicts: Iterable[Verdict]) -> int:
    """Exit code of a benchmark with these goals; 0 without goals."""
    outcomes = {verdict.outcome for verdict in verdicts}
    worst = next((outcome for outcome in (Outcome.MISSED, Outcome.UNJUDGED) if outcome in outcomes), Outcome.MET)
    return EXIT_CODES[worst]


def conclude(verdicts: Sequence[Verdict]) -> int:
    """Print the verdicts; returns the benchmark's exit code."""
    for verdict in verdicts:
        print(verdict)
    return exit_code(verdicts)


def judge_median(goal: str, values: Sequence[float], bound: float, unit: str = "s") -> Verdict:
    """Judge a goal for the median of measured times. A failure counts as `math.inf`."""
    if len(values) < MIN_VALUES:
        return Verdict(Outcome.UNJUDGED, goal, f"{len(values)} measured, at least {MIN_VALUES} are needed")
    median = statistics.median(values)
    outcome = Outcome.MET if median <= bound else Outcome.MISSED
    formatted = f"{median:.3g} {unit}" if math.isfinite(median) else "never"
    return Verdict(outcome, goal, f"median {formatted} of {len(values)}")


def interval(values: Sequence[float], confidence: float = CONFIDENCE) -> tuple[float, float] | None:
    """Compute the confidence interval of the median from the order of the values alone (the sign test).

    It assumes nothing about the distribution: the number of `n` values below the true median is that of heads in `n`
    throws of a coin. Returns None if even the whole range does not reach this confidence: below six values for 95 %.
    """
    ordered, count = sorted(values), len(values)
    outside, bounds = 0.0, None
    for cut in range(count // 2):
        outside += math.comb(count, cut) / 2**count
        if 1 - 2 * outside < confidence:
            break
        bounds = ordered[cut], ordered[count - 1 - cut]
    return bounds
