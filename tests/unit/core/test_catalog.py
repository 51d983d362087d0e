"""The one reading of evaluations, lineage and set-aside checkpoints."""

import json
import os
import time
from pathlib import Path
from typing import Any

import pytest

from tandem.confidence import Estimate, Interval
from tandem.rundir.catalog import Lineage, Results, read_result
from tandem.rundir.evaluations import FinalFile, parse_final_file
from tandem.rundir.layout import RunDir
from tandem.rundir.lineage import GenerationRecord
from tandem.wire.status import CheckpointRef

STEP = "step-000000100"


@pytest.fixture
def rundir(tmp_path: Path) -> RunDir:
    run = RunDir(tmp_path)
    run.create()
    return run


def write(rundir: RunDir, name: str, content: Any, step: str = STEP) -> FinalFile:
    folder = rundir.evaluations / step
    folder.mkdir(exist_ok=True)
    (folder / name).write_text(content if isinstance(content, str) else json.dumps(content))
    word = parse_final_file(folder / name)
    assert word is not None
    return word


def names(results: Results, now: float, awaited: frozenset[str] | None = None) -> list[str]:
    return [result.checkpoint.name for result, _ in results.new(now, awaited)]


def test_a_result_has_its_scores_and_its_rank(rundir: RunDir) -> None:
    content = {"metrics": {"accuracy": 0.5, "loss": 1.5, "odd": None}, "finishedAt": 7.0, "samples": 10}
    read = read_result(write(rundir, "g000002.json", content))
    result, whole = read
    assert result.checkpoint == CheckpointRef(name=STEP, step=100, generation=2)
    assert result.metrics == result.deciding == {"accuracy": 0.5, "loss": 1.5}
    assert (result.validation, result.skipped, result.finished_at) == ({}, "", 7.0)
    assert whole["samples"] == 10
    assert result.rank("accuracy", "Maximize").score == -0.5
    assert result.rank("perplexity", "Minimize") is None


def test_held_out_data_decides(rundir: RunDir) -> None:
    held = {"metrics": {"accuracy": 0.25, "loss": 2.0}}
    read = read_result(write(rundir, "g000002.json", {"metrics": {"accuracy": 0.5, "loss": 1.0}, "validation": held}))
    assert read[0].deciding == read[0].validation == held["metrics"]


def test_intervals_are_those_of_the_test_data_and_estimates_those_that_decide(rundir: RunDir) -> None:
    held = {"metrics": {"accuracy": 0.25, "loss": 2.0}, "intervals": {"accuracy": [0.2, 0.3]}}
    damaged = {"loss": [1.0], "odd": "wide", "f1": [0.4, None], "turned": [0.5, 0.4], "accuracy": [0.4, 0.6]}
    content = {"metrics": {"accuracy": 0.5, "loss": 1.0}, "intervals": damaged, "validation": held}
    result, _ = read_result(write(rundir, "g000002.json", content))
    assert result.intervals == {"accuracy": (0.4, 0.6)}
    assert result.estimates == {"accuracy": Estimate(0.25, Interval(0.2, 0.3)), "loss": Estimate(2.0)}


def test_a_note_says_why_a_checkpoint_was_skipped(rundir: RunDir) -> None:
    read = read_result(write(rundir, "g000002.skipped.json", {"why": "newer ones came first", "at": 3.0}))
    assert (read[0].skipped, read[0].finished_at, read[0].metrics) == ("newer ones came first", 3.0, {})
    assert read_result(write(rundir, "g000003.skipped.json", "{"))[0].skipped


@pytest.mark.parametrize("content", ["", "[]", '{"metrics": {}}', '{"metrics": 3}', '{"metrics"', "9" * 5000])
def test_what_holds_no_scores_is_no_result(rundir: RunDir, content: str) -> None:
    assert read_result(write(rundir, "g000002.json", content)) is None


def test_each_result_is_read_once(rundir: RunDir) -> None:
    write(rundir, "g000002.json", {"metrics": {"loss": 1.0}})
    old = time.time() - 10
    os.utime(rundir.evaluations / STEP, (old, old))
    results = Results(rundir)
    assert names(results, time.time()) == [STEP]
    assert names(results, time.time()) == []
    assert results.changed_at == pytest.approx(old)
    results.forget(STEP)
    assert names(results, time.time()) == [STEP]


@pytest.mark.parametrize("ahead", [3600.0, -3600.0])
def test_a_result_that_comes_while_it_is_followed_came_now_whatever_the_clock_of_the_disk_says(
    rundir: RunDir, ahead: float
) -> None:
    results, now = Results(rundir), time.time()
    assert names(results, now) == []
    write(rundir, "g000002.json", {"metrics": {"loss": 1.0}})
    os.utime(rundir.evaluations / STEP, (now + ahead, now + ahead))
    for later in (1.0, 2.0, 30.0):
        names(results, now + later)
    assert results.changed_at == now + 1.0
    anew = Results(rundir)
    names(anew, now + 60.0)
    names(anew, now + 90.0)
    assert anew.changed_at == pytest.approx(min(now + ahead, now + 60.0)), "before it began, only the disk knows"


def test_a_folder_that_nobody_awaits_is_looked_at_rarely(rundir: RunDir) -> None:
    results, now = Results(rundir), time.time()
    folder = rundir.evaluations / STEP
    folder.mkdir()
    os.utime(folder, (now - 1000, now - 1000))
    assert names(results, now, frozenset()) == []
    write(rundir, "g000002.json", {"metrics": {"loss": 1.0}})
    assert names(results, now + 1, frozenset()) == []
    assert names(results, now + 2, frozenset({STEP})) == [STEP]


def test_the_newest_alone_are_read(rundir: RunDir) -> None:
    for step in (100, 200, 300):
        write(rundir, "g000002.json", {"metrics": {"loss": 1.0}}, f"step-{step:09d}")
    (rundir.evaluations / "zzz").mkdir()
    assert names(Results(rundir, max_folders=2), time.time()) == ["step-000000200", "step-000000300"]


def test_the_lineage_follows_new_generations(rundir: RunDir) -> None:
    lineage, first = Lineage(rundir), CheckpointRef(name=STEP, step=100, generation=1)
    lineage.look()
    assert not lineage.is_known
    rundir.record_generation(GenerationRecord(generation=1, world_size=1, started_at=0))
    lineage.look()
    assert lineage.counts(first)
    rundir.record_generation(GenerationRecord(generation=2, world_size=1, started_at=0))
    lineage.look()
    assert not lineage.counts(first)
    rundir.rewinds.mkdir(exist_ok=True)
    (rundir.rewinds / "000001.json").write_text("{")
    lineage.look()
    assert lineage.rewinds == []


def test_what_was_set_aside_is_listed_with_its_reason(rundir: RunDir) -> None:
    for name in (STEP, "step-000000200"):
        rundir.checkpoint(name).mkdir()
    rundir.set_aside(STEP, why="a chunk is damaged")
    rundir.set_aside("step-000000200", ".stale")
    bad, stale = rundir.all_set_aside()
    assert (bad.checkpoint, bad.step, bad.is_bad, bad.why) == (STEP, 100, True, "a chunk is damaged")
    assert (stale.checkpoint, stale.is_bad, stale.why) == ("step-000000200", False, "")
    assert rundir.bad() == {f"{STEP}.bad": "a chunk is damaged"}
