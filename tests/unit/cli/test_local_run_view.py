"""A local run as its files tell it."""

from dataclasses import replace
from pathlib import Path

from tandem.rundir.layout import RunDir
from tandem.rundir.log import LogWriter
from tandem.rundir.records import EventRecord
from tandem.wire.status import Event
from tandem_cli.local.run_view import job_summary
from tandem_cli.terminal import tables
from tandem_cli.view import JobView
from tandem_launcher.recorded_status import unseen_events
from tests.support import manifests
from tests.support.worlds.simulated_run import T0, make_run


def event(at: float, text: str, kind: str = "info") -> Event:
    return Event.model_validate({"at": at, "kind": kind, "text": text})


def test_what_the_coordinator_said_after_it_was_asked_last_is_in_its_log(tmp_path: Path) -> None:
    rundir = manifests.run_directory(tmp_path / "run", manifests.job())
    log = LogWriter(rundir.coordinator_log)
    for time, level, text in (
        (5.0, "info", "of an earlier start"),
        (10.001, "info", "generation 1"),
        (10.002, "warning", "failure 1 of 3"),
        (12.0, "odd", "generation 1"),
        (12.0, "error", "worker-0 failed"),
    ):
        log.append(EventRecord(time=time, level=level, text=text))
    log.close()

    late = [
        event(10.002, "failure 1 of 3", "warning"),
        event(12.0, "generation 1"),
        event(12.0, "worker-0 failed", "error"),
    ]
    assert unseen_events(rundir.path, [event(9.0, "before"), event(10.0, "generation 1")], 8.0) == late
    assert unseen_events(rundir.path, [], 8.0) == [event(10.001, "generation 1"), *late]
    seen = [event(11.999, "generation 1"), event(12.0, "worker-0 failed", "error")]
    assert unseen_events(rundir.path, seen, 8.0) == [], "a line is written a little after the word"
    assert unseen_events(RunDir(tmp_path / "none").path, [], 8.0) == []


def test_of_a_run_that_is_over_is_said_how_long_it_took(tmp_path: Path) -> None:
    summary = job_summary(make_run(tmp_path / "digits", steps=40, every=20))
    (title, *_) = tables.job_lines(JobView(job=summary, pods=(), job_events=()), None, T0)
    assert " · took " in title.plain
    draining = replace(summary, status=summary.status.model_copy(update={"phase": "Draining"}))
    (title, *_) = tables.job_lines(JobView(job=draining, pods=(), job_events=()), None, T0)
    assert " · trained " in title.plain
