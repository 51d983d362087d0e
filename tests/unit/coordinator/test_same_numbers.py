"""One run directory, and the same numbers on the screen, the live page, in the report and in the metrics."""

import json
import re
from pathlib import Path
from typing import Any

import pytest

from tandem.formatting import duration, number
from tandem.job.resource import DistributedTrainingJob
from tandem.rundir.layout import RunDir
from tandem.rundir.lineage import GenerationRecord
from tandem.wire import measures
from tandem.wire.status import CheckpointRef, Snapshot, Status, Troubles, trouble_messages
from tandem_cli.local.run_view import job_summary
from tandem_cli.report import clock, figures
from tandem_cli.report.comparison import outcome
from tandem_cli.report.figures import curves
from tandem_cli.report.reading import read
from tandem_cli.report.run import RunData
from tandem_cli.report.summary import Summary, summarize, time_by_phase
from tandem_cli.report.writing import write
from tandem_coordinator.charts.chart import WIDE
from tandem_coordinator.page import parts, pictures
from tandem_coordinator.page.parts import Glance
from tandem_coordinator.page.timeline import Timeline
from tandem_coordinator.prometheus import Figures, prometheus_text
from tandem_coordinator.run_watcher import Observed, RunDirectory
from tandem_coordinator.snapshots import Instant
from tandem_launcher.terminal import summary as ending
from tests.support.lines import Lines
from tests.support.worlds.simulated_run import make_run

NOW = 2_000_000_000.0


class Views:
    """All views of one run directory."""

    def __init__(self, path: Path) -> None:
        self.rundir = RunDir(path)
        self.job: DistributedTrainingJob = self.rundir.read_job()
        self.run: RunData = read(path)
        self.report: Summary = summarize(self.run, clock.make_clock(self.run.marks))
        self.observed: Observed = RunDirectory(self.rundir, self.job.spec.evaluation).poll(NOW)
        self.timeline = Timeline(self.rundir)
        assert self.timeline.follow(60.0, rest_factor=0.0)
        self.end = ending.result(self.rundir)
        self.status: Status = job_summary(path).status
        snapshot = Snapshot(
            job="digits",
            time=NOW,
            status=Status(
                latest_checkpoint=self.observed.latest_checkpoint,
                latest_evaluation=self.observed.latest_evaluation,
                best_checkpoint=self.observed.best,
            ),
        )
        figures = Figures(clock=Instant(NOW, 0.0), observed=self.observed)
        self.metrics = {
            line.split("{")[0] + "".join(re.findall(r'result="\w+"', line)): float(line.rsplit(" ", 1)[1])
            for line in prometheus_text(snapshot, "team", figures).decode().splitlines()
            if not line.startswith("#")
        }


@pytest.fixture(scope="module")
def views(tmp_path_factory: pytest.TempPathFactory) -> Views:
    kills = {230: "WorkerFailed", 330: "MemberLost"}
    return Views(make_run(tmp_path_factory.mktemp("run") / "digits", steps=400, kills=kills))


def test_an_outage_has_one_length(views: Views) -> None:
    told = measures.outages(views.run.generations)
    assert [one.reason for one in told] == ["WorkerFailed", "MemberLost"]
    assert measures.outages(views.timeline.generations.values()) == told
    assert time_by_phase(views.run, clock.make_clock(views.run.marks))["restart"] == pytest.approx(
        sum(one.seconds for one in told)
    )
    (chart,) = curves.world(views.run, clock.make_clock(views.run.marks))
    words = [band.words[1] for band in chart.panels[0].bands]
    assert words == [f"{duration(one.seconds)} without a step" for one in told]
    assert re.findall(r"[^<>]* without a step", pictures.speed(views.timeline, WIDE)) == words


def test_no_curve_leads_through_an_outage(views: Views) -> None:
    ticks = clock.make_clock(views.run.marks)
    (chart,) = curves.world(views.run, ticks)
    for outage in measures.outages(views.run.generations):
        begin, end = ticks.position(outage.begin), ticks.position(outage.end)
        for curve in chart.panels[0].curves:
            inside = [y for x, y in curve.points if begin < x < end]
            before = [y for x, y in curve.points if x <= begin]
            assert inside == []
            assert before[-1] is None


def test_a_restart_is_counted_the_same(views: Views) -> None:
    assert views.report.restarts == measures.restarts([*views.timeline.generations.values()]) == 2
    assert views.end.restarts == views.status.restarts == 2


def test_checkpoints_are_counted_the_same(views: Views) -> None:
    evaluations = views.observed.evaluations
    results = list(views.timeline.results.values())
    assert evaluations.merged == sum(not one.skipped for one in results) == views.end.evaluated
    assert evaluations.merged == views.metrics['tandem_evaluations_totalresult="merged"']
    assert evaluations.skipped == views.metrics['tandem_evaluations_totalresult="skipped"']
    counting = [one for one in results if not one.skipped and views.timeline.counts(one.checkpoint)]
    assert views.report.evaluated == len(counting)


def test_the_best_is_the_same(views: Views) -> None:
    assert views.run.best.evaluation is not None
    assert views.observed.best.name == views.run.best.name
    assert views.metrics["tandem_best_step"] == views.run.best.step
    assert views.metrics["tandem_best_score"] == views.run.best.evaluation.metrics["accuracy"]


def test_the_newest_checkpoint_is_the_same(views: Views) -> None:
    newest = max((c for c in views.run.checkpoints if c.counts), key=lambda c: c.step)
    assert views.observed.latest_checkpoint.step == newest.step == views.metrics["tandem_checkpoint_step"]
    assert views.end.step == newest.step
    assert views.status.latest_checkpoint == views.observed.latest_checkpoint


ENDED: dict[str, dict[str, Any]] = {
    "complete": {},
    "failed": {"end": "failed"},
    "killed": {"stop_after": 387},
    "short": {"steps": 12, "every": 5},
    "gone on with": {"kills": {230: "Started"}},
}
"""How a run may have come to an end."""


@pytest.mark.parametrize("how", ENDED)
def test_what_a_run_that_has_ended_came_to_is_the_same(how: str, tmp_path: Path) -> None:
    views = Views(make_run(tmp_path / "digits", **{"steps": 400, **ENDED[how]}))
    progress = views.status.progress
    assert progress.step == views.report.steps == views.end.made
    assert progress.total_steps == views.run.total_steps
    assert views.status.restarts == views.end.restarts == views.report.restarts
    assert views.status.loss == views.end.loss == views.run.model_steps.loss[-1]


def test_a_generation_without_a_step_takes_back_what_came_after_its_checkpoint(tmp_path: Path) -> None:
    path = make_run(tmp_path / "digits", steps=400, stop_after=387)
    rundir = RunDir(path)
    resumed = CheckpointRef(name="step-000000350", step=350, generation=1)
    record = GenerationRecord(generation=2, resumed_from=resumed, world_size=2, members=["worker-0"], started_at=NOW)
    rundir.record_generation(record)
    views = Views(path)
    assert views.status.progress.step == views.report.steps == 350
    assert views.status.loss == views.run.model_steps.loss[-1]


def test_troubles_are_told_of_a_run_that_has_ended_too(tmp_path: Path) -> None:
    path = make_run(tmp_path / "digits", steps=100)
    troubles = Troubles(saves_failed=8, saves_failed_in_a_row=8, save_message="no space", lines_lost=327)
    log = Lines(RunDir(path).log / "coordinator.jsonl")
    log.append({"kind": "troubles", "time": NOW, **troubles.dump()})
    log.close()
    views = Views(path)
    assert views.status.troubles == views.end.troubles == troubles
    assert list(trouble_messages(views.status.troubles)) == [
        one for one in trouble_messages(views.run.troubles) if one.level != "info"
    ]
    red = '<p class="why bad">the last 8 saves have failed: no space</p>'
    assert red in write(path, png=False).page.read_text("utf-8")
    glance = Glance(Snapshot(job="digits", time=NOW, status=views.status), 0)
    assert red in parts.texts(glance, views.timeline)["head"]


def test_the_training_loss_is_that_of_the_last_step_that_has_one(tmp_path: Path) -> None:
    path = make_run(tmp_path / "digits", steps=400)
    (log,) = RunDir(path).training_logs().values()
    lines = [json.loads(line) for line in log.read_text().splitlines()]
    for line in lines:
        if line["kind"] == "step" and line["step"] > 398:
            del line["loss"]
    log.write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    (loss,) = [line["loss"] for line in lines if line["kind"] == "step" and line["step"] == 398]
    views = Views(path)
    assert views.status.loss == views.end.loss == outcome(views.run, "digits").loss == loss
    drawn = figures.pictures(views.run, clock.make_clock(views.run.marks), views.report)[0]
    assert f"to {number(loss)} in 400 steps" in drawn.finding
