"""Measurement of one side: fresh processes with one rank of one thread, and their record."""

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
from tandem.processes.launch import RUN_DIR
from tandem.rundir.checkpoint import WEIGHTS
from tandem.rundir.layout import RunDir
from tests.support import manifests
from tests.support.lines import read_lines
from tests.support.processes import TANDEM

SKIP = 10
"""First steps that are excluded: memory and caches warm up."""
NEVER = 1_000_000
OFFLINE = {"HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false", "CUDA_VISIBLE_DEVICES": ""}
WITH_TRL, PLAIN = "benchmarks.fine_tuning.with_trl", "benchmarks.fine_tuning.plain_loop"


@dataclass(frozen=True)
class Case:
    """Case to measure."""

    work: Path
    """Folder of `work.prepare`."""
    packing: bool
    seed: int
    plan: Plan
    plan_file: Path
    every: int = 0
    """Steps between two evaluations; 0 for none."""
    save_every: int = 0
    """Steps between two saved states; 0 for the last one only. Tandem evaluates saved states."""


@dataclass(frozen=True)
class Run:
    """Result of one run."""

    measurement: Measurement
    """Speed; the throughput is tokens a second, without padding."""
    steps: list[Step]
    padding: float
    """Share of padding in the tokens of its batches."""
    peak: float
    """Peak resident memory of the rank, MB of 10^6 bytes."""
    held_out: float
    """Loss of its last weights, nats for each held-out token."""
    scores: list[Score]
    """Its own evaluations."""

    @property
    def evaluated_seconds(self) -> float:
        """Seconds from the end of the first step until the last evaluation, or the last step if that is later."""
        return max(self.steps[-1].at, *(score.at for score in self.scores), 0.0) - self.steps[0].at

    def known_loss(self, seconds: float) -> float:
        """The last score known this long after the end of the first step; infinite without one."""
        earlier = [score for score in self.scores if score.at - self.steps[0].at <= seconds]
        return max(earlier, key=lambda score: score.step).loss if earlier else math.inf

    def __str__(self) -> str:
        use = self.measurement.use
        return (
            f"{self.measurement.throughput:.0f} tokens/s, {1000 * use.ranks:.0f} + {1000 * use.beside:.0f} ms of "
            f"processors a step, padding {self.padding:.1%}, peak {self.peak:.0f} MB, held-out loss "
            f"{self.held_out:.4f}"
        )


def tandem(case: Case) -> Run:
    """Run Tandem's trainer, started by torchrun, with its log and the last checkpoint.

    Raises:
        Failure: the run failed.
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
    """Run `tandem run`, the rank on one core, and an evaluator process on the other, which evaluates every checkpoint.

    Raises:
        Failure: the run failed, or a checkpoint was not evaluated.
    """
    with tempfile.TemporaryDirectory() as name:
        manifest, run_dir = Path(name, "job.yaml"), RunDir(Path(name, "run"))
        evaluators = {"metric": "perplexity", "policy": "Every"}
        manifest.write_text(json.dumps(manifests.manifest("bench", **tandem_spec(case, evaluators=evaluators))))
        command = [TANDEM, "run", str(manifest), "--run-dir", str(run_dir.path), "--pin"]
        course = watched(command, Path(name), _is_forked, case.plan.steps, OFFLINE)
        scores = [
            Score(result["step"], result["finishedAt"], math.log(result["metrics"]["perplexity"]))
            for path in sorted(run_dir.evaluations.glob("step-*/g000001.json"))
            for result in [json.loads(path.read_text())]
        ]
        run = _of_tandem(case, run_dir, course, scores)
    if len(scores) < case.plan.steps // case.every:
        raise Failure(f"{len(scores)} of {case.plan.steps // case.every} checkpoints were evaluated")
    return run


def trl(case: Case) -> Run:
    """Run TRL's SFTTrainer in one process without a launcher, which evaluates in between if specified.

    Raises:
        Failure: the run failed.
    """
    options = ["--packing"] if case.packing else []
    return _recorded(case, WITH_TRL, [*options, *(["--evaluate-every", str(case.every)] if case.every else [])])


def plain(case: Case) -> Run:
    """Run the plain loop, which packs nothing.

    Raises:
        Failure: the run failed.
    """
    return _recorded(case, PLAIN, [])


def sides(packing: bool) -> dict[str, Callable[[Case], Run]]:
    """Sides that support the packing, in the order of their turns."""
    return {"Tandem": tandem, "TRL": trl} | ({} if packing else {"plain loop": plain})


def log_steps(path: Path, plan: Plan) -> list[Step]:
    """Read the steps of one of Tandem's training logs. Steps with other rows than the plan's have no documents."""
    steps = []
    for line in read_lines(path)[0]:
        if line["kind"] == "step":
            index = line["step"] - 1
            documents = plan.documents[index] if line.get("ids") == plan.ids[index] else []
            steps.append(Step(line["step"], line["time"], line["loss"], documents, plan.widths[index]))
    return steps


def tandem_spec(case: Case, **more: Any) -> dict[str, Any]:
    trainer = {
        "task": "causal-lm",
        "parameters": parameters(case.work, case.packing),
        "loop": loop(case.seed, case.plan.steps),
    }
    return {"trainer": trainer, "checkpoint": {"everySteps": case.save_every or NEVER}} | more


def _of_tandem(case: Case, run_dir: RunDir, course: Course, scores: Sequence[Score] = ()) -> Run:
    steps = [step for path in sorted(run_dir.log.glob("train-g*.jsonl")) for step in log_steps(path, case.plan)]
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
    if [entry.step for entry in steps] != list(range(1, plan.steps + 1)):
        raise Failure(f"{len(steps)} steps, and not each of {plan.steps} once")
    ends = [entry.at for entry in steps]
    own = [replace(entry, at=course.running(entry.at)) for entry in steps]
    tokens = sum(plan.tokens[SKIP:]) / (own[-1].at - own[SKIP - 1].at)
    model = AutoModelForCausalLM.from_pretrained(case.work / MODEL).eval()
    # The last layer is tied to the first.
    differing = model.load_state_dict(dict(weights), strict=False)
    if differing.unexpected_keys or set(differing.missing_keys) - {"lm_head.weight"}:
        raise Failure(f"other weights than the model's: {differing}")
    return Run(
        measurement=Measurement(tokens, course.use(ends, SKIP), own[0].at - course.started),
        steps=own,
        padding=1 - sum(plan.tokens) / sum(entry.width for entry in steps),
        peak=max(sample.peak for sample in course.samples),
        held_out=held_out_loss(case.work, model),
        scores=[replace(entry, at=course.running(entry.at)) for entry in scores],
    )


def _is_tandem(process: psutil.Process) -> bool:
    args = process.cmdline()
    return "tandem_trainer" in args and "torch.distributed.run" not in args


def _is_forked(process: psutil.Process) -> bool:
    return process.name() == "tandem-rank"


def _is_module(module: str, process: psutil.Process) -> bool:
    return module in process.cmdline()
