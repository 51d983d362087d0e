"""One of two ranks is killed, and the run continues with one: the lost data, and the time.

All sides save every SAVE_EVERY steps. Once step KILL_AFTER is complete, a rank is killed with SIGKILL. Then each side
does what it is made for:

- Tandem: the agent dies with its rank, as with a lost node. The remaining worker continues by itself.
- TRL: everything that remains of the run is killed in the same moment, and it is started again at once with one rank.
  So it needs to wait neither for its launcher to notice, nor for a person.

The counted documents are those that the final model has learned from (`verdict.gap`).
"""

import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

import psutil

from benchmarks.fine_tuning.record import Resumed, Step, read
from benchmarks.fine_tuning.sides import OFFLINE, WITH_TRL, Case, log_steps, tandem_spec
from benchmarks.fine_tuning.verdict import gap
from benchmarks.fine_tuning.work import BATCH
from benchmarks.throughput.sides import Failure
from tandem.job.resource import Elasticity
from tests.support.elastic import Elastic
from tests.support.lines import read_lines
from tests.support.zygote import Forked

SAVE_EVERY, KILL_AFTER, STEPS = 10, 15, 30
BETWEEN_LOOKS, PATIENCE = 0.1, 300.0
Process = subprocess.Popen[bytes] | Forked
TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
WORKERS = "worker-0", "worker-1"


def tandem(case: Case) -> Resumed:
    """Run two workers, one of which is lost. The coordinator and the agents are started without `tandem run`, which
    would start another worker before the group has formed again.

    Raises:
        Failure: the run did not continue with one rank to its end.
    """
    with tempfile.TemporaryDirectory() as name:
        spec = tandem_spec(case, evaluators={"replicas": 0}, workers={"replicas": 2, "minReplicas": 1})
        # The default settings instead of those of tests.
        job = Elastic(Path(name), elasticity=Elasticity().dump(), **spec)
        job.extra |= OFFLINE

        def phases() -> list[list[Step]]:
            # One phase for each generation.
            return [log_steps(path, case.plan) for path in sorted(job.rundir.log.glob("train-g*.jsonl"))]

        with job:
            job.start(*WORKERS)
            output = Path(name, f"{WORKERS[0]}.txt")
            _await_step(job.agents[WORKERS[0]], output, phases)
            killed_at = job.kill_agent(WORKERS[1])
            _await_end(job.agents[WORKERS[0]], output)
        starts = [line for line in read_lines(job.rundir.log / "train-g000002.jsonl")[0] if line["kind"] == "start"]
        if not starts or starts[0]["worldSize"] != 1:
            raise Failure(f"went on otherwise than with one rank: {starts}")
        return _resumed(case, phases(), killed_at)


def trl(case: Case, keep_batch: bool) -> Resumed:
    """Run SFTTrainer under torchrun with two ranks, then `resume_from_checkpoint` with one.

    Args:
        keep_batch: a step of the one rank has twice as many micro-batches, as its user has to remember. Otherwise the
            command is the same, and a step has half of the rows.

    Raises:
        Failure: the run did not continue to its end.
    """
    with tempfile.TemporaryDirectory() as name:
        output_file, output = Path(name, "output.txt"), Path(name, "output")
        output.mkdir()
        shared = ["-m", WITH_TRL, "--work", str(case.work), "--plan", str(case.plan_file), "--output", str(output)]
        shared += ["--save-every", str(SAVE_EVERY), "--per-rank", str(BATCH // 2)]
        doubled = ["--accumulate", "2"] if keep_batch else []

        def steps(paths: Iterable[Path]) -> list[Step]:
            return [step for path in paths for step in read(path)[0]]

        with _running(output_file, [*TORCHRUN, "--nproc-per-node=2", *shared]) as process:
            _await_step(process, output_file, lambda: [steps(output.glob("record-*.jsonl"))])
            killed_at = _kill([*psutil.Process(process.pid).children(recursive=True), psutil.Process(process.pid)])
        before = set(output.glob("record-*.jsonl"))
        with _running(output_file, [*TORCHRUN, "--nproc-per-node=1", *shared, "--resume", *doubled]) as process:
            _await_end(process, output_file)
        return _resumed(case, [steps(before), steps(set(output.glob("record-*.jsonl")) - before)], killed_at)


@contextmanager
def _running(output_file: Path, command: Sequence[str]) -> "Iterator[subprocess.Popen[bytes]]":
    """Run a command, and kill everything that remains of it afterwards."""
    variables = {"OMP_NUM_THREADS": "1", "HF_DATASETS_CACHE": str(output_file.with_name("cache"))}
    with output_file.open("ab") as output:
        process = subprocess.Popen(
            command,
            env=os.environ | OFFLINE | variables,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
        )
    try:
        yield process
    finally:
        if process.poll() is None:
            _kill([*psutil.Process(process.pid).children(recursive=True), psutil.Process(process.pid)])
        process.wait()


def _await_step(process: Process, output: Path, phases: Callable[[], list[list[Step]]]) -> None:
    deadline = time.monotonic() + PATIENCE
    while max((step.step for phase in phases() for step in phase), default=0) < KILL_AFTER:
        if process.poll() is not None or time.monotonic() > deadline:
            raise Failure(f"ended before it was killed:\n{output.read_text()[-2000:]}")
        time.sleep(BETWEEN_LOOKS)


def _await_end(process: Process, output: Path) -> None:
    try:
        code = process.wait(PATIENCE)
    except subprocess.TimeoutExpired as error:
        raise Failure("did not come to its end") from error
    if code != 0:
        raise Failure(f"ended with {code}:\n{output.read_text()[-2000:]}")


def _kill(processes: Sequence[psutil.Process]) -> float:
    """Kill processes with SIGKILL; returns the time, in seconds since the epoch."""
    killed_at = time.time()
    for process in processes:
        with suppress(psutil.NoSuchProcess):
            process.send_signal(signal.SIGKILL)
    return killed_at


def _resumed(case: Case, phases: Sequence[Sequence[Step]], killed_at: float) -> Resumed:
    before, *after = phases
    last = max(step.step for step in before)
    repeated = [step.at for phase in after for step in phase]
    new = [step.at for phase in after for step in phase if step.step > last]
    if not new:
        raise Failure(f"took no step after step {last}")
    return Resumed(*gap(case.plan, phases), min(repeated) - killed_at, min(new) - killed_at)
