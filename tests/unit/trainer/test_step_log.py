"""What a script says of its steps: to the agent through the pulse, and in the training log."""

import json
import math
import os
import threading
import time
from collections.abc import Iterator
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import tandem
from tandem import script
from tandem.processes import launch
from tandem.rundir.layout import RunDir
from tandem.wire.protocol import SCRIPT, TRAIN
from tandem_trainer import step_log
from tandem_trainer.pulse import Beat, Pulse, PulseView
from tests.support.waiting import until


class Agent:
    """The agent's end of one rank, and the run directory."""

    def __init__(self, folder: Path) -> None:
        self.view, self.rundir = PulseView(folder, 0), RunDir(folder / "run")
        self.path = self.rundir.training_log(7)

    def beat(self) -> Beat:
        found = self.view.beat()
        assert found is not None
        return found

    def lines(self, *kinds: str) -> list[dict[str, Any]]:
        """What was written, once the script has ended."""
        if step_log._step_log is not None:
            step_log._step_log.close()
        found = [json.loads(line) for line in self.path.read_text().splitlines()] if self.path.exists() else []
        return [line for line in found if not kinds or line["kind"] in kinds]


@pytest.fixture
def agent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Agent]:
    made = Agent(tmp_path)
    monkeypatch.setenv(launch.PULSE, str(tmp_path))
    monkeypatch.setenv(launch.RUN_DIR, str(made.rundir.path))
    monkeypatch.setenv(launch.GENERATION, "7")
    monkeypatch.setenv(script.STEP_LOG, "tandem_trainer.step_log")
    for name, value in {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "2"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(Pulse, "current", None)
    for name, fresh in {"_step_log": None, "_session": None, "_has_no_pulse": False, "_names": set()}.items():
        monkeypatch.setattr(step_log, name, fresh)
    monkeypatch.setattr(script, "_imported", None)
    yield made
    if step_log._step_log is not None:
        step_log._step_log.close()
    if Pulse.current is not None:
        Pulse.current.close()
    made.view.close()


def test_the_agent_hears_at_once_how_far_the_script_is(agent: Agent) -> None:
    tandem.log(step=3, loss=0.5, samples=64, total=100)
    beat = agent.beat()
    assert (beat.step, beat.total_steps, beat.loss, beat.phase, beat.pauses) == (3, 100, 0.5, TRAIN, False)
    assert agent.view.runs_script, "it obeys no orders"
    tandem.log(step=4)
    assert (agent.beat().step, agent.beat().loss, agent.beat().total_steps) == (4, 0.5, 100), "what was said stays"


def test_each_step_is_logged_and_what_else_was_said_of_it(agent: Agent) -> None:
    for step in range(1, 4):
        tandem.log(step=step, loss=1 / step, samples=64, total=3, lr=0.1, perplexity=2.0 * step)
    tandem.log(step=3, accuracy=0.9)
    start = agent.lines("start")[0]
    assert start.pop("processAt") < start["time"]
    assert start | {"time": 0} == {"kind": "start", "time": 0, "step": 0, "totalSteps": 3, "worldSize": 2}
    steps = agent.lines("step")
    assert [(one["step"], one["loss"], one["samples"], one["lr"]) for one in steps] == [
        (1, 1.0, 64, 0.1),
        (2, 0.5, 64, 0.1),
        (3, 1 / 3, 64, 0.1),
    ]
    assert [(one["step"], one["values"]) for one in agent.lines("values")] == [
        (1, {"perplexity": 2.0}),
        (2, {"perplexity": 4.0}),
        (3, {"perplexity": 6.0}),
        (3, {"accuracy": 0.9}),
    ]
    assert agent.lines()[-1]["kind"] == "end"


@pytest.mark.parametrize("every", [1, 5])
def test_samples_are_those_of_one_step_however_rarely_steps_are_logged(
    agent: Agent, monkeypatch: pytest.MonkeyPatch, every: int
) -> None:
    now = 100.0
    monkeypatch.setattr(time, "perf_counter", lambda: now)
    for step in range(every, 41, every):
        tandem.log(step=step, samples=64)
        now += 0.1 * every
    assert agent.beat().throughput == pytest.approx(640.0)
    rates = agent.lines("rate")
    assert all(one["throughput"] == pytest.approx(640.0) for one in rates)
    assert all(one["stepSeconds"] == pytest.approx(0.1) for one in rates)
    assert sum(one["steps"] for one in rates) == 41 - every, "those before the first call are not known"
    assert sum(one["samples"] for one in rates) == 64 * (41 - every)
    assert sum(one["phases"]["compute"] for one in rates) == pytest.approx(0.1 * (40 - every))


def test_without_samples_time_and_steps_are_summed_up_all_the_same(
    agent: Agent, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = 100.0
    monkeypatch.setattr(time, "perf_counter", lambda: now)
    for step in range(1, 12):
        tandem.log(step=step)
        now += 0.1
    rates = agent.lines("rate")
    assert sum(one["steps"] for one in rates) == 11
    assert not any("samples" in one or "throughput" in one for one in rates)
    assert not any("loss" in one for one in agent.lines("step"))


def test_a_pause_is_no_part_of_a_step_and_no_step_is_due(agent: Agent, monkeypatch: pytest.MonkeyPatch) -> None:
    now = 100.0
    monkeypatch.setattr(time, "perf_counter", lambda: now)
    for step in range(1, 12):
        tandem.log(step=step, samples=10)
        now += 0.1
        if step == 6:
            with tandem.pausing("validation"):
                now += 30.0
                tandem.log(step=step, accuracy=0.5)
                assert (agent.beat().phase, agent.beat().pauses) == ("validation", True)
            assert (agent.beat().phase, agent.beat().pauses) == (TRAIN, False)
    rates = agent.lines("rate")
    assert sum(one["phases"].get("pause", 0.0) for one in rates) == pytest.approx(30.0)
    assert [one["throughput"] for one in rates] == [pytest.approx(100.0)] * len(rates)


def test_the_time_after_the_last_step_is_no_part_of_one(agent: Agent, monkeypatch: pytest.MonkeyPatch) -> None:
    now = 100.0
    monkeypatch.setattr(time, "perf_counter", lambda: now)
    tandem.log(step=1, samples=10)
    now += 0.1
    tandem.log(step=2, samples=10)
    with tandem.pausing("export"):
        now += 50.0
    now += 20.0
    (rate,) = agent.lines("rate")
    assert rate["throughput"] == pytest.approx(100.0)
    assert rate["phases"]["compute"] == pytest.approx(0.1)


def test_a_pause_before_the_first_step_is_one_too(agent: Agent) -> None:
    with tandem.pausing("loading"):
        assert (agent.beat().phase, agent.beat().pauses) == ("loading", True)
    assert agent.beat().phase == SCRIPT
    tandem.log(step=1)
    assert agent.beat().phase == TRAIN


def test_a_pause_has_a_name_that_can_be_shown(agent: Agent) -> None:
    with pytest.raises(ValueError, match="cannot name a pause"):
        tandem.pausing("train")


@pytest.mark.parametrize("loss", [math.nan, math.inf, -math.inf])
def test_a_loss_that_is_not_finite_is_taken_as_it_is(agent: Agent, loss: float) -> None:
    tandem.log(step=1, loss=loss, other=loss, lr=loss)
    assert str(agent.beat().loss) == str(loss)
    (step,), (values,) = agent.lines("step"), agent.lines("values")
    assert str(step["loss"]) == str(values["values"]["other"]) == str(loss)
    assert "lr" not in step


@pytest.mark.parametrize(
    "value",
    [torch.tensor(2.5), torch.tensor([2.5], requires_grad=True), np.float32(2.5), np.array([2.5]), Fraction(5, 2)],
    ids=["tensor", "tensor of one element", "numpy scalar", "array of one element", "fraction"],
)
def test_tensors_and_arrays_of_one_element_are_numbers(agent: Agent, value: Any) -> None:
    tandem.log(step=1, loss=value, other=value)
    assert agent.beat().loss == 2.5
    assert agent.lines("values")[0]["values"] == {"other": 2.5}


@pytest.mark.parametrize("step", [torch.tensor(5), np.int64(5), 5])
def test_whole_numbers_of_any_kind_are_steps(agent: Agent, step: Any) -> None:
    tandem.log(step=step, total=np.int32(9), samples=torch.tensor(2))
    assert (agent.beat().step, agent.beat().total_steps) == (5, 9)


@pytest.mark.parametrize(
    ("given", "error", "words"),
    [
        ({"step": 1.0}, TypeError, "step has to be a whole number, and is 1.0"),
        ({"step": "1"}, TypeError, "step has to be a whole number, and is '1'"),
        ({"step": True}, TypeError, "step has to be a whole number"),
        ({"step": -1}, ValueError, "step has to be between 0 and"),
        ({"step": 2**60}, ValueError, "step has to be between 0 and"),
        ({"step": 1, "samples": 6.4}, TypeError, "samples has to be a whole number"),
        ({"step": 1, "total": None, "samples": -4}, ValueError, "samples has to be between"),
        ({"step": 1, "loss": "0.5"}, TypeError, "loss has to be a number, and is '0.5'"),
        ({"step": 1, "loss": torch.ones(3)}, TypeError, "loss has to be one number"),
        ({"step": 1, "loss": np.ones(3)}, TypeError, "loss has to be one number"),
        ({"step": 1, "other": None}, TypeError, "other has to be a number, and is None"),
        ({"step": 1, "other": 1j}, TypeError, "other has to be a number"),
        ({"step": 1, "other": 10**400}, ValueError, "other is too large"),
        ({"step": 1, "a b": 1.0}, ValueError, "'a b' cannot name a value"),
        ({"step": 1, "a" * 41: 1.0}, ValueError, "up to 40 letters"),
        ({"step": 1, "time": 1.0}, ValueError, "'time' cannot name a value: it is taken"),
        ({"step": 1} | {f"name{n}": 1.0 for n in range(17)}, ValueError, "more than 16 names of values"),
    ],
    ids=lambda value: str(value)[:40] if isinstance(value, dict) else "",
)
def test_a_mistake_is_told_at_once(agent: Agent, given: dict[str, Any], error: type[Exception], words: str) -> None:
    with pytest.raises(error, match=words.replace("(", r"\(")):
        tandem.log(**given)
    tandem.log(step=1, fine=1.0)
    assert agent.lines("values")[0]["values"] == {"fine": 1.0}, "it changes nothing"


def test_sixteen_names_are_taken_over_all_calls(agent: Agent) -> None:
    for number in range(16):
        tandem.log(step=1, **{f"name{number}": 1.0})
    with pytest.raises(ValueError, match="more than 16"):
        tandem.log(step=1, another=1.0)


def test_the_log_belongs_to_the_rank_that_makes_it(agent: Agent) -> None:
    agent.path.parent.mkdir(parents=True)
    agent.path.write_text("")
    tandem.log(step=5, loss=0.5)
    assert agent.lines() == []
    assert agent.beat().step == 5, "and the pulse is each rank's own"


def test_another_rank_leaves_the_log_to_the_first_for_a_moment(agent: Agent, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "1")
    tandem.log(step=5, loss=0.5)
    time.sleep(0.3)
    assert not agent.path.exists()
    until(agent.path.exists, "the log of the only rank that calls")
    assert [one["step"] for one in agent.lines("step")] == [5]


def test_what_was_logged_is_written_though_the_script_says_nothing_more(agent: Agent) -> None:
    tandem.log(step=1, loss=0.5)
    until(lambda: agent.path.exists() and '"kind":"step"' in agent.path.read_text(), "the first step on the disk")
    tandem.log(step=2, loss=0.5)
    until(lambda: agent.path.read_text().count('"kind":"step"') == 2, "the second one", seconds=10)


def test_a_disk_that_fails_costs_lines_that_are_counted(agent: Agent, caplog: pytest.LogCaptureFixture) -> None:
    agent.rundir.path.write_text("a file where the run directory should be")
    tandem.log(step=1, loss=0.5)
    until(lambda: (told := agent.view.trouble()) and told.lines_lost, "the lines that are lost")
    assert "event=log-not-written" in caplog.text
    agent.rundir.path.unlink()
    tandem.log(step=2, loss=0.25)
    assert [(one["kind"], one.get("step")) for one in agent.lines("start", "step")] == [("start", 0), ("step", 2)]


def test_a_process_that_the_agent_did_not_start_logs_nothing_and_says_so_once(
    agent: Agent, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("LOCAL_RANK", "5")
    for step in range(3):
        tandem.log(step=step, loss=0.5)
    with tandem.pausing("validation"):
        pass
    assert caplog.text.count("event=steps-not-logged") == 1
    assert agent.lines() == []


def test_a_forked_child_does_not_speak_for_the_rank(agent: Agent) -> None:
    tandem.log(step=1)
    found = step_log._step_log
    found._process = os.getpid() + 1
    tandem.log(step=2)
    with tandem.pausing("validation"):
        assert agent.beat().step == 1
        assert agent.beat().phase == TRAIN
    found._process = os.getpid()


def test_threads_may_call_at_the_same_time(agent: Agent) -> None:
    def calls(first: int) -> None:
        for step in range(first, first + 500):
            tandem.log(step=step, value=float(step))

    threads = [threading.Thread(target=calls, args=(1 + 500 * number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(agent.lines("values")) == 2000
    assert {one["step"] for one in agent.lines("values")} == set(range(1, 2001))


class Beside:
    """A session, as far as the step log knows it."""

    def __init__(self) -> None:
        self.told: list[tuple[int, dict[str, float]]] = []

    def log_values(self, step: int, values: dict[str, float]) -> None:
        self.told.append((step, values))

    def pausing(self, name: str) -> Any:
        raise AssertionError(name)


def test_beside_a_session_only_other_values_count(agent: Agent) -> None:
    session = Beside()
    step_log.use_session(session)
    tandem.log(step=1, loss=0.5, samples=64, total=10)
    tandem.log(step=2, loss=0.5, samples=64, total=10, perplexity=12.0)
    with pytest.raises(AssertionError, match="validation"):
        tandem.pausing("validation")
    assert session.told == [(2, {"perplexity": 12.0})]
    assert agent.view.beat() is None
    assert agent.lines() == []
