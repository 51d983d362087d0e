"""Where the wall time of a real run went, and what `checkpoint.every: Auto` makes of it."""

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

from tandem.formatting import parse_rfc3339
from tandem.processes.launch import SUBMITTED_ANNOTATION
from tandem.rundir.layout import RunDir
from tandem.rundir.ledger import newest_ledger
from tandem.rundir.log import LogReader
from tandem.rundir.records import (
    COORDINATOR,
    TRAINING,
    CoordinatorEnd,
    IntervalChosen,
    Rate,
    Start,
    Step,
    TrainingRecord,
)
from tandem.wire.save_interval import best_interval
from tests.support.local_run import DIGITS, LocalRun
from tests.support.survivors import TASK, check_played, start_regrouping
from tests.support.waiting import until

FAULTS = ["1:update-done:50", "0:update-done:100"]
"""The first one loses 50 steps, the second one those since the checkpoint at step 60."""


def logged(run_dir: RunDir) -> Iterator[tuple[int, TrainingRecord]]:
    """All records of training, oldest first, with their generation."""
    for generation, path in run_dir.training_logs().items():
        for record in LogReader(path, TRAINING):
            yield generation, record


def has_trained(run_dir: RunDir, generation: int) -> bool:
    """Whether a generation has taken a step."""
    return any(number == generation and isinstance(record, Step) for number, record in logged(run_dir))


@pytest.mark.timeout(600)
def test_the_causes_add_up_to_the_wall_time_and_what_was_recomputed_are_the_steps_taken_again(tmp_path: Path) -> None:
    folder = tmp_path / "killed"
    trainer = {
        "task": "slopes:Slopes",
        "parameters": {"folder": str(folder), "faults": FAULTS, "seconds": 0.02},  # a rate is recorded in between
        "loop": {"epochs": 10, "globalBatchSize": 25},
    }
    restarting = {"onMembershipChange": "Restart", "heartbeatSeconds": 0.1}
    with start_regrouping(folder, TASK, trainer, elasticity=restarting, checkpoint={"everySteps": 60}) as run:
        assert run.ends(400) == 0, run.output
        shown = run.called("status", str(run.path)).stdout
    check_played(folder, FAULTS)
    wall = newest_ledger(run.run_dir).wall

    submitted_at = parse_rfc3339(run.run_dir.read_job().metadata.annotations[SUBMITTED_ANNOTATION])
    ended_at = run.run_dir.done()["at"]
    last = next(
        entry for entry in LogReader(run.run_dir.coordinator_log, COORDINATOR) if isinstance(entry, CoordinatorEnd)
    )
    # The coordinator sees the end a little later.
    assert ended_at - submitted_at - 0.2 <= wall.total <= last.time - submitted_at + 0.2

    recomputed, reached, taken_before, again, setbacks = 0.0, 0, set[int](), 0, 0
    steps_of: dict[int, set[int]] = {}
    for generation, record in logged(run.run_dir):
        if isinstance(record, Step):
            taken_before |= steps_of.pop(generation - 1, set())
            steps_of.setdefault(generation, set()).add(record.step)
            again += record.step in taken_before
        elif isinstance(record, Start):
            setbacks += record.step < reached
        elif isinstance(record, Rate):
            repeated = min(record.steps, max(0, reached - (record.step - record.steps)))
            recomputed += record.phases["compute"] * repeated / record.steps
            reached = max(reached, record.step)
    assert again > 0
    assert wall.recomputed == pytest.approx(recomputed, abs=0.01)
    assert wall.setbacks == setbacks > 0
    assert min(wall.training, wall.start, wall.restart, wall.checkpoint, wall.recomputed) > 0.0
    assert wall.unreported == 0.0
    assert "ETTR" in shown
    assert "recomputed" in shown


@pytest.mark.timeout(600)
def test_auto_learns_from_each_save_and_each_failure_and_goes_on_with_both_after_a_restart(tmp_path: Path) -> None:
    job = yaml.safe_load(DIGITS.read_text())
    job["spec"]["checkpoint"] = {"every": "Auto"}
    (tmp_path / "job.json").write_text(json.dumps(job))
    endless = ["--set", "trainer.loop.epochs=100000"]
    with LocalRun(tmp_path, *endless, manifest=tmp_path / "job.json") as run:
        run.reaches(20)
        run.interrupt()
        run.ends(200)
    saved = run.run_dir.committed()[0]
    assert "saveInterval" in saved.loop
    with LocalRun(tmp_path, *endless, manifest=tmp_path / "job.json") as run:
        run.reaches(saved.step + 20)
        until(lambda: run.rank_of("worker-1"), "a rank").kill()
        until(lambda: has_trained(run.run_dir, 3), "the next group")
        run.interrupt()
        run.ends(200)
        shown = run.called("status", str(run.path)).stdout
    chosen: dict[int, list[IntervalChosen]] = {}
    for generation, record in logged(run.run_dir):
        if isinstance(record, IntervalChosen):
            chosen.setdefault(generation, []).append(record)
    first, resumed, after_failure = (entries[0] for entries in list(chosen.values())[:3])
    assert first.failures == resumed.failures == 0, "a run that was interrupted has lost nothing"
    assert after_failure.failures == 1
    assert resumed.save_seconds == pytest.approx(first.save_seconds, abs=1e-5)
    for entry in (first, resumed, after_failure):
        expected = best_interval(entry.save_seconds, entry.write_seconds, entry.failures, entry.training_seconds)
        assert entry.seconds == pytest.approx(expected, rel=0.01)
    assert run.run_dir.committed()[0].loop["saveInterval"]["costs"]
    assert "(checkpoint.every: Auto)" in shown
