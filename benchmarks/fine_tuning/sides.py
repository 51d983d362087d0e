"""One measurement of a side: fresh processes with one rank of one thread, and what they wrote down."""

import json
import math
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import psutil
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from benchmarks.fine_tuning.record import Score, Step, read
from benchmarks.fine_tuning.work import MODEL, Plan, held_out_loss, loop, parameters
from benchmarks.throughput.sides import Course, Failure, Measurement, watched
from tandem.launch import RUN_DIR
from tandem.rundir.checkpoint import WEIGHTS
from tandem.rundir.layout import RunDir
from tests.support import manifests
from tests.support.lines import read_lines
from tests.support.processes import TANDEM

SKIP = 10
"""First steps that do not count: memory and caches warm up."""
NEVER = 1_000_000
OFFLINE = {"HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false", "CUDA_VISIBLE_DEVICES": ""}
WITH_TRL, PLAIN = "benchmarks.fine_tuning.with_trl", "benchmarks.fine_tuning.plain_loop"


@dataclass(frozen=True)
class Case:
    """What is to be measured."""

    work: Path
    """The folder of `work.prepare`."""
    packing: bool
    seed: int
    plan: Plan
    plan_file: Path
    every: int = 0
    """Steps between two evaluations; 0: none."""
    save_every: int = 0
    """Steps between two states that are saved; 0: only the last one is. Tandem evaluates those that are saved."""


@dataclass(frozen=True)
class Run:
    """What one run showed."""

    measurement: Measurement
    """Its throughput is tokens a second, without padding."""
    steps: list[Step]
    padding: float
    """Share of the tokens of its batches."""
    peak: float
    """Resident memory of the rank at the most, MB of 10^6 bytes."""
    held_out: float
    """Loss of its last weights, nats for each token that is held out."""
    scores: list[Score]
    """Of its own evaluations."""

    @property
    def evaluated_seconds(self) -> float:
        """From the end of the first step until the last evaluation, or the last step, whichever is later."""
        return max(self.steps[-1].at, *(score.at for score in self.scores), 0.0) - self.steps[0].at

    def known_loss(self, seconds: float) -> float:
        """The last score that was known so long after the end of the first step; infinite where there was none."""
        known = [score for score in self.scores if score.at - self.steps[0].at <= seconds]
        return max(known, key=lambda score: score.step).loss if known else math.inf

    def __str__(self) -> str:
        use = self.measurement.use
        return (
            f"{self.measurement.throughput:.0f} tokens/s, {1000 * use.ranks:.0f} + {1000 * use.beside:.0f} ms of "
            f"processors a step, padding {self.padding:.1%}, peak {self.peak:.0f} MB, held-out loss "
            f"{self.held_out:.4f}"
        )


def tandem(case: Case) -> Run:
    """Tandem's trainer, started by torchrun, with its log and the last checkpoint.

    Raises:
        Failure: it did not do its work.
    """
    with tempfile.TemporaryDirectory() as name:
        job = manifests.job("bench", **tandem_spec(case))
        run_dir = manifests.run_directory(Path(name, "run"), job)
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=1"]
        command += ["-m", "tandem_trainer"]
        variables = OFFLINE | {RUN_DIR: str(run_dir.path)}
        course = watched(command, Path(name), _is_tandem, case.plan.steps, variables)
        return _of_tandem(case, run_dir, course)


def tandem_with_evaluators(case: Case) -> Run:
    """`tandem run`, the rank on one core, and an evaluator process on the other, which evaluates every checkpoint.

    Raises:
        Failure: it did not do its work, or a checkpoint was not evaluated.
    """
    with tempfile.TemporaryDirectory() as name:
        manifest, run_dir = Path(name, "job.yaml"), RunDir(Path(name, "run"))
        evaluators = {"metric": "perplexity", "policy": "Every"}
        manifest.write_text(json.dumps(manifests.manifest("bench", **tandem_spec(case, evaluators=evaluators))))
        command = [TANDEM, "run", str(manifest), "--run-dir", str(run_dir.path), "--pin"]
        course = watched(command, Path(name), _is_forked, case.plan.steps, OFFLINE)
        scores = [
            Score(found["step"], found["finishedAt"], math.log(found["metrics"]["perplexity"]))
            for path in sorted(run_dir.evaluations.glob("step-*/g000001.json"))
            for found in [json.loads(path.read_text())]
        ]
        run = _of_tandem(case, run_dir, course, scores)
    if len(scores) < case.plan.steps // case.every:
        raise Failure(f"{len(scores)} of {case.plan.steps // case.every} checkpoints were evaluated")
    return run


def trl(case: Case) -> Run:
    """TRL's SFTTrainer, in one process without a launcher, which evaluates in between where that is asked.

    Raises:
        Failure: it did not do its work.
    """
    options = ["--packing"] if case.packing else []
    return _recorded(case, WITH_TRL, [*options, *(["--evaluate-every", str(case.every)] if case.every else [])])


def plain(case: Case) -> Run:
    """The plain loop, which packs nothing.

    Raises:
        Failure: it did not do its work.
    """
    return _recorded(case, PLAIN, [])


def sides(packing: bool) -> dict[str, Callable[[Case], Run]]:
    """Those that can do it, in the order of their turns."""
    return {"Tandem": tandem, "TRL": trl} | ({} if packing else {"plain loop": plain})


def log_steps(path: Path, plan: Plan) -> list[Step]:
    """What one of Tandem's training logs says. Steps of other rows than the plan's have no documents."""
    found = []
    for line in read_lines(path)[0]:
        if line["kind"] == "step":
            index = line["step"] - 1
            documents = plan.documents[index] if line.get("ids") == plan.ids[index] else []
            found.append(Step(line["step"], line["time"], line["loss"], documents, plan.widths[index]))
    return found


def tandem_spec(case: Case, **more: Any) -> dict[str, Any]:
    trainer = {
        "task": "causal-lm",
        "parameters": parameters(case.work, case.packing),
        "loop": loop(case.seed, case.plan.steps),
    }
    return {"trainer": trainer, "checkpoint": {"everySteps": case.save_every or NEVER}} | more


def _of_tandem(case: Case, run_dir: RunDir, course: Course, scores: Sequence[Score] = ()) -> Run:
    steps = [one for path in sorted(run_dir.log.glob("train-g*.jsonl")) for one in log_steps(path, case.plan)]
    committed = run_dir.committed()
    if not committed or committed[0].step != case.plan.steps:
        raise Failure("the last step was not saved")
    weights = run_dir.checkpoint(committed[0].name) / committed[0].entry(WEIGHTS).path
    return _run(case, course, steps, load_file(weights), scores)


def _recorded(case: Case, module: str, options: Sequence[str]) -> Run:
    with tempfile.TemporaryDirectory() as name:
        output = Path(name, "output")
        output.mkdir()
        command = [sys.executable, "-m", module, "--work", str(case.work), "--plan", str(case.plan_file)]
        command += ["--output", str(output), *options]
        variables = OFFLINE | {"HF_DATASETS_CACHE": str(case.work / "cache")}
        course = watched(command, Path(name), partial(_is_module, module), case.plan.steps, variables)
        (path,) = output.glob("record-*.jsonl")
        steps, scores = read(path)
        weights = load_file(output / "final" / "model.safetensors")
    return _run(case, course, steps, weights, scores)


def _run(
    case: Case,
    course: Course,
    steps: list[Step],
    weights: Mapping[str, torch.Tensor],
    scores: Sequence[Score],
) -> Run:
    plan = case.plan
    if [one.step for one in steps] != list(range(1, plan.steps + 1)):
        raise Failure(f"{len(steps)} steps, and not each of {plan.steps} once")
    ends = [one.at for one in steps]
    own = [replace(one, at=course.running(one.at)) for one in steps]
    tokens = sum(plan.tokens[SKIP:]) / (own[-1].at - own[SKIP - 1].at)
    model = AutoModelForCausalLM.from_pretrained(case.work / MODEL).eval()
    # The last layer is tied to the first.
    lacking = model.load_state_dict(dict(weights), strict=False)
    if lacking.unexpected_keys or set(lacking.missing_keys) - {"lm_head.weight"}:
        raise Failure(f"other weights than the model's: {lacking}")
    return Run(
        measurement=Measurement(tokens, course.use(ends, SKIP), own[0].at - course.began),
        steps=own,
        padding=1 - sum(plan.tokens) / sum(one.width for one in steps),
        peak=max(look.peak for look in course.looks),
        held_out=held_out_loss(case.work, model),
        scores=[replace(one, at=course.running(one.at)) for one in scores],
    )


def _is_tandem(process: psutil.Process) -> bool:
    words = process.cmdline()
    return "tandem_trainer" in words and "torch.distributed.run" not in words


def _is_forked(process: psutil.Process) -> bool:
    return process.name() == "tandem-rank"


def _is_module(module: str, process: psutil.Process) -> bool:
    return module in process.cmdline()
