"""What a benchmark concludes from its figures, and the exit code that says so. Pure.

A goal is met, missed, or not judged: the run was too short or the machine too noisy to tell. A benchmark ends with 0
only where every goal that it states is met:

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
"""Fewer than so many times of something are not judged."""


class Outcome(Enum):
    """What became of a goal."""

    MET = "met"
    MISSED = "missed"
    UNJUDGED = "not judged"


EXIT_CODES = {Outcome.MET: 0, Outcome.MISSED: 1, Outcome.UNJUDGED: 3}


@dataclass(frozen=True)
class Verdict:
    """What became of one goal, and why."""

    outcome: Outcome
    goal: str
    why: str

    def __str__(self) -> str:
        return f"{self.outcome.value}: {self.goal}: {self.why}"


def exit_code(verdicts: Iterable[Verdict]) -> int:
    """Of a benchmark with these goals. Without a goal there is none to miss: 0."""
    outcomes = {verdict.outcome for verdict in verdicts}
    worst = next((one for one in (Outcome.MISSED, Outcome.UNJUDGED) if one in outcomes), Outcome.MET)
    return EXIT_CODES[worst]


def at_most(goal: str, values: Sequence[float], bound: float, unit: str = "s") -> Verdict:
    """Judge a goal for the median of some times. A failure is a time of `math.inf`, longer than anything."""
    if len(values) < MIN_VALUES:
        return Verdict(Outcome.UNJUDGED, goal, f"{len(values)} measured, at least {MIN_VALUES} are needed")
    median = statistics.median(values)
    outcome = Outcome.MET if median <= bound else Outcome.MISSED
    shown = f"{median:.3g} {unit}" if math.isfinite(median) else "never"
    return Verdict(outcome, goal, f"median {shown} of {len(values)}")


def interval(values: Sequence[float], confidence: float = CONFIDENCE) -> tuple[float, float] | None:
    """The confidence interval of the median, from the values' order alone (the sign test).

    It assumes nothing of how the values are distributed: so many of `n` values lie below the true median as heads fall
    in `n` throws of a coin. Returns None where even the whole range does not hold it with this confidence: below six
    values for 95 %.
    """
    ordered, count = sorted(values), len(values)
    outside, found = 0.0, None
    for cut in range(count // 2):
        outside += math.comb(count, cut) / 2**count
        if 1 - 2 * outside < confidence:
            break
        found = ordered[cut], ordered[count - 1 - cut]
    return found
