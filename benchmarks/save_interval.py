"""The interval of saves that `checkpoint.every: Auto` takes, beside the best that a search finds, in simulated time:
`python -m benchmarks.save_interval`.

Each trace is a run: hours of steps, the time for which a save blocks training and that it takes on the disk, and times
of failures. The mean time between failures is between a quarter of an hour and four days. Failures come by chance
(exponential), in bursts (Weibull), or change their rate twentyfold half-way. Some are survived without a loss of steps.
A failure loses the steps since the last save that was on the disk, and RESTART_SECONDS. Pauses vary by 30 %, and the
first save takes twice as long.

Auto is the trainer's own SaveInterval under a simulated clock: it knows only what has happened so far. The search knows
the whole trace: it simulates fixed intervals, and takes the one with which the run ends first. Part of its lead is
therefore luck that no rule can have, such as a save just before a failure.

Goal: with Auto no run takes more than 1 % longer than with the best interval.
"""

import argparse
import math
import random
import sys
from bisect import bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import median

from benchmarks.goals import Outcome, Verdict, exit_code
from tandem.job.resource import CheckpointSpec
from tandem.rundir.records import IntervalChosen
from tandem_trainer.save_interval import FailureCount, SaveInterval, recent_failures

HOUR = 3600.0
RESTART_SECONDS, REGROUP_SECONDS = 60.0, 1.0
SHAPES = ("chance", "bursts", "changing")
WEIBULL_SHAPE = 0.7
"""Shape of times between failures that come in bursts, as of clusters (B. Schroeder, G. Gibson, 2010)."""
RATE_CHANGE = 20.0
MAX_EXCESS = 0.01
"""Time by which a run may take longer than with the best interval, as a share."""
GRID = [1.25**power for power in range(7, 45)]
"""Intervals that the search tries, in seconds: from 5 s to 5 h."""


@dataclass(frozen=True)
class Trace:
    """One run and what happens to it."""

    shape: str
    between_seconds: float
    """Mean time between failures that lose steps."""
    work_seconds: float
    """Time of all steps."""
    stall_seconds: float
    """Time for which a save blocks training."""
    write_seconds: float
    """Time of a save on the disk."""
    survived: float
    """Share of the failures that lose no step."""
    seed: int


@dataclass(frozen=True)
class Course:
    """The course of a run with one rule."""

    seconds: float
    """Wall time."""
    saves: int
    failures: int
    """Failures that lost steps."""
    repeated: float
    """Seconds of repeated steps."""


def trace_of(seed: int) -> Trace:
    """Draw a trace."""
    chance = random.Random(seed)

    def between(low: float, high: float) -> float:
        return math.exp(chance.uniform(math.log(low), math.log(high)))

    return Trace(
        shape=SHAPES[seed % len(SHAPES)],
        between_seconds=between(0.25 * HOUR, 96 * HOUR),
        work_seconds=between(12 * HOUR, 240 * HOUR),
        stall_seconds=between(0.02, 20.0),
        write_seconds=between(0.5, 60.0),
        survived=chance.choice((0.0, 0.5)),
        seed=seed,
    )


def failures_of(trace: Trace) -> Callable[[float], tuple[float, bool]]:
    """Return a function that gives the first failure after a time: its time, and whether it is survived. It does not
    depend on the rule."""
    chance, times, survived = random.Random(trace.seed + 1), [0.0], [False]
    scale = trace.between_seconds / math.gamma(1 + 1 / WEIBULL_SHAPE)

    def following(now: float) -> tuple[float, bool]:
        while times[-1] <= now:
            if trace.shape == "bursts":
                gap = chance.weibullvariate(scale, WEIBULL_SHAPE)
            else:
                fast = trace.shape == "changing" and times[-1] > trace.work_seconds / 2
                gap = chance.expovariate((RATE_CHANGE if fast else 1.0) / trace.between_seconds)
            times.append(times[-1] + gap)
            survived.append(chance.random() < trace.survived)
        place = bisect_right(times, now)
        return times[place], survived[place]

    return following


class _Discarded:
    def append(self, *records: IntervalChosen) -> None:
        """Add nothing."""


def simulate(trace: Trace, fixed: float | None) -> Course:
    """Simulate a run.

    Args:
        fixed: seconds between saves; None: the trainer's own rule.
    """
    chance = random.Random(trace.seed + 2)
    following = failures_of(trace)
    now = done = saved = pending = repeated = 0.0
    staged_at = durable_at = 0.0
    """Times at which `pending` and `saved` were copied."""
    written_at = math.inf
    """Time at which `pending` is on the disk."""
    saves = failures = 0
    count, generations = FailureCount(), list[tuple[float, bool]]()
    rule = SaveInterval(
        CheckpointSpec(every="Auto") if fixed is None else CheckpointSpec(every_seconds=fixed), lambda: now
    )
    rule.begin(_Discarded(), lambda: count)
    started_at = saved_at = now
    failure, is_survived = following(now)
    while True:
        assert rule.seconds is not None
        remaining = trace.work_seconds - done
        due = max(0.0, saved_at + rule.seconds - now)
        steps = min(remaining, due)
        if failure <= now + steps:
            # A failure amid steps.
            done += max(0.0, failure - now)
            now = failure
            if written_at <= now:
                saved, durable_at, written_at = pending, staged_at, math.inf
            if is_survived:
                now += REGROUP_SECONDS
                failure, is_survived = following(now)
                continue
            failures += 1
            repeated += done - saved
            written_at = math.inf
            generations.insert(0, (now - started_at, True))
            count = recent_failures(generations)
            done, now = saved, now + RESTART_SECONDS
            # As in the trainer, the interval goes on from the checkpoint that is restored.
            started_at, saved_at = now, durable_at
            rule.begin(_Discarded(), lambda count=count: count)  # type: ignore[misc]
            failure, is_survived = following(now)
            continue
        now, done = now + steps, done + steps
        if done >= trace.work_seconds:
            return Course(now, saves, failures, repeated)
        if written_at <= now:
            saved, durable_at, written_at = pending, staged_at, math.inf
        if written_at < math.inf:
            # The save before is still being written: this one is skipped.
            saved_at = now
            continue
        stall = trace.stall_seconds * chance.uniform(0.7, 1.3) * (2.0 if saves == 0 else 1.0)
        rule.saved(stall, {"seconds": trace.write_seconds})
        now, saves = now + stall, saves + 1
        pending, staged_at, written_at, saved_at = done, now, now + trace.write_seconds, now


@dataclass(frozen=True)
class Result:
    """Outcome of one trace."""

    trace: Trace
    auto: Course
    best_interval: float
    best: Course
    default: Course

    @property
    def excess(self) -> float:
        """Time by which Auto takes longer than the best interval, as a share."""
        return self.auto.seconds / self.best.seconds - 1


def result_of(trace: Trace) -> Result:
    """Simulate a trace with Auto, with every interval of the search, and with the default."""
    auto = simulate(trace, None)
    limit = 3 * auto.seconds
    courses = {every: simulate(trace, every) for every in _searched(trace, limit)}
    best_interval = min(courses, key=lambda every: courses[every].seconds)
    return Result(trace, auto, best_interval, courses[best_interval], simulate(trace, 60.0))


def _searched(trace: Trace, limit: float) -> list[float]:
    # With an interval far above the time between failures a run never ends.
    fastest = trace.between_seconds / (RATE_CHANGE if trace.shape == "changing" else 1.0)
    return [every for every in GRID if every <= 3 * fastest and every < limit]


def table(results: Sequence[Result]) -> str:
    """The results, as a table."""
    lines = [
        f"{'seed':<5} {'failures':<23} {'every':>7} {'save':>8} {'on disk':>7} {'steps':>8} {'lost':>6} {'best':>10} "
        f"{'with it':>10} {'Auto':>10} {'excess':>8} {'60 s':>8}",
    ]
    for result in results:
        trace = result.trace
        kind = f"{trace.shape}{'' if not trace.survived else ', half survived'}"
        lines.append(
            f"{trace.seed:<5} {kind:<23} {trace.between_seconds / HOUR:>5.1f} h {trace.stall_seconds:>6.2f} s "
            f"{trace.write_seconds:>5.1f} s {trace.work_seconds / HOUR:>6.1f} h {result.auto.failures:>6} "
            f"{result.best_interval:>8.0f} s {result.best.seconds / HOUR:>8.2f} h {result.auto.seconds / HOUR:>8.2f} h "
            f"{result.excess:>+8.2%} {result.default.seconds / result.best.seconds - 1:>+8.2%}"
        )
    return "\n".join(lines)


def verdict(results: Sequence[Result]) -> Verdict:
    """Judge the goal."""
    worst = max(result.excess for result in results)
    middle = median(result.excess for result in results)
    outcome = Outcome.MET if worst <= MAX_EXCESS else Outcome.MISSED
    goal = f"with Auto no run takes more than {MAX_EXCESS:.0%} longer than with the best interval"
    return Verdict(outcome, goal, f"{worst:+.2%} at most, {middle:+.2%} in the median of {len(results)} traces")


def main() -> int:
    """Run all traces."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.save_interval", description=(__doc__ or "").split("\n")[0]
    )
    parser.add_argument("--traces", type=int, default=20, help="number of traces (default: 20)")
    parser.add_argument("--seed", type=int, default=0, help="seed of the first (default: 0)")
    args = parser.parse_args()
    results = [result_of(trace_of(seed)) for seed in range(args.seed, args.seed + args.traces)]
    print(table(results))
    judged = verdict(results)
    print(f"{judged.outcome.value}: {judged.goal}: {judged.reason}")
    return exit_code([judged])


if __name__ == "__main__":
    sys.exit(main())
