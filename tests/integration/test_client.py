"""The Python client on this machine: a job is submitted, watched and stopped, and its best weights are loaded."""

import importlib
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

from tandem import Client, UserError, frame
from tandem_cli.client import RunHandle
from tandem_cli.local import submission
from tandem_cli.local.known import is_alive
from tests.support.local_run import DIGITS, SECONDS
from tests.support.waiting import until
from tests.support.warm_run import WARM_TANDEM, warm_run_environment

pytestmark = pytest.mark.timeout(600)
SMALL = {"workers.replicas": 1, "evaluators.processesPerReplica": 1, "checkpoint.everySteps": 20}

FUNCTION = """
import os

import tandem
from its_settings import STEPS


def train(options, rate):
    print("called with", options, rate, "in", os.environ["RANK"], flush=True)
    for step in range(STEPS):
        tandem.log(step=step + 1, loss=rate / (step + 1), total=STEPS)
"""


@pytest.fixture
def client(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Client]:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    made = Client()
    yield made
    for run in made.runs():
        if is_alive(run._run.run_dir().path):
            run.stop(now=True)


@pytest.fixture
def warm_client(client: Client, monkeypatch: pytest.MonkeyPatch) -> Client:
    """A client whose runs start warm: how they start by themselves is what the first test shows."""
    for name, value in warm_run_environment().items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(submission, "module_command", lambda module, *words: [*WARM_TANDEM, *words])
    return client


def submitted(client: Client, epochs: int) -> RunHandle:
    return client.submit(
        yaml.safe_load(DIGITS.read_text()), overrides={**SMALL, "trainer.loop.epochs": epochs}, run_dir="a run"
    )


def test_a_job_trains_and_its_best_checkpoint_is_loaded(client: Client, capfd: pytest.CaptureFixture[str]) -> None:
    run = submitted(client, epochs=3)
    lines = [line.text for line in run.logs(follow=True)]
    status = run.wait(SECONDS, check=True)
    assert (status.phase, lines != []) == ("Succeeded", True)
    losses, scores, best = run.losses(), run.scores(), run.best()
    assert status.progress is not None
    assert [one.step for one in losses] == list(range(1, status.progress.step + 1))
    assert best is not None
    assert best in scores
    assert losses[-1].loss < losses[0].loss
    assert len(frame(losses)) == len(losses)
    checkpoint = run.checkpoint("best")
    assert (checkpoint.step, dict(checkpoint.metrics)) == (best.step, dict(best.metrics))
    weights = checkpoint.load()
    assert weights["classifier.3.bias"].shape == (10,)
    assert "Training loss" in run._repr_html_()
    assert run.report("page.html").read_text().startswith("<!DOCTYPE html>")
    assert client.run("digits").phase == "Succeeded"
    assert submitted(client, epochs=3).phase == "Succeeded", "a complete run is returned as it is"
    assert tuple(capfd.readouterr()) == ("", ""), "a library prints nothing"


def test_a_function_of_a_module_trains_on_two_workers(warm_client: Client, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = Path("code")
    folder.mkdir()
    monkeypatch.syspath_prepend(folder.resolve())
    (folder / "its_settings.py").write_text("STEPS = 12\n")
    (folder / "a_training.py").write_text(FUNCTION)
    train = importlib.import_module("a_training").train
    run = warm_client.train(train, {"of": [1, 2]}, kwargs={"rate": 0.5}, workers=2, code=folder)
    status = run.wait(SECONDS, check=True)
    assert (run.name, status.phase, len(run.losses())) == ("train", "Succeeded", 12)
    calls = {line.text.partition("called ")[2] for line in run.logs(role="worker") if "called " in line.text}
    assert calls == {"with {'of': [1, 2]} 0.5 in 0", "with {'of': [1, 2]} 0.5 in 1"}
    again = warm_client.train(train, {"of": [1, 2]}, kwargs={"rate": 0.5}, workers=2, code=folder)
    assert again.phase == "Succeeded", "a complete run is returned as it is"


def test_a_run_is_stopped_and_resumed(warm_client: Client) -> None:
    run = submitted(warm_client, epochs=5000)
    with pytest.raises(UserError, match=r"another tandem run \(process \d+\) uses a run"):
        submitted(warm_client, epochs=5000)
    assert run.wait(SECONDS, until=lambda status: status.latest_checkpoint is not None).phase == "Running"
    with pytest.raises(UserError, match="the number of workers of a local run cannot change"):
        run.scale(2)
    assert run.stop().startswith("a run is stopped; saved after step ")
    status = run.wait(0)
    assert status.phase == "Suspended"
    assert status.latest_checkpoint is not None
    again = submitted(warm_client, epochs=5000)
    until(lambda: any("resuming" in note for note in again.notes), "it resumes")
    again.stop(now=True)
