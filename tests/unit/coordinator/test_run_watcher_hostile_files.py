"""Whatever stands in a run directory, the coordinator goes on to look at it, and says what it cannot read."""

import json
import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tandem.formatting import rfc3339
from tandem.rundir.layout import RunDir
from tandem.rundir.log import LogReader
from tandem.rundir.records import COORDINATOR, EVALUATOR, TRAINING
from tandem_coordinator.run_watcher import MAX_MESSAGE_LENGTH, MAX_REASON_LENGTH, Observed, RunDirectory, RunWatcher
from tandem_coordinator.state_store import StateStore
from tests.support.waiting import until
from tests.support.worlds.small_run import SmallRun

HUGE = 10**400
DEEP = "[" * 100_000
Put = Callable[[Path], object]


@pytest.fixture
def run(tmp_path: Path) -> SmallRun:
    made = SmallRun(tmp_path / "run")
    made.begin(1)
    made.save(50)
    return made


def text(content: str) -> Put:
    def put(path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.unlink(missing_ok=True)
        path.write_text(content)

    return put


def says(**content: object) -> Put:
    return text(json.dumps(content))


def folder(path: Path) -> None:
    path.unlink(missing_ok=True)
    path.mkdir(parents=True)


def pipe(path: Path) -> None:
    path.unlink(missing_ok=True)
    os.mkfifo(path)


CONTENTS: dict[str, Put] = {
    "a number of 400 digits": text(f'{{"at": {HUGE}, "step": {HUGE}, "time": {HUGE}, "generation": {HUGE}}}\n'),
    "a time that never comes": says(at=1e300, step=-1, time=-1e300, reason=None, message=[1]),
    "nested without measure": text(DEEP),
    "a line without end": text("x" * 3_000_000),
    "another thing": text("[null]\n"),
    "no JSON": text('{"at": '),
    "bytes": lambda path: path.write_bytes(b"\xff\xfe\x00" * 1000),
    "empty": text(""),
    "a folder": folder,
    "a pipe": pipe,
}
PLACES = [
    *("DONE", "FAILED.json", "coordinator.json", "latest.json", "best.json", "rewinds/000001.json"),
    *("log/train-g000001.jsonl", "log/evaluator-a.jsonl", "log/coordinator.jsonl"),
    *("evaluations/step-000000050/g000001.json", "evaluations/../odd name/g000001.json"),
    *("checkpoints/step-000000050/manifest.json", "checkpoints/step-000000099/manifest.json"),
]


@pytest.fixture
def observed(run: SmallRun) -> Iterator[Callable[[], list[Observed | str]]]:
    """Starts an observer; what it has told and complained about so far."""
    started: list[RunWatcher] = []

    def start() -> list[Observed | str]:
        told: list[Observed | str] = []
        directory = RunDirectory(run.rundir, run.rundir.read_job().spec.evaluation)
        started.append(RunWatcher(directory, told.append, told.append))
        started[-1].start()
        return told

    yield start
    for run_watcher in started:
        run_watcher.stop()
        run_watcher.join(30)
        assert not run_watcher.is_alive()


@pytest.mark.parametrize("place", PLACES)
def test_no_file_ends_the_observer(run: SmallRun, place: str, observed: Callable[[], list[Observed | str]]) -> None:
    for name, put in CONTENTS.items():
        path = run.rundir.path / place
        path.parent.mkdir(parents=True, exist_ok=True)
        if path.is_dir():
            path.rmdir()
        put(path)
        told = observed()
        until(lambda told=told: told, f"a look at {place} with {name}")  # type: ignore[misc]
        assert isinstance(told[0], Observed), f"{name}: {told[0]}"
        ending = told[0].ending
        assert ending is None or ending.ended_at is None or rfc3339(ending.ended_at)
        assert StateStore(run.rundir)._read() is None
        for kinds in (COORDINATOR, EVALUATOR, TRAINING):
            assert list(LogReader(path, kinds)) == []


def test_what_is_damaged_is_told_and_looked_at_again(
    run: SmallRun, observed: Callable[[], list[Observed | str]]
) -> None:
    record = run.rundir.generations / "000001.json"
    sound = record.read_text()
    text(DEEP)(record)
    told = observed()
    until(lambda: told, "a complaint")
    assert "is damaged" in str(told[0])
    text(sound)(record)
    until(lambda: isinstance(told[-1], Observed), "a look that goes well")


def test_nothing_that_anybody_raises_ends_the_observer() -> None:
    class Breaking(RunDirectory):
        def __init__(self) -> None:
            self.looks = 0

        def poll(self, now: float) -> Observed:
            self.looks += 1
            raise [OverflowError("x" * 100_000), RecursionError(), KeyError("a")][self.looks % 3]

    told: list[object] = []
    run_watcher = RunWatcher(Breaking(), told.append, told.append)
    run_watcher.start()

    def complaints() -> bool:
        run_watcher.poll_now()
        return len(told) >= 3

    until(complaints, "three complaints")
    run_watcher.stop()
    run_watcher.join(30)
    assert max(len(str(one)) for one in told) < MAX_MESSAGE_LENGTH + 100


def test_what_a_failure_says_is_cut(run: SmallRun) -> None:
    says(reason="R" * 10_000, message="m" * 100_000, at=HUGE)(run.rundir.failed_file)
    ending = RunDirectory(run.rundir, run.rundir.read_job().spec.evaluation).poll(time.time()).ending
    assert (len(ending.reason), len(ending.message), ending.ended_at) == (MAX_REASON_LENGTH, MAX_MESSAGE_LENGTH, None)


@pytest.mark.parametrize("name", ["../../etc", "a/b", "..", "", ".hidden", "x" * 300])
def test_the_last_checkpoint_of_a_run_has_a_plain_name(run: SmallRun, name: str) -> None:
    says(final={"name": name, "step": 50, "generation": 1}, at=1.0)(run.rundir.done_file)
    ending = RunDirectory(run.rundir, run.rundir.read_job().spec.evaluation).poll(time.time()).ending
    assert (ending.failed, ending.final) == (False, None)


@pytest.mark.parametrize(
    ("at", "said"),
    [(1e300, "9999-12-31T23:59:59Z"), (-1e300, "1970-01-01T00:00:00Z"), (0.0, "1970-01-01T00:00:00Z")],
)
def test_any_time_can_be_written(at: float, said: str) -> None:
    assert rfc3339(at) == said


def test_a_page_of_the_ledger_with_numbers_that_nobody_gives_out_is_none(tmp_path: Path) -> None:
    rundir = RunDir(tmp_path)
    says(owner="a", generation=HUGE, replicas=1, target=1)(rundir.coordinator_file)
    assert StateStore(rundir)._read() is None
