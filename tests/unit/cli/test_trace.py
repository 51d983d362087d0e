"""`tandem trace`: the waterfall of a failure on a terminal and for programs, and a sentence where there is none."""

import json
import re
from pathlib import Path
from types import SimpleNamespace

import pytest
from typer.testing import CliRunner

from tandem.rundir.layout import RunDir
from tandem.wire.trace import UNACCOUNTED, Span, Trace
from tandem_cli.commands import trace as command
from tandem_cli.kubernetes.pod_spans import pod_spans
from tandem_cli.main import application
from tandem_cli.report import clock
from tandem_cli.report.figures import pictures, waterfall
from tandem_cli.report.reading import read
from tandem_cli.report.summary import summarize
from tandem_cli.terminal.waterfall import waterfall as drawn
from tandem_cli.view import JobEvent
from tandem_coordinator.charts.chart import NARROW, WIDE
from tests.support.processes import tandem
from tests.support.worlds.simulated_run import T0, make_run

TRACE = Trace(
    generation=2,
    kind="failure",
    reason="WorkerFailed",
    detail="rank 1 (worker-1) was killed by signal 9 (SIGKILL)",
    begin=100.0,
    end=110.0,
    without="step",
    is_complete=False,
    first_generation=2,
    spans=(Span("detection", 100.0, 102.0), Span("restore", 102.0, 109.999), Span(UNACCOUNTED, 109.999, 110.0)),
    work=(Span("training", 110.0, 200.0), Span("evaluation of step 50", 95.0, 104.0, "evaluator-0")),
    notes=("a note",),
    trace_id="0" * 32,
)


@pytest.fixture(scope="module")
def broken(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_run(tmp_path_factory.mktemp("runs") / "broken", steps=300, kills={130: "WorkerFailed"})


@pytest.mark.parametrize("width", [None, 200, 80, 60, 30])
def test_each_span_has_a_bar_at_its_place_and_no_line_is_too_long(width: int | None) -> None:
    lines = [line.plain for line in drawn(TRACE, width)]
    assert lines[0].startswith("generation 2  failure: rank 1"[: width or 99][:29])
    text = "\n".join(lines)
    assert all(len(line) <= (width or 200) for line in lines[:-1])
    if width is None or width >= 60:
        assert "evaluation of step 50 (evaluator-0)" in text
        assert "so far" in text
        detection, restore = lines[3], lines[4]
        assert "20 %" in detection
        if width != 60:
            assert detection.index("━") < detection.rindex("━") < restore.index("━")
    assert lines[-1] == "  note: a note"


def test_the_command_shows_the_last_failure(broken: Path) -> None:
    shown = tandem("trace", str(broken))
    assert shown.returncode == 0, shown.stderr
    assert "generation 2  failure: WorkerFailed of worker-1" in shown.stdout
    assert "100 %" in shown.stdout
    records = json.loads(tandem("trace", str(broken), "-o", "json").stdout)["traces"]
    assert [record["generation"] for record in records] == [2]
    assert sum(span["seconds"] for span in records[0]["spans"]) == pytest.approx(records[0]["seconds"])
    both = json.loads(tandem("trace", str(broken), "--last", "5", "-o", "json").stdout)["traces"]
    assert [record["kind"] for record in both] == ["start", "failure"]


def test_a_run_without_a_failure_shows_its_start_and_says_so(tmp_path: Path) -> None:
    shown = tandem("trace", str(make_run(tmp_path / "whole", steps=100)))
    assert shown.returncode == 0, shown.stderr
    assert "generation 1  start" in shown.stdout
    assert shown.stderr == "nothing has failed in this run, so this is its start\n"


def test_what_cannot_be_shown_is_one_sentence(broken: Path, tmp_path: Path) -> None:
    unknown = tandem("trace", str(broken), "--generation", "9")
    assert (unknown.returncode, unknown.stderr) == (2, "error: the run has no generation 9; its newest is 2\n")
    both = tandem("trace", str(broken), "--generation", "2", "--last", "2")
    assert (both.returncode, both.stderr) == (2, "error: give either --generation or --last\n")
    (tmp_path / "job.json").write_text("{}")
    empty = tandem("trace", str(tmp_path))
    assert (empty.returncode, empty.stderr) == (2, "error: there is nothing to trace yet: the run has no generation\n")


def test_damaged_lines_are_passed_over_and_reported(tmp_path: Path) -> None:
    path = make_run(tmp_path / "torn", steps=100)
    with (path / "log" / "coordinator.jsonl").open("a") as log:
        log.write('{"kind":"generation","ti\n')
    assert tandem("trace", str(path)).stderr.splitlines()[-1] == (
        "log/coordinator.jsonl has 1 line that is not a record; passed over"
    )


def test_the_report_has_the_waterfall_of_the_last_failure(broken: Path) -> None:
    run = read(broken)
    ticks = clock.make_clock(run.marks)
    picture = next(picture for picture in pictures(run, ticks, summarize(run, ticks)) if picture.name == "waterfall")
    assert picture.title == "Where the time of the last failure went"
    assert "Generation 2:" in picture.finding
    for name, style in (("wide", WIDE), ("narrow", NARROW)):
        svg = picture.draw(name, style)
        assert svg is not None
        assert svg.count("<rect") >= len(waterfall.select(run).spans)


def happened(reason: str, text: str, at: float, first: float | None = None, who: str = "worker-1") -> JobEvent:
    return JobEvent(
        at=at, first=at if first is None else first, who=who, reason=reason, text=text, count=1, warning=False
    )


def test_queueing_and_image_pulls_come_from_events() -> None:
    pulled = 'Successfully pulled image "registry/a:1" in 1m2.5s (1m3s including waiting). Image size: 12 bytes.'
    spans = pod_spans(
        [
            happened("FailedScheduling", "0/2 nodes are available", 15.0, first=10.0),
            happened("Scheduled", "Successfully assigned", 20.0),
            happened("Pulled", pulled, 100.0),
            happened("Pulled", 'Container image "a" already present on machine', 101.0),
            happened("Scheduled", "Successfully assigned", 20.0, who="worker-0"),
        ]
    )
    assert [(span.name, span.begin, span.end, span.detail) for span in spans] == [
        ("queueing", 10.0, 20.0, "worker-1"),
        ("image pull", 37.5, 100.0, "worker-1"),
    ]


def test_of_a_job_on_a_cluster_the_pulls_of_its_images_are_part_of_the_trace(
    broken: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pulled = happened("Pulled", 'Successfully pulled image "registry/a:1" in 500ms (1s including waiting)', T0 + 1.9)

    class Job:
        def run_dir(self) -> RunDir:
            return RunDir(broken)

        def view(self) -> SimpleNamespace:
            return SimpleNamespace(job_events=(pulled,))

    monkeypatch.setattr(command, "find_run", lambda name, namespace, context: Job())
    shown = CliRunner().invoke(application(["trace"]), ["trace", "digits", "-n", "team", "-g", "1"])
    assert shown.exit_code == 0, shown.output
    assert re.search(r"  image pull \(worker-1\) +0\.5 s", shown.output)
