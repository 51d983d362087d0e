"""Throughput of our loop beside a bare one, and of training with evaluators beside training without.

    python tests/bench/throughput.py [--pairs 7] [--steps 600] [--only loop|evaluators]

Every measurement is a fresh `tandem run` or `torchrun`; the two sides take turns (A B B A A B …), because the speed of
a shared machine drifts. Reported: the median and the range of each side, and the median of the ratios of neighbours.
The first steps, in which memory and caches warm up, are left out on both sides.

  loop        two ranks of one thread each: `tandem run` with its log, its coordinator and a checkpoint every 50 steps,
              beside tests/bench/bare_ddp.py, which has nothing of the kind; once as everybody writes it, and once
              keeping freed memory as Tandem's ranks do (tandem.memory), so that what the loop alone costs is seen
  evaluators  one rank pinned to core 0: with one evaluator process pinned to core 1 (`tandem run --pin`, which
              uses sched_setaffinity) that evaluates every checkpoint, beside the same without evaluators
"""

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

HERE = Path(__file__).resolve().parent
MODEL, SAMPLES, IMAGE_SIZE, BATCH = "cnn", 4096, 28, 64
SKIP = 100
TANDEM = [str(Path(sys.executable).with_name("tandem"))]

MANIFEST = f"""\
apiVersion: tandem.dev/v1alpha1
kind: DistributedTrainingJob
metadata: {{name: bench}}
spec:
  trainer:
    task: image-classification
    config:
      model: {MODEL}
      data: {{name: synthetic, samples: {SAMPLES}, imageSize: {IMAGE_SIZE}}}
      globalBatchSize: {BATCH}
      epochs: 1000
  checkpoint: {{everySteps: 50}}
"""


def main() -> None:
    """Measure and print a table; exit code 1 if a measurement failed."""
    parser = argparse.ArgumentParser(description="Throughput of Tandem's training loop, compared.")
    parser.add_argument("--pairs", type=int, default=7, help="measurements of each side")
    parser.add_argument(
        "--steps", type=int, default=600, help=f"optimizer steps of each; the first {SKIP} do not count"
    )
    parser.add_argument("--only", choices=["loop", "evaluators"], help="one comparison alone")
    options = parser.parse_args()
    steps = options.steps
    what = f"{MODEL} on {IMAGE_SIZE}×{IMAGE_SIZE}, batch {BATCH}, {steps} steps"
    print(f"{platform.machine()}, {os.cpu_count()} cores, {what}")
    sound = True
    if options.only != "evaluators":
        sound &= compare(
            "two ranks, one thread each",
            ("tandem run", lambda: tandem(steps, "workers.replicas=2", "evaluators.replicas=0")),
            {"bare DDP loop": lambda: bare(steps), "bare, keeping memory": lambda: bare(steps, keep=True)},
            options.pairs,
            goal=0.99,
        )
    if options.only != "loop":
        sound &= compare(
            "one rank pinned to core 0",
            ("with an evaluator on core 1", lambda: tandem(steps, "evaluators.policy=Every", pin=True)),
            {"without evaluators": lambda: tandem(steps, "evaluators.replicas=0", pin=True)},
            options.pairs,
            goal=0.98,
        )
    sys.exit(0 if sound else 1)


Measure = Callable[[], float | None]


def compare(title: str, ours: tuple[str, Measure], references: dict[str, Measure], pairs: int, goal: float) -> bool:
    """Measure all sides in turns and print what came out. Returns whether no measurement failed."""
    print(f"\n{title}")
    name, measure = ours
    sides = {name: measure, **references}
    results: dict[str, list[float | None]] = {side: [] for side in sides}
    for number in range(pairs):
        for side in list(sides) if number % 2 == 0 else reversed(list(sides)):
            results[side].append(sides[side]())
            print(f"  {number + 1}/{pairs} {side}: {shown(results[side][-1])}", flush=True)
    for side, values in results.items():
        good = [value for value in values if value is not None]
        print(
            f"  {side:<28} median {statistics.median(good):8.1f} samples/s"
            f"   range {min(good):.1f} to {max(good):.1f}   failed {len(values) - len(good)} of {len(values)}"
        )
    for reference in references:
        ratios = [a / b for a, b in zip(results[name], results[reference], strict=True) if a and b]
        print(
            f"  {name} / {reference}: median of the ratios of neighbours {statistics.median(ratios):.3f},"
            f" range {min(ratios):.3f} to {max(ratios):.3f}; goal ≥ {goal}"
        )
    return all(None not in values for values in results.values())


def shown(value: float | None) -> str:
    return "FAILED" if value is None else f"{value:.1f} samples/s"


def tandem(steps: int, *overrides: str, pin: bool = False) -> float | None:
    """Samples a second of a whole `tandem run`, from its own training log; None if it failed."""
    with tempfile.TemporaryDirectory() as folder:
        run_dir = Path(folder) / "run"
        command = [*TANDEM, "run", "-", "--run-dir", str(run_dir), *(["--pin"] if pin else [])]
        for override in (*overrides, f"trainer.config.maxSteps={steps}"):
            command += ["--set", f"spec.{override}"]
        environment = os.environ | {"OMP_NUM_THREADS": "1"}
        ended = subprocess.run(command, input=MANIFEST, text=True, capture_output=True, env=environment, check=False)
        if ended.returncode != 0:
            print(ended.stdout[-2000:], ended.stderr[-2000:])
            return None
        logs = sorted((run_dir / "log").glob("train-g*.jsonl"))
        lines = [json.loads(line) for line in logs[-1].read_text().splitlines() if line]
    taken = [line for line in lines if line["kind"] == "step"]
    if len(logs) != 1 or len(taken) != steps:
        print(f"  {len(logs)} generations, {len(taken)} of {steps} steps")
        return None
    counted = taken[SKIP:]
    return sum(line["samples"] for line in counted) / (counted[-1]["time"] - taken[SKIP - 1]["time"])


def bare(steps: int, keep: bool = False) -> float | None:
    """Samples a second of the bare loop; None if it failed. `keep`: with Tandem's setting of the allocator."""
    arguments = [MODEL, SAMPLES, IMAGE_SIZE, BATCH, steps, SKIP, int(keep)]
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    command += [str(HERE / "bare_ddp.py"), *map(str, arguments)]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    ended = subprocess.run(command, text=True, capture_output=True, env=environment, check=False)
    for word in ended.stdout.split():
        if ended.returncode == 0 and word.startswith("throughput="):
            return float(word.removeprefix("throughput="))
    print(ended.stdout[-2000:], ended.stderr[-2000:])
    return None


if __name__ == "__main__":
    main()
