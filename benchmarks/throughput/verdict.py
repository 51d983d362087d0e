"""Whether a side keeps up with a reference, by the ratios of neighbouring runs. Pure.

Two figures are compared, so that 1 is even and more is better:

- **Processor seconds a step**, the reference's over ours. They hardly depend on other load of the machine, so the
  median decides: the goal is missed if it is below. The machine was too noisy even for these if the median's confidence
  interval extends beyond the goal, to the other side of it, by more than STEADY; then nothing is judged.
- **Throughput by the clock**, ours over the reference's. It varies by 15 % from run to run on a shared machine, so one
  median says little: the goal is missed if the whole confidence interval is below. If the interval extends to a loss of
  CLOCK below the goal, the run could not have detected such a loss, and nothing is judged. The clock is needed all the
  same: a loop that waits uses no processor.

If a goal says so, the **start**, from the command to the end of the first step, is judged like the clock: the
reference's seconds over ours, at least 1.

The interval is that of `goals.interval`: from the order of the ratios alone, at 95 %. It needs six rounds. If a
measurement failed, of whatever side, the goal is missed: a failure cannot be compared, and must not be ignored.

Rejected: the median of the clock's ratios alone (on a quiet machine two medians of three pairs were 0.86 and 0.93,
their ratios from 0.78 to 1.15), the fastest run of each side (it excludes a cost that occurs only sometimes), an
interval by the normal distribution (one neighbour's burst widens it at will), a bootstrap (it is random, and nine
values hold no more than their order), counting instructions (the virtual machines that this was written on have no such
counters), rounds until the interval is narrow (whoever stops when the figures please has chosen them).
"""

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from benchmarks.goals import CONFIDENCE, Outcome, Verdict, interval
from benchmarks.throughput.processors import Use
from benchmarks.throughput.sides import Measurement

STEADY = 0.02
"""Distance that the interval of the processor seconds may extend to the other side of the goal."""
CLOCK = 0.10
"""Loss of throughput below the goal that a run must be able to detect."""


@dataclass(frozen=True)
class Goal:
    """Minimum share of a reference's throughput."""

    title: str
    minimum: float
    share: Callable[[Use], float]
    """Processor seconds that count: those of all processes that share the ranks' cores."""
    start: bool = False
    """Whether the first step must not be later."""


Runs = Sequence[Measurement | None]
"""Runs of one side, in order of time; None for one that failed."""


def judge(goal: Goal, own_runs: Runs, reference: Runs, *further: Runs) -> list[Verdict]:
    """Judge by processor seconds, by the clock and by the start; a single verdict if a measurement failed.

    Args:
        further: more sides of the same rounds, without a goal.
    """
    runs = [run for side in (own_runs, reference, *further) for run in side]
    if None in runs:
        return [Verdict(Outcome.MISSED, goal.title, f"{runs.count(None)} of {len(runs)} measurements failed")]
    verdicts = [
        by_processors(goal, processor_ratios(own_runs, reference, goal.share)),
        by_clock(f"{goal.title}, by the clock", goal.minimum, clock_ratios(own_runs, reference)),
    ]
    if goal.start:
        verdicts.append(by_clock("the first step no later", 1.0, start_ratios(own_runs, reference)))
    return verdicts


def by_processors(goal: Goal, ratios: Sequence[float]) -> Verdict:
    """Judge by the ratios of processor seconds a step, the reference's over ours."""
    title = f"{goal.title}, processor seconds"
    bounds = interval(ratios)
    if bounds is None:
        return _too_few(title, ratios)
    (low, high), median = bounds, statistics.median(ratios)
    is_met = median >= goal.minimum
    if (low < goal.minimum - STEADY) if is_met else (high > goal.minimum + STEADY):
        return Verdict(
            Outcome.UNJUDGED, title, f"too noisy, the interval may reach {STEADY:g} beyond: {summary(ratios)}"
        )
    return Verdict(Outcome.MET if is_met else Outcome.MISSED, title, summary(ratios))


def by_clock(title: str, minimum: float, ratios: Sequence[float]) -> Verdict:
    """Judge ratios that vary with the machine, of which more is better."""
    bounds = interval(ratios)
    if bounds is None:
        return _too_few(title, ratios)
    low, high = bounds
    if high < minimum:
        return Verdict(Outcome.MISSED, title, summary(ratios))
    if low < minimum - CLOCK:
        return Verdict(Outcome.UNJUDGED, title, f"too noisy to see a loss of {CLOCK:.0%}: {summary(ratios)}")
    return Verdict(Outcome.MET, title, summary(ratios))


def processor_ratios(own_runs: Runs, reference: Runs, share: Callable[[Use], float]) -> list[float]:
    """Ratios of neighbouring runs that both succeeded: the reference's processor seconds a step over ours."""
    return [share(other.use) / share(own.use) for own, other in zip(own_runs, reference, strict=True) if own and other]


def clock_ratios(own_runs: Runs, reference: Runs) -> list[float]:
    """Ratios of neighbouring runs that both succeeded: our throughput over the reference's."""
    return [own.throughput / other.throughput for own, other in zip(own_runs, reference, strict=True) if own and other]


def start_ratios(own_runs: Runs, reference: Runs) -> list[float]:
    """Ratios of neighbouring runs that both succeeded: the reference's seconds to the first step over ours."""
    return [other.start / own.start for own, other in zip(own_runs, reference, strict=True) if own and other]


def summary(ratios: Sequence[float]) -> str:
    """Format the median, its interval and the range."""
    if not ratios:
        return "no pair succeeded"
    bounds = interval(ratios)
    inside = "" if bounds is None else f", {CONFIDENCE:.0%} interval {bounds[0]:.3f} to {bounds[1]:.3f}"
    spread = f"range {min(ratios):.3f} to {max(ratios):.3f}"
    return f"median of {len(ratios)} ratios {statistics.median(ratios):.3f}{inside}, {spread}"


def _too_few(title: str, ratios: Sequence[float]) -> Verdict:
    return Verdict(Outcome.UNJUDGED, title, f"{len(ratios)} rounds are too few for an interval of {CONFIDENCE:.0%}")
