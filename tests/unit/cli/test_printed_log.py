"""Logs of what processes print: their bound, and who reads them meanwhile."""

from collections.abc import Callable
from pathlib import Path

import pytest

from tandem_cli import printed_log
from tandem_cli.local.child import last_lines
from tandem_cli.local.run_output import Logs
from tandem_cli.printed_log import earlier_part, limit_size, read_tail

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
        sizes = sum(file.stat().st_size for file in log.parent.iterdir())
        assert sizes < 2 * BOUND + 500, number
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
