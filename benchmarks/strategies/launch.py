"""Starts the ranks that are measured, all of them by torchrun."""

import subprocess
import sys
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil

from benchmarks.strategies.work import RANKS, Work
from benchmarks.throughput.sides import Failure
from tandem.rundir.layout import RunDir
from tests.support import ROOT, manifests

TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={RANKS}"]
NEVER = 1_000_000
"""Steps between checkpoints: none is saved."""


def in_time(command: list[str], environment: Mapping[str, str], seconds: float) -> "subprocess.CompletedProcess[str]":
    """Run torchrun to its end, and kill it with its ranks if that takes longer.

    Raises:
        Failure: the run took longer.
    """
    process = subprocess.Popen(
        command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    try:
        output, errors = process.communicate(timeout=seconds)
    except subprocess.TimeoutExpired as error:
        # Each rank has a session of its own: killing torchrun's would not reach them.
        for member in (*psutil.Process(process.pid).children(recursive=True), process):
            with suppress(psutil.NoSuchProcess, ProcessLookupError):
                member.kill()
        process.communicate()
        raise Failure("took too long") from error
    return subprocess.CompletedProcess(command, process.returncode, output, errors)


def run_directory(path: Path, work: Work, strategy: str, steps: int, every: int, **loop: Any) -> RunDir:
    """Create a run directory with a job that trains this many steps and saves after each `every`."""
    trainer = {
        "task": "tandem_trainer.causal_lm:CausalLM",
        "parameters": work.parameters,
        "loop": work.loop(strategy, steps) | loop,
    }
    job = manifests.job(
        "bench", trainer=trainer, checkpoint={"everySteps": every}, workers={"processesPerReplica": RANKS}
    )
    return manifests.run_directory(path, job)
