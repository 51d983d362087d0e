"""What the coordinator sees of checkpoints, evaluations and the volume for Prometheus."""

import os
import shutil
import time
from collections import Counter
from pathlib import Path
from typing import Any, Literal

import pytest

from tandem.job.resource import Evaluators
from tandem.rundir import evaluations, watched
from tandem.rundir.catalog import OLD_SECONDS
from tandem.rundir.durable import replace_json
from tandem.rundir.layout import checkpoint_name
from tandem.rundir.lineage import Rewind
from tandem.rundir.micro_batch import OutOfMemoryRecord, memory_settings_digest
from tandem.wire.status import CheckpointRef
from tandem_coordinator.run_watcher import POLL_SECONDS, RunDirectory, RunWatcher
from tests.support.lines import Lines
from tests.support.waiting import until
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
    replace_json(
        folder / f"g{reference.generation:06d}.json", {"step": reference.step, "metrics": metrics}, durable=False
    )
    then = time.time() - seconds_ago
    os.utime(folder, (then, then))
    return then


def test_an_empty_run_directory_has_room_and_nothing_else(directory: RunDirectory) -> None:
    seen = directory.poll(time.time())
    assert 0 < seen.volume.free <= seen.volume.size
    assert (seen.saved, seen.rewinds, seen.evaluations.waits_since) == (None, 0, None)


def test_the_newest_checkpoint_has_a_time_and_a_size(run: SmallRun, directory: RunDirectory) -> None:
    run.save(50)
    run.save(100)
    saved = directory.poll(time.time()).saved
    assert saved is not None
    manifest = run.rundir.manifest("step-000000100")
    assert (saved.saved_at, saved.size) == (manifest.created_at, manifest.size)


def test_a_checkpoint_waits_from_when_it_was_taken(run: SmallRun, directory: RunDirectory) -> None:
    run.save(50)
    taken = run.rundir.manifest("step-000000050").created_at
    run.save(100)
    assert directory.poll(time.time()).evaluations.waits_since == taken


def test_evaluators_that_publish_something_do_not_let_it_wait(run: SmallRun, directory: RunDirectory) -> None:
    evaluated_at = evaluate(run, run.save(50), seconds_ago=30.0)
    assert directory.poll(time.time()).evaluations.waits_since is None
    second = run.save(100)
    waits_since = directory.poll(time.time()).evaluations.waits_since
    assert waits_since == pytest.approx(evaluated_at, abs=0.001), "it was taken a minute ago, before that"
    evaluate(run, second)
    seen = directory.poll(time.time()).evaluations
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
    before = directory.poll(time.time()).evaluations
    evaluate(run, references[0])
    after = directory.poll(time.time()).evaluations
    assert (before.merged, before.skipped) == (0, 2)
    assert (after.merged, after.skipped) == (1, 2), "a counter never falls"


def test_a_checkpoint_that_several_evaluators_could_not_read_failed_once(
    run: SmallRun, directory: RunDirectory
) -> None:
    for name in ("0-0", "0-1"):
        lines = Lines(run.rundir.log / f"evaluator-{name}.jsonl")
        lines.append({"kind": "bad", "time": time.time(), "checkpoint": "step-000000050", "why": "broken"})
        lines.close()
    assert directory.poll(time.time()).evaluations.failed == 1


def test_micro_batches_that_did_not_fit_are_those_of_the_job_as_it_is(run: SmallRun) -> None:
    job = run.rundir.read_job()
    settings, other = memory_settings_digest(job), "b" * 32
    directory = RunDirectory(run.rundir, job.spec.evaluation, job=job)
    assert directory.poll(time.time()).limits == ()
    for generation, (samples, whose) in enumerate([(64, other), (8, settings), (4, settings)], start=1):
        misfit = OutOfMemoryRecord(generation=generation, rank=0, samples=samples, settings=whose)
        assert run.rundir.record_misfit(misfit)
    run.begin(2)
    assert directory.poll(time.time()).limits == (4, 2)


def test_rewinds_are_counted(run: SmallRun, directory: RunDirectory) -> None:
    for number in (1, 2):
        rewind = Rewind(number=number, generation=1, bad_step=60, resume_before=60, skip_from=50, skip_to=70)
        assert run.rundir.record_rewind(rewind)
    assert directory.poll(time.time()).rewinds == 2


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """How often the disk was asked for the facts of a file, and for a file."""
    counted: Counter[str] = Counter()
    stat, opened = os.stat, os.open

    def counting_stat(*given: Any, **more: Any) -> os.stat_result:
        counted["stat"] += 1
        return stat(*given, **more)

    def counting_open(*given: Any, **more: Any) -> int:
        counted["open"] += 1
        return opened(*given, **more)

    monkeypatch.setattr(os, "stat", counting_stat)
    monkeypatch.setattr(os, "open", counting_open)
    return counted


def looks(directory: RunDirectory, seconds: float, asked: Counter[str]) -> Counter[str]:
    """What is asked of the disk on the average by a look, over a time from now on."""
    asked.clear()
    began, count = time.time(), int(seconds / POLL_SECONDS)
    for number in range(1, count + 1):
        directory.poll(began + number * POLL_SECONDS)
    return Counter({what: number // count for what, number in asked.items()})


def test_old_evaluations_are_looked_at_rarely(run: SmallRun, directory: RunDirectory, asked: Counter[str]) -> None:
    for step in range(1_000):
        evaluate(run, CheckpointRef(name=checkpoint_name(step), step=step, generation=1), seconds_ago=3_600.0)
    assert directory.poll(time.time()).evaluations.merged == 1_000
    assert asked["open"] >= 1_000
    assert looks(directory, 60.0, asked)["stat"] < 100
    late = evaluate(run, CheckpointRef(name=checkpoint_name(7), step=7, generation=2), seconds_ago=1_800.0)
    assert directory.poll(late + 1_800.0 + OLD_SECONDS + 60.0).evaluations.merged == 1_001


def test_logs_of_evaluators_that_have_ended_or_are_silent_are_looked_at_rarely(
    run: SmallRun, directory: RunDirectory, asked: Counter[str]
) -> None:
    for number in range(300):
        path = run.rundir.log / f"evaluator-{number}-0.jsonl"
        lines = Lines(path)
        lines.append({"kind": "usage", "time": time.time(), "cpuSeconds": 1.0, "state": "idle"})
        if number % 2:
            lines.append({"kind": "end", "time": time.time()})
        else:
            os.utime(path, (1.0, 1.0))
        lines.close()
    directory.poll(time.time())
    assert looks(directory, 60.0, asked)["open"] < 30
    back = Lines(run.rundir.log / "evaluator-7-0.jsonl")
    now = time.time() + 60.0 + OLD_SECONDS
    back.append({"kind": "usage", "time": now, "cpuSeconds": 2.0, "state": "idle"})
    back.close()
    assert [view.name for view in directory.poll(now).evaluators if not view.silent_seconds] == ["7-0"]


@pytest.mark.parametrize("policy", ["Every", "Latest"])
@pytest.mark.parametrize("is_final", [False, True])
def test_a_new_evaluation_of_an_old_checkpoint_is_seen_at_once(
    run: SmallRun, policy: Literal["Every", "Latest"], is_final: bool
) -> None:
    evaluation = run.rundir.read_job().spec.evaluation.model_copy(update={"policy": policy})
    directory = RunDirectory(run.rundir, evaluation)
    old, newest = run.save(50), run.save(100)
    folder = run.rundir.evaluations / old.name
    folder.mkdir()
    replace_json(folder / "g000001.shard-0-of-2.json", {})
    if is_final:
        replace_json(folder / "g000001.skipped.json", {"why": "a newer one", "at": 0.0})
        run.rundir.mark_done(old)
    os.utime(folder, (1.0, 1.0))
    now = time.time()
    for number in range(3):
        assert directory.poll(now + number).evaluations.merged == 0
    evaluate(run, old, seconds_ago=3_600.0)
    assert directory.poll(now + 3.0).evaluations.merged == 1
    evaluate(run, newest)
    assert directory.poll(now + 3.5).evaluations.merged == 2


def test_an_evaluation_whose_checkpoint_is_deleted_at_once_is_seen_at_once(
    run: SmallRun, directory: RunDirectory
) -> None:
    reference = run.save(50)
    folder = run.rundir.evaluations / reference.name
    folder.mkdir()
    os.utime(folder, (1.0, 1.0))
    now = time.time()
    directory.poll(now)
    evaluate(run, reference, seconds_ago=3_600.0)
    shutil.rmtree(run.rundir.checkpoint(reference.name))
    assert directory.poll(now + 0.5).evaluations.merged == 1


def test_a_clock_that_is_set_back_keeps_nothing_from_being_seen(run: SmallRun, directory: RunDirectory) -> None:
    reference = CheckpointRef(name=checkpoint_name(7), step=7, generation=1)
    evaluate(run, reference, seconds_ago=7_200.0)
    now = time.time()
    directory.poll(now)
    evaluate(run, reference.model_copy(update={"generation": 2}), seconds_ago=5_400.0)
    assert directory.poll(now - 3_600.0).evaluations.merged == 2


# Programs of the user's own


def publish(run: SmallRun, step: int, **metrics: float | None) -> CheckpointRef:
    """A checkpoint, and what the program of `evaluators.command` has reported of it."""
    reference = run.save(step)
    folder = evaluations.folder(run.rundir, reference)
    folder.mkdir()
    replace_json(folder / evaluations.merged_name(reference), {"metrics": metrics}, durable=False)
    return reference


def test_a_result_without_the_score_that_decides_is_an_evaluation_all_the_same(
    run: SmallRun, directory: RunDirectory
) -> None:
    run.rundir.mark_done(publish(run, 100, bleu=0.3, loss=None))
    found = directory.poll(time.time())
    assert found.final_is_evaluated
    assert found.evaluations.merged == 1
    assert found.latest_evaluation is None


def test_the_best_score_has_its_interval_and_says_with_how_many_it_is_tied(
    run: SmallRun, directory: RunDirectory
) -> None:
    for step, accuracy in ((100, 0.5), (200, 0.9), (300, 0.89)):
        run.evaluate(run.save(step), accuracy, intervals={"accuracy": [accuracy - 0.03, accuracy + 0.03]})
    found = directory.poll(time.time())
    assert found.best is not None
    assert (found.best.low, found.best.high, found.best.tied) == (pytest.approx(0.87), pytest.approx(0.93), 1)
    assert found.latest_evaluation is not None
    assert found.latest_evaluation.tied is None


@pytest.mark.parametrize("policy", ["Latest", "Every"])
def test_a_checkpoint_that_cannot_be_evaluated_is_waited_for_no_longer(
    run: SmallRun, policy: Literal["Latest", "Every"]
) -> None:
    final = run.save(100)
    evaluations.record_failed_evaluation(run.rundir, final, "the program ended with exit code 1")
    run.rundir.mark_done(final)
    found = RunDirectory(run.rundir, Evaluators(policy=policy)).poll(time.time())
    assert found.final_is_evaluated
    assert found.evaluations.skipped == 0


def test_all_metrics_of_the_newest_evaluation_are_known(run: SmallRun, directory: RunDirectory) -> None:
    for step, bleu in ((100, 0.1), (200, 0.2)):
        publish(run, step, accuracy=0.5, bleu=bleu)
    assert directory.poll(time.time()).latest_metrics == {"accuracy": 0.5, "bleu": 0.2}


def test_what_a_script_has_saved_is_found_while_no_evaluator_looks_and_stays_though_it_is_deleted(
    run: SmallRun,
) -> None:
    evaluators = Evaluators(command=["true"], watch="*.bin", settle_seconds=0.0)
    directory = RunDirectory(run.rundir, evaluators, is_own_script=True)
    path = run.rundir.path / "ckpt-40.bin"
    path.write_bytes(b"weights")
    for _ in range(2):
        found = directory.poll(time.time())
    assert found.latest_checkpoint == CheckpointRef(name="step-000000040", step=40, generation=0)
    path.unlink()
    assert (run.rundir.path / "watched" / "step-000000040" / "ckpt-40.bin").read_bytes() == b"weights"
    assert directory.poll(time.time()).latest_checkpoint == found.latest_checkpoint


def test_what_is_not_copied_for_evaluators_is_reported_once(run: SmallRun, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watched, "MAX_COPIES", 0)
    evaluators = Evaluators(command=["true"], watch="last.bin", settle_seconds=0.0)
    problems: list[str] = []
    run_watcher = RunWatcher(
        RunDirectory(run.rundir, evaluators, is_own_script=True), lambda _: run_watcher.poll_now(), problems.append
    )
    run_watcher.start()
    for content in (b"first", b"second state"):
        (run.rundir.path / "last.bin").write_bytes(content)
        until(lambda size=len(content): f"{size}-" in str(watched.records(run.rundir)), "a record")
    run_watcher.stop()
    run_watcher.join(30)
    assert problems == [
        "last.bin is not copied: 0 copies wait for their evaluation, which is the maximum; what is overwritten before "
        "its evaluation is lost"
    ]


def test_a_disk_that_takes_no_record_blinds_nobody(run: SmallRun) -> None:
    evaluators = Evaluators(command=["true"], watch="*.bin", settle_seconds=0.0)
    (run.rundir.path / "watched").write_text("in the way")
    (run.rundir.path / "ckpt-40.bin").write_bytes(b"weights")
    directory = RunDirectory(run.rundir, evaluators, is_own_script=True)
    saved = run.save(10)
    for _ in range(3):
        assert directory.poll(time.time()).latest_checkpoint == saved


class TestBesideTheBaseModel:
    """Accuracy of 0.5 to begin with."""

    @pytest.fixture
    def directory(self, run: SmallRun) -> RunDirectory:
        evaluate_base(run, accuracy=0.5, loss=2.0)
        return RunDirectory(run.rundir, run.rundir.read_job().spec.evaluation, has_base=True)

    def test_its_scores_are_there_before_any_checkpoint(self, directory: RunDirectory) -> None:
        seen = directory.poll(time.time())
        assert [(one.metric, one.base, one.value) for one in seen.against_base.compared] == [
            ("accuracy", 0.5, None),
            ("loss", 2.0, None),
        ]
        assert (seen.best, seen.latest_evaluation, seen.evaluations.merged) == (None, None, 0)

    def test_the_best_checkpoint_stands_beside_it_and_becomes_another_one(
        self, run: SmallRun, directory: RunDirectory
    ) -> None:
        run.save(50, accuracy=0.7)
        assert directory.poll(time.time()).against_base.compared[0].value == 0.7
        run.save(100, accuracy=0.9)
        seen = directory.poll(time.time())
        assert [(one.base, one.value) for one in seen.against_base.compared] == [(0.5, 0.9), (2.0, 0.5)]
        assert seen.against_base.worse == 0

    def test_three_that_are_worse_are_told_until_one_is_no_worse(self, run: SmallRun, directory: RunDirectory) -> None:
        run.save(50, accuracy=0.9)
        for step in (100, 150):
            run.save(step, accuracy=0.4)
        assert directory.poll(time.time()).against_base.worse == 0
        run.save(200, accuracy=0.3)
        told = directory.poll(time.time()).against_base
        assert (told.worse, told.compared[0].value) == (3, 0.9)
        assert told.message == (
            "the last 3 evaluated checkpoints are worse than the base model: accuracy 30.00 % at step 200, 50.00 % of "
            "the base"
        )
        run.save(250, accuracy=0.5)
        assert directory.poll(time.time()).against_base.worse == 0

    def test_at_the_end_of_training_one_is_enough(self, run: SmallRun, directory: RunDirectory) -> None:
        final = run.save(50, accuracy=0.4)
        assert directory.poll(time.time()).against_base.worse == 0
        run.rundir.mark_done(final)
        assert directory.poll(time.time()).against_base.worse == 1

    def test_one_that_could_not_be_evaluated_is_compared_with_nothing(self, run: SmallRun) -> None:
        evaluations.record_failed_evaluation(run.rundir, evaluations.BASE, "it is not there")
        directory = RunDirectory(run.rundir, run.rundir.read_job().spec.evaluation, has_base=True)
        for step in (50, 100, 150):
            run.save(step, accuracy=0.1)
        seen = directory.poll(time.time()).against_base
        assert (seen.compared, seen.worse, seen.message) == ((), 0, "")


def evaluate_base(run: SmallRun, **metrics: float) -> None:
    folder = evaluations.folder(run.rundir, evaluations.BASE)
    folder.mkdir()
    replace_json(folder / evaluations.merged_name(evaluations.BASE), {"metrics": metrics}, durable=False)


def test_a_run_that_took_fewer_steps_than_announced_says_so_and_why(run: SmallRun, directory: RunDirectory) -> None:
    run.rundir.mark_done(run.save(40), "stopped early after step 40 of 100: the loss has not fallen", plannedSteps=100)
    ending = directory.poll(time.time()).ending
    assert not ending.failed
    assert (ending.reason, ending.total_steps) == ("StoppedEarly", 100)
    assert ending.message == "stopped early after step 40 of 100: the loss has not fallen"
