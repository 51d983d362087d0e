"""What ranks must agree on is agreed on: real ranks, of which one differs."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tandem.processes.exitcode import ExitCode
from tandem.rundir.layout import RunDir
from tests.support import SCRIPTS, manifests
from tests.support.ranks import Ranks, records, run

ALL = pytest.mark.full("core", "trainer")
TANDEM = str(Path(sys.executable).with_name("tandem"))
SCRIPT = str(SCRIPTS / "disagreeing.py")


def rundir_of(path: Path, **checkpoint: Any) -> RunDir:
    job = manifests.job("disagreeing", trainer={"command": ["python", SCRIPT]}, checkpoint=checkpoint)
    return manifests.run_directory(path, job)


@pytest.mark.parametrize(
    ("how", "why"),
    [
        ("samples", "samples is 120 on rank 0 and 118 on rank 1"),
        ("stream", "rank 1 took other samples in step 1 than the other ranks"),
        pytest.param("listed", "rank 1 took other samples in step 1 than the other ranks", marks=ALL),
        ("epoch", "rank 1 took other samples in step"),
        ("forgot", "after step 1 rank 1 held other weights than the other ranks: the script has never called what "),
        pytest.param("strategy", "strategy is ['ddp'] on rank 0 and ['fsdp'] on rank 1", marks=ALL),
        pytest.param("seed", "seed is 0 on rank 0 and 1 on rank 1", marks=ALL),
        pytest.param("epochs", "epochs is 3 on rank 0 and 2 on rank 1", marks=ALL),
        pytest.param("order", "rank 1 took other samples in step", marks=ALL),
    ],
)
def test_a_rank_that_differs_ends_the_run_with_a_sentence_and_no_sample_is_lost(
    tmp_path: Path, how: str, why: str
) -> None:
    rundir = rundir_of(tmp_path, everySteps=5)
    with Ranks(rundir, 2, SCRIPT, how) as ranks:
        codes, output = ranks.finish()
    assert codes == [ExitCode.CONFIGURATION] * 2, output
    assert why in rundir.failed()["message"]
    assert all(record["step"] <= 10 for record in records(rundir, "step")), "no step of the second epoch is logged"
    kind = "RanksDiffer" if how == "forgot" else "SamplesDiffer" if "took other samples" in why else None
    named = [(record["reason"], record["message"][:17]) for record in records(rundir, "corruption")]
    assert named == ([(kind, "rank 1 (worker-1 ")] if kind else [])


@pytest.mark.parametrize("how", ["memory", pytest.param("rows", marks=ALL)])
def test_weights_that_differ_are_not_saved(tmp_path: Path, how: str) -> None:
    """A wrong bit is seen at the next save; an embedding that scales the rows it looks up, after the first step."""
    rundir = rundir_of(tmp_path, everySteps=5)
    with Ranks(rundir, 2, SCRIPT, how) as ranks:
        codes, output = ranks.finish()
    assert codes == [ExitCode.FAILED] * 2, output
    found = re.search(r"after step (\d+) rank 1 held other weights than the other ranks: ", output)
    assert found, output
    # A save that is due while the one before is being written is left out.
    assert int(found[1]) > 7 if how == "memory" else found[1] == "1"
    assert rundir.checkpoint_names() == (["step-000000005"] if how == "memory" else [])
    assert rundir.failed() is None, "another machine may do better"
    (record,) = records(rundir, "corruption")
    assert record["reason"] == "RanksDiffer"
    assert re.match(r"rank 1 \(worker-1 on .+\): after step \d+ rank 1 held other weights", record["message"])


@pytest.mark.parametrize("how", ["none", pytest.param("alike-stream", marks=ALL)])
def test_statistics_and_buffers_of_one_rank_are_its_own(tmp_path: Path, how: str) -> None:
    rundir = rundir_of(tmp_path, everySteps=5)
    run(rundir, 2, SCRIPT, how)
    assert len(records(rundir, "step")) == 30


TASK = """
import os
import torch
from torch import nn
from torch.nn.functional import cross_entropy
from tandem_trainer.task import Task

X, Y = torch.randn(60, 8), torch.randint(0, 3, (60,))

class Rows(torch.utils.data.Dataset):
    def __len__(self): return 60 - int(os.environ["RANK"])
    def __getitem__(self, number): return X[number], Y[number]

class Mine(Task[None]):
    def model(self): return nn.Linear(8, 3)
    def data(self, split): return Rows()
    def loss(self, model, batch): return cross_entropy(model(batch[0]), batch[1], reduction="none")
"""


def test_the_ranks_of_a_task_count_the_same_samples(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "own_task.py").write_text(TASK)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")]))
    job = manifests.job("task", trainer={"task": "own_task:Mine"}, checkpoint={})
    rundir = manifests.run_directory(tmp_path / "run", job)
    with Ranks(rundir, 2, cold=True) as ranks:
        codes, output = ranks.finish()
    assert codes == [ExitCode.CONFIGURATION] * 2, output
    assert "samples is 60 on rank 0 and 59 on rank 1" in json.dumps(rundir.failed())


def tandem(*words: str) -> tuple[int, str]:
    ended = subprocess.run([TANDEM, *words], check=False, capture_output=True, text=True, timeout=120)
    return ended.returncode, ended.stdout + ended.stderr


@pytest.mark.full("core", "trainer", "cli")
def test_the_logs_of_a_run_say_whether_each_sample_was_taken_once(tmp_path: Path) -> None:
    """Of a run that another number of ranks has gone on with."""
    rundir = rundir_of(tmp_path / "run", everySteps=5, keepLast=9)
    with Ranks(rundir, 2, SCRIPT, "memory") as ranks:
        ranks.finish()
    assert rundir.checkpoint_names() == ["step-000000005"]
    run(rundir, 1, SCRIPT, "none")
    folder = str(rundir.path)
    code, output = tandem("verify", folder)
    assert code == 0, output
    words = [" ".join(line.split()) for line in output.splitlines()]
    assert words == [
        "samples each of 120 taken once an epoch, by all ranks; 3 whole epochs",
        "steps 30 steps that count",
    ]

    log = rundir.training_log(max(rundir.chain()))
    lines = log.read_text().splitlines()
    step = next(number for number, line in enumerate(lines) if '"step":17,' in line and '"ids"' in line)
    changed = json.loads(lines[step])
    log.write_text("\n".join([*lines[:step], json.dumps(changed | {"ids": "0" * 16}), *lines[step + 1 :], ""]))
    code, output = tandem("verify", folder)
    assert (code, "steps that took other samples than the seed gives them: 17" in output) == (1, True), output
    log.write_text("\n".join([*lines[:step], *lines[step + 1 :], ""]))
    code, output = tandem("verify", folder, "-o", "json")
    assert code == 1, output
    assert json.loads(output)["problems"] == ["steps that are not logged: 17"]


def test_of_a_stream_the_steps_are_counted(tmp_path: Path) -> None:
    rundir = rundir_of(tmp_path / "run")
    run(rundir, 1, SCRIPT, "alike-stream")
    code, output = tandem("verify", str(rundir.path))
    assert code == 0, output
    assert "not compared with their order: it reads a stream" in output
