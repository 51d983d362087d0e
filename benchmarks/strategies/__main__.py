"""What the strategies cost in memory and time: `make bench-strategies`, or

    python -m benchmarks.strategies [--only memory overhead save] [--rounds 9] [--steps 60]

Two ranks of one thread each, over gloo, all of them started by torchrun; every measurement is in fresh processes.

  memory    peak memory of a rank under fsdp over that under ddp, 60 million parameters; `memory` says what is measured.
  overhead  Tandem's loop (`-m tandem_trainer` with its log, without a save before the end) beside the same with torch
            alone and with accelerate, whose sides take turns (A B C C B A). Judged as `benchmarks.throughput` does.
  save      the stall of a save under each strategy, from the training log. Without a goal.

Exit codes: 0 where all goals are met; 1 where one is missed or a measurement failed; 3 where one could not be judged.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil

from benchmarks.goals import Outcome, Verdict, exit_code
from benchmarks.strategies.work import LARGE, RANKS, SMALL, STRATEGIES, Work
from benchmarks.throughput.sides import Failure, Measurement, measured, watched
from benchmarks.throughput.verdict import Goal, clock_ratios, judge, processor_ratios, shown
from tandem.launch import RUN_DIR
from tandem.rundir.layout import RunDir
from tests.support import ROOT, manifests
from tests.support.lines import read_lines

PARTS = ("memory", "overhead", "save")
LEAST_SAVING = 0.6
"""Peak memory of a rank under fsdp over that under ddp, at two ranks."""
MEMORY_STEPS, MEMORY_SECONDS = 4, 300.0
SKIP = 10
"""First steps that do not count."""
SAVES, SAVE_EVERY = 4, 10
NEVER = 1_000_000
TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={RANKS}"]


def main() -> None:
    """Measure, print what came out, and end with the code of the verdicts."""
    options = _options()
    print(f"load {os.getloadavg()[0]:.1f}, {os.cpu_count()} cores", flush=True)
    verdicts: list[Verdict] = []
    if "memory" in options.only:
        verdicts += memory()
    if "overhead" in options.only:
        for strategy in STRATEGIES:
            verdicts += overhead(strategy, options.rounds, options.steps)
    if "save" in options.only:
        for strategy in STRATEGIES:
            verdicts += save(strategy)
    print()
    for verdict in verdicts:
        print(verdict)
    sys.exit(exit_code(verdicts))


def memory() -> list[Verdict]:
    """The peak of the rank that has most, of each strategy."""
    print(f"\nmemory of a rank: {LARGE}, MB above what it had before the model", flush=True)
    goal = f"peak memory of a rank under fsdp ≤ {LEAST_SAVING:g} of ddp's"
    peaks: dict[str, float] = {}
    for strategy in STRATEGIES:
        try:
            ranks = _memory(strategy)
        except Failure as failure:
            return [Verdict(Outcome.MISSED, goal, f"{strategy} failed: {failure}")]
        most = max(ranks, key=lambda rank: float(rank["peak"]))
        peaks[strategy] = most["peak"]
        state = {name: f"{size:,}" for name, size in most["state"].items()}
        seconds = statistics.median(most["processorSeconds"][1:])
        print(
            f"  {strategy}: peak {most['peak']:.0f}, at the start {most['start']:.0f}, after the split "
            f"{most['afterSplit']:.0f}; {seconds:.2f} processor s a step; {most['parameters']:,} parameters; bytes "
            f"of state {state}, together {sum(most['state'].values()):,}",
            flush=True,
        )
    ratio = peaks["fsdp"] / peaks["ddp"]
    print(f"  fsdp / ddp: {ratio:.3f}", flush=True)
    return [Verdict(Outcome.MET if ratio <= LEAST_SAVING else Outcome.MISSED, goal, f"{ratio:.3f}")]


def _memory(strategy: str) -> list[dict[str, Any]]:
    """What each rank found.

    Raises:
        Failure: they did not end well.
    """
    with tempfile.TemporaryDirectory() as name:
        command = [*TORCHRUN, "-m", "benchmarks.strategies.memory", "--strategy", strategy, "--output", name]
        command += ["--steps", str(MEMORY_STEPS)]
        done = in_time(command, os.environ | {"OMP_NUM_THREADS": "1"}, MEMORY_SECONDS)
        if done.returncode != 0:
            raise Failure(f"ended with {done.returncode}:\n{done.stderr[-2000:]}")
        return [json.loads(Path(name, f"{rank}.json").read_text()) for rank in range(RANKS)]


def in_time(command: list[str], environment: Mapping[str, str], seconds: float) -> "subprocess.CompletedProcess[str]":
    """Run torchrun to its end. If that takes longer, its ranks are ended with it.

    Raises:
        Failure: it took longer.
    """
    process = subprocess.Popen(
        command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    try:
        output, errors = process.communicate(timeout=seconds)
    except subprocess.TimeoutExpired as error:
        # Each rank is in a session of its own: killing torchrun's would not reach them.
        for one in (*psutil.Process(process.pid).children(recursive=True), process):
            with suppress(psutil.NoSuchProcess, ProcessLookupError):
                one.kill()
        process.communicate()
        raise Failure("took too long") from error
    return subprocess.CompletedProcess(command, process.returncode, output, errors)


def overhead(strategy: str, rounds: int, steps: int) -> list[Verdict]:
    """Tandem's loop with a strategy beside its references, in turns."""
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
        for side in sides if number % 2 == 0 else reversed(sides):
            try:
                found, said = sides[side](), ""
            except Failure as failure:
                found, said = None, f"FAILED: {failure}"
            runs[side].append(found)
            print(f"  {number + 1}/{rounds} {side}: {found or said}", flush=True)
    verdicts = []
    for reference, least in goals.items():
        ours, theirs = runs["Tandem"], runs[reference]
        print(f"  Tandem / {reference}: by the clock {shown(clock_ratios(ours, theirs))}")
        print(f"    processor seconds {shown(processor_ratios(ours, theirs, lambda use: use.ranks))}", flush=True)
        goal = Goal(f"{strategy} in Tandem's loop ≥ {least:g} of {reference}", least, lambda use: use.ranks)
        verdicts += judge(goal, ours, theirs)
    return verdicts


def _tandem(strategy: str, steps: int) -> Measurement:
    """
    Raises:
        Failure: it did not do its work.
    """
    with tempfile.TemporaryDirectory() as name:
        run_dir = _run_directory(Path(name, "run"), SMALL, strategy, steps, NEVER)
        command = [*TORCHRUN, "-m", "tandem_trainer"]
        began, looks = watched(command, Path(name), _is_rank, steps, {RUN_DIR: str(run_dir.path)})
        ends = [line["time"] for line in _records(run_dir, "step")]
        return measured(began, looks, ends, steps, SMALL.batch_size, SKIP)


def _reference(strategy: str, steps: int, *options: str) -> Measurement:
    """
    Raises:
        Failure: it did not do its work.
    """
    with tempfile.TemporaryDirectory() as name:
        times = Path(name, "times.json")
        command = [*TORCHRUN, "-m", "benchmarks.strategies.by_hand", "--strategy", strategy, *options]
        command += ["--steps", str(steps), "--times", str(times)]
        began, looks = watched(command, Path(name), _is_rank, steps)
        return measured(began, looks, json.loads(times.read_text()), steps, SMALL.batch_size, SKIP)


def save(strategy: str) -> list[Verdict]:
    """Report how long training stood still for each save, on rank 0."""
    print(f"\nsaves under {strategy}: {LARGE}", flush=True)
    steps = SAVES * SAVE_EVERY + 1
    with tempfile.TemporaryDirectory() as name:
        run_dir = _run_directory(Path(name, "run"), LARGE, strategy, steps, SAVE_EVERY)
        try:
            watched([*TORCHRUN, "-m", "tandem_trainer"], Path(name), _is_rank, steps, {RUN_DIR: str(run_dir.path)})
        except Failure as failure:
            return [Verdict(Outcome.MISSED, f"saves under {strategy}", str(failure))]
        saved, left_out = _records(run_dir, "checkpoint"), len(_records(run_dir, "skipped"))
    if not saved:
        return [Verdict(Outcome.MISSED, f"saves under {strategy}", "no save was committed")]
    stalls = [record["stallSeconds"] for record in saved]
    print(
        f"  {len(saved)} of {saved[0]['bytes'] / 1e6:.0f} MB: stall median {statistics.median(stalls):.3f} s, range "
        f"{min(stalls):.3f} to {max(stalls):.3f}; {left_out} left out because the one before was being written",
        flush=True,
    )
    return []


def _run_directory(path: Path, work: Work, strategy: str, steps: int, every: int) -> RunDir:
    trainer = {
        "task": "tandem_trainer.causal_lm:CausalLM",
        "parameters": work.parameters,
        "loop": work.loop(strategy, steps),
    }
    job = manifests.job("bench", trainer=trainer, checkpoint={"everySteps": every}, workers={"replicas": RANKS})
    return manifests.run_directory(path, job)


def _records(run_dir: RunDir, kind: str) -> list[dict[str, Any]]:
    return [line for path in run_dir.log.glob("train-g*.jsonl") for line in read_lines(path)[0] if line["kind"] == kind]


def _is_rank(process: psutil.Process) -> bool:
    words = process.cmdline()
    mine = {"tandem_trainer", "benchmarks.strategies.by_hand"} & set(words)
    return bool(mine) and "torch.distributed.run" not in words


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.strategies", description="What the strategies cost in memory and time."
    )
    parser.add_argument("--only", nargs="+", choices=PARTS, default=list(PARTS), help="these parts alone")
    parser.add_argument("--rounds", type=int, default=9, help="of overhead; fewer than 6 are not judged")
    parser.add_argument("--steps", type=int, default=60, help=f"of overhead; the first {SKIP} do not count")
    options = parser.parse_args()
    if options.rounds < 1 or options.steps <= SKIP:
        parser.error(f"--rounds must be at least 1, and --steps more than {SKIP}")
    return options


if __name__ == "__main__":
    main()
