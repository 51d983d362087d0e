"""A checkpoint whose weights are those of an earlier one although steps were taken is named, and nothing else is."""

import time
from pathlib import Path

import pytest
import torch

from tandem_coordinator.run_watcher import RunDirectory
from tandem_coordinator.weights_watch import MAX_CHECKPOINTS, Unchanged, WeightsWatch
from tests.support.worlds.small_run import SmallRun

SAME = {"layer.weight": torch.ones(4, 3)}
HINT = ", bit for bit, although {} steps were taken since: does the optimizer have the model's parameters, is the"


@pytest.fixture
def run(tmp_path: Path) -> SmallRun:
    made = SmallRun(tmp_path / "run", keepLast=1)
    made.begin(1)
    return made


def poll(run: SmallRun) -> Unchanged:
    return RunDirectory(run.rundir, run.rundir.read_job().spec.evaluation).poll(time.time()).unchanged


def test_weights_that_change_are_not_mentioned(run: SmallRun) -> None:
    for step in (50, 100, 150):
        run.save(step)
    assert poll(run) == Unchanged()


def test_checkpoints_that_repeat_the_one_before_are_counted_until_one_differs(run: SmallRun) -> None:
    run.save(50)
    run.save(100, weights=SAME)
    run.save(150, weights=SAME)
    first = poll(run)
    assert first.count == 1
    assert first.message.startswith("the newest checkpoint has the weights of step-000000100" + HINT.format(50))
    run.save(200, weights=SAME)
    second = poll(run)
    assert second.count == 2
    assert second.message.startswith("the newest 2 checkpoints have the weights of step-000000100" + HINT.format(100))
    run.save(250)
    assert poll(run) == Unchanged()


def test_updates_that_rounding_hides_from_evaluators_are_changes(run: SmallRun) -> None:
    run.save(50, weights=SAME, full={"layer.weight": torch.full((4, 3), 1.0001)})
    run.save(100, weights=SAME, full={"layer.weight": torch.full((4, 3), 1.0002)})
    assert poll(run) == Unchanged()


def test_a_checkpoint_off_the_lineage_is_no_earlier_one(run: SmallRun) -> None:
    first = run.save(50)
    run.save(100, weights=SAME)
    run.begin(2, first)
    run.save(110, 2, weights=SAME)
    assert poll(run) == Unchanged()


def test_a_run_without_weights_repeats_none(run: SmallRun) -> None:
    run.save(50, weights={})
    run.save(100, weights={})
    assert poll(run) == Unchanged()


def test_one_that_is_deleted_meanwhile_is_compared_all_the_same(run: SmallRun) -> None:
    directory = RunDirectory(run.rundir, run.rundir.read_job().spec.evaluation)
    run.save(50, weights=SAME)
    directory.poll(time.time())
    run.save(100, weights=SAME)
    (run.rundir.checkpoints / "step-000000050").rename(run.rundir.path / "gone")
    assert directory.poll(time.time()).unchanged.count == 1


def test_memory_is_bounded(run: SmallRun) -> None:
    watch, manifest = WeightsWatch(), run.rundir.manifest(run.save(50, weights=SAME).name)
    for step in range(MAX_CHECKPOINTS + 10):
        watch.record(manifest.model_copy(update={"step": step}))
    assert watch.unchanged(lambda _: True).count == MAX_CHECKPOINTS - 1
