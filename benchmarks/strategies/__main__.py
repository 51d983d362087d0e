"""Cost of the strategies in memory and time: `make bench-strategies`, or

    python -m benchmarks.strategies [--only memory overhead save bubble] [--strategies ddp fsdp] [--rounds 9]
                                    [--steps 60]

Two ranks of one thread each, over gloo, all of them started by torchrun; every measurement is in fresh processes.

  memory    peak memory of a rank under fsdp over that under ddp, 60 million parameters; see `memory`.
  overhead  Tandem's loop (`-m tandem_trainer` with its log, without a save before the end) beside the same with torch
            alone and with accelerate; the sides of a round take turns of seconds (benchmarks.turns). Judged as
            `benchmarks.throughput` does.
  save      the stall of a save under each strategy, from the training log. Without a goal.
  bubble    the share of a step in which the ranks of a pipeline wait, under each schedule, beside theory.

Exit codes: 0 where all goals are met; 1 where one is missed or a measurement failed; 3 where one could not be judged.
"""

import argparse
import json
import os
import statistics
import sys
import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import psutil

from benchmarks.goals import Outcome, Verdict, conclude
from benchmarks.strategies.bubble import bubble
from benchmarks.strategies.launch import NEVER, TORCHRUN, in_time, run_directory
from benchmarks.strategies.work import LARGE, RANKS, SMALL, STRATEGIES
from benchmarks.throughput.sides import Failure, Measurement, attempted, measured, watched
from benchmarks.throughput.verdict import Goal, clock_ratios, judge, processor_ratios, summary
from benchmarks.turns import in_turns
from tandem.processes.launch import RUN_DIR
from tandem.rundir.layout import RunDir
from tests.support.lines import read_lines

PARTS = ("memory", "overhead", "save", "bubble")
MIN_SAVING = 0.6
"""Goal for the peak memory of a rank under fsdp over that under ddp, at two ranks."""
MEMORY_STEPS, MEMORY_SECONDS = 4, 300.0
SKIP = 10
"""First steps that are excluded."""
SAVES, SAVE_EVERY = 4, 10


def main() -> None:
    """Measure, print the results, and end with the code of the verdicts."""
    options = _options()
    print(f"load {os.getloadavg()[0]:.1f}, {os.cpu_count()} cores", flush=True)
    verdicts: list[Verdict] = []
    if "memory" in options.only:
        verdicts += memory()
    if "overhead" in options.only:
        for strategy in options.strategies:
            verdicts += overhead(strategy, options.rounds, options.steps)
    if "save" in options.only:
        for strategy in options.strategies:
            verdicts += save(strategy)
    if "bubble" in options.only:
        verdicts += bubble(options.rounds)
    print()
    sys.exit(conclude(verdicts))


def memory() -> list[Verdict]:
    """Measure the peak of the rank that has most, under each strategy."""
    print(f"\nmemory of a rank: {LARGE}, MB above what it had before the model", flush=True)
    goal = f"peak memory of a rank under fsdp ≤ {MIN_SAVING:g} of ddp's"
    peaks: dict[str, float] = {}
    for strategy in STRATEGIES:
        try:
            ranks = _memory(strategy)
        except Failure as failure:
            return [Verdict(Outcome.MISSED, goal, f"{strategy} failed: {failure}")]
        rank = max(ranks, key=lambda member: float(member["peak"]))
        peaks[strategy] = rank["peak"]
        state = {name: f"{size:,}" for name, size in rank["state"].items()}
        seconds = statistics.median(rank["processorSeconds"][1:])
        print(
            f"  {strategy}: peak {rank['peak']:.0f}, at the start {rank['start']:.0f}, after the split "
            f"{rank['afterSplit']:.0f}; {seconds:.2f} processor s a step; {rank['parameters']:,} parameters; bytes "
            f"of state {state}, together {sum(rank['state'].values()):,}",
            flush=True,
        )
    ratio = peaks["fsdp"] / peaks["ddp"]
    print(f"  fsdp / ddp: {ratio:.3f}", flush=True)
    return [Verdict(Outcome.MET if ratio <= MIN_SAVING else Outcome.MISSED, goal, f"{ratio:.3f}")]


def _memory(strategy: str) -> list[dict[str, Any]]:
    """Measure the memory of each rank.

    Raises:
        Failure: the ranks failed.
    """
    with tempfile.TemporaryDirectory() as name:
        command = [*TORCHRUN, "-m", "benchmarks.strategies.memory", "--strategy", strategy, "--output", name]
        command += ["--steps", str(MEMORY_STEPS)]
        done = in_time(command, os.environ | {"OMP_NUM_THREADS": "1"}, MEMORY_SECONDS)
        if done.returncode != 0:
            raise Failure(f"ended with {done.returncode}:\n{done.stderr[-2000:]}")
        return [json.loads(Path(name, f"{rank}.json").read_text()) for rank in range(RANKS)]


def overhead(strategy: str, rounds: int, steps: int) -> list[Verdict]:
    """Measure Tandem's loop with a strategy beside its references, in turns."""
    print(f"\n{strategy}: {SMALL}, {steps} steps", flush=True)
    sides: dict[str, Callable[[], Measurement]] = {
        "Tandem": lambda: _tandem(strategy, steps),
        "by hand": lambda: _reference(strategy, steps),
    }
    goals = {"by hand": 0.99}
    if strategy == "ddp":
        sides["accelerate"] = lambda: _reference(strategy, steps, "--accelerate")
        goals["accelerate"] = 1.0
    else:
        print("  without accelerate: on CPUs it passes over its plugin for fully_shard (by_hand)", flush=True)
    runs: dict[str, list[Measurement | None]] = {side: [] for side in sides}
    for number in range(rounds):
        measures = {side: partial(attempted, measure) for side, measure in sides.items()}
        for side, (measurement, problem) in in_turns(measures, number).items():
            runs[side].append(measurement)
            print(f"  {number + 1}/{rounds} {side}: {measurement or f'FAILED: {problem}'}", flush=True)
    verdicts = []
    for reference, minimum in goals.items():
        own_runs, reference_runs = runs["Tandem"], runs[reference]
        print(f"  Tandem / {reference}: by the clock {summary(clock_ratios(own_runs, reference_runs))}")
        print(
            f"    processor seconds {summary(processor_ratios(own_runs, reference_runs, lambda use: use.ranks))}",
            flush=True,
        )
        goal = Goal(f"{strategy} in Tandem's loop ≥ {minimum:g} of {reference}", minimum, lambda use: use.ranks)
        verdicts += judge(goal, own_runs, reference_runs)
    return verdicts


def _tandem(strategy: str, steps: int) -> Measurement:
    """Measure Tandem's loop.

    Raises:
        Failure: the run failed.
    """
    with tempfile.TemporaryDirectory() as name:
        run_dir = run_directory(Path(name, "run"), SMALL, strategy, steps, NEVER)
        command = [*TORCHRUN, "-m", "tandem_trainer"]
        course = watched(command, Path(name), _is_rank, steps, {RUN_DIR: str(run_dir.path)})
        ends = [line["time"] for line in _records(run_dir, "step")]
        return measured(course, ends, steps, SMALL.batch_size, SKIP)


def _reference(strategy: str, steps: int, *options: str) -> Measurement:
    """Measure a reference.

    Raises:
        Failure: the run failed.
    """
    with tempfile.TemporaryDirectory() as name:
        times = Path(name, "times.json")
        command = [*TORCHRUN, "-m", "benchmarks.strategies.by_hand", "--strategy", strategy, *options]
        command += ["--steps", str(steps), "--times", str(times)]
        course = watched(command, Path(name), _is_rank, steps)
        return measured(course, json.loads(times.read_text()), steps, SMALL.batch_size, SKIP)


def save(strategy: str) -> list[Verdict]:
    """Report the stall of training for each save, on rank 0."""
    print(f"\nsaves under {strategy}: {LARGE}", flush=True)
    steps = SAVES * SAVE_EVERY + 1
    with tempfile.TemporaryDirectory() as name:
        run_dir = run_directory(Path(name, "run"), LARGE, strategy, steps, SAVE_EVERY)
        try:
            watched([*TORCHRUN, "-m", "tandem_trainer"], Path(name), _is_rank, steps, {RUN_DIR: str(run_dir.path)})
        except Failure as failure:
            return [Verdict(Outcome.MISSED, f"saves under {strategy}", str(failure))]
        saved, skipped = _records(run_dir, "checkpoint"), len(_records(run_dir, "skipped"))
    if not saved:
        return [Verdict(Outcome.MISSED, f"saves under {strategy}", "no save was committed")]
    stalls = [record["stallSeconds"] for record in saved]
    print(
        f"  {len(saved)} of {saved[0]['bytes'] / 1e6:.0f} MB: stall median {statistics.median(stalls):.3f} s, range "
        f"{min(stalls):.3f} to {max(stalls):.3f}; {skipped} left out because the one before was being written",
        flush=True,
    )
    return []


def _records(run_dir: RunDir, kind: str) -> list[dict[str, Any]]:
    return [line for path in run_dir.log.glob("train-g*.jsonl") for line in read_lines(path)[0] if line["kind"] == kind]


def _is_rank(process: psutil.Process) -> bool:
    args = process.cmdline()
    modules = {"tandem_trainer", "benchmarks.strategies.by_hand"} & set(args)
    return bool(modules) and "torch.distributed.run" not in args


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.strategies", description="What the strategies cost in memory and time."
    )
    parser.add_argument("--only", nargs="+", choices=PARTS, default=list(PARTS), help="these parts alone")
    parser.add_argument(
        "--strategies", nargs="+", choices=STRATEGIES, default=list(STRATEGIES), help="of overhead and save"
    )
    parser.add_argument("--rounds", type=int, default=9, help="of overhead and bubble; fewer than 6 are not judged")
    parser.add_argument("--steps", type=int, default=60, help=f"of overhead; the first {SKIP} do not count")
    options = parser.parse_args()
    if options.rounds < 1 or options.steps <= SKIP:
        parser.error(f"--rounds must be at least 1, and --steps more than {SKIP}")
    return options


if __name__ == "__main__":
    main()
