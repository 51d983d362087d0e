"""A rank is killed on two ranks, and the run goes on with one: what is lost of the data, and how long it takes.

All sides save every SAVE_EVERY steps. Once step KILL_AFTER is complete, one rank is ended with SIGKILL, and in the same
moment all that is left of the run, so no side waits for its launcher to find out. Then it is started again at once with
one rank.

Documents are counted that the model has learned from in the end (`verdict.gap`).
"""

import json
import math
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path

import psutil

from benchmarks.fine_tuning.record import Resumed, Step, read
from benchmarks.fine_tuning.sides import OFFLINE, WITH_TRL, Case, log_steps, tandem_spec
from benchmarks.fine_tuning.verdict import gap
from benchmarks.fine_tuning.work import BATCH
from benchmarks.throughput.sides import Failure
from tandem.rundir.layout import RunDir
from tests.support import manifests
from tests.support.processes import TANDEM

SAVE_EVERY, KILL_AFTER, STEPS = 10, 15, 30
BETWEEN_LOOKS, PATIENCE = 0.1, 300.0
TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--standalone"]


def tandem(case: Case) -> Resumed:
    """`tandem run` with two workers, then the same with one.

    Raises:
        Failure: it did not go on to its end.
    """
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        run_dir = RunDir(folder / "run")
        found = manifests.manifest("bench", **tandem_spec(case, evaluators={"replicas": 0}))
        (folder / "job.yaml").write_text(json.dumps(found))

        def command(ranks: int) -> list[str]:
            words = [TANDEM, "run", str(folder / "job.yaml"), "--run-dir", str(run_dir.path)]
            return [*words, "--set", f"workers.replicas={ranks}", "--set", "workers.minReplicas=1"]

        def steps() -> list[list[Step]]:
            # A log is of one generation, and each of them is one of the phases.
            return [log_steps(path, case.plan) for path in sorted(run_dir.log.glob("train-g*.jsonl"))]

        at = _killed(folder, command(2), lambda process: process.name() == "tandem-rank", steps)
        return _resumed(case, folder, command(1), at, steps)


def trl(case: Case, keep_batch: bool) -> Resumed:
    """SFTTrainer under torchrun with two ranks, then `resume_from_checkpoint` with one.

    Args:
        keep_batch: twice as many micro-batches make a step of the one rank, as its user has to remember. Otherwise
            the command is the same, and a step has half of the rows.

    Raises:
        Failure: it did not go on to its end.
    """
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        output = folder / "output"
        output.mkdir()

        def command(ranks: int) -> list[str]:
            words = [*TORCHRUN, f"--nproc-per-node={ranks}", "-m", WITH_TRL, "--work", str(case.work)]
            words += ["--plan", str(case.plan_file), "--output", str(output)]
            words += ["--save-every", str(SAVE_EVERY), "--per-rank", str(BATCH // 2)]
            words += ["--accumulate", "2"] if keep_batch and ranks == 1 else []
            return [*words, *(["--resume"] if ranks == 1 else [])]

        before: list[Path] = []

        def steps() -> list[list[Step]]:
            paths = sorted(output.glob("record-*.jsonl"))
            phases = [[path for path in paths if (path in before) == known] for known in (True, False)]
            return [[one for path in some for one in read(path)[0]] for some in phases if some]

        def is_rank(process: psutil.Process) -> bool:
            words = process.cmdline()
            return WITH_TRL in words and "torch.distributed.run" not in words

        at = _killed(folder, command(2), is_rank, steps)
        before += sorted(output.glob("record-*.jsonl"))
        return _resumed(case, folder, command(1), at, steps)


Phases = Callable[[], list[list[Step]]]


def _killed(folder: Path, command: Sequence[str], is_rank: Callable[[psutil.Process], bool], steps: Phases) -> float:
    """Start a run, and kill it; when that was, seconds since the epoch."""
    process = _started(folder, command)
    deadline = time.monotonic() + PATIENCE
    try:
        while max((one.step for phase in steps() for one in phase), default=0) < KILL_AFTER:
            if process.poll() is not None or time.monotonic() > deadline:
                raise Failure(f"ended before it was killed:\n{(folder / 'output.txt').read_text()[-2000:]}")
            time.sleep(BETWEEN_LOOKS)
        everybody = psutil.Process(process.pid).children(recursive=True)
        ranks = [one for one in everybody if _safely(is_rank, one)]
        if not ranks:
            raise Failure("no rank was found")
        at = time.time()
        for one in (ranks[-1], process, *everybody):
            with suppress(psutil.NoSuchProcess, ProcessLookupError):
                os.kill(one.pid, signal.SIGKILL)
        psutil.wait_procs(everybody, timeout=10)
        return at
    finally:
        _end(process)


def _resumed(case: Case, folder: Path, command: Sequence[str], at: float, steps: Phases) -> Resumed:
    """Go on to the end, and see what came of it."""
    first = steps()
    most = max(one.step for phase in first for one in phase)
    process = _started(folder, command)
    try:
        code = process.wait(PATIENCE)
    except subprocess.TimeoutExpired as error:
        raise Failure("did not come to its end") from error
    finally:
        _end(process)
    phases = steps()
    if code != 0 or len(phases) <= len(first):
        raise Failure(f"did not go on, and ended with {code}:\n{(folder / 'output.txt').read_text()[-2000:]}")
    new = [one.at for phase in phases[len(first) :] for one in phase if one.step > most]
    lost, repeated, again = gap(case.plan, phases)
    return Resumed(lost, repeated, again, min(new, default=math.inf) - at)


def _started(folder: Path, command: Sequence[str]) -> "subprocess.Popen[bytes]":
    with (folder / "output.txt").open("ab") as output:
        return subprocess.Popen(
            command,
            env=os.environ | OFFLINE | {"OMP_NUM_THREADS": "1", "HF_DATASETS_CACHE": str(folder / "cache")},
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
        )


def _end(process: "subprocess.Popen[bytes]") -> None:
    """Leave nothing behind."""
    if process.poll() is not None:
        return
    for one in (*psutil.Process(process.pid).children(recursive=True), process):
        with suppress(psutil.NoSuchProcess, ProcessLookupError):
            one.kill()
    process.wait()


def _safely(is_rank: Callable[[psutil.Process], bool], process: psutil.Process) -> bool:
    try:
        return is_rank(process)
    except psutil.Error:
        return False
