"""Claims, evaluation files and the look at the run directory, on a real folder."""

import errno
import json
import os
import threading
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tandem.job.resource import Evaluators
from tandem.rundir import lease
from tandem.rundir.checkpoint import FILE, Manifest
from tandem.rundir.durable import read_json_or_none, replace_json
from tandem.rundir.evaluations import folder, merged_name, shard_name
from tandem.rundir.layout import RunDir, checkpoint_name
from tandem.wire.status import CheckpointRef
from tandem_evaluator import claim as claim_module
from tandem_evaluator import survey as survey_module
from tandem_evaluator.choice import EvaluationState
from tandem_evaluator.claim import claim, claim_file, release_leftovers
from tandem_evaluator.evaluation import TaskScoring
from tandem_evaluator.publication import Publication
from tandem_evaluator.result import ShardResult
from tandem_evaluator.survey import Survey
from tests.support.checkpoints import begin, commit
from tests.support.waiting import until

TWO = Evaluators(processes_per_replica=2)


@pytest.fixture
def rundir(tmp_path: Path) -> RunDir:
    subject = RunDir(tmp_path / "run")
    subject.create()
    begin(subject, 1)
    return subject


def shard_result(reference: CheckpointRef, shard: int, shards: int = 2, right: int = 4, at: float = 1.0) -> ShardResult:
    """Five of the ten samples, of which so many are right."""
    return ShardResult(
        checkpoint=reference.name,
        step=reference.step,
        generation=reference.generation,
        samples=5,
        confusion=[[right, 5 - right], [0, 0]],
        shard=shard,
        shards=shards,
        loss_sum=1.0,
        seconds=1.0,
        evaluator="evaluator-0-0",
        at=at,
    )


def publication(rundir: RunDir) -> Publication:
    data = SimpleNamespace(total=10, classes=2, held_out=0)
    return Publication(rundir, TWO, TaskScoring(data))  # type: ignore[arg-type]


# Claims


def test_a_claim_is_renewed_in_time_for_as_long_as_it_is_held(rundir: RunDir, monkeypatch: pytest.MonkeyPatch) -> None:
    """In a time in which nothing takes any but waiting for the next renewal."""
    path = claim_file(rundir, CheckpointRef(name=checkpoint_name(10), step=10, generation=1), 0, 2)
    now, was_held = [1_000_000.0], []

    class Waited(threading.Event):
        def wait(self, timeout: float | None = None) -> bool:
            assert timeout is not None
            now[0] += timeout
            was_held.append(lease.is_held(path))
            return super().wait(0.001)

    monkeypatch.setattr(lease, "server_time", lambda folder: now[0])
    monkeypatch.setattr(claim_module, "threading", SimpleNamespace(Event=Waited, Thread=threading.Thread))
    held = claim(path, "a")
    assert held is not None
    with held:
        until(lambda: now[0] > 1_000_000.0 + 10 * lease.LEASE_LENGTH_SECONDS, "ten times the lease's time")
        assert claim(path, "b") is None
    assert all(was_held)
    assert not path.exists()


def test_who_was_overtaken_leaves_the_claim_to_the_other(rundir: RunDir) -> None:
    path = rundir.leases / "evaluate-x.json"
    asleep = claim(path, "a", seconds=0.3)
    assert asleep is not None
    path.write_text(json.dumps({"holder": "b", "until": time.time() + 100}))
    until(lambda: not asleep._thread.is_alive(), "the end of the thread")
    asleep.release()
    assert json.loads(path.read_text())["holder"] == "b"


def test_a_process_started_again_gives_back_what_it_died_with(rundir: RunDir) -> None:
    names = {"evaluate-mine": "a", "evaluate-theirs": "b", "other-mine": "a"}
    for name, holder in names.items():
        assert lease.acquire(rundir.leases / f"{name}.json", holder)
    release_leftovers(rundir, "a")
    assert sorted(path.stem for path in rundir.leases.iterdir()) == ["evaluate-theirs", "other-mine"]


def test_claims_that_ran_out_long_ago_are_swept(rundir: RunDir) -> None:
    for name, ends in {"evaluate-old": time.time() - 7200, "evaluate-recent": time.time() - 20}.items():
        (rundir.leases / f"{name}.json").write_text(json.dumps({"holder": "b", "until": ends}))
    (rundir.leases / "evaluate-garbage.json").write_text("{")
    release_leftovers(rundir, "a")
    assert sorted(path.stem for path in rundir.leases.iterdir()) == ["evaluate-garbage", "evaluate-recent"]


def test_a_claim_names_its_checkpoint_as_retention_expects(rundir: RunDir) -> None:
    reference = commit(rundir, 10)
    assert claim_file(rundir, reference, 0, 2).name.split("-")[1:3] == reference.name.split("-")


# Evaluation files


def test_the_last_shard_makes_the_merged_result(rundir: RunDir) -> None:
    reference, subject = commit(rundir, 10), publication(rundir)
    assert subject.publish(shard_result(reference, 1))
    assert subject.merge(reference) is None
    assert subject.publish(shard_result(reference, 0))
    merged = subject.merge(reference)
    assert (merged.samples, merged.metrics.accuracy) == (10, 0.8)


def test_a_shard_done_twice_is_counted_once_and_the_first_stays(rundir: RunDir) -> None:
    reference, subject = commit(rundir, 10), publication(rundir)
    assert subject.publish(shard_result(reference, 0, at=1.0))
    assert not subject.publish(shard_result(reference, 0, at=2.0))
    subject.publish(shard_result(reference, 1, at=3.0))
    merged = subject.merge(reference)
    assert (merged.samples, merged.started_at) == (10, 0.0)
    assert subject.merge(reference) is None, "another process finds it merged"


def test_shards_of_another_number_are_not_mixed(rundir: RunDir) -> None:
    reference, subject = commit(rundir, 10), publication(rundir)
    subject.publish(shard_result(reference, 0, shards=2))
    subject.publish(shard_result(reference, 1, shards=3))
    assert subject.merge(reference) is None


@pytest.mark.parametrize(
    "damage",
    [
        lambda body: "{",
        lambda body: "[]",
        lambda body: json.dumps(body | {"samples": 4}),
        lambda body: json.dumps(body | {"confusion": [[1, 1, 1], [1, 1, 0], [0, 0, 0]]}),
        lambda body: json.dumps(body | {"confusion": [[1, 1], [1, 1]]}),
        lambda body: json.dumps(body | {"generation": 7}),
    ],
    ids=["torn", "not an object", "other data", "other classes", "miscounted", "other checkpoint"],
)
def test_a_result_that_cannot_be_right_is_discarded_and_done_again(rundir: RunDir, damage: Any) -> None:
    reference, subject = commit(rundir, 10), publication(rundir)
    for shard in range(2):
        subject.publish(shard_result(reference, shard))
    path = folder(rundir, reference) / shard_name(reference, 1, 2)
    path.write_text(damage(json.loads(path.read_text())))
    assert subject.merge(reference) is None
    assert Survey(rundir, 2).scan().states == (EvaluationState(reference, frozenset({0})),)
    assert subject.publish(shard_result(reference, 1))
    assert subject.merge(reference) is not None


def merge_all(rundir: RunDir, reference: CheckpointRef, right: int) -> None:
    for shard in range(2):
        publication(rundir).publish(shard_result(reference, shard, right=right))
    assert publication(rundir).merge(reference)


def test_best_follows_the_merged_results_and_the_lineage(rundir: RunDir) -> None:
    subject = publication(rundir)
    subject.update_best()
    assert not rundir.best_file.exists()
    ten, twenty = commit(rundir, 10), commit(rundir, 20)
    merge_all(rundir, ten, right=3)
    merge_all(rundir, twenty, right=5)
    subject.update_best()
    assert read_json_or_none(rundir.best_file)["step"] == 20
    begin(rundir, 2, ten)
    subject.update_best()
    assert read_json_or_none(rundir.best_file)["step"] == 10
    begin(rundir, 3)
    subject.update_best()
    assert not rundir.best_file.exists()


def test_who_saw_less_but_writes_last_looks_again(rundir: RunDir, monkeypatch: pytest.MonkeyPatch) -> None:
    """A slow process has computed best.json from one result; before it writes, another merges a better one."""
    ten, twenty = commit(rundir, 10), commit(rundir, 20)
    merge_all(rundir, ten, right=3)
    overtaken: list[object] = []

    def overtaken_write(path: Path, value: object) -> None:
        if not overtaken:
            overtaken.append(value)
            merge_all(rundir, twenty, right=5)
            publication(rundir).update_best()
        replace_json(path, value)

    monkeypatch.setattr("tandem_evaluator.publication.replace_json", overtaken_write)
    publication(rundir).update_best()
    assert read_json_or_none(rundir.best_file)["step"] == 20


def test_a_merged_result_that_is_garbage_is_discarded(rundir: RunDir) -> None:
    ten, twenty = commit(rundir, 10), commit(rundir, 20)
    merge_all(rundir, ten, right=3)
    merge_all(rundir, twenty, right=5)
    garbage = folder(rundir, twenty) / merged_name(twenty)
    garbage.write_text("{")
    publication(rundir).update_best()
    assert read_json_or_none(rundir.best_file)["step"] == 10
    assert not garbage.exists()
    assert publication(rundir).merge(twenty)


# The look


def test_a_look_sees_results_claims_and_notes(rundir: RunDir) -> None:
    subject = Survey(rundir, 2)
    references = [commit(rundir, step) for step in (10, 20, 30, 40)]
    merge_all(rundir, references[0], right=3)
    publication(rundir).skip(references[1], "why not")
    publication(rundir).publish(shard_result(references[2], 0))
    publication(rundir).publish(shard_result(references[2], 1, shards=3))
    assert lease.acquire(claim_file(rundir, references[2], 1, 2), "b")
    assert lease.acquire(claim_file(rundir, references[3], 0, 2), "b", seconds=-1)
    view = subject.scan()
    assert [one.reference.step for one in view.states] == [40, 30, 20, 10]
    assert view.states[0] == EvaluationState(references[3])
    assert view.states[1] == EvaluationState(references[2], frozenset({0}), frozenset({1}))
    assert view.states[2].skipped
    assert view.states[3].merged
    assert not view.ended


def test_only_checkpoints_on_the_lineage_are_seen(rundir: RunDir) -> None:
    subject = Survey(rundir, 2)
    ten, twenty = commit(rundir, 10), commit(rundir, 20)
    assert [one.reference for one in subject.scan().states] == [twenty, ten]
    begin(rundir, 2, ten)
    assert [one.reference for one in subject.scan().states] == [ten]
    rundir.set_aside(twenty.name, ".stale")
    again = commit(rundir, 20, 2)
    assert [one.reference for one in subject.scan().states] == [again, ten]


def test_the_evaluation_of_a_name_that_is_used_again_starts_anew(rundir: RunDir) -> None:
    subject = Survey(rundir, 2)
    ten, twenty = commit(rundir, 10), commit(rundir, 20)
    merge_all(rundir, twenty, right=3)
    for _ in range(2):
        assert subject.scan().states[0].merged
    begin(rundir, 2, ten)
    rundir.set_aside(twenty.name, ".stale")
    commit(rundir, 20, 2)
    assert subject.scan().states[0] == EvaluationState(CheckpointRef(name=twenty.name, step=20, generation=2))


def test_the_end_and_the_final_checkpoint(rundir: RunDir) -> None:
    subject, final = Survey(rundir, 2), commit(rundir, 10)
    rundir.mark_done(final)
    view = subject.scan()
    assert (view.ended, view.final) == (True, final)


def test_a_final_checkpoint_that_was_evaluated_and_deleted_needs_nothing_more(rundir: RunDir) -> None:
    subject, ten, twenty = Survey(rundir, 2), commit(rundir, 10), commit(rundir, 20)
    merge_all(rundir, twenty, right=3)
    rundir.mark_done(twenty)
    rundir.set_aside(twenty.name)
    assert subject.scan().states == (EvaluationState(twenty, merged=True), EvaluationState(ten))


def test_a_failure_is_an_end_without_a_final_checkpoint(rundir: RunDir) -> None:
    commit(rundir, 10)
    rundir.mark_failed("Diverged", "the loss stayed NaN", 65)
    view = Survey(rundir, 2).scan()
    assert (view.ended, view.final) == (True, None)


def test_a_broken_manifest_is_believed_only_at_the_second_look(rundir: RunDir, monkeypatch: pytest.MonkeyPatch) -> None:
    subject, ten, twenty = Survey(rundir, 2), commit(rundir, 10), commit(rundir, 20)
    manifest = rundir.checkpoint(twenty.name) / FILE
    sound = manifest.read_bytes()
    manifest.write_bytes(sound.replace(b'"step": 20', b'"step": 21'))
    view = subject.scan()
    assert [one.reference for one in view.states] == [ten]
    assert (view.unsure, subject.broken) == (True, {})
    monkeypatch.setattr(survey_module, "DOUBT_SECONDS", 0.0)
    assert not subject.scan().unsure
    assert "does not match its own digest" in subject.broken[twenty.name]
    manifest.write_bytes(sound)
    assert [one.reference for one in subject.scan().states] == [twenty, ten]
    assert subject.broken == {}


def test_a_manifest_that_cannot_be_read_now_is_not_called_broken(
    rundir: RunDir, monkeypatch: pytest.MonkeyPatch
) -> None:
    subject, ten, twenty = Survey(rundir, 2), commit(rundir, 10), commit(rundir, 20)
    read = rundir.manifest

    def failing(name: str) -> Manifest:
        if name == twenty.name:
            raise OSError(errno.EIO, "Input/output error")
        return read(name)

    monkeypatch.setattr(rundir, "manifest", failing)
    assert [one.reference for one in subject.scan().states] == [ten]
    assert subject.broken == {}
    rundir.mark_done(twenty)
    with pytest.raises(OSError, match="Input/output"):
        subject.scan()


def test_a_long_run_is_not_read_again_at_every_look(rundir: RunDir, monkeypatch: pytest.MonkeyPatch) -> None:
    for step in range(10, 60, 10):
        merge_all(rundir, commit(rundir, step), right=3)
    subject = Survey(rundir, 2)
    before = subject.scan()

    def refuse(*_: object) -> None:
        raise AssertionError("read again")

    monkeypatch.setattr(rundir, "manifest", refuse)
    monkeypatch.setattr(rundir, "generation_records", refuse)
    assert subject.scan() == before


def test_of_a_long_run_a_look_asks_for_little(rundir: RunDir, monkeypatch: pytest.MonkeyPatch) -> None:
    for step in range(10, 310, 10):
        merge_all(rundir, commit(rundir, step), right=3)
    new = commit(rundir, 310)
    subject, asked = Survey(rundir, 2), list[str]()
    before, stat = subject.scan(), Path.stat

    def noted(path: Path, **options: bool) -> os.stat_result:
        asked.append(path.parent.name)
        return stat(path, **options)

    monkeypatch.setattr(Path, "stat", noted)
    assert subject.scan() == before
    assert asked.count(new.name) == 1
    assert len([name for name in asked if name.startswith("step-")]) == 1, "and nothing of the thirty that are done"
    monkeypatch.setattr(time, "monotonic", lambda now=time.monotonic: now() + survey_module.RECHECK_SECONDS)
    subject.scan()
    assert len({*asked}) >= 31, "they are looked at again after a while"
