"""Logs of what processes print: their bound, and who reads them meanwhile."""

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tandem_cli.local.run_output import Logs
from tandem_launcher import printed_log
from tandem_launcher.local.child import last_lines
from tandem_launcher.printed_log import LogLimiter, earlier_part, limit_size, read_tail
from tests.support.waiting import SECONDS

BOUND = 1000
START = "--- 2026-11-23 08:47:20 worker-0, start 1\n"


@pytest.fixture
def log(tmp_path: Path) -> Path:
    (tmp_path / "log").mkdir()
    file = tmp_path / "log" / "worker-0.txt"
    file.write_text(START)
    return file


def printed(log: Path, *numbers: int) -> None:
    """Print a hundred bytes for each of these numbers."""
    with log.open("a") as file:
        file.writelines(f"{number:099d}\n" for number in numbers)


def read(logs: Logs) -> list[int]:
    return [int(line.text) for line in logs.lines() if line.text.isdigit()]


def test_a_small_log_stays_as_it_is(log: Path) -> None:
    assert limit_size(log, BOUND) is None
    assert log.read_text() == START
    assert not earlier_part(log).exists()


def test_a_copy_that_takes_long_stops_nobody(log: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    may_end, copy = threading.Event(), printed_log._copy_end

    def slow(*arguments: Any) -> int | None:
        assert may_end.wait(SECONDS)
        return copy(*arguments)

    monkeypatch.setattr(printed_log, "_copy_end", slow)
    limiter = LogLimiter(log, BOUND)
    limiter.poll()
    assert not any(thread.name.startswith("limit of") for thread in threading.enumerate())
    printed(log, *range(11))
    for _ in range(3):
        limiter.poll()
        assert limiter.parts == 0
    printed(log, 11)
    may_end.set()
    limiter.wait()
    assert limiter.parts == 1
    assert earlier_part(log).read_text().splitlines()[-1] == f"{11:099d}"
    limiter.poll()
    limiter.wait()
    assert limiter.parts == 1


def test_a_missing_log_is_no_error(tmp_path: Path) -> None:
    assert limit_size(tmp_path / "none.txt", BOUND) is None
    assert read_tail(tmp_path / "none.txt") == ""


def test_a_process_goes_on_printing_into_the_new_part(log: Path) -> None:
    with log.open("ab", buffering=0) as child:
        child.write(b"x" * BOUND + b"\nbefore\n")
        assert limit_size(log, 10 * BOUND) is None
        assert limit_size(log, BOUND) == 2
        child.write(b"after\n")
    head, *rest = log.read_text().splitlines()
    assert head.endswith("worker-0, part 2 of its output; part 1 is in worker-0.txt.1")
    assert rest == ["after"]
    assert earlier_part(log).read_text().endswith("\nbefore\n")


def test_however_much_is_printed_two_parts_are_kept(log: Path) -> None:
    parts = []
    for number in range(100):
        printed(log, number)
        parts += [part] if (part := limit_size(log, BOUND)) else []
        assert sum(file.stat().st_size for file in log.parent.iterdir()) < 2 * BOUND + 500, number
    assert parts == list(range(2, 2 + len(parts)))
    assert len(parts) > 5
    assert "older ones are deleted" in log.read_text()
    assert sorted(file.name for file in log.parent.iterdir()) == ["worker-0.txt", "worker-0.txt.1"]


def test_whoever_follows_a_log_reads_each_line_once(log: Path) -> None:
    logs, seen = Logs(log.parent.parent, (), "", None), list[int]()
    for number in range(0, 100, 2):
        printed(log, number)
        seen += read(logs) if number % 10 == 0 else []
        printed(log, number + 1)
        limit_size(log, BOUND)
    assert seen + read(logs) == list(range(100))


def test_whoever_comes_later_reads_both_parts(log: Path) -> None:
    for number in range(25):
        printed(log, number)
        limit_size(log, BOUND)
    seen = read(Logs(log.parent.parent, (), "", None))
    assert seen == list(range(seen[0], 25))
    assert len(seen) > 10
    assert read(Logs(log.parent.parent, (), "", 3)) == [22, 23, 24]


def test_the_last_words_are_whole_across_parts(log: Path) -> None:
    printed(log, *range(20))
    with log.open("a") as file:
        file.write("Traceback\n  line 1\n  li")
    limit_size(log, BOUND)
    with log.open("a") as file:
        file.write("ne 2\nKeyError: 3\n")
    assert last_lines(log, 4) == ["Traceback", "  line 1", "  line 2", "KeyError: 3"]


def test_a_full_disk_does_not_lift_the_bound(log: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    refused: Callable[..., object] = lambda *_: (_ for _ in ()).throw(OSError(28, "No space left on device"))  # noqa: E731
    printed(log, *range(20))
    monkeypatch.setattr(printed_log.Path, "replace", refused)
    assert limit_size(log, BOUND) == 2
    assert log.stat().st_size < BOUND
    assert [file.name for file in log.parent.iterdir()] == ["worker-0.txt"]


def test_a_process_that_prints_faster_than_anybody_looks_keeps_its_newest_lines(log: Path) -> None:
    printed(log, *range(1000))
    assert limit_size(log, BOUND) == 2
    assert earlier_part(log).stat().st_size <= 2 * BOUND
    assert earlier_part(log).read_text().endswith(f"{999:099d}\n")


def test_a_process_whose_first_line_is_empty_has_lines(log: Path) -> None:
    log.write_text("\n0\n1\n")
    assert read(Logs(log.parent.parent, (), "", None)) == [0, 1]


@pytest.fixture
def _hasty(log: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A child prints the same line before each header."""
    header = printed_log._header

    def late_header(path: Path, number: int, omitted: int | None) -> bytes:
        with path.open("a") as file:
            file.write("Epoch\n")
        return header(path, number, omitted)

    monkeypatch.setattr(printed_log, "_header", late_header)


@pytest.mark.usefixtures("_hasty")
def test_a_part_is_known_wherever_its_header_is(log: Path) -> None:
    logs, lines, parts = Logs(log.parent.parent, (), "", None), list[int](), list[int | None]()
    for number in range(60):
        printed(log, number)
        part = limit_size(log, BOUND)
        parts += [part] if part else []
        lines += read(logs)
        assert f"{number:099d}" in last_lines(log, 3)
    assert parts == list(range(2, 2 + len(parts)))
    assert lines == list(range(60))


def test_a_follower_that_misses_a_part_says_so(log: Path) -> None:
    logs = Logs(log.parent.parent, (), "", None)
    printed(log, *range(5))
    read(logs)
    for number in range(5, 60):
        printed(log, number)
        limit_size(log, BOUND)
    texts = [line.text for line in logs.lines()]
    numbers = [int(text) for text in texts if text.isdigit()]
    assert "lines are missing" in texts[0]
    assert numbers == list(range(numbers[0], 60))
    assert not any("missing" in text for text in texts[1:])


def test_a_follower_finds_its_place_in_a_copy_without_its_start(log: Path) -> None:
    logs = Logs(log.parent.parent, (), "", None)
    printed(log, *range(40))
    lines = read(logs)
    printed(log, *range(40, 45))
    assert limit_size(log, BOUND) == 2
    assert "without" in log.read_text()
    assert lines + read(logs) == list(range(45))
    printed(log, *range(45, 100))
    limit_size(log, BOUND)
    texts = [line.text for line in logs.lines()]
    assert "lines are missing" in texts[0]
    assert texts[-2] == f"{99:099d}"


def test_a_follower_goes_on_where_the_disk_has_no_room_for_copies(log: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(printed_log, "_copy_end", lambda *_: None)
    logs = Logs(log.parent.parent, (), "", None)
    printed(log, *range(20))
    read(logs)
    limit_size(log, BOUND)
    assert "could not be copied" in log.read_text()
    printed(log, 20)
    assert read(logs) == [20]


def test_what_is_printed_during_the_copy_is_copied(log: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    printed(log, *range(1000))
    fstat = printed_log.os.fstat

    def fstat_and_print(descriptor: int) -> object:
        status = fstat(descriptor)
        printed(log, 1000)
        return status

    monkeypatch.setattr(printed_log.os, "fstat", fstat_and_print)
    limit_size(log, BOUND)
    monkeypatch.undo()
    assert earlier_part(log).read_text().endswith(f"{1000:099d}\n")


def test_a_child_that_does_not_append_leaves_a_hole_that_nobody_reads(log: Path) -> None:
    logs, lines, parts = Logs(log.parent.parent, (), "", None), list[int](), 0
    with log.open("r+b", buffering=0) as child:
        for first in range(0, 10_000, 100):
            child.write(b"".join(b"%099d\n" % number for number in range(first, first + 100)))
            parts += limit_size(log, 2**18) is not None
            lines += read(logs)
            assert last_lines(log, 1) == [f"{first + 99:099d}"]
    assert 2 <= parts <= 4
    assert lines == list(range(10_000))
    assert b"\0" * 512 not in earlier_part(log).read_bytes()
