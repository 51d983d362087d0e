"""What a rank measures of its steps."""

from pathlib import Path

import pytest
import torch

from tandem.rundir.layout import RunDir
from tandem.rundir.log import LogWriter
from tandem_trainer.meter import RESIDENT, Meter, peak_memory
from tandem_trainer.pulse import Pulse, PulseView
from tests.support.clock import Clock
from tests.support.lines import read_lines


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr("tandem_trainer.meter.time.perf_counter", clock)
    return clock


def test_the_time_of_a_pause_is_not_a_steps(tmp_path: Path, clock: Clock) -> None:
    rundir = RunDir(tmp_path)
    rundir.create()
    log = LogWriter(rundir.training_log(1))
    meter = Meter(None, 1, None, log, None)
    for step in (1, 2):
        meter.begin_step()
        clock.passes(0.25)
        meter.data_ready()
        clock.passes(0.25)
        with meter.pausing():
            clock.passes(600.0)
            with meter.pausing():
                clock.passes(600.0)
        clock.passes(0.5)
        meter.end_step(step, torch.arange(8), None, torch.tensor(1.0))
    assert meter.mean_step_seconds() == pytest.approx(1.0)
    meter.agreed([1.0, 1.0], 0.0)
    log.close()
    (rate,) = (line for line in read_lines(rundir.log / "train-g000001.jsonl")[0] if line["kind"] == "rate")
    assert rate["stepSeconds"] == pytest.approx(1.0)
    assert rate["throughput"] == pytest.approx(8.0)
    assert rate["phases"] == pytest.approx({"data": 0.5, "compute": 1.5, "checkpoint": 0.0, "pause": 2400.0})


def test_a_step_takes_as_long_as_the_gpu_and_not_as_the_cpu_that_runs_ahead(clock: Clock) -> None:
    """The CPU has launched ten steps in ten milliseconds when a vote waits for their losses."""
    meter = Meter(None, 1, None, None, None)
    for first in (1, 11):
        for step in range(first, first + 10):
            meter.begin_step()
            meter.data_ready()
            clock.passes(0.001)
            meter.end_step(step, torch.arange(8), None, torch.tensor(1.0))
        clock.passes(19.99)
        assert meter.mean_step_seconds() == pytest.approx(2.0)
        meter.agreed([1.0] * 10, 0.0)


def test_the_log_says_how_the_last_step_was_taken(tmp_path: Path, clock: Clock) -> None:
    rundir = RunDir(tmp_path)
    rundir.create()
    log = LogWriter(rundir.training_log(1))
    meter = Meter(None, 1, None, log, None)
    assert meter.gradients is not None
    for step, norm in ((1, 3.0), (2, float("inf"))):
        meter.begin_step()
        clock.passes(1.0)
        meter.data_ready()
        meter.gradients.record(torch.tensor(norm))
        meter.end_step(step, torch.arange(8), 0.1 / step, torch.tensor(1.0))
        meter.agreed([1.0 / step], 0.0)
    log.close()
    for kind in ("step", "rate"):
        lines = [line for line in read_lines(rundir.log / "train-g000001.jsonl")[0] if line["kind"] == kind]
        told = [(line["lr"], line["loss"], line.get("gradientNorm")) for line in lines]
        assert told == [(0.1, 1.0, 3.0), (0.05, 0.5, None)]
    assert Meter(None, 1, None, None, None).gradients is None, "who writes no log measures nothing"


def test_a_loss_is_told_as_soon_as_the_ranks_have_agreed_on_it(tmp_path: Path) -> None:
    view = PulseView(tmp_path, 0)
    meter = Meter(None, 1, None, None, Pulse(tmp_path / "rank-0", 0, 1))
    meter.begin_step()
    meter.data_ready()
    meter.end_step(1, torch.arange(8), None, torch.tensor(2.0))
    meter.agreed([1.5], 0.0)
    beat = view.beat()
    assert (beat.step, beat.loss) == (1, 1.5)


def test_the_peak_of_resident_memory_stays_when_memory_is_given_back() -> None:
    before = peak_memory(torch.device("cpu"))[RESIDENT]
    held = torch.ones(before // 4 + 2**24)
    size = held.nbytes
    del held
    after = peak_memory(torch.device("cpu"))
    assert size < after[RESIDENT] < before + 2 * size
    assert set(after) == {RESIDENT}, "of a GPU nothing is known"
