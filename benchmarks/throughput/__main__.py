"""Throughput of Tandem's loop beside a bare one, and of training with evaluators beside training without: `make bench`.

    python -m benchmarks.throughput [--rounds 9] [--steps 600] [--only loop|script|evaluators|trainer] [--model cnn]

Every measurement is a fresh `tandem run` or `torchrun`. Those of a round exist at the same time and take turns of
seconds (benchmarks.turns), every other round in reverse order, because the speed of a shared machine drifts. Each run
gives its throughput by the clock, and the processor seconds of a step: of the ranks, and of all other processes. The
first steps, in which memory and caches warm up, are excluded on all sides. All run on the same two cores, whatever the
machine has.

  loop        two ranks of one thread each: `tandem run` with its log, its coordinator and a checkpoint every 50 steps,
              beside a bare loop (bare_ddp.py) without any of these. No core is free, so the processor seconds of all
              processes count. Beside it, without a goal, the bare loop with Tandem's setting of the allocator
              (tandem_trainer.malloc), which shows the cost of the rest.
  script      the bare loop as the unchanged script of a `tandem run`, beside the same under torchrun: how long it takes
              to the first step, and how fast it is from then on. The processor seconds of all processes count.
  evaluators  one rank of one thread with a core of its own (`tandem run --pin`), and one evaluator process on the other
              core that evaluates every checkpoint, beside the same without evaluators, where the rank may use both
              cores. The processor seconds of the ranks count.
  trainer     the same with Hugging Face's Trainer, unchanged, whose states an evaluator scores beside it. Beside it,
              without a goal, the Trainer that evaluates the same itself, as its users do; by the clock, training waits.

`verdict` describes how the goals are judged. Exit codes: 0 where all goals are met; 1 where one is missed or a
measurement failed; 3 where the machine was too noisy, or the rounds too few, to judge one and none is missed. Results
go to runs/throughput/, one record a line, as they come.
"""

import argparse
import json
import os
import platform
import statistics
import sys
import time
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import TextIO

from benchmarks.goals import Verdict, conclude
from benchmarks.throughput.sides import (
    SKIP,
    TRAINER_BATCH,
    Measure,
    Measurement,
    Work,
    attempted,
    bare,
    script,
    tandem,
    trainer,
)
from benchmarks.throughput.verdict import Goal, clock_ratios, judge, processor_ratios, start_ratios, summary
from benchmarks.turns import in_turns
from tandem_launcher.local.placement import usable_cores
from tests.support import ROOT

RESULTS = ROOT / "runs" / "throughput"
ONLY = ("loop", "script", "evaluators", "trainer")


@dataclass(frozen=True)
class Comparison:
    """Tandem's side beside its references. The goal is for the first of them."""

    title: str
    own: str
    sides: dict[str, Measure]
    """Sides in the order of their turns, including Tandem's."""
    goal: Goal

    @property
    def references(self) -> list[str]:
        """All sides but Tandem's."""
        return [side for side in self.sides if side != self.own]


def comparisons(work: Work) -> dict[str, Comparison]:
    """Comparisons by the names in ONLY."""
    small = replace(work, batch_size=TRAINER_BATCH)
    return {
        "loop": Comparison(
            "two ranks, one thread each",
            "tandem run",
            {
                "tandem run": lambda: tandem(work, "workers.replicas=2", "evaluators.replicas=0"),
                "bare DDP loop": lambda: bare(work),
                "bare, keeping memory": lambda: bare(work, keep=True),
            },
            Goal("tandem run ≥ 0.99 of a bare DDP loop", 0.99, lambda use: use.total),
        ),
        "script": Comparison(
            "an unchanged script, two ranks, one thread each",
            "by tandem run",
            {"by tandem run": lambda: script(work), "by torchrun": lambda: bare(work)},
            Goal("a script by tandem run ≥ 0.99 of the same by torchrun", 0.99, lambda use: use.total, start=True),
        ),
        "evaluators": Comparison(
            "one rank with a core of its own",
            "with an evaluator",
            {
                "with an evaluator": lambda: tandem(work, "evaluators.policy=Every", pin=True),
                "without evaluators": lambda: tandem(work, "evaluators.replicas=0", pin=True),
            },
            Goal("training with an evaluator ≥ 0.98 of training alone", 0.98, lambda use: use.ranks),
        ),
        "trainer": Comparison(
            "Hugging Face's Trainer, one rank with a core of its own, a state every 50 steps",
            "with an evaluator",
            {
                "with an evaluator": lambda: trainer(small, with_evaluator=True),
                "without evaluation": lambda: trainer(small),
                "evaluating itself": lambda: trainer(small, inline=True),
            },
            Goal("a Trainer with an evaluator ≥ 0.98 of one without evaluation", 0.98, lambda use: use.ranks),
        ),
    }


def main() -> None:
    """Measure, print the results, and end with the code of the verdicts."""
    options = _options()
    cores = usable_cores()
    if len(cores) < 2:
        sys.exit("two cores are needed, and this process may use one")
    # Hyperthreads of one physical core are neighbours in this order.
    os.sched_setaffinity(0, {cores[0], cores[len(cores) // 2]})
    work = Work(options.model, options.steps)
    RESULTS.mkdir(parents=True, exist_ok=True)
    path = RESULTS / f"{time.strftime('%Y%m%d-%H%M%S')}-{os.getpid()}.jsonl"
    load = os.getloadavg()[0]
    print(
        f"{platform.machine()}, 2 of {len(cores)} cores, load {load:.1f}, {work}; results in {path.relative_to(ROOT)}"
    )
    verdicts: list[Verdict] = []
    with path.open("a", buffering=1) as file:
        for name, comparison in comparisons(work).items():
            if options.only in (None, name):
                verdicts += compare(comparison, options.rounds, file)
    print()
    sys.exit(conclude(verdicts))


def compare(comparison: Comparison, rounds: int, file: TextIO) -> list[Verdict]:
    """Measure all sides in turns and print the results."""
    print(f"\n{comparison.title}", flush=True)
    sides = list(comparison.sides)
    runs: dict[str, list[Measurement | None]] = {side: [] for side in sides}
    for number in range(rounds):
        measures = {side: partial(attempted, measure) for side, measure in comparison.sides.items()}
        for side, (measurement, problem) in in_turns(measures, number).items():
            runs[side].append(measurement)
            record = {"side": side, "round": number, "load": os.getloadavg()[0], "problem": problem}
            print(json.dumps(record | (asdict(measurement) if measurement else {})), file=file)
            print(f"  {number + 1}/{rounds} {side}: {measurement or f'FAILED: {problem}'}", flush=True)
    for side in sides:
        print(f"  {side:<22} {_summary(runs[side])}")
    own = runs[comparison.own]
    for name in comparison.references:
        reference = runs[name]
        print(f"  {comparison.own} / {name}")
        print(f"    by the clock:                  {summary(clock_ratios(own, reference))}")
        print(f"    seconds to the first step:     {summary(start_ratios(own, reference))}")
        print(f"    processor seconds, ranks:      {summary(processor_ratios(own, reference, lambda use: use.ranks))}")
        print(f"    processor seconds, everything: {summary(processor_ratios(own, reference, lambda use: use.total))}")
    return judge(comparison.goal, own, *(runs[reference] for reference in comparison.references))


def _summary(runs: list[Measurement | None]) -> str:
    good = [run for run in runs if run is not None]
    failed = f"failed {len(runs) - len(good)} of {len(runs)}"
    if not good:
        return failed
    speeds = [run.throughput for run in good]
    ranks = 1000 * statistics.median(run.use.ranks for run in good)
    beside_ranks = 1000 * statistics.median(run.use.beside for run in good)
    clock = f"median {statistics.median(speeds):.1f} samples/s, range {min(speeds):.1f} to {max(speeds):.1f}"
    return f"{clock}; processors a step: ranks {ranks:.1f} ms, beside {beside_ranks:.1f} ms; {failed}"


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.throughput", description="Throughput of Tandem's training loop, compared."
    )
    parser.add_argument("--rounds", type=int, default=9, help="measurements of each side; fewer than 6 are not judged")
    parser.add_argument(
        "--steps", type=int, default=600, help=f"optimizer steps of each; the first {SKIP} do not count"
    )
    parser.add_argument("--only", choices=ONLY, help="one comparison alone")
    parser.add_argument("--model", default="cnn", help="one of the built-in models")
    options = parser.parse_args()
    if options.rounds < 1 or options.steps <= SKIP:
        parser.error(f"--rounds must be at least 1, and --steps more than {SKIP}")
    return options


if __name__ == "__main__":
    main()
