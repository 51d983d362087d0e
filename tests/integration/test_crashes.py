"""A script that fails: how `tandem run` says so, how often it starts it, and what the corrected one needs."""

import json
import re
import subprocess
from pathlib import Path
from typing import Any

import pytest

from tandem.rundir.layout import RunDir
from tests.support import manifests
from tests.support.manifests import images
from tests.support.processes import environment
from tests.support.warm_run import WARM_TANDEM, warm_run_environment

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
    command = [*WARM_TANDEM, "run", str(file), "--run-dir", str(folder / "run")]
    variables = environment(warm_run_environment())
    return subprocess.run(command, cwd=folder, env=variables, capture_output=True, text=True, timeout=200, check=False)


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


LOOP = """
import torch
import torch.distributed as dist
from torch import nn
from tandem_trainer.session import Session

def gather(rank):
    dist.all_gather([torch.zeros(4), torch.zeros(4)], torch.zeros(4 - rank))

with Session(seed=1) as session:
    model = session.distribute(nn.Linear(4, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    session.keep(model, optimizer)
    for batch in session.batches(torch.rand(40, 4), 8, epochs=4):
        {mistake}
        batch.mean(model(batch.data).squeeze(1) ** 2).backward()
        optimizer.step()
        optimizer.zero_grad()
"""
PLAIN = """
import torch
import torch.distributed as dist
from torch import nn

dist.init_process_group("gloo")
model = nn.parallel.DistributedDataParallel(nn.Linear(4, 1))
for step in range(20):
    {mistake}
    model(torch.ones(2, 4)).sum().backward()
dist.destroy_process_group()
"""


@pytest.mark.parametrize(
    ("script", "mistake", "error", "warm"),
    [
        pytest.param(LOOP, "batch.labels", "AttributeError: 'Batch' object has", True, id="first batch", marks=FULL),
        pytest.param(LOOP, "batch.step < 8 or {}[True]", "KeyError: True", True, id="loop", marks=FULL),
        pytest.param(
            LOOP, "batch.step < 8 or session.rank == 0 or {}[1]", "KeyError: 1", True, id="one rank", marks=FULL
        ),
        pytest.param(LOOP, "gather(session.rank)", "RuntimeError: ProcessGroupGloo", True, id="collective"),
        pytest.param(PLAIN, "model.nothing", "AttributeError: 'DistributedData", True, id="plain script", marks=FULL),
        pytest.param(PLAIN, "model.nothing", "AttributeError: 'DistributedData", False, id="cold start", marks=FULL),
    ],
)
def test_wherever_a_mistake_stands_two_failures_find_it_and_the_users_traceback_comes_first_and_once(
    tmp_path: Path, script: str, mistake: str, error: str, warm: bool
) -> None:
    (tmp_path / "train.py").write_text(script.replace("{mistake}", mistake))
    failed = run_job(
        tmp_path,
        trainer={"command": ["python", "train.py"]},
        workers={"replicas": 2},
        elasticity={"warmStart": warm, "maxRestarts": 10},
    )
    assert failed.returncode == 1, failed.stdout + failed.stderr
    rundir = RunDir(tmp_path / "run")
    assert rundir.newest_generation() <= 2
    record = rundir.failed()
    assert record["reason"] == "RepeatedFailure"
    lines = [re.sub(r"^ *(\[rank\d\]:)? *", "", line) for line in failed.stderr.splitlines()]
    assert lines[1] == "Traceback (most recent call last):", failed.stderr
    assert lines[2].startswith(f'File "{tmp_path}/train.py", line '), failed.stderr
    assert failed.stderr.count("Traceback") == 1
    assert any(line.startswith(error) for line in lines[3:]), failed.stderr
    for frame in ("tandem_trainer", "torch/distributed/elastic", "torch/distributed/run.py"):
        assert frame not in failed.stderr
    if warm:
        assert re.search(rf"{error}[^\n]*\({tmp_path}/train\.py:\d+, in ", record["message"]), record["message"]
    assert "Connection closed by peer" not in failed.stderr


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
    diverged = run_job(tmp_path, trainer=images(config), evaluators={"replicas": 0})
    assert diverged.returncode == 65, diverged.stdout + diverged.stderr
    assert "training diverged: the loss became NaN at step 2; going back" in diverged.stdout
    assert "in the restart budget" not in diverged.stdout
    assert "lost its connection" not in diverged.stdout
    assert "Try a lower learning rate" in diverged.stderr
    assert "trouble     the loss became useless: training went back " in diverged.stderr
    assert "try again" not in diverged.stderr
