"""The trace of a few steps that `tandem bench --profile` asks for."""

import json
from pathlib import Path

import pytest
import torch

from tandem.processes.launch import TRACE
from tandem_trainer.step_trace import TRACED, WAIT, WARM_UP, StepTrace

CPU = torch.device("cpu")


def run(rank: int, steps: int) -> None:
    trace = StepTrace(rank, CPU)
    for _ in range(steps):
        torch.ones(8) @ torch.ones(8)
        trace.step()
    trace.close()


def test_rank_0_traces_a_few_steps(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "trace.json"
    monkeypatch.setenv(TRACE, str(file))
    run(0, WAIT + WARM_UP + TRACED + 2)
    names = [event["name"] for event in json.loads(file.read_text())["traceEvents"]]
    assert sum(name.startswith("ProfilerStep#") for name in names) == TRACED
    assert "aten::dot" in names


def test_other_ranks_write_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(TRACE, str(tmp_path / "trace.json"))
    run(1, WAIT + WARM_UP + TRACED)
    assert not list(tmp_path.iterdir())
