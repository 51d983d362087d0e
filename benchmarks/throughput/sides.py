"""Measurement of one side: a fresh `tandem run` or `torchrun`, its throughput and the processor seconds of a step."""

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path

import psutil

from benchmarks.throughput.processors import IsRank, Sample, Use, per_step, sample
from benchmarks.turns import Pauses, Turn
from tandem.rundir.layout import RunDir
from tandem_launcher.local.placement import usable_cores
from tests.support.lines import read_lines
from tests.support.manifests import manifest
from tests.support.processes import TANDEM

SKIP = 100
"""First steps that are excluded: memory and caches warm up."""
SAMPLE_SECONDS = 0.5
"""Seconds between samples; a sample takes 4 ms of one core, on every side."""
START_SECONDS, STEP_SECONDS = 120.0, 5.0
"""Timeout of a run: for its start, and for each of its steps."""
LEAVE_SECONDS = 30.0
SCRIPT = Path(__file__).with_name("bare_ddp.py")
TRAINER_EVERY, TRAINER_BATCH = 50, 8
"""Steps between two saved states, and samples of a step."""
TRAINER, TRAINER_LOSS = Path(__file__).with_name("trainer.py"), Path(__file__).with_name("trainer_loss.py")


@dataclass(frozen=True)
class Work:
    """Training job, the same on every side."""

    model: str
    steps: int
    samples: int = 4096
    image_size: int = 28
    batch_size: int = 64

    def __str__(self) -> str:
        return f"{self.model} on {self.image_size}×{self.image_size}, batch {self.batch_size}, {self.steps} steps"


@dataclass(frozen=True)
class Measurement:
    """Result of one run."""

    throughput: float
    """Samples a second, by the clock."""
    use: Use
    start: float
    """Seconds from the command to the end of the first step."""

    def __str__(self) -> str:
        use = f"{self.use.ranks * 1000:.1f} + {self.use.beside * 1000:.1f} ms of processors a step"
        return f"{self.throughput:.1f} samples/s, {use}, first step after {self.start:.1f} s"


class Failure(Exception):  # noqa: N818 - it is what the table counts
    """A run did not do its work."""


Measure = Callable[[], Measurement]


@dataclass(frozen=True)
class Course:
    """Samples of a run, taken from outside."""

    started: float
    """Start, in seconds since the epoch."""
    samples: Sequence[Sample]
    pauses: Pauses
    """Periods in which it was stopped for other sides' turns."""

    def running(self, time: float) -> float:
        """Convert a time, in seconds since the epoch, to the run's own time."""
        return self.pauses.running(time)

    def use(self, ends: Sequence[float], skip: int) -> Use:
        """Compute the processor seconds of a step.

        Args:
            ends: end times of the steps, in seconds since the epoch.
            skip: first steps that are excluded.

        Raises:
            Failure: the run was too short.
        """
        samples = [replace(sample, time=self.running(sample.time)) for sample in self.samples]
        use = per_step(samples, [self.running(end) for end in ends], skip)
        if use is None:
            raise Failure(f"too short for two samples after step {skip}: raise --steps")
        return use


def attempted(measure: Measure) -> tuple[Measurement | None, str]:
    """Measure, and return the measurement, or the reason of its failure."""
    try:
        return measure(), ""
    except Failure as failure:
        return None, str(failure)


def tandem(work: Work, *overrides: str, pin: bool = False) -> Measurement:
    """Run a whole `tandem run` with its log, its coordinator and a checkpoint every 50 steps.

    Raises:
        Failure: the run ended early, failed, or was restarted.
    """
    parameters = {
        "model": work.model,
        "data": {"name": "synthetic", "samples": work.samples, "imageSize": work.image_size},
    }
    loop = {"globalBatchSize": work.batch_size, "epochs": 1_000_000, "maxSteps": work.steps}
    trainer = {"task": "image-classification", "parameters": parameters, "loop": loop}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        course = _tandem_run(work, folder, *overrides, pin=pin, trainer=trainer, checkpoint={"everySteps": 50})
        logs = sorted(RunDir(folder / "run").log.glob("train-g*.jsonl"))
        ends = [line["time"] for line in read_lines(logs[-1])[0] if line["kind"] == "step"] if logs else []
        if len(logs) != 1 or len(ends) != work.steps:
            raise Failure(f"{len(logs)} generations, {len(ends)} of {work.steps} steps")
    return measured(course, ends, work.steps, work.batch_size)


def script(work: Work) -> Measurement:
    """Run the bare loop as the script of a `tandem run`, with two ranks; the script does not know Tandem.

    Raises:
        Failure: the run ended early or failed.
    """
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        times = folder / "times.json"
        command = ["python", *_script(work, times)]
        course = _tandem_run(work, folder, trainer={"command": command}, workers={"replicas": 2})
        ends = json.loads(times.read_text())
    return measured(course, ends, work.steps, work.batch_size)


def trainer(work: Work, inline: bool = False, with_evaluator: bool = False) -> Measurement:
    """Run Hugging Face's Trainer as the script of a `tandem run`, one rank with a core of its own.

    Args:
        inline: the Trainer evaluates its states itself.
        with_evaluator: an evaluator process does, on the other core.

    Raises:
        Failure: the run ended early or failed, or a state was not evaluated.
    """
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        times, run_dir = folder / "times.json", RunDir(folder / "run")
        command = ["python", str(TRAINER), "--steps", str(work.steps), "--batch-size", str(work.batch_size)]
        command += ["--every", str(TRAINER_EVERY), "--times", str(times)]
        spec: dict[str, object] = {"trainer": {"command": command + (["--inline"] if inline else [])}}
        if with_evaluator:
            program = ["python", str(TRAINER_LOSS)]
            spec["evaluators"] = {"command": program, "watch": "checkpoint-*", "metric": "loss", "policy": "Every"}
        course = _tandem_run(work, folder, pin=True, **spec)
        ends = json.loads(times.read_text())
        if with_evaluator and len(list(run_dir.evaluations.glob("step-*/g000000.json"))) < work.steps // TRAINER_EVERY:
            raise Failure("not every state was evaluated")
    return measured(course, ends, work.steps, work.batch_size)


def bare(work: Work, keep: bool = False) -> Measurement:
    """Run the bare loop under `torchrun`, with two ranks.

    Args:
        keep: with Tandem's setting of the allocator.

    Raises:
        Failure: the run ended early or failed.
    """
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        times = folder / "times.json"
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
        command += [*_script(work, times), *(["--keep-memory"] if keep else [])]
        course = watched(command, folder, _is_bare_rank, work.steps)
        ends = json.loads(times.read_text())
    return measured(course, ends, work.steps, work.batch_size)


def _tandem_run(work: Work, folder: Path, *overrides: str, pin: bool = False, **spec: object) -> Course:
    """Run `tandem run` with a job of this spec, in a folder.

    Raises:
        Failure: the run ended early or failed.
    """
    (folder / "job.yaml").write_text(json.dumps(manifest("bench", **spec)))
    command = [TANDEM, "run", str(folder / "job.yaml"), "--run-dir", str(folder / "run"), *(["--pin"] if pin else [])]
    for override in overrides:
        command += ["--set", f"spec.{override}"]
    return watched(command, folder, _is_our_rank, work.steps, is_pinned=pin)


def _script(work: Work, times: Path) -> list[str]:
    """The bare loop and its arguments."""
    command = [str(SCRIPT), "--model", work.model, "--samples", str(work.samples)]
    command += ["--image-size", str(work.image_size), "--batch-size", str(work.batch_size)]
    return [*command, "--steps", str(work.steps), "--times", str(times)]


def _is_our_rank(process: psutil.Process) -> bool:
    return process.name() == "tandem-rank"


def _is_bare_rank(process: psutil.Process) -> bool:
    args = process.cmdline()
    return str(SCRIPT) in args and "torch.distributed.run" not in args


def watched(
    command: Sequence[str],
    folder: Path,
    is_rank: IsRank,
    steps: int,
    variables: Mapping[str, str] | None = None,
    is_pinned: bool = False,
) -> Course:
    """Run a command to its end, in turns with others if the caller is `in_turns`.

    Args:
        folder: folder for its output.
        steps: number of its steps, which limit its duration.
        variables: variables of its environment, in addition to this process's.
        is_pinned: for a run with `--pin`: the sampling, 4 ms each time, is restricted to the last core, which no rank
            has. Otherwise it would take a part of the rank's core on the side alone whose other core is busy.

    Raises:
        Failure: the run ended early or failed.
    """
    output = folder / "output.txt"
    samples = []
    started = time.time()
    with output.open("wb") as file:
        process = subprocess.Popen(
            command,
            env=os.environ | {"OMP_NUM_THREADS": "1"} | dict(variables or {}),
            stdin=subprocess.DEVNULL,
            stdout=file,
            stderr=subprocess.STDOUT,
        )
        if is_pinned:
            os.sched_setaffinity(0, usable_cores()[-1:])  # Of this thread; a round has threads of its own.
        try:
            root, limit = psutil.Process(process.pid), START_SECONDS + steps * STEP_SECONDS
            turn = Turn(root)
            while process.poll() is None and turn.pauses.running(time.time()) < started + limit:
                samples.append(sample(root, is_rank))
                if turn.is_over:
                    turn.pass_on()
                with suppress(subprocess.TimeoutExpired):
                    process.wait(SAMPLE_SECONDS)
        finally:
            early = process.poll() is None
            _end(process)
    if early or process.returncode != 0:
        reason = "took too long" if early else f"ended with {process.returncode}"
        raise Failure(f"{reason}:\n{output.read_text(errors='replace')[-2000:]}")
    return Course(started, samples, turn.pauses)


def _end(process: subprocess.Popen[bytes]) -> None:
    """End a command that still runs; both commands take their processes along."""
    if process.poll() is None:
        process.terminate()
        with suppress(subprocess.TimeoutExpired):
            process.wait(LEAVE_SECONDS)
        process.kill()
        process.wait()


def measured(course: Course, ends: Sequence[float], steps: int, batch_size: int, skip: int = SKIP) -> Measurement:
    """Evaluate a run in its own running time.

    Args:
        ends: end times of the steps, in seconds since the epoch.
        batch_size: samples of a step, over all ranks.
        skip: first steps that are excluded.

    Raises:
        Failure: the number of steps is wrong.
    """
    if len(ends) != steps:
        raise Failure(f"{len(ends)} of {steps} steps")
    own = [course.running(end) for end in ends]
    throughput = (steps - skip) * batch_size / (own[-1] - own[skip - 1])
    return Measurement(throughput, course.use(ends, skip), own[0] - course.started)
