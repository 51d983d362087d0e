"""A script that fails: how `tandem run` says so, how often it starts it, and what the corrected one needs."""

import json
import re
import subprocess
from pathlib import Path
from typing import Any

import pytest

from tandem.rundir.layout import RunDir
from tests.support import manifests
from tests.support.processes import TANDEM

pytestmark = pytest.mark.timeout(300)
FULL = pytest.mark.full("cli", "coordinator", "trainer")

SCRIPT = """
import os, sys, time
print("started", flush=True)
if os.environ["RANK"] == "1":
    {failing}
time.sleep(60 if {waits} else 0)
"""


def run(folder: Path, failing: str, waits: bool) -> "subprocess.CompletedProcess[str]":
    script = folder / "train.py"
    script.write_text(SCRIPT.format(failing=failing, waits=waits))
    return run_job(folder, trainer={"command": [str(script)]}, workers={"replicas": 2})


def run_job(folder: Path, **spec: Any) -> "subprocess.CompletedProcess[str]":
    file = folder / "job.yaml"
    file.write_text(json.dumps(manifests.manifest("mine", **spec)))
    command = [TANDEM, "run", str(file), "--run-dir", str(folder / "run")]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=200, check=False)


def test_the_second_time_it_ends_with_the_scripts_own_traceback_and_the_corrected_one_just_runs(tmp_path: Path) -> None:
    failed = run(tmp_path, "{}['image']", waits=True)
    said = failed.stderr
    assert failed.returncode == 1, failed.stdout + said
    assert "rank 1 (worker-1) failed: KeyError: 'image'" in said
    lines = [line.strip() for line in said.splitlines()]
    assert lines[1] == "Traceback (most recent call last):", said
    assert "KeyError: 'image'" in lines
    assert "tandem_trainer" not in said
    assert "log/worker-1.txt" in said
    logs = [(tmp_path / "run" / "log" / f"worker-{index}.txt").read_text() for index in (0, 1)]
    # Rank 0 may be ended before its first line: rank 1 fails as early as that.
    assert logs[1].count("started") == 2, "two starts of the rank that fails"
    assert "code=None" not in "".join(logs)
    assert "has to leave" not in failed.stdout

    corrected = run(tmp_path, "pass", waits=False)
    assert corrected.returncode == 0, corrected.stdout + corrected.stderr
    assert "the script starts again" in corrected.stdout
    assert re.search(r"generation \d+ with 2 replicas, because the job starts", corrected.stdout)
    assert "event=warning" not in corrected.stdout
    assert RunDir(tmp_path / "run").done() is not None


@pytest.mark.parametrize(
    ("code", "warm"),
    [(75, True), *(pytest.param(*case, marks=FULL) for case in ((75, False), (66, True), (66, False)))],
)
def test_a_script_that_chooses_one_of_our_numbers_has_failed_like_any_other(
    tmp_path: Path, code: int, warm: bool
) -> None:
    script = tmp_path / "train.py"
    script.write_text(SCRIPT.format(failing=f"sys.exit({code})", waits=True))
    elasticity = {"warmStart": warm}
    failed = run_job(tmp_path, trainer={"command": [str(script)]}, workers={"replicas": 2}, elasticity=elasticity)
    assert failed.returncode == 1, failed.stdout + failed.stderr
    assert f"rank 1 (worker-1) ended with exit code {code}; twice, before Tandem heard of a step" in failed.stderr
    assert "in the restart budget" in failed.stdout
    for wrong in ("Rewound", "became useless", "lost its connection"):
        assert wrong not in failed.stdout + failed.stderr


@FULL
def test_training_that_diverges_is_called_that_at_once_and_no_failure(tmp_path: Path) -> None:
    config = {"data": {"name": "digits"}, "optimizer": {"learningRate": 1e30}}
    diverged = run_job(tmp_path, trainer={"task": "image-classification", "config": config}, evaluators={"replicas": 0})
    assert diverged.returncode == 65, diverged.stdout + diverged.stderr
    assert "training diverged: the loss became NaN at step 2; going back" in diverged.stdout
    assert "in the restart budget" not in diverged.stdout
    assert "lost its connection" not in diverged.stdout
    assert "Try a lower learning rate" in diverged.stderr
    assert "trouble     the loss became useless: training went back " in diverged.stderr
    assert "try again" not in diverged.stderr
