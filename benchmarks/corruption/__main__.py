"""Wrong numbers that are planted in trainer, loader, saver, memory, processor, disk and evaluator, and whether each is
named; and false alarms where nothing is wrong: `python -m benchmarks.corruption`.

Each mutant is a run of two ranks with the built-in trainer. It has to be named within BOUND steps, by the comparison
that is for it. Gradients are compared each ten steps instead of each 1,024. Undisturbed runs of several strategies,
precisions and optimizers have to name nothing.
"""

import argparse
import json
import re
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from benchmarks.corruption.mutants import EVERY, MUTANTS, PLANTED, Mutant
from benchmarks.goals import Outcome, Verdict, conclude
from tandem.rundir.layout import RunDir
from tandem_coordinator.run_watcher import RunDirectory
from tandem_evaluator.evaluation import Evaluation, TaskScoring
from tandem_evaluator.evaluator_log import EvaluatorLog
from tandem_evaluator.loop import Evaluator
from tandem_trainer.checkpoint.lending import Library
from tests.support.evaluator_run import Run
from tests.support.ranks import Ranks, make_rundir, records

BOUND = 2 * EVERY
"""Steps within which a mutant has to be named."""
STEPS = 40
JOB: dict[str, Any] = {"model": "simple-net", "data": {"name": "digits"}, "globalBatchSize": 100, "epochs": 10_000}
SAVES = {"everySteps": EVERY, "keepLast": 9}
TRAINER = str(Path(__file__).with_name("mutants.py"))
DISKS = {
    "byte of the weights": ("weights", False),
    "byte of the moments": ("optimizer", False),
    "byte of the manifest": ("manifest", False),
    "weights cut off": ("weights", True),
}
RIGHT: dict[str, dict[str, Any]] = {
    "ddp, adam": {},
    "ddp, adamw, average, clipping": {"optimizer": {"name": "adamw"}, "emaDecay": 0.99, "gradientClipNorm": 1.0},
    "ddp, sgd, micro-batches": {"optimizer": {"name": "sgd", "momentum": 0.9}, "microBatchSize": 9},
    "ddp, muon, dropout": {"optimizer": {"name": "muon"}, "model": "cnn"},
    "ddp, adamw8bit": {"optimizer": {"name": "adamw8bit"}},
    "ddp, bfloat16": {"precision": "bfloat16"},
    "ddp, batch norm": {"model": "resnet-18", "globalBatchSize": 24, "dropLast": True, "maxSteps": 60},
    "fsdp, adam": {"strategy": "fsdp"},
    "fsdp, bfloat16": {"strategy": "fsdp", "precision": "bfloat16"},
    "hogwild, sgd": {"strategy": "hogwild", "optimizer": {"name": "sgd"}},
}


def train(rundir: RunDir, mutant: str) -> list[int]:
    """Train one generation; returns the exit codes."""
    with Ranks(rundir, 2, TRAINER, mutant) as ranks:
        codes, output = ranks.finish(900)
    if mutant in ("none", "leaves") and not set(codes) <= {0, 75}:
        sys.exit(f"an undisturbed run ended with {codes}:\n{output[-2000:]}")
    return codes


def reasons_of(rundir: RunDir) -> list[str]:
    """Kinds of all wrong numbers that a coordinator knows of, and whether a checkpoint was set aside."""
    directory = RunDirectory(rundir, rundir.read_job().spec.evaluation)
    before = directory.poll(time.time())
    # Checkpoints are compared at the first look, logs from then on.
    reported = {str(record["reason"]) for record in records(rundir, "corruption")}
    reported |= {corruption.reason for corruption in before.corruptions}
    reported |= {"WeightsUnchanged"} if before.unchanged.count else set()
    return sorted(reported | ({"set aside"} if rundir.set_aside_names() else set()))


def steps_until_record(rundir: RunDir, planted: int) -> int:
    """Steps from the mutation to the step after which it was named: at the latest that of the next save."""
    lines = [record for path in sorted(rundir.log.glob("train-g*.jsonl")) for record in _lines(path)]
    kinds = [record["kind"] for record in lines]
    if "corruption" in kinds:
        message = str(lines[kinds.index("corruption")]["message"])
        steps = [int(number.replace(",", "")) for number in re.findall(r"steps? ([\d,]*\d)", message)]
        logged = [record["step"] for record in lines[: kinds.index("corruption")] if record["kind"] == "step"]
        last = max([planted, *steps, *logged[-1:]])
        return -(-last // EVERY) * EVERY - planted
    # Two checkpoints after it differ from what they should be.
    return (planted // EVERY + 2) * EVERY - planted


def _lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines() if line]


def play(folder: Path, name: str, mutant: Mutant) -> tuple[list[str], int]:
    """Train with a mutation. Returns what was named, and after how many steps."""
    rundir = make_rundir(folder, JOB | {"maxSteps": STEPS} | dict(mutant.options), checkpoint=SAVES)
    if mutant.restarts:
        train(rundir, "leaves")
        if early := reasons_of(rundir):
            sys.exit(f"{early} in an undisturbed run")
    train(rundir, name)
    return reasons_of(rundir), 0 if mutant.restarts else steps_until_record(rundir, PLANTED)


def damage(folder: Path, file: str, cuts: bool) -> list[str]:
    """Damage a file of the newest checkpoint while no process runs, and train on. Returns what was named."""
    rundir = make_rundir(folder, JOB | {"maxSteps": STEPS}, checkpoint=SAVES)
    train(rundir, "leaves")
    checkpoint = rundir.checkpoint(rundir.checkpoint_names()[-1])
    path = next(path for path in sorted(checkpoint.rglob("*.*")) if path.name.startswith(file))
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content[: len(content) // 2] if cuts else content)
    train(rundir, "none")
    return reasons_of(rundir)


def score_others(folder: Path) -> list[str]:
    """Score one checkpoint with the weights of another. Returns what was named."""
    run = Run(folder, {"name": "digits"}, {}, model="simple-net")
    first, final = (run.checkpoint(step, run.weights(step, image_size=8)) for step in (10, 20))
    run.rundir.mark_done(final)
    real = Library.weights

    def weights(library: Library, path: Path, manifest: Any) -> Any:
        other = run.rundir.manifest(first.name)
        return real(library, run.rundir.checkpoint(first.name), other)

    Library.weights = weights  # type: ignore[method-assign]
    try:
        with EvaluatorLog(run.rundir, "evaluator-0-0") as log:
            scoring = TaskScoring(Evaluation.load(run.job.spec.trainer.images))
            Evaluator(run.rundir, run.job.spec.evaluation, "evaluator-0-0", scoring, log).run()
    finally:
        Library.weights = real  # type: ignore[method-assign]
    return sorted({record["reason"] for record in run.log("evaluator-0-0", "corruption")})


def zoo(folder: Path, only: str) -> Iterator[tuple[str, str, tuple[str, ...], list[str], int]]:
    """Play each mutant. Yields its place and name, what should name it, what did, and after how many steps."""
    for number, (name, mutant) in enumerate(MUTANTS.items()):
        if only in f"{mutant.place} {name}":
            yield mutant.place, name, mutant.reasons, *play(folder / f"mutant-{number}", name, mutant)
    for number, (name, (file, cuts)) in enumerate(DISKS.items()):
        if only in f"disk {name}":
            yield "disk", name, ("set aside",), damage(folder / f"disk-{number}", file, cuts), 0
    if only in "evaluator weights of another checkpoint":
        reported = score_others(folder / "evaluator")
        yield "evaluator", "weights of another checkpoint", ("ScoresDiffer",), reported, 0


def main() -> int:
    """Play all mutants and the undisturbed runs. Returns the exit code."""
    parser = argparse.ArgumentParser(prog="make bench-corruption")
    parser.add_argument("--only", default="", help="mutants whose place and name contain this")
    parser.add_argument("--steps", type=int, default=3_000, help="undisturbed steps")
    options = parser.parse_args()
    missed, total, by_place, longest = list[str](), 0, Counter[str](), 0
    with tempfile.TemporaryDirectory() as folder:
        print("| place | planted | named by | within steps |\n|---|---|---|---|")
        for place, name, reasons, reported, steps in zoo(Path(folder), options.only):
            is_named = bool(reported) and set(reported) <= set(reasons) and steps <= BOUND
            total, longest = total + 1, max(longest, steps)
            by_place[place] += is_named
            missed += [] if is_named else [f"{place}: {name}: {', '.join(reported) or 'nothing'}"]
            print(f"| {place} | {name} | {', '.join(reported) or '**nothing**'} | {steps or 'at once'} |", flush=True)
        alarms, steps = list[str](), 0
        for number, (name, settings) in enumerate(RIGHT.items() if options.steps else ()):
            count = {"maxSteps": max(20, options.steps // len(RIGHT))}
            replicas = {"workers": {"processesPerReplica": 2}} if settings.get("strategy") == "hogwild" else {}
            config = JOB | count | settings
            rundir = make_rundir(Path(folder) / f"right-{number}", config, checkpoint=SAVES, **replicas)
            train(rundir, "none")
            alarms += [f"{name}: {reason}" for reason in reasons_of(rundir)]
            steps += len(records(rundir, "step"))
            print(f"{name}: {len(records(rundir, 'step'))} steps, {reasons_of(rundir) or 'nothing'} named", flush=True)
    print(f"{total} mutants: {', '.join(f'{place} {count}' for place, count in by_place.items())}")
    verdicts = [
        Verdict(
            Outcome.MISSED if missed else Outcome.MET,
            f"each mutant is named, by its comparison, within {BOUND} steps",
            "; ".join(missed) or f"{total} of {total}, {longest} steps at most",
        ),
        Verdict(
            Outcome.MISSED if alarms else Outcome.MET if steps else Outcome.UNJUDGED,
            "where nothing is wrong nothing is named",
            "; ".join(alarms) or f"{steps:,} steps of {len(RIGHT)} settings",
        ),
    ]
    return conclude(verdicts)


if __name__ == "__main__":
    sys.exit(main())
