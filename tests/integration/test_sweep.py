"""A sweep on this machine: its driver is killed, it continues, and it stops the trials that are worse."""

import json
import os
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from tandem import Client, UserError
from tandem_cli.client.sweep import SweepHandle
from tandem_cli.local.known import is_alive
from tandem_cli.sweep import background
from tests.support import hills, manifests
from tests.support.waiting import until
from tests.support.warm_run import WARM_TANDEM, warm_run_environment

pytestmark = pytest.mark.timeout(900)
HEIGHTS = [0.9, 0.1, 0.2, 0.95, 0.3]


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    for name, value in warm_run_environment().items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(background, "module_command", lambda module, *words: [*WARM_TANDEM, *words])
    hills.write(tmp_path)
    (tmp_path / "job.yaml").write_text(json.dumps(manifests.manifest("hill", **hills.spec())))
    yield tmp_path
    for path in (tmp_path / "runs").glob("*/*/job.json"):
        if is_alive(path.parent):
            Client().run(path.parent).stop(now=True)


def has_score(sweep: SweepHandle, number: int) -> bool:
    trials = sweep.trials()
    return len(trials) > number and bool(trials[number].scores)


def killed(sweep: SweepHandle) -> None:
    driver = sweep._folder.driver()
    assert driver is not None
    os.kill(driver, signal.SIGKILL)
    until(lambda: not sweep.is_running, "the driver is gone")


def test_a_driver_that_is_killed_three_times_repeats_no_trial_and_stops_the_worse_ones(folder: Path) -> None:
    job = manifests.manifest("hill", **hills.spec(lowest=0.5))
    sweep = Client().sweep(hills.sweep(HEIGHTS), job=job, name="hills")
    with pytest.raises(UserError, match="is running, in process"):
        sweep.resume()
    for number in (0, 2, 3):
        until(lambda number=number: has_score(sweep, number), "a trial with a score", seconds=300)  # type: ignore[misc]
        killed(sweep)
        sweep.resume()
    trials = sweep.wait(300)
    assert [trial.values["trainer.args[0]"] for trial in trials] == HEIGHTS
    assert [trial.run for trial in trials] == [f"hills-{number}" for number in range(len(HEIGHTS))]
    assert {trial.state for trial in trials} == {"Complete", "Pruned"}
    best = sweep.best()
    assert best is not None
    assert (best.number, best.state, best.step) == (3, "Complete", 30)
    assert best.score == pytest.approx(0.95 * 1.03)
    assert {trial.state for trial in trials if trial.values["trainer.args[0]"] < 0.5} == {"Pruned"}
    for trial in trials:
        run = sweep.folder / trial.run
        assert (run / "starts").read_text() == "started\n", "no trial began twice"
        assert (run / "out/step-30.txt").exists() or trial.state == "Pruned"
        assert not is_alive(run)
    assert f"{len(trials)} trials: " in sweep.report().read_text()


def test_ctrl_c_saves_and_the_same_command_continues(folder: Path) -> None:
    spec = {"apiVersion": "tandem.dev/v1alpha1", "kind": "Sweep", "metadata": {"name": "two"}}
    trials = hills.sweep(HEIGHTS, job="job.yaml", pruner={"name": "none"}, budget={"trials": 2})
    content = {**spec, "spec": trials}
    Path("sweep.json").write_text(json.dumps(content))
    command = [*WARM_TANDEM, "sweep", "sweep.json"]
    first = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    sweep = None
    try:
        until(lambda: Path("runs/two/two-1/out/step-5.txt").exists(), "both trials train")
        sweep = Client().find_sweep("two")
        first.send_signal(signal.SIGINT)
        output, _ = first.communicate(timeout=60)
    finally:
        first.kill()
    assert "saving and stopping 2 trials" in output
    assert "to continue: tandem sweep runs/two" in output
    assert [trial.state for trial in sweep.trials()] == ["Running", "Running"]
    assert not any(is_alive(Path(f"runs/two/two-{number}")) for number in (0, 1))
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert "trial 0 continues: args[0] 0.9" in done.stdout, done.stderr
    assert [trial.state for trial in sweep.trials()] == ["Complete", "Complete"]
    assert "best trial 0, height" in done.stdout
    assert "weights  not exported: " in done.stdout, "a file of a script"
    assert done.returncode == 0, done.stderr
    assert "- '0.9'" in Path("runs/two/best.yaml").read_text()


def test_trials_pause_with_what_they_have_and_the_best_one_continues(folder: Path) -> None:
    # One after the other: of two, the last one to arrive at the rung would be the best of three there, and not pause.
    spec = hills.sweep([0.1, 0.9, 0.2], pruner={"name": "promotion", "minSteps": 5}, workers=1)
    sweep = Client().sweep(spec, job="job.yaml", name="paused")
    trials = sweep.wait(300)
    log = (sweep.folder / "sweep.log").read_text()
    assert [trial.state for trial in trials] == ["Pruned", "Complete", "Pruned"], log
    assert [f"trial {number} paused: height" in log for number in range(3)] == [True] * 3
    starts = [(sweep.folder / trial.run / "starts").read_text().count("started") for trial in trials]
    # It is alone at the next rung, and pauses there, too, unless it is through before its score is known.
    assert starts in ([1, 2, 1], [1, 3, 1]), log
    assert (sweep.folder / "paused-1/out/step-30.txt").exists()
