"""The timeline of a run, as its files say it: at once or bit by bit, whole or damaged, of this version or of the one
before."""

import json
from pathlib import Path
from typing import Any

import pytest

from tandem.rundir.layout import RunDir
from tandem.rundir.timeline import TimelineReader
from tandem.wire.trace import traces
from tandem_cli.report.reading import read
from tests.support import manifests
from tests.support.worlds.simulated_run import make_run


def write(path: Path, *lines: dict[str, Any] | str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a") as file:
        file.writelines(f"{line if isinstance(line, str) else json.dumps(line)}\n" for line in lines)


@pytest.fixture
def rundir(tmp_path: Path) -> RunDir:
    """A run in which a rank was killed, and whose second generation took over the steps that the first had not
    logged."""
    rundir = manifests.run_directory(tmp_path / "run", manifests.job("digits"))
    write(
        rundir.coordinator_log,
        {"kind": "event", "time": 95.0, "level": "info", "text": "it starts"},
        {"kind": "generation", "time": 100.0, "generation": 1, "reason": "Started", "readyAt": 99.0},
        {"kind": "closed", "time": 200.5, "generation": 1, "reason": "WorkerFailed", "detail": "killed"},
        {"kind": "generation", "time": 201.0, "generation": 2, "reason": "WorkerFailed", "failedAt": 200.4},
        {"kind": "sample", "time": 209.0},
        {"kind": "uploaded", "time": 209.5, "checkpoint": "step-000000001", "seconds": 1.5, "bytes": 7},
    )
    write(
        rundir.training_log(1),
        {"kind": "start", "time": 104.0, "step": 0, "processAt": 101.0, "joinedAt": 102.0, "restoreAt": 103.0},
        {"kind": "step", "time": 105.0, "step": 1, "loss": 1.0},
        {"kind": "step", "time": 200.0, "step": 2, "loss": 1.0},
        {"kind": "checkpoint", "time": 150.0, "name": "step-000000001", "step": 1, "commitSeconds": 2.0},
    )
    write(
        rundir.training_log(2),
        {"kind": "start", "time": 202.0, "step": 2},
        {"kind": "step", "time": 200.3, "step": 3, "loss": 1.0},
        {"kind": "step", "time": 203.0, "step": 4, "loss": 1.0},
    )
    write(
        rundir.evaluator_log("evaluator-0"),
        {"kind": "evaluated", "time": 160.0, "checkpoint": "step-000000001", "step": 1, "seconds": 4.0},
    )
    return rundir


def test_steps_that_a_generation_took_over_are_those_of_the_one_before(rundir: RunDir) -> None:
    start, failure = traces(TimelineReader(rundir).read())
    assert (failure.begin, failure.end) == (200.3, 203.0)
    assert [span.name for span in failure.spans][:2] == ["unlogged steps", "detection"]
    assert (start.begin, start.end) == (95.0, 105.0)
    assert [(span.name, span.detail, span.seconds) for span in failure.work[1:]] == [("upload", "step-000000001", 1.5)]
    assert [(span.name, span.detail, span.begin, span.end) for span in start.work[1:]] == [
        ("save", "step 1", 148.0, 150.0),
        ("evaluation", "step 1, evaluator-0", 156.0, 160.0),
    ]


def test_a_reader_that_comes_back_knows_what_one_knows_that_comes_late(rundir: RunDir) -> None:
    reader = TimelineReader(rundir)
    before = traces(reader.read())
    hung = {"kind": "closed", "time": 300.0, "generation": 2, "reason": "Hung", "failedAt": 290.0}
    write(rundir.coordinator_log, hung)
    write(rundir.training_log(2), {"kind": "step", "time": 289.0, "step": 5, "loss": 1.0})
    rundir.mark_failed("Hung", "it hangs", 1)
    after = reader.read()
    assert after == TimelineReader(rundir).read()
    assert [trace.kind for trace in traces(after)] == ["start", "failure", "end"]
    assert [trace.trace_id for trace in before] == [trace.trace_id for trace in traces(after)[:2]]


def test_damaged_lines_cost_themselves_and_are_reported_once(rundir: RunDir) -> None:
    whole = TimelineReader(rundir).read()
    write(rundir.training_log(1), '{"kind":"step","ti', "\x00\x00", '{"kind":"step","step":1,"time":"late"}')
    write(rundir.coordinator_log, {"kind": "of a newer version", "time": 1.0})
    reader = TimelineReader(rundir)
    assert reader.read() == whole
    reader.read()
    assert reader.faults == ["log/train-g000001.jsonl has 3 lines that are not a record; passed over"]


def test_a_run_without_anything_has_no_traces(tmp_path: Path) -> None:
    timeline = TimelineReader(RunDir(tmp_path)).read()
    assert timeline.generations == ()
    assert traces(timeline) == []


def test_the_report_and_the_command_have_the_same_traces(tmp_path: Path, rundir: RunDir) -> None:
    """The report has read the logs already, and does not read them again."""
    broken = make_run(tmp_path / "old", steps=300, kills={130: "WorkerFailed", 210: "MemberLost"}, end="failed")
    for path in (broken, rundir.path):
        reported, own = read(path).timeline, TimelineReader(RunDir(path)).read()
        for one, other in zip(traces(reported), traces(own), strict=True):
            assert (one.trace_id, one.kind, one.spans) == (other.trace_id, other.kind, other.spans)
            assert {(span.name, span.begin) for span in one.work} == {(span.name, span.begin) for span in other.work}


def test_a_run_of_the_version_before_adds_up(tmp_path: Path) -> None:
    path = make_run(tmp_path / "old", steps=300, kills={130: "WorkerFailed"})
    failure = traces(TimelineReader(RunDir(path)).read())[-1]
    assert failure.kind == "failure"
    assert sum(span.seconds for span in failure.spans) == pytest.approx(failure.seconds)
    assert "unlogged steps, detection" in [span.name for span in failure.spans]


def test_a_step_that_ends_when_its_hung_group_is_ended_is_not_the_last_before_the_outage(rundir: RunDir) -> None:
    """A stopped rank continues when its agent ends it, and the step that waited for it is logged ten seconds late."""
    hung = {"kind": "closed", "time": 300.0, "generation": 2, "reason": "Hung", "failedAt": 290.2}
    write(rundir.coordinator_log, hung, {"kind": "generation", "time": 301.0, "generation": 3, "reason": "Hung"})
    steps = [{"kind": "step", "time": at, "step": 5 + index} for index, at in enumerate((289.0, 290.0, 300.1, 300.2))]
    write(rundir.training_log(2), *steps)
    write(
        rundir.training_log(3), {"kind": "start", "time": 302.0, "step": 5}, {"kind": "step", "time": 303.0, "step": 6}
    )
    own, reported = (traces(one)[-1] for one in (TimelineReader(rundir).read(), read(rundir.path).timeline))
    assert own.spans == reported.spans
    assert (own.reason, own.begin, own.end) == ("Hung", 290.0, 303.0)
    assert [(span.name, round(span.seconds, 3)) for span in own.spans[:2]] == [
        ("unlogged steps", 0.2),
        ("detection", 9.8),
    ]
