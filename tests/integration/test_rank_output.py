"""What several ranks of a replica print: labelled with the rank, whole, and never in the way of the agent's end."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

PRINTS = """
import os, sys
rank = int(os.environ["RANK"])
for number in range(1000):
    print("line", number)
    print("warning", number, file=sys.stderr)
os.write(1, b"x" * 100_000 + b"\\n")
sys.stdout.write("50 %\\r100 %\\r")
sys.stdout.write("no end")
if rank == 1 and "FAIL" in os.environ:
    raise KeyError("of rank 1")
"""
LEAVES_A_CHILD = """
import subprocess, sys
print("parent", flush=True)
subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"], start_new_session=True)
"""


def run(
    folder: Path, script: str, *options: str, ranks: int = 2, **variables: str
) -> "subprocess.CompletedProcess[str]":
    (folder / "script.py").write_text(script)
    agent = [sys.executable, "-P", "-m", "tandem_trainer.agent", *options, "--standalone", f"--nproc-per-node={ranks}"]
    return subprocess.run(
        [*agent, "--max-restarts=0", "--monitor-interval=0.05", "--", "script.py"],
        cwd=folder,
        env=os.environ | {"OMP_NUM_THREADS": "1"} | variables,
        capture_output=True,
        encoding="utf-8",
        timeout=120,
        check=False,
    )


@pytest.mark.parametrize(
    "options", [pytest.param(("--warm",), id="warm"), pytest.param((), id="cold", marks=pytest.mark.full("trainer"))]
)
@pytest.mark.parametrize(
    "fails", [pytest.param(False, id="well"), pytest.param(True, id="failed", marks=pytest.mark.full("trainer"))]
)
def test_each_line_names_its_rank_and_none_is_lost(tmp_path: Path, options: tuple[str, ...], fails: bool) -> None:
    done = run(tmp_path, PRINTS, *options, **({"FAIL": "1"} if fails else {}))
    assert (done.returncode != 0) == fails, done.stderr
    for rank in (0, 1):
        # A failed group ends the other rank wherever it is.
        if fails and rank == 0:
            continue
        label = f"[rank {rank}] "
        lines = [line.removeprefix(label) for line in done.stdout.splitlines() if line.startswith(label)]
        assert lines[:1000] == [f"line {number}" for number in range(1000)]
        assert "".join(lines[1000:-3]) == "x" * 100_000
        assert lines[-3:] == ["50 %", "100 %", "no end"]
        warnings = [line for line in done.stderr.splitlines() if line.startswith(f"{label}warning")]
        assert warnings == [f"{label}warning {number}" for number in range(1000)]
    assert ("[rank 1] KeyError: 'of rank 1'" in done.stderr) == fails


@pytest.mark.full("trainer")
def test_one_rank_has_the_log_for_itself(tmp_path: Path) -> None:
    assert run(tmp_path, "print('alone', end='')", "--warm", ranks=1).stdout == "alone"


@pytest.mark.full("trainer")
def test_what_ranks_leave_behind_does_not_hold_the_agent_up(tmp_path: Path) -> None:
    done = run(tmp_path, LEAVES_A_CHILD, "--warm")
    assert done.returncode == 0, done.stderr
    assert sorted(done.stdout.splitlines()) == ["[rank 0] parent", "[rank 1] parent"]
