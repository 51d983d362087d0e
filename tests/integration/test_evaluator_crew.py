"""Several evaluator processes of one pod, under one parent."""

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import psutil
import pytest

from tandem.processes.exitcode import ExitCode
from tandem.processes.launch import environment
from tests.support.evaluator_run import Run, ends
from tests.support.waiting import until

DIGITS = {"name": "digits"}


@contextmanager
def crew(run: Run, processes: int) -> Iterator["subprocess.Popen[str]"]:
    """Start one; it is gone with all of its processes when the block is left."""
    variables = environment(run.job, run.rundir.path, "evaluator-0")
    process = subprocess.Popen(
        [sys.executable, "-m", "tandem_evaluator", "--processes", str(processes)],
        env=os.environ | {"OMP_NUM_THREADS": "1"} | variables,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    try:
        yield process
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.communicate()


def at_work(run: Run, count: int) -> None:
    names = [f"evaluator-0-{index}" for index in range(count)]
    until(lambda: all(run.log(name, "usage") for name in names), f"{count} processes are at work")


def test_all_share_the_work_a_killed_one_is_started_again_and_all_leave_at_the_end(tmp_path: Path) -> None:
    run = Run(tmp_path, DIGITS, {"processesPerReplica": 2}, model="simple-net")
    with crew(run, 2) as process:
        at_work(run, 2)
        children = psutil.Process(process.pid).children()
        assert len(children) == 2
        children[0].kill()
        until(
            lambda: {*psutil.Process(process.pid).children()} - {*children} if not children[0].is_running() else None,
            "another one in the place of the killed",
        )
        final = run.checkpoint(100, run.weights(1, image_size=8))
        run.rundir.mark_done(final)
        code, said = ends(process)
    assert code == ExitCode.DONE, said
    assert run.merged(final) is not None
    assert "evaluator 0 ended with code -9" in said


def test_sigterm_ends_all_and_asks_to_be_started_again(tmp_path: Path) -> None:
    run = Run(tmp_path, DIGITS, {"processesPerReplica": 2}, model="simple-net")
    with crew(run, 2) as process:
        at_work(run, 2)
        children = psutil.Process(process.pid).children()
        process.terminate()
        code, said = ends(process)
        assert code == ExitCode.PREEMPTED, said
        assert not any(child.is_running() for child in children)


@pytest.mark.full("evaluator")
def test_a_job_that_cannot_be_evaluated_ends_all_with_its_code(tmp_path: Path) -> None:
    run = Run(tmp_path, {"name": "mnist", "path": "/nowhere", "download": False}, {"processesPerReplica": 3})
    with crew(run, 3) as process:
        code, said = ends(process)
    assert code == ExitCode.CONFIGURATION
    assert "tandem evaluator:" in said
