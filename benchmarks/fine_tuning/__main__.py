"""Fine-tuning beside TRL's SFTTrainer and a plain loop: `make bench-fine-tuning`, or

    python -m benchmarks.fine_tuning [--only unpacked packed evaluation kill] [--rounds 9] [--steps 60] [--seeds 0 1 2]

The same model, documents, order, length, batch, AdamW and seeds on every side (`work`). The sides of a round live at
once and take turns of seconds (benchmarks.turns), every other round in reverse order; rounds take the seeds in turn,
and every measurement is in fresh processes, in float32, of one rank and one thread. Kills come one after the other.

  unpacked    each document is a row: Tandem, TRL, a plain loop. TRL and the plain loop pad it to the longest of its
              batch, Tandem makes one row of all documents
  packed      each side packs by itself, Tandem and TRL. Both make one row of a whole batch
  evaluation  on held-out documents every 50 steps: TRL in between, Tandem by an evaluator process on another core
  kill        SIGKILL of one of two ranks, and a resume on one: Tandem, TRL as it is documented, and TRL with its
              micro-batches doubled by hand

No row is judged unless the first 20 losses of all sides agree, and their documents are the same (`verdict`). Exit
codes: 0 where all goals are met; 1 where one is missed or a measurement failed; 3 where one could not be judged.
"""

import argparse
import os
import statistics
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TypeVar

from benchmarks.fine_tuning import kill, verdict
from benchmarks.fine_tuning.record import Resumed
from benchmarks.fine_tuning.sides import SKIP, Case, Run, sides, tandem_with_evaluators, trl
from benchmarks.fine_tuning.work import BATCH, LENGTH, plan, prepare
from benchmarks.goals import Outcome, Verdict, conclude, judge_median
from benchmarks.throughput.sides import Failure
from benchmarks.throughput.verdict import clock_ratios, processor_ratios, summary
from benchmarks.turns import in_turns

PARTS = ("unpacked", "packed", "evaluation", "kill")
EVERY = 50
"""Steps between two evaluations."""
TANDEM = "Tandem"
T = TypeVar("T")


@dataclass(frozen=True)
class Bench:
    """Settings that all parts share."""

    work: Path
    rounds: int
    steps: int
    seeds: Sequence[int]

    def case(self, number: int, packing: bool = False, steps: int | None = None) -> Case:
        """Case of a round."""
        seed = self.seeds[number % len(self.seeds)]
        steps_plan = plan(self.work, packing, seed, steps or self.steps)
        file = self.work / f"plan-{packing}-{seed}-{steps_plan.steps}.json"
        steps_plan.write(file)
        return Case(self.work, packing, seed, steps_plan, file)


def main() -> None:
    """Measure, print the results, and end with the code of the verdicts."""
    options = _options()
    print(
        f"load {os.getloadavg()[0]:.1f}, {os.cpu_count()} cores, batch {BATCH}×{LENGTH}; GPUs: not measured", flush=True
    )
    verdicts: list[Verdict] = []
    with tempfile.TemporaryDirectory() as name:
        bench = Bench(Path(name), options.rounds, options.steps, options.seeds)
        prepare(bench.work)
        for packing in (False, True):
            if ("packed" if packing else "unpacked") in options.only:
                verdicts += throughput(bench, packing)
        if "evaluation" in options.only:
            verdicts += evaluation(bench)
        if "kill" in options.only:
            verdicts += killed(bench)
    print()
    sys.exit(conclude(verdicts))


def throughput(bench: Bench, packing: bool) -> list[Verdict]:
    """Compare speed, padding, memory and held-out loss at equal tokens."""
    print(f"\n{'packed' if packing else 'unpacked'}, {bench.steps} steps", flush=True)
    runs, problems = _in_turns(bench, sides(packing), lambda number: bench.case(number, packing))
    if problems:
        return problems
    verdicts = []
    for other in runs:
        if other != TANDEM:
            own_runs, other_runs = ([run and run.measurement for run in runs[side]] for side in (TANDEM, other))
            print(f"  {TANDEM} / {other}: by the clock {summary(clock_ratios(own_runs, other_runs))}")
            print(
                f"    processor seconds {summary(processor_ratios(own_runs, other_runs, lambda use: use.ranks))}",
                flush=True,
            )
            verdicts += verdict.compared(runs[TANDEM], runs[other], other, packing)
    return verdicts


def evaluation(bench: Bench) -> list[Verdict]:
    """Compare training with evaluation."""
    steps = max(2 * EVERY, bench.steps // EVERY * EVERY)
    print(f"\nunpacked, {steps} steps, with evaluation every {EVERY}", flush=True)

    def case(number: int) -> Case:
        return replace(bench.case(number, steps=steps), every=EVERY, save_every=EVERY)

    runs, problems = _in_turns(bench, {TANDEM: tandem_with_evaluators, "TRL": trl}, case)
    if problems:
        return problems
    for side, side_runs in runs.items():
        print(
            f"  {side}: from the first step to the last score "
            f"{_spread([run.evaluated_seconds for run in side_runs if run])}"
        )
    return verdict.evaluated(runs[TANDEM], runs["TRL"])


def killed(bench: Bench) -> list[Verdict]:
    """Compare a kill, and the resume on another world size."""
    print(f"\na rank killed after step {kill.KILL_AFTER}, a state every {kill.SAVE_EVERY}: 2 ranks, then 1", flush=True)
    measures: dict[str, Callable[[Case], Resumed]] = {
        TANDEM: kill.tandem,
        "TRL": lambda case: kill.trl(case, keep_batch=False),
        "TRL, micro-batches doubled": lambda case: kill.trl(case, keep_batch=True),
    }
    recoveries: dict[str, list[Resumed | None]] = {side: [] for side in measures}
    for number in range(bench.rounds):
        case = replace(bench.case(number, steps=kill.STEPS), save_every=kill.SAVE_EVERY)
        for side in measures if number % 2 == 0 else reversed(measures):
            recoveries[side].append(_measured(partial(measures[side], case), f"{number + 1}/{bench.rounds} {side}"))
    goal = f"{TANDEM}, killed and resumed"
    if None in recoveries[TANDEM]:
        return [Verdict(Outcome.MISSED, goal, f"{recoveries[TANDEM].count(None)} of {bench.rounds} failed")]
    own = [resumed for resumed in recoveries[TANDEM] if resumed]
    seconds = [resumed.seconds for resumed in own]
    verdicts = [verdict.without_gap(TANDEM, own)]
    for side, resumes in recoveries.items():
        if side != TANDEM and (other_seconds := [resumed.seconds for resumed in resumes if resumed]):
            title = f"{goal}: next new step no later than {side}"
            verdicts.append(judge_median(title, seconds, statistics.median(other_seconds)))
    return verdicts


def _in_turns(
    bench: Bench, measures: Mapping[str, Callable[[Case], Run]], case: Callable[[int], Case]
) -> tuple[dict[str, list[Run | None]], list[Verdict]]:
    """Measure the runs of each side, round after round; returns them, and reasons why they must not be compared."""
    runs: dict[str, list[Run | None]] = {side: [] for side in measures}
    problems: list[str] = []
    largest = 0.0
    for number in range(bench.rounds):
        current = case(number)
        by_side = in_turns(
            {
                side: partial(_measured, partial(measure, current), f"{number + 1}/{bench.rounds} {side}")
                for side, measure in measures.items()
            },
            number,
        )
        for side, run in by_side.items():
            runs[side].append(run)
        steps = {side: run.steps for side, side_runs in runs.items() if (run := side_runs[-1])}
        problems += [f"round {number + 1}: {problem}" for problem in verdict.admitted(current.plan, steps)]
        if TANDEM in steps:
            largest = max(
                largest, *(verdict.largest_difference(steps[TANDEM], side_steps)[0] for side_steps in steps.values())
            )
    for side, side_runs in runs.items():
        good = [run for run in side_runs if run]
        print(f"  {side}: failed {side_runs.count(None)} of {len(side_runs)}", end="")
        if good:
            print(
                f"; tokens/s {_spread([run.measurement.throughput for run in good])}, processor ms a step "
                f"{_spread([1000 * run.measurement.use.ranks for run in good])}, padding {good[0].padding:.1%}, peak "
                f"memory {_spread([run.peak for run in good])} MB, held-out loss "
                f"{statistics.fmean(run.held_out for run in good):.4f}",
                end="",
            )
        print(flush=True)
    print(f"  first {verdict.STEPS} losses: they differ by {largest:.1e} of {TANDEM}'s at the most", flush=True)
    goal = f"the same documents, and the first {verdict.STEPS} losses within {verdict.TOLERANCE:g}"
    return runs, [Verdict(Outcome.MISSED, goal, "; ".join(problems))] if problems else []


def _measured(measure: Callable[[], T], label: str) -> T | None:
    """Measure; None if that failed. Prints the result."""
    try:
        result = measure()
    except Failure as failure:
        print(f"  {label}: FAILED: {failure}", flush=True)
        return None
    print(f"  {label}: {result}", flush=True)
    return result


def _spread(values: Sequence[float]) -> str:
    return f"{statistics.median(values):.0f} ({min(values):.0f} to {max(values):.0f})"


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.fine_tuning", description="Fine-tuning beside TRL and a plain loop."
    )
    parser.add_argument("--only", nargs="+", choices=PARTS, default=list(PARTS), help="these parts alone")
    parser.add_argument("--rounds", type=int, default=9, help="of each part; fewer than 6 are not judged by time")
    parser.add_argument("--steps", type=int, default=60, help=f"of each run; the first {SKIP} do not count for speed")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2], help="of the order, in turn")
    options = parser.parse_args()
    if options.rounds < 1 or options.steps < verdict.STEPS:
        parser.error(f"--rounds must be at least 1, and --steps {verdict.STEPS}")
    return options


if __name__ == "__main__":
    main()
