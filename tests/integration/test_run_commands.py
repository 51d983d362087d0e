"""A run of this machine in the commands that a job on a cluster has: ls, status, logs, events, open, stop."""

import json
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.local_run import LocalRun
from tests.support.processes import TANDEM, environment
from tests.support.waiting import until

pytestmark = pytest.mark.timeout(600)
FIELDS = (
    *("trainer.loop.epochs=5000", "workers.replicas=1", "evaluators.processesPerReplica=1"),
    "checkpoint.everySteps=10",
)


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalRun]:
    folder = tmp_path_factory.mktemp("a folder of my own")
    words = [word for field in FIELDS for word in ("--set", field)]
    with LocalRun(folder, *words, variables={"XDG_STATE_HOME": str(folder / "state")}) as started:
        started.reaches(20)
        yield started


def test_a_path_with_spaces_is_quoted_where_it_is_to_be_typed(run: LocalRun) -> None:
    assert " " in str(run.path)
    assert f"live page: tandem open '{run.path}'" in run.output


def test_it_is_found_by_its_name_wherever_it_is(run: LocalRun) -> None:
    listed = run.called("ls")
    assert listed.stdout.splitlines()[0].split()[:3] == ["RUN", "NAME", "PHASE"]
    assert str(run.path) in listed.stdout
    (record,) = json.loads(run.called("ls", "-o", "json").stdout)
    assert (record["name"], record["status"]["phase"]) == ("digits", "Running")


@pytest.mark.parametrize("by", ["name", "folder"])
def test_status_is_that_of_a_job(run: LocalRun, by: str) -> None:
    told = run.called("status", "digits" if by == "name" else str(run.path))
    assert told.returncode == 0, told.stderr
    assert told.stdout.startswith(f"digits  Running  in {run.path} · made ")
    for line in ("  workers      1 of 1 (1 to 1) · world size 1 · generation 1 · no restarts", "PROCESS", "worker-0"):
        assert line in told.stdout
    record = json.loads(run.called("status", str(run.path), "-o", "json").stdout)
    assert record["status"]["progress"]["step"] >= 20
    assert [pod["name"] for pod in record["pods"]][:2] == ["coordinator", "worker-0"]


def test_events_and_logs_are_told(run: LocalRun) -> None:
    assert "generation 1 with 1 replica, because the job starts" in run.called("events", "digits").stdout
    (event,) = [one for one in json.loads(run.called("events", "digits", "-o", "json").stdout) if not one["warning"]]
    assert event["who"] == "job"
    whole = run.called("logs", "digits").stdout
    assert "coordinator   │ " in whole
    assert "worker-0      │ " in whole
    assert len(run.called("logs", "digits", "coordinator", "--tail", "1").stdout.splitlines()) == 1


def test_open_gives_the_address_of_its_page(run: LocalRun) -> None:
    assert run.called("open", "--print").stdout.startswith("http://127.0.0.1:")
    assert run.called("open", "digits", "--print").stdout.startswith("http://127.0.0.1:")


def test_stop_has_it_save_and_whoever_follows_sees_it_end(run: LocalRun, tmp_path: Path) -> None:
    followed = tmp_path / "followed"
    variables = {"XDG_STATE_HOME": str(run.path.parent / "state")}
    with followed.open("w") as output:
        following = subprocess.Popen(
            [TANDEM, "logs", "digits", "--follow"], cwd="/usr", env=environment(variables), stdout=output
        )
    until(lambda: "listening" in followed.read_text(), "the first lines")
    stopped = run.called("stop", "digits")
    assert stopped.returncode == 0, stopped.stderr
    (saved, *_) = run.run_dir.committed()
    assert stopped.stdout == f"{run.path} is stopped; saved after step {saved.step:,}\n"
    assert run.ends() == 130
    assert following.wait(60) == 0
    assert "event=stopped" in followed.read_text()
    told = run.called("status", "digits").stdout
    assert f"not running; the same `tandem run` continues after step {saved.step:,}" in told
    again = run.called("stop", "digits")
    assert again.returncode == 2
    assert "is not running" in again.stderr
