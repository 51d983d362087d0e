"""Whether a side keeps up with a reference, by the ratios of neighbours. Pure.

Two figures are compared, so that 1 is even and more is better:

- **Processor seconds a step**, the reference's over ours. They hardly depend on what else the machine does, so the
  median decides: the goal is missed where it lies below. The machine was too noisy even for these where the median's
  confidence interval reaches beyond the goal, to the other side of it, by more than STEADY; then nothing is judged.
- **Throughput by the clock**, ours over the reference's. It swings by 15 % from run to run on a shared machine, so one
  median says little: the goal is missed where the whole confidence interval lies below. Where the interval reaches
  down to a loss of CLOCK below the goal, the run could not have seen such a loss, and nothing is judged. The clock is
  needed all the same: a loop that waits takes no processor.

Where a goal says so, the **start**, from the command to the end of the first step, is judged like the clock: the
reference's seconds over ours, which have to be 1 at least.

The interval is that of `goals.interval`: from the order of the ratios alone, at 95 %. It needs six rounds. Where a
measurement failed, of whatever side, the goal is missed: what fails cannot be compared, and must not be left out.

Rejected: the median of the clock's ratios alone (on a quiet machine two medians of three pairs were 0.86 and 0.93,
their ratios from 0.78 to 1.15), the fastest run of each side (a cost that comes now and then is not in it), an interval
by the normal distribution (one neighbour's burst widens it at will), a bootstrap (it is random, and nine values hold no
more than their order), counting instructions (the virtual machines that this was written on have no such counters),
rounds until the interval is narrow (whoever stops when the figures please has chosen them).
"""

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from benchmarks.goals import CONFIDENCE, Outcome, Verdict, interval
from benchmarks.throughput.processors import Use
from benchmarks.throughput.sides import Measurement

STEADY = 0.02
"""So far the interval of the processor seconds may reach to the other side of the goal."""
CLOCK = 0.10
"""A loss of throughput below the goal that a run must be able to see."""


@dataclass(frozen=True)
class Goal:
    """At least so much of a reference's throughput."""

    words: str
    least: float
    share: Callable[[Use], float]
    """The processor seconds that count: of all processes that share the ranks' cores."""
    start: bool = False
    """Whether the first step may come no later."""


Runs = Sequence[Measurement | None]
"""Of one side, in the order of time; None for one that failed."""


def judge(goal: Goal, ours: Runs, reference: Runs, *others: Runs) -> list[Verdict]:
    """The verdicts by processor seconds, by the clock and of the start; one alone where a measurement failed.

    Args:
        others: what was measured beside these two, for which there is no goal.
    """
    runs = [run for side in (ours, reference, *others) for run in side]
    if None in runs:
        return [Verdict(Outcome.MISSED, goal.words, f"{runs.count(None)} of {len(runs)} measurements failed")]
    verdicts = [
        by_processors(goal, processor_ratios(ours, reference, goal.share)),
        by_clock(f"{goal.words}, by the clock", goal.least, clock_ratios(ours, reference)),
    ]
    if goal.start:
        verdicts.append(by_clock("the first step no later", 1.0, start_ratios(ours, reference)))
    return verdicts


def by_processors(goal: Goal, ratios: Sequence[float]) -> Verdict:
    """Judge by the ratios of processor seconds a step, the reference's over ours."""
    words = f"{goal.words}, processor seconds"
    found = interval(ratios)
    if found is None:
        return _too_few(words, ratios)
    (low, high), median = found, statistics.median(ratios)
    is_met = median >= goal.least
    if (low < goal.least - STEADY) if is_met else (high > goal.least + STEADY):
        return Verdict(Outcome.UNJUDGED, words, f"too noisy, the interval may reach {STEADY:g} beyond: {shown(ratios)}")
    return Verdict(Outcome.MET if is_met else Outcome.MISSED, words, shown(ratios))


def by_clock(words: str, least: float, ratios: Sequence[float]) -> Verdict:
    """Judge ratios that swing with the machine, of which more is better."""
    found = interval(ratios)
    if found is None:
        return _too_few(words, ratios)
    low, high = found
    if high < least:
        return Verdict(Outcome.MISSED, words, shown(ratios))
    if low < least - CLOCK:
        return Verdict(Outcome.UNJUDGED, words, f"too noisy to see a loss of {CLOCK:.0%}: {shown(ratios)}")
    return Verdict(Outcome.MET, words, shown(ratios))


def processor_ratios(ours: Runs, reference: Runs, share: Callable[[Use], float]) -> list[float]:
    """Of neighbours that both succeeded: the reference's processor seconds a step over ours."""
    return [share(theirs.use) / share(own.use) for own, theirs in zip(ours, reference, strict=True) if own and theirs]


def clock_ratios(ours: Runs, reference: Runs) -> list[float]:
    """Of neighbours that both succeeded: our throughput over the reference's."""
    return [own.throughput / theirs.throughput for own, theirs in zip(ours, reference, strict=True) if own and theirs]


def start_ratios(ours: Runs, reference: Runs) -> list[float]:
    """Of neighbours that both succeeded: the reference's seconds to the first step over ours."""
    return [theirs.start / own.start for own, theirs in zip(ours, reference, strict=True) if own and theirs]


def shown(ratios: Sequence[float]) -> str:
    """Median, its interval and the range, in words."""
    if not ratios:
        return "no pair succeeded"
    found = interval(ratios)
    inside = "" if found is None else f", {CONFIDENCE:.0%} interval {found[0]:.3f} to {found[1]:.3f}"
    spread = f"range {min(ratios):.3f} to {max(ratios):.3f}"
    return f"median of {len(ratios)} ratios {statistics.median(ratios):.3f}{inside}, {spread}"


def _too_few(words: str, ratios: Sequence[float]) -> Verdict:
    return Verdict(Outcome.UNJUDGED, words, f"{len(ratios)} rounds are too few for an interval of {CONFIDENCE:.0%}")
