"""How rank 0 finds the scores that end training."""

import threading
from pathlib import Path
from typing import Any

import pytest

from tandem.rundir.durable import replace_json
from tandem.rundir.layout import RunDir
from tandem.rundir.lineage import GenerationRecord
from tandem_trainer.score_watch import LOOK_SECONDS, ScoreWatch
from tests.support import manifests
from tests.support.clock import Clock
from tests.support.waiting import SECONDS


def run_directory(path: Path, **run_policy: Any) -> RunDir:
    rundir = manifests.run_directory(path, manifests.job("digits", runPolicy=run_policy))
    assert rundir.record_generation(
        GenerationRecord(generation=1, resumed_from=None, continues=None, world_size=1, started_at=1.0)
    )
    return rundir


def evaluated(rundir: RunDir, step: int, accuracy: float) -> None:
    folder = rundir.evaluations / f"step-{step:09}"
    folder.mkdir(parents=True)
    replace_json(folder / "g000001.json", {"metrics": {"accuracy": accuracy, "loss": 1.0}})


class Watched:
    """A watch that is asked after each interval, and whose look is waited for."""

    def __init__(self, rundir: RunDir) -> None:
        self.clock = Clock(100.0)
        self.watch = ScoreWatch(rundir, self.clock)

    def reason(self) -> str:
        self.clock.passes(LOOK_SECONDS)
        self.watch.reason()
        if self.watch._thread is not None:
            self.watch._thread.join()
        return self.watch.reason()


def test_the_reason_comes_from_the_results_in_the_run_directory(tmp_path: Path) -> None:
    rundir = run_directory(tmp_path / "run", stopWhen={"noBetterFor": 2})
    watched = Watched(rundir)
    for step, accuracy in ((10, 0.5), (20, 0.9), (30, 0.8)):
        evaluated(rundir, step, accuracy)
        assert watched.reason() == ""
    evaluated(rundir, 40, 0.85)
    assert watched.reason() == "accuracy has not become better than 90.00 % (step 20) in 2 evaluations"


def test_a_step_does_not_wait_for_the_disk_and_looks_are_seconds_apart(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    watched = Watched(run_directory(tmp_path / "run", stopWhen={"reaches": 0.5}))
    looks: list[float] = []
    may_end = threading.Event()

    def look() -> None:
        looks.append(watched.clock())
        may_end.wait(SECONDS)

    monkeypatch.setattr(watched.watch, "_update", look)
    assert watched.watch.reason() == ""
    watched.clock.passes(LOOK_SECONDS)
    assert watched.watch.reason() == "", "the disk is slow"
    may_end.set()
    assert watched.reason() == ""
    assert looks == [100.0, 100.0 + 2 * LOOK_SECONDS]


def test_a_job_without_the_setting_is_read_once(tmp_path: Path) -> None:
    rundir = run_directory(tmp_path / "run")
    watched = Watched(rundir)
    assert watched.reason() == ""
    first = watched.watch._thread
    assert watched.reason() == ""
    assert watched.watch._thread is first


def test_what_cannot_be_read_is_read_again(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    rundir = run_directory(tmp_path / "run", stopWhen={"reaches": 0.5})
    evaluated(rundir, 10, 0.6)
    content = rundir.job_file.read_bytes()
    rundir.job_file.write_bytes(b"{")
    watched = Watched(rundir)
    assert watched.reason() == ""
    assert "runPolicy.stopWhen cannot be read" in caplog.text
    rundir.job_file.write_bytes(content)
    assert watched.reason() == "accuracy is 60.00 % at step 10"
