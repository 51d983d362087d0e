"""A log: one writer that holds nobody up, readers that take whatever they meet."""

import json
import logging
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tandem.rundir import durable
from tandem.rundir.log import MAX_LINE_LENGTH, READ_BYTES, LogReader, LogWriter
from tandem.rundir.records import (
    COORDINATOR,
    TRAINING,
    EventRecord,
    LostLines,
    NotSaved,
    Sample,
    Start,
    Step,
    TrainingRecord,
)

PATIENCE_SECONDS = 20


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "log" / "train-g000003.jsonl"


@pytest.fixture
def lost() -> list[int]:
    return []


@pytest.fixture
def writer(path: Path, lost: list[int]) -> Iterator[LogWriter]:
    writer = LogWriter(path, lost.append)
    yield writer
    writer.close(PATIENCE_SECONDS)


def step(number: int) -> Step:
    return Step(time=1.0 + number, step=number)


def steps(path: Path) -> list[int]:
    return [record.step for record in LogReader(path, TRAINING) if isinstance(record, Step)]


@pytest.fixture
def disk(monkeypatch: pytest.MonkeyPatch) -> Callable[[bool], None]:
    """Makes the disk full, or empty again."""
    append = durable.Lines.append

    def full(self: durable.Lines, *lines: bytes) -> None:
        raise OSError(28, "No space left on device")

    return lambda is_full: monkeypatch.setattr(durable.Lines, "append", full if is_full else append)


class TestTheWriter:
    def test_has_written_what_was_handed_over_once_it_has_settled(self, path: Path, writer: LogWriter) -> None:
        for number in range(100):
            writer.append(step(number))
        writer.settle()
        assert steps(path) == list(range(100))

    def test_loses_lines_to_a_full_disk_and_nothing_else(
        self,
        path: Path,
        writer: LogWriter,
        lost: list[int],
        disk: Callable[[bool], None],
        caplog: pytest.LogCaptureFixture,
    ) -> None:
        writer.append(step(1))
        writer.settle()
        with caplog.at_level(logging.WARNING):
            disk(True)
            writer.append(step(2), step(3))
            writer.append(step(4))
            writer.settle()
            disk(False)
            writer.append(step(5))
            writer.settle()
        assert steps(path) == [1, 5]
        assert [record.lines for record in LogReader(path, TRAINING) if isinstance(record, LostLines)] == [3]
        assert (writer.lost, lost) == (3, [2, 1])
        said = [record.getMessage() for record in caplog.records]
        assert len(said) == 2, "not a word for each line"
        assert "No space left" in said[0]
        assert "lost=3" in said[1]

    def test_holds_nobody_up_while_the_disk_hangs_and_counts_what_it_could_not_keep(
        self, path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr("tandem.rundir.log.MAX_QUEUED_APPENDS", 3)
        goes_on, hangs = threading.Event(), threading.Event()
        append = durable.Lines.append

        def hang(self: durable.Lines, *lines: bytes) -> None:
            hangs.set()
            goes_on.wait(PATIENCE_SECONDS)
            append(self, *lines)

        monkeypatch.setattr(durable.Lines, "append", hang)
        writer = LogWriter(path)
        writer.append(step(0))
        assert hangs.wait(PATIENCE_SECONDS)
        for number in range(1, 6):
            writer.append(step(number))
        assert writer.lost == 2
        goes_on.set()
        writer.close(PATIENCE_SECONDS)
        assert steps(path) == [0, 1, 2, 3]
        assert [record.lines for record in LogReader(path, TRAINING) if isinstance(record, LostLines)] == [2]

    def test_leaves_after_some_time_though_the_disk_hangs(self, path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        goes_on = threading.Event()
        monkeypatch.setattr(durable.Lines, "append", lambda *_: goes_on.wait(PATIENCE_SECONDS))
        writer = LogWriter(path)
        writer.append(step(0))
        began = time.monotonic()
        writer.close(0.1)
        assert time.monotonic() - began < PATIENCE_SECONDS
        goes_on.set()

    def test_can_say_at_once_that_the_file_cannot_be_opened(self, tmp_path: Path) -> None:
        (tmp_path / "log").touch()
        writer = LogWriter(tmp_path / "log" / "evaluator-a.jsonl")
        with pytest.raises(OSError, match="log"):
            writer.open()
        writer.close(PATIENCE_SECONDS)

    def test_leaves_out_what_is_not_there_and_keeps_numbers_that_json_has_no_word_for(
        self, path: Path, writer: LogWriter
    ) -> None:
        writer.append(Step(time=1.5, step=7, loss=float("nan")))
        writer.settle()
        assert path.read_text() == '{"kind":"step","time":1.5,"step":7,"loss":NaN}\n'

    def test_goes_on_after_a_text_that_is_not_utf_8(self, path: Path, writer: LogWriter) -> None:
        writer.append(NotSaved(time=1.5, step=7, why="cannot write caf\udce9: full"))
        writer.append(step(8))
        writer.close(PATIENCE_SECONDS)
        assert list(LogReader(path, TRAINING)) == [
            NotSaved(time=1.5, step=7, why="cannot write caf?: full"),
            step(8),
        ]


class TestAReader:
    def test_goes_on_where_it_stopped(self, path: Path, writer: LogWriter) -> None:
        log: LogReader[TrainingRecord] = LogReader(path, TRAINING)
        assert log.read() is None, "there is no file yet"
        writer.append(step(1), step(2))
        writer.settle()
        assert log.read() == [step(1), step(2)]
        assert log.read() is None
        writer.append(step(3))
        writer.settle()
        assert log.left > 0
        assert log.read() == [step(3)]
        assert (log.left, log.offset, log.damaged) == (0, path.stat().st_size, 0)

    def test_waits_for_the_rest_of_half_a_line(self, tmp_path: Path) -> None:
        file = tmp_path / "log.jsonl"
        file.write_text('{"kind": "step", "time": 1, "step": 1}\n{"kind": "step", "ti')
        log = LogReader(file, TRAINING)
        assert [record.time for record in log] == [1.0]
        with file.open("a") as more:
            more.write('me": 2, "step": 2}\n')
        assert log.read() == [Step(time=2.0, step=2)]
        assert log.damaged == 0

    def test_passes_over_a_line_torn_by_a_crash_which_the_next_writer_does_not_join(self, path: Path) -> None:
        path.parent.mkdir()
        path.write_text('{"kind": "step", "time": 1, "step": 1}\n{"kind": "step", "ti')
        writer = LogWriter(path)
        writer.append(step(2))
        writer.close(PATIENCE_SECONDS)
        assert steps(path) == [1, 2]

    @pytest.mark.parametrize(
        "line", [b"\xff\xfe", b"[1]", b"nonsense", b"[" * 100_000, b'{"time": 1}', b'{"kind": "step", "time": "x"}']
    )
    def test_passes_over_lines_that_are_no_records_and_counts_them(self, tmp_path: Path, line: bytes) -> None:
        file = tmp_path / "log.jsonl"
        good = b'{"kind": "step", "time": 1, "step": 1}\n'
        file.write_bytes(good + line + b"\n\n" + good)
        log = LogReader(file, TRAINING)
        assert list(log) == [Step(time=1.0, step=1)] * 2
        assert log.damaged == 1

    @pytest.mark.parametrize("written", ['{"kind":"sample","time":1}', '{"kind": "sample", "time": 1}'])
    def test_can_pass_over_a_kind_unread_however_it_was_written(
        self, tmp_path: Path, written: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        file = tmp_path / "log.jsonl"
        file.write_text(f'{written}\n{{"kind": "event", "time": 2, "text": "a"}}\n')
        parsed: list[bytes] = []
        parse = COORDINATOR.parse
        monkeypatch.setattr(COORDINATOR, "parse", lambda line: parsed.append(line) or parse(line))
        assert list(LogReader(file, COORDINATOR, skip=Sample)) == [EventRecord(time=2.0, text="a")]
        assert len(parsed) == 1

    @pytest.mark.parametrize("bite", [32 * 2**10, READ_BYTES])
    @pytest.mark.parametrize("size", [32 * 2**10 + 10, READ_BYTES + 10, MAX_LINE_LENGTH + 10, 2 * MAX_LINE_LENGTH])
    def test_may_meet_very_long_lines_and_goes_on_after_them(self, tmp_path: Path, size: int, bite: int) -> None:
        file = tmp_path / "log.jsonl"
        long = json.dumps({"kind": "event", "time": 1.0, "text": "y" * size})
        file.write_text(long + '\n{"kind": "event", "time": 2.0}\n')
        found = [record.time for record in LogReader(file, COORDINATOR, bite=bite)]
        assert found == ([1.0, 2.0] if size < MAX_LINE_LENGTH else [2.0])

    def test_reads_a_log_in_bites_whatever_their_size(self, tmp_path: Path) -> None:
        file = tmp_path / "log.jsonl"
        lines = [Start(time=1.0, step=0), *(step(number) for number in range(50)), LostLines(time=2.0, lines=3)]
        file.write_text("".join(line.model_dump_json(exclude_none=True) + "\n" for line in lines))
        for bite in (1, 7, 64, 1000):
            assert list(LogReader(file, TRAINING, bite=bite)) == lines

    def test_has_nothing_of_a_folder_or_a_pipe(self, tmp_path: Path) -> None:
        assert LogReader(tmp_path, TRAINING).read() is None
