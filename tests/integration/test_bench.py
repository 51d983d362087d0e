"""`tandem bench` as a user calls it: runs that really train, and what they leave."""

import csv
import io
import json
import os
import signal
import subprocess
from itertools import pairwise
from pathlib import Path

import pytest

from tandem.processes.exitcode import ExitCode
from tandem.rundir.layout import RunDir
from tandem_cli.bench.schedule import RecordedSchedule, replayed
from tandem_trainer.strategies.passes import RECORDED_STEPS
from tests.support import EXAMPLES
from tests.support.manifests import manifest
from tests.support.processes import TANDEM, environment
from tests.support.waiting import until

DIGITS = EXAMPLES / "digits.yaml"
SECONDS = 120.0
FULL = pytest.mark.full("cli", "trainer")


def table(folder: Path) -> list[dict[str, str]]:
    return list(csv.DictReader(io.StringIO((folder / "bench.csv").read_text())))


@FULL
def test_one_and_two_workers_are_measured(tmp_path: Path) -> None:
    words = [TANDEM, "bench", str(DIGITS), "--workers", "1,2", "--steps", "12", "--rounds", "1", "--out", "out"]
    done = subprocess.run(words, cwd=tmp_path, env=environment(), capture_output=True, text=True, timeout=SECONDS)
    assert done.returncode == ExitCode.DONE, done.stderr
    rows = table(tmp_path / "out")
    assert [(row["strategy"], row["workers"]) for row in rows] == [("ddp", "1"), ("ddp", "2")]
    assert all(float(row["samplesPerSecond"]) > 0 for row in rows)
    assert all(10e6 < float(row["peakMemoryBytes"]) < 10e9 for row in rows)
    assert float(rows[0]["efficiency"]) == 1.0
    assert abs(float(rows[0]["finalLoss"]) - float(rows[1]["finalLoss"])) < 1e-3, "the same steps were trained"
    assert {path.name for path in (tmp_path / "out").iterdir()} == {
        *("bench.csv", "bench.json", "bench.png", "bench.svg", "runs")
    }
    runs = sorted((tmp_path / "out" / "runs").iterdir())
    assert [path.name for path in runs] == ["ddp-1-1", "ddp-2-1"]
    assert not any(RunDir(path).checkpoints.exists() for path in runs), "weights that nobody needs"
    assert "2/2 ddp, 2 workers, round 1 of 1: " in done.stderr
    assert "samples/s" in done.stdout


@FULL
def test_the_ranks_of_a_pipeline_record_each_pass_and_the_schedule_is_drawn(tmp_path: Path) -> None:
    options = ["--workers", "1", "--steps", "5", "--rounds", "1", "--profile", "--out", "out"]
    words = [TANDEM, "bench", str(EXAMPLES / "minigpt-pipeline.yaml"), *options]
    words += ["--set", 'trainer.loop.pipeline={"stages": 2, "schedule": "zeroBubble", "chunks": 4}']
    done = subprocess.run(words, cwd=tmp_path, env=environment(), capture_output=True, text=True, timeout=SECONDS)
    assert done.returncode == ExitCode.DONE, done.stderr
    assert "zeroBubble, 2 ranks, 4 micro-batches: bubble " in done.stderr
    assert (tmp_path / "out" / "schedule-pipeline-1.png").read_bytes().startswith(b"\x89PNG")
    schedule = RecordedSchedule.read_json((tmp_path / "out" / "trace-pipeline-1.schedule.json").read_bytes())
    assert len(schedule.steps) == RECORDED_STEPS
    for step in schedule.steps:
        by_rank = {rank: [one for one in step if one.rank == rank] for rank in range(2)}
        for rank, passes in by_rank.items():
            forward = sorted((one.stage, one.micro_batch) for one in passes if one.kind == "forward")
            assert forward == [(stage, number) for stage in (rank, rank + 2) for number in range(4)]
            assert len([one for one in passes if one.kind in ("backward", "input")]) == 8
            assert all(one.end <= other.begin for one, other in pairwise(passes)), "one pass after the other"
        assert len(replayed(step, lambda _: 1.0)) == len(step)


@FULL
def test_ctrl_c_ends_the_run_and_shows_what_was_measured(tmp_path: Path) -> None:
    words = [TANDEM, "bench", str(DIGITS), "--workers", "1", "--steps", "100000", "--rounds", "1", "--out", "out"]
    with subprocess.Popen(
        words, cwd=tmp_path, env=environment(), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, start_new_session=True
    ) as process:
        run_dir = RunDir(tmp_path / "out" / "runs" / "ddp-1-1")
        until(lambda: any(b'"step"' in path.read_bytes() for path in run_dir.training_logs().values()), "a step")
        os.kill(process.pid, signal.SIGINT)
        output = process.communicate(timeout=SECONDS)[0].decode()
    assert process.returncode == ExitCode.INTERRUPTED, output
    assert "ended before it was measured" in output


@pytest.mark.full("cli", "trainer")
def test_a_run_that_fails_is_a_row_and_the_others_are_measured(tmp_path: Path) -> None:
    (tmp_path / "halves.py").write_text(TASK)
    (tmp_path / "job.yaml").write_text(json.dumps(manifest("halves", trainer={"task": "halves:Halves"})))
    words = [TANDEM, "bench", "job.yaml", "--workers", "1,2", "--steps", "6", "--rounds", "1"]
    done = subprocess.run(words, cwd=tmp_path, env=environment(), capture_output=True, text=True, timeout=SECONDS)
    assert done.returncode == ExitCode.FAILED, done.stderr
    one, two = table(tmp_path / "runs" / "bench-halves")
    assert float(one["samplesPerSecond"]) > 0
    assert not one["failure"]
    assert not two["samplesPerSecond"]
    assert "not for two" in two["failure"]


TASK = """
import os

import torch
from torch import nn
from torch.utils.data import TensorDataset

from tandem_trainer.task import Task


class Halves(Task[None]):
    def model(self):
        if os.environ.get("WORLD_SIZE") == "2":
            raise ValueError("not for two")
        return nn.Linear(1, 1)

    def data(self, split):
        return TensorDataset(torch.ones(64, 1), torch.ones(64, 1))

    def loss(self, model, batch):
        return (model(batch[0]) - batch[1]).square().squeeze(1)
"""
