"""What the coordinator sees of checkpoints, evaluations and the volume for Prometheus."""

import os
import time
from pathlib import Path

import pytest

from tandem.durable import Lines, replace_json
from tandem.rewind import Rewind
from tandem.status import CheckpointRef
from tandem_coordinator.observer import RunDirectory
from tests.support.worlds.small_run import SmallRun


@pytest.fixture
def run(tmp_path: Path) -> SmallRun:
    made = SmallRun(tmp_path / "run")
    made.begin(1)
    return made


@pytest.fixture
def directory(run: SmallRun) -> RunDirectory:
    return RunDirectory(run.rundir, run.rundir.read_job().spec.evaluation)


def evaluate(run: SmallRun, reference: CheckpointRef, seconds_ago: float = 0.0) -> float:
    """As evaluators would have, so long ago; when that was."""
    folder = run.rundir.evaluations / reference.name
    folder.mkdir(exist_ok=True)
    metrics = {"loss": 0.5, "accuracy": 0.9, "macroF1": 0.9}
    replace_json(folder / f"g{reference.generation:06d}.json", {"step": reference.step, "metrics": metrics})
    then = time.time() - seconds_ago
    os.utime(folder, (then, then))
    return then


def test_an_empty_run_directory_has_room_and_nothing_else(directory: RunDirectory) -> None:
    seen = directory.look(time.time())
    assert seen.volume is not None
    assert 0 < seen.volume.free <= seen.volume.size
    assert (seen.saved, seen.rewinds, seen.evaluations.waits_since) == (None, 0, None)


def test_the_newest_checkpoint_has_a_time_and_a_size(run: SmallRun, directory: RunDirectory) -> None:
    run.save(50)
    run.save(100)
    saved = directory.look(time.time()).saved
    assert saved is not None
    manifest = run.rundir.manifest("step-000000100")
    assert (saved.at, saved.size) == (manifest.created_at, manifest.size)


def test_a_checkpoint_waits_from_when_it_was_taken(run: SmallRun, directory: RunDirectory) -> None:
    run.save(50)
    taken = run.rundir.manifest("step-000000050").created_at
    run.save(100)
    assert directory.look(time.time()).evaluations.waits_since == taken


def test_evaluators_that_publish_something_do_not_let_it_wait(run: SmallRun, directory: RunDirectory) -> None:
    evaluated_at = evaluate(run, run.save(50), seconds_ago=30.0)
    assert directory.look(time.time()).evaluations.waits_since is None
    second = run.save(100)
    waits_since = directory.look(time.time()).evaluations.waits_since
    assert waits_since == pytest.approx(evaluated_at, abs=0.001), "it was taken a minute ago, before that"
    evaluate(run, second)
    seen = directory.look(time.time()).evaluations
    assert (seen.merged, seen.waits_since) == (2, None)


def test_what_was_skipped_stays_counted_when_it_is_evaluated_all_the_same(
    run: SmallRun, directory: RunDirectory
) -> None:
    references = []
    for step in (50, 100):
        references.append(run.save(step))
        folder = run.rundir.evaluations / f"step-{step:09d}"
        folder.mkdir(exist_ok=True)
        replace_json(folder / "g000001.skipped.json", {"why": "a newer one", "at": 0.0})
    before = directory.look(time.time()).evaluations
    evaluate(run, references[0])
    after = directory.look(time.time()).evaluations
    assert (before.merged, before.skipped) == (0, 2)
    assert (after.merged, after.skipped) == (1, 2), "a counter never falls"


def test_a_checkpoint_that_several_evaluators_could_not_read_failed_once(
    run: SmallRun, directory: RunDirectory
) -> None:
    for name in ("0-0", "0-1"):
        lines = Lines(run.rundir.log / f"evaluator-{name}.jsonl")
        lines.append({"kind": "bad", "time": time.time(), "checkpoint": "step-000000050", "why": "broken"})
        lines.close()
    assert directory.look(time.time()).evaluations.failed == 1


def test_rewinds_are_counted(run: SmallRun, directory: RunDirectory) -> None:
    for number in (1, 2):
        rewind = Rewind(number=number, generation=1, bad_step=60, resume_before=60, skip_from=50, skip_to=70)
        assert run.rundir.record_rewind(rewind)
    assert directory.look(time.time()).rewinds == 2
