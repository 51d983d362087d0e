"""Sides of a benchmark that share their minutes: one runs, the others stand still, and its time is its own."""

import subprocess
import sys
import time
from contextlib import suppress
from itertools import pairwise
from pathlib import Path

import psutil
import pytest

from benchmarks import turns
from benchmarks.throughput import sides
from benchmarks.throughput.processors import Sample
from benchmarks.throughput.sides import Course, Failure, measured, watched
from benchmarks.turns import Pauses, in_turns, stopped
from tests.support.waiting import until

COUNTING = """
import os, sys, time
if len(sys.argv) > 3:
    os.fork()
with open(sys.argv[1], "a", buffering=1) as file:
    while os.path.getsize(sys.argv[1]) < int(sys.argv[2]):
        print(time.time(), file=file)
        time.sleep(0.001)
"""


def at_work(file: Path) -> list[float]:
    return [float(line) for line in file.read_text().splitlines()]


def test_a_moment_of_a_run_is_less_all_its_stops_before() -> None:
    pauses = Pauses([(10.0, 12.0), (20.0, 25.0)])
    assert [pauses.running(at) for at in (5.0, 10.0, 11.0, 12.0, 20.0, 30.0)] == [5.0, 10.0, 10.0, 10.0, 18.0, 23.0]


def test_what_a_run_shows_has_no_stop_in_it() -> None:
    ends = [1.0, 2.0, 3.0, 14.0, 15.0, 16.0]
    looks = [Sample(at, at - stop, 0.0) for at, stop in ((1.5, 0.0), (2.5, 0.0), (14.5, 10.0), (15.5, 10.0))]
    course = Course(0.5, looks, Pauses([(3.0, 13.0)]))
    found = measured(course, ends, steps=6, batch_size=8, skip=1)
    assert (found.throughput, found.start, found.use.ranks) == pytest.approx((8.0, 0.5, 1.0))


def test_a_process_and_all_that_it_has_started_stand_still_and_go_on(tmp_path: Path) -> None:
    file = tmp_path / "counted"
    with subprocess.Popen([sys.executable, "-c", COUNTING, str(file), "1000000000", "fork"]) as process:
        try:
            root = psutil.Process(process.pid)
            until(lambda: file.exists() and file.read_text() and root.children(), "both count")
            with stopped(root):
                family = [root, *root.children()]
                until(lambda: {one.status() for one in family} == {psutil.STATUS_STOPPED}, "both stand still")
                size = file.stat().st_size
                time.sleep(0.2)
                assert file.stat().st_size == size
            until(lambda: file.stat().st_size > size, "they go on")
        finally:
            for one in [*root.children(recursive=True), root]:
                with suppress(psutil.NoSuchProcess):
                    one.kill()


def test_sides_run_one_at_a_time_and_each_to_its_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(turns, "SECONDS", 0.1)
    monkeypatch.setattr(sides, "SAMPLE_SECONDS", 0.05)

    def counted(name: str) -> Course:
        command = [sys.executable, "-c", COUNTING, str(tmp_path / name), "12000"]
        (tmp_path / f"{name}-output").mkdir()
        return watched(command, tmp_path / f"{name}-output", lambda _: True, steps=1)

    courses = in_turns({name: lambda name=name: counted(name) for name in "abc"})
    moments = {name: at_work(tmp_path / name) for name in "abc"}
    for name, course in courses.items():
        for begin, end in course.pauses.spans:
            assert not [at for at in moments[name] if begin < at < end]
    whose = [name for _, name in sorted((at, name) for name in moments for at in moments[name])]
    changes = sum(one != other for one, other in pairwise(whose))
    assert 3 <= changes <= sum(len(course.pauses.spans) + 1 for course in courses.values())


def test_a_side_that_fails_ends_its_turn_alone(tmp_path: Path) -> None:
    def failing() -> str:
        try:
            watched([sys.executable, "-c", "raise SystemExit(3)"], tmp_path, lambda _: True, steps=1)
        except Failure as failure:
            return str(failure)
        return "passed"

    found = in_turns({"one": failing, "other": lambda: "passed"})
    assert found["one"].startswith("ended with 3")
    assert found["other"] == "passed"


@pytest.mark.parametrize(("number", "first"), [(0, "one"), (1, "other"), (2, "one")])
def test_who_is_first_changes_with_each_round(number: int, first: str) -> None:
    began: list[str] = []
    in_turns({name: lambda name=name: began.append(name) for name in ("one", "other")}, number)
    assert began[0] == first
