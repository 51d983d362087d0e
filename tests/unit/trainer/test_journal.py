"""The training log, on a disk that works and on one that is full."""

import json
import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tandem.rundir.durable import Lines
from tandem.rundir.layout import RunDir
from tandem_trainer.journal import Journal


@pytest.fixture
def rundir(tmp_path: Path) -> RunDir:
    rundir = RunDir(tmp_path)
    rundir.create()
    return rundir


@pytest.fixture
def journal(rundir: RunDir) -> Iterator[Journal]:
    journal = Journal(rundir, 3)
    yield journal
    journal.close()


def steps(rundir: RunDir) -> list[int]:
    lines = (rundir.log / "train-g000003.jsonl").read_text().splitlines()
    return [record["step"] for line in lines if line and "step" in (record := json.loads(line))]


def test_what_was_handed_over_is_on_the_disk_once_it_has_settled(rundir: RunDir, journal: Journal) -> None:
    for step in range(100):
        journal.write("step", step=step)
    journal.settle()
    assert steps(rundir) == list(range(100))


def test_a_full_disk_loses_lines_and_nothing_else(
    rundir: RunDir, journal: Journal, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    append = Lines.append

    def full(self: Lines, *records: dict[str, Any]) -> None:
        raise OSError(28, "No space left on device")

    journal.write("step", step=1)
    journal.settle()
    with caplog.at_level(logging.WARNING):
        monkeypatch.setattr(Lines, "append", full)
        journal.write("step", step=2)
        journal.write("step", step=3)
        journal.settle()
        monkeypatch.setattr(Lines, "append", append)
        journal.write("step", step=4)
        journal.settle()
    assert steps(rundir) == [1, 4]
    said = [record.getMessage() for record in caplog.records]
    assert len(said) == 2, "not a word per line"
    assert "No space left" in said[0]
    assert "2 lines are lost" in said[1]
