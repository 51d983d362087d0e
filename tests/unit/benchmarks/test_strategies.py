"""The benchmark of the strategies leaves no process behind, and says so when there is nothing to report."""

import os
import sys
from pathlib import Path
from typing import Any

import psutil
import pytest

from benchmarks.goals import Outcome
from benchmarks.strategies import __main__ as strategies
from benchmarks.throughput.sides import Failure

RANK = "import os, sys, time; open(sys.argv[1], 'w').write(str(os.getpid())); time.sleep(600)"
TORCHRUN = (
    "import subprocess, sys, time\n"
    "subprocess.Popen([sys.executable, '-c', *sys.argv[1:]], start_new_session=True)\n"
    "time.sleep(600)"
)


def test_ranks_end_with_a_measurement_that_takes_too_long(tmp_path: Path) -> None:
    file = tmp_path / "rank"
    seconds = 0.5
    while not file.exists() or not file.read_text():
        with pytest.raises(Failure, match="took too long"):
            strategies.in_time([sys.executable, "-c", TORCHRUN, RANK, str(file)], os.environ, seconds)
        seconds *= 2  # the rank had not begun
    psutil.wait_procs([psutil.Process(pid)] if psutil.pid_exists(pid := int(file.read_text())) else [], timeout=30)
    assert not psutil.pid_exists(pid)


def test_a_run_without_a_save_is_a_goal_that_was_missed(monkeypatch: pytest.MonkeyPatch) -> None:
    def nothing(*_: Any) -> tuple[float, list[object]]:
        return 0.0, []

    monkeypatch.setattr(strategies, "watched", nothing)
    (verdict,) = strategies.save("fsdp")
    assert verdict.outcome == Outcome.MISSED
    assert "no save was committed" in str(verdict)
