"""Files that a script overwrites: each of their states is evaluated as itself, within bounds, and nothing is left."""

import errno
import hashlib
import os
import shutil
import sys
import tempfile
import threading
import time
from collections import defaultdict
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tandem.job.resource import Evaluators
from tandem.rundir import evaluations, file_copy, lease, watched
from tandem.rundir.durable import read_json_or_none
from tandem.rundir.layout import RunDir
from tandem.rundir.watched import Finder, Policy, Watched
from tandem_evaluator.loop import Evaluator
from tandem_evaluator.program import ProgramScoring
from tandem_evaluator.watch import WatchSurvey
from tests.support.waiting import until

LAST = "last.bin"
DIGESTS = """
import hashlib
from tandem.evaluation import checkpoints
for one in checkpoints():
    one.report(digest=int(hashlib.sha256(one.weights.read_bytes()).hexdigest()[:12], 16))
"""


@pytest.fixture
def rundir(tmp_path: Path) -> RunDir:
    subject = RunDir(tmp_path / "run")
    subject.create()
    return subject


@pytest.fixture(autouse=True)
def bytes_are_copied(monkeypatch: pytest.MonkeyPatch) -> None:
    """On every disk that tests run on, and nobody waits for it: machines do not crash here."""
    monkeypatch.setattr(file_copy, "_shares_blocks", lambda *_: False)
    monkeypatch.setattr(os, "fsync", lambda _: None)


@pytest.fixture
def on_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watched, "INLINE_BYTES", 0)


class Script:
    """A script that writes into one file again and again. Each state has a time of its own."""

    def __init__(self, path: Path) -> None:
        self.path, self._seconds = path, 1_000.0
        self.contents: list[bytes] = []

    def save(self, content: bytes = b"") -> bytes:
        self._seconds += 1
        content = content or f"state {len(self.contents):06d} ".encode() * 20
        self.path.write_bytes(content)
        os.utime(self.path, (self._seconds, self._seconds))
        self.contents.append(content)
        return content

    def replace(self) -> bytes:
        aside = Script(self.path.with_name("aside.tmp"))
        aside.contents, aside._seconds = self.contents, self._seconds
        content = aside.save()
        self._seconds = aside._seconds
        aside.path.replace(self.path)
        return content


@pytest.fixture
def script(rundir: RunDir) -> Script:
    return Script(rundir.path / LAST)


def finder(rundir: RunDir, pattern: str = "*.bin", settle: float = 0.0, policy: Policy | None = "Every") -> Finder:
    return Finder(rundir, pattern, settle, policy)


def look(subject: Finder, times: int = 2) -> None:
    for _ in range(times):
        subject.look(ended=False)


def kept(rundir: RunDir) -> list[bytes]:
    """What evaluators would read, by step."""
    return [watched.evaluated_path(rundir, one).read_bytes() for one in watched.records(rundir)]


def digest(content: bytes) -> int:
    return int(hashlib.sha256(content).hexdigest()[:12], 16)


def files(rundir: RunDir) -> set[str]:
    return {path.name for path in (rundir.path / "watched").rglob("*") if path.is_file()}


def notes(rundir: RunDir) -> list[str]:
    return [read_json_or_none(path)["why"] for path in sorted(rundir.evaluations.glob("*/*.skipped.json"))]


def evaluated(rundir: RunDir, tmp_path: Path, **spec: Any) -> dict[int, float]:
    """Run an evaluator to its end. Returns the digests that it reported, by step."""
    program = tmp_path / "digests.py"
    program.write_text(DIGESTS)
    evaluators = Evaluators(command=[sys.executable, str(program)], metric="digest", goal="Maximize", **spec)
    scoring = ProgramScoring(evaluators)
    try:
        assert Evaluator(rundir, evaluators, "evaluator-0-0", scoring, Mock()).run() == 0
    finally:
        scoring.close()
    results = [read_json_or_none(path) for path in rundir.evaluations.glob("*/g000000.json")]
    return {result["step"]: result["metrics"]["digest"] for result in results}


def test_thirty_states_of_one_file_have_thirty_evaluations_of_what_was_written(
    rundir: RunDir, script: Script, tmp_path: Path
) -> None:
    subject = finder(rundir)
    for _ in range(30):
        script.save()
        look(subject)
    rundir.mark_failed("Failed", "exit code 1", 1)
    results = evaluated(rundir, tmp_path, watch=LAST, policy="Every")
    assert results == {number: digest(content) for number, content in enumerate(script.contents, 1)}
    assert notes(rundir) == []
    best = max(script.contents, key=digest)
    left = {"record.json"} if best == script.contents[-1] else {"record.json", LAST}
    assert files(rundir) == left, "the best one alone is kept"
    path = watched.checkpoint_path(rundir, read_json_or_none(rundir.best_file)["name"])
    assert path is not None
    assert path.read_bytes() == best


def test_a_name_with_a_number_is_overwritten_if_the_pattern_names_no_other(rundir: RunDir) -> None:
    script, subject = Script(rundir.path / "resnet50.bin"), finder(rundir, "resnet50.bin")
    for _ in range(3):
        script.save()
        look(subject)
    assert kept(rundir) == script.contents
    assert [one.step for one in watched.records(rundir)] == [1, 2, 3]


def test_a_pattern_that_matches_copies_as_well_does_not_find_them(rundir: RunDir, script: Script) -> None:
    subject = finder(rundir, "**/*.bin")
    for _ in range(3):
        script.save()
        look(subject, 4)
    assert [one.path for one in watched.records(rundir)] == [LAST] * 3


def test_nothing_is_copied_where_nobody_evaluates(rundir: RunDir, script: Script) -> None:
    subject = finder(rundir, policy=None)
    script.save()
    look(subject)
    assert [one.copied_bytes for one in watched.records(rundir)] == [None]


def test_files_with_a_number_are_linked(rundir: RunDir) -> None:
    path = rundir.path / "ckpt-5.bin"
    path.write_bytes(b"weights")
    look(finder(rundir))
    (record,) = watched.records(rundir)
    assert record.copied_bytes is None
    assert watched.evaluated_path(rundir, record).samefile(path)


def test_a_script_that_renames_pays_for_one_copy(rundir: RunDir, script: Script) -> None:
    subject = finder(rundir)
    for _ in range(3):
        script.replace()
        look(subject)
    assert [one.copied_bytes is not None for one in watched.records(rundir)] == [True, False, False]
    assert kept(rundir) == script.contents
    script.save()
    look(subject)
    script.save()
    look(subject)
    assert kept(rundir)[3:] == script.contents[3:], "it writes into the file from now on"


def test_a_large_file_is_copied_beside_the_next_looks_and_by_one_process_alone(
    rundir: RunDir, script: Script, monkeypatch: pytest.MonkeyPatch, on_thread: None
) -> None:
    going_on, copies = threading.Event(), []
    original = file_copy.copy

    def slow(*arguments: Any) -> int:
        copies.append(arguments[0])
        going_on.wait(30)
        return original(*arguments)

    monkeypatch.setattr(file_copy, "copy", slow)
    one, other = finder(rundir), finder(rundir)
    script.save()
    (rundir.path / "ckpt-7.bin").write_bytes(b"weights")
    for subject in (one, other):
        look(subject, 3)
    assert [record.step for record in watched.records(rundir)] == [7], "others are not waited for"
    going_on.set()
    until(lambda: len(watched.records(rundir)) == 2, "the copy")
    for subject in (one, other):
        look(subject, 3)
    assert len(copies) == 1
    assert kept(rundir) == [b"weights", script.contents[0]]
    assert files(rundir) == {"record.json", LAST, "ckpt-7.bin"}


def test_a_state_that_is_overwritten_while_it_is_copied_is_never_evaluated(
    rundir: RunDir, script: Script, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(file_copy, "CHUNK_BYTES", 50)
    original, saves = file_copy._copy_chunk, [1, 2, 3]

    def copy_chunk(*arguments: Any) -> int:
        if saves:
            saves.pop()
            script.save()
        return original(*arguments)

    monkeypatch.setattr(file_copy, "_copy_chunk", copy_chunk)
    subject = finder(rundir)
    script.save()
    look(subject, 10)
    assert kept(rundir) == script.contents[-1:]
    assert files(rundir) == {"record.json", LAST}
    (problem,) = subject.take_problems()
    assert "last.bin was overwritten while it was copied" in problem


def test_beyond_the_number_of_copies_a_state_is_linked_and_its_note_says_why_it_was_lost(
    rundir: RunDir, script: Script, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(watched, "MAX_COPIES", 2)
    subject = finder(rundir)
    for _ in range(5):
        script.save()
        look(subject)
    (problem,) = subject.take_problems()
    assert problem == (
        "last.bin is not copied: 2 copies wait for their evaluation, which is the maximum; what is overwritten before "
        "its evaluation is lost"
    )
    rundir.mark_failed("Failed", "exit code 1", 1)
    results = evaluated(rundir, tmp_path, watch="*.bin", policy="Every")
    assert results == {step: digest(script.contents[step - 1]) for step in (1, 2, 5)}
    assert notes(rundir) == [f"{watched.OVERWRITTEN}; no copy was taken: {problem[24:80]}"] * 2


def test_the_bytes_of_copies_have_a_limit_and_free_space_is_left(
    rundir: RunDir, script: Script, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(watched, "MAX_COPIED_BYTES", 500)
    subject = finder(rundir)
    for _ in range(2):
        script.save(os.urandom(300))
        look(subject)
    assert [one.copied_bytes for one in watched.records(rundir)] == [300, None]
    assert "may have at most 500 B" in subject.take_problems()[0]
    monkeypatch.setattr(watched, "MAX_COPIED_BYTES", 10**6)
    monkeypatch.setattr(os, "statvfs", lambda _: Mock(f_bavail=1499, f_frsize=1))
    subject = finder(rundir)
    script.save(os.urandom(300))
    look(subject)
    assert [one.copied_bytes for one in watched.records(rundir)] == [300, None, None]
    assert "the disk has only 1.5 kB free" in subject.take_problems()[0]


def test_a_disk_that_is_nearly_full_gets_no_links_so_that_what_the_script_deletes_makes_room(
    rundir: RunDir, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = rundir.path / "ckpt-5.bin"
    path.write_bytes(b"w" * 300)
    monkeypatch.setattr(os, "statvfs", lambda _: Mock(f_bavail=599, f_frsize=1))
    subject = WatchSurvey(rundir, 1, "ckpt-*.bin", 0.0)
    for _ in range(2):
        view = subject.scan()
    assert [subject.open(state.reference)[0] for state in view.states] == [path]
    path.unlink()
    assert subject.scan().states == ()
    assert notes(rundir) == [f"{watched.OVERWRITTEN}; no link was made: the disk has only 599 B free"]


def test_a_full_disk_costs_the_copy_and_nothing_else(
    rundir: RunDir, script: Script, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(file_copy, "_copy_chunk", full)
    subject = finder(rundir)
    script.save()
    look(subject)
    assert kept(rundir) == script.contents
    assert watched.records(rundir)[0].no_copy_reason == "no copy was taken: the copy failed: No space left on device"
    assert files(rundir) == {"record.json", LAST}
    script.save()
    view = WatchSurvey(rundir, 1, "*.bin", 0.0).scan()
    assert view.states == ()
    assert notes(rundir) == [f"{watched.OVERWRITTEN}; {watched.records(rundir)[0].no_copy_reason}"]


def test_a_copy_that_a_crash_has_left_is_removed_and_that_of_a_living_process_is_not(rundir: RunDir) -> None:
    partial = rundir.path / "watched" / f"{watched.PARTIAL}host-1-2"
    partial.mkdir(parents=True)
    (partial / LAST).write_bytes(b"half")
    living = lease.acquire(rundir.leases / watched.COPY_LEASE, "another")
    assert living is not None
    subject = finder(rundir)
    assert subject.look(ended=True), "it is waited for"
    assert partial.exists()
    living.release()
    assert not subject.look(ended=True)
    assert not partial.exists()


def test_under_latest_a_newer_copy_removes_those_that_nobody_has_started(rundir: RunDir, script: Script) -> None:
    subject = finder(rundir, policy="Latest")
    script.save()
    look(subject)
    claim = rundir.leases / "evaluate-step-000000001-g000000-shard-0-of-1.json"
    evaluating = lease.acquire(claim, "evaluator-0-0")
    assert evaluating is not None
    with evaluating:
        for _ in range(3):
            script.save()
            look(subject)
    existing = [watched.evaluated_path(rundir, one) != script.path for one in watched.records(rundir)]
    assert existing == [True, False, False, True]
    assert notes(rundir) == [evaluations.PASSED_OVER] * 3
    assert read_json_or_none(rundir.evaluations / "step-000000004" / "g000000.skipped.json") is None


def test_under_latest_links_of_skipped_checkpoints_are_removed(rundir: RunDir) -> None:
    """A script with retention of its own would otherwise delete files that stay on the disk."""
    subject = WatchSurvey(rundir, 1, "ckpt-*.bin", 0.0, "Latest")
    for step in (1, 2, 3):
        (rundir.path / f"ckpt-{step}.bin").write_bytes(b"weights")
    for _ in range(2):
        view = subject.scan()
    for state in view.states[1:]:
        evaluations.record_skipped_evaluation(rundir, state.reference, evaluations.PASSED_OVER)
    (rundir.path / "ckpt-1.bin").unlink()
    for _ in range(2):
        view = subject.scan()
    assert [state.reference.step for state in view.states] == [3, 2]
    assert {path.name for path in rundir.path.glob("watched/*/*.bin")} == {"ckpt-3.bin"}


def test_a_file_that_never_rests_for_the_settle_time_is_reported(
    rundir: RunDir, script: Script, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = time.monotonic()
    monkeypatch.setattr(lease, "server_time", lambda _: script.path.stat().st_mtime + 1)
    subject = finder(rundir, settle=10.0)
    for seconds in range(40):
        script.save()
        monkeypatch.setattr(time, "monotonic", lambda passed=seconds: now + passed)
        look(subject)
    assert watched.records(rundir) == []
    (problem,) = subject.take_problems()
    assert "last.bin was overwritten again and again for 31 s" in problem
    assert "10 s without a change (evaluators.settleSeconds)" in problem


def test_a_first_write_that_takes_long_is_not_reported(rundir: RunDir, monkeypatch: pytest.MonkeyPatch) -> None:
    now = time.monotonic()
    subject = finder(rundir, settle=3600.0)
    for seconds in range(100):
        (rundir.path / LAST).write_bytes(b"w" * (seconds + 1))
        monkeypatch.setattr(time, "monotonic", lambda passed=seconds: now + passed * 120)
        look(subject, 1)
    assert subject.take_problems() == []


def test_a_damaged_record_is_in_nobodys_way_for_ever(rundir: RunDir, script: Script) -> None:
    damaged = rundir.path / "watched" / "step-000000001"
    damaged.mkdir(parents=True)
    (damaged / "record.json").write_text("{")
    script.save()
    look(finder(rundir), 3)
    assert files(rundir) == {"record.json"}


def test_a_record_of_a_copy_is_read_by_the_version_before(rundir: RunDir, script: Script) -> None:
    script.save()
    look(finder(rundir))
    content = read_json_or_none(rundir.path / "watched" / "step-000000001" / "record.json")
    assert content.keys() == {"step", "path", "fingerprint", "at", "copiedBytes"}
    for new in ("copiedBytes", "noCopyReason"):
        content.pop(new, None)
    assert Watched.read(content).step == 1


WRITES = ("in place", "rename", "append", "touch", "delete", "create again", "half")
ACTIONS = st.tuples(
    st.sampled_from((*WRITES, "look", "look", "look", "coordinator looks", "coordinator looks", "evaluate", "restart")),
    st.booleans(),
)


@given(st.lists(ACTIONS, max_size=40), st.lists(st.sampled_from(WRITES), max_size=10), st.booleans(), st.booleans())
@settings(max_examples=200)
def test_whatever_a_script_writes_each_evaluated_state_was_once_wholly_on_the_disk(
    actions: list[tuple[str, bool]], during_copies: list[str], only_newest: bool, threads: bool
) -> None:
    with tempfile.TemporaryDirectory() as name, pytest.MonkeyPatch.context() as patch:
        rundir = RunDir(Path(name))
        rundir.create()
        paths = [rundir.path / LAST, rundir.path / "best.bin"]
        states: dict[str, set[bytes]] = defaultdict(set)
        seconds = iter(range(1000, 10**6))
        count, lock = 0, threading.Lock()

        def write(kind: str, path: Path) -> None:
            with lock:
                write_alone(kind, path)

        def write_alone(kind: str, path: Path) -> None:
            nonlocal count
            count += 1
            content = f"{count:06d}".encode() * 12
            if kind == "rename":
                path.with_name("aside.tmp").write_bytes(content)
                path.with_name("aside.tmp").replace(path)
            elif kind == "append" and path.exists():
                with path.open("ab") as file:
                    file.write(content)
            elif kind == "delete":
                path.unlink(missing_ok=True)
                return
            elif kind == "create again":
                path.unlink(missing_ok=True)
                path.write_bytes(content)
            elif kind == "half":
                path.write_bytes(content[:30])
            elif kind != "touch" or not path.exists():
                path.write_bytes(content)
            moment = next(seconds)
            os.utime(path, (moment, moment))
            states[path.name].add(path.read_bytes())

        original, during = file_copy._copy_chunk, list(during_copies)

        def copy_chunk(*arguments: Any) -> int:
            copied = original(*arguments)
            if during:
                write(during.pop(), paths[len(during) % 2])
            elif count % 3 == 0 and (path := Path(f"/proc/self/fd/{arguments[0]}").readlink()) in paths:
                write("in place", path)
            return copied

        patch.setattr(file_copy, "CHUNK_BYTES", 20)
        patch.setattr(file_copy, "_copy_chunk", copy_chunk)
        patch.setattr(watched, "MAX_COPIES", 5)
        if threads:
            patch.setattr(watched, "INLINE_BYTES", 0)
        policy: Policy = "Latest" if only_newest else "Every"
        survey = WatchSurvey(rundir, 1, "*.bin", 0.0, policy)
        coordinator = Finder(rundir, "*.bin", 0.0, policy)
        final: dict[str, bytes] = {}

        def evaluate(view: Any) -> None:
            """Evaluate the oldest checkpoint, as an evaluator does."""
            for state in reversed(view.states):
                if state.merged:
                    continue
                path, _ = survey.open(state.reference)
                content = path.read_bytes()
                if not any(one.reference == state.reference and survey._finder.is_there(one) for one in records()):
                    continue
                assert state.reference.name not in final, "evaluated once"
                assert content in states[path.name], "it is a mixture"
                final[state.reference.name] = content
                evaluations.record_failed_evaluation(rundir, state.reference, "it is a test")
                return

        def records() -> list[Watched]:
            return watched.records(rundir)

        def join() -> None:
            for finding in (survey._finder, coordinator):
                if finding._copying is not None:
                    finding._copying.join()

        for action, first in actions:
            if action == "restart":
                join()
                survey = WatchSurvey(rundir, 1, "*.bin", 0.0, policy)
            elif action == "coordinator looks":
                coordinator.look(ended=False)
            elif action in ("look", "evaluate"):
                view = survey.scan()
                if action == "evaluate":
                    evaluate(view)
                if not first:
                    join()
            else:
                write(action, paths[first])
        join()
        rundir.mark_failed("Failed", "exit code 1", 1)
        for _ in range(3 * len(records()) + 6):
            evaluate(survey.scan())
            join()
        known = {one.reference.name for one in records()}
        skipped = {path.parent.name for path in rundir.evaluations.glob("*/*.skipped.json")}
        assert known == final.keys() | skipped, "each state has an outcome"
        for path in paths:
            if path.exists() and path.stat().st_size:
                assert any(watched.is_unchanged(path, one) for one in records() if one.path == path.name)
        assert files(rundir) <= {"record.json"}, "nothing is left"
        shutil.rmtree(rundir.path / "watched", ignore_errors=True)
