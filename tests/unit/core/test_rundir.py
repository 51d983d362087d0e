"""The run directory: what counts in it, and what is passed over, set aside or refused."""

import json
from pathlib import Path

import pytest

from tandem.job.resource import API_VERSION, KIND, DistributedTrainingJob
from tandem.rundir.checkpoint import FILE, Broken
from tandem.rundir.durable import read_json, temporary_beside
from tandem.rundir.layout import BAD, STALE, FinishedMember, RunDir, checkpoint_name
from tandem.rundir.lineage import GenerationRecord
from tandem.wire.status import CheckpointRef
from tests.support import manifests
from tests.support.checkpoints import commit


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    made = RunDir(tmp_path / "run")
    made.create()
    return made


def start(run: RunDir, generation: int, resumed_from: CheckpointRef | None = None) -> bool:
    record = GenerationRecord(generation=generation, resumed_from=resumed_from, world_size=1, started_at=0.0)
    return run.record_generation(record)


def committed(run: RunDir) -> list[int]:
    return [manifest.step for manifest in run.committed()]


def test_an_empty_or_missing_directory_has_nothing_in_it(tmp_path: Path) -> None:
    run = RunDir(tmp_path / "run")
    assert run.committed() == []
    assert run.checkpoint_names() == []
    assert run.generation_records() == []
    assert run.newest_generation() == 0
    assert (run.done(), run.failed(), run.ended()) == (None, None, False)
    run.create()
    run.create()
    assert run.committed() == []


def test_the_job_is_kept(run: RunDir) -> None:
    data = {
        "apiVersion": API_VERSION,
        "kind": KIND,
        "metadata": {"name": "a", "labels": {"team": "vision"}},
        "spec": {"trainer": {"task": "image-classification"}},
    }
    job = DistributedTrainingJob.parse(data)
    run.write_job(job)
    assert run.read_job() == job
    run.job_file.write_text("{}")
    with pytest.raises(ValueError, match="apiVersion"):
        run.read_job()


def test_a_generation_is_recorded_once(run: RunDir) -> None:
    first = commit(run, 10)
    assert start(run, 1)
    assert start(run, 2, first)
    assert not start(run, 2)
    assert run.generation_records()[1].resumed_from == first
    assert run.newest_generation() == 2


def test_who_has_finished_is_recorded_by_generation_and_process(run: RunDir) -> None:
    members = {FinishedMember(7, "worker-0.a", "0f1e"), FinishedMember(1_000_000, "worker-1", "a2")}
    for member in [*members, *members]:
        run.record_finished(member)
    (run.finished / "notes.txt").touch()
    assert run.finished_members() == members


def test_a_file_of_the_scripts_own_in_the_place_of_that_record_says_nothing(run: RunDir) -> None:
    run.finished.touch()
    assert run.finished_members() == frozenset()


def test_checkpoints_that_count_come_newest_first(run: RunDir) -> None:
    start(run, 1)
    commit(run, 10)
    resumed = commit(run, 20)
    commit(run, 30)
    start(run, 2, resumed)
    commit(run, 25, 2)
    assert committed(run) == [25, 20, 10]


def test_a_superseded_writer_that_ran_ahead_is_ignored(run: RunDir) -> None:
    start(run, 1)
    first = commit(run, 10)
    start(run, 2, first)
    commit(run, 1000)
    commit(run, 20, 2)
    assert committed(run) == [20, 10]


def test_a_generation_that_nobody_resumed_from_is_ignored(run: RunDir) -> None:
    start(run, 1)
    start(run, 2)
    commit(run, 500)
    assert committed(run) == []


def test_damaged_checkpoints_are_passed_over_and_told(run: RunDir) -> None:
    start(run, 1)
    for step in (10, 20, 30):
        commit(run, step)
    (run.checkpoint(checkpoint_name(20)) / FILE).unlink()
    (run.checkpoint(checkpoint_name(30)) / FILE).write_text("{")
    run.checkpoint(checkpoint_name(40)).touch()
    assert committed(run) == [10]
    assert sorted(run.damaged()) == [checkpoint_name(20), checkpoint_name(30), checkpoint_name(40)]


def test_what_is_not_committed_is_no_checkpoint(run: RunDir) -> None:
    start(run, 1)
    commit(run, 10)
    for name in (temporary_beside(run.checkpoint(checkpoint_name(20))).name, "step-20", "step-000000030.bad", "x"):
        (run.checkpoints / name).mkdir()
    assert run.checkpoint_names() == [checkpoint_name(10)]


def test_names_are_in_the_order_of_the_steps_beyond_nine_digits(run: RunDir) -> None:
    steps = [999_999_999, 1_000_000_000, 5]
    for step in steps:
        commit(run, step)
    assert run.checkpoint_names() == [checkpoint_name(step) for step in sorted(steps)]


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b"{}", b'{"generation": 2}'])
def test_a_damaged_record_is_refused_for_it_says_what_counts(run: RunDir, content: bytes) -> None:
    start(run, 1)
    first = commit(run, 10)
    start(run, 2, first)
    (run.generations / "000002.json").write_bytes(content)
    with pytest.raises(ValueError, match=r"000002\.json is damaged"):
        run.committed()
    assert run.newest_generation() == 2


def test_a_record_under_the_wrong_number_is_refused(run: RunDir) -> None:
    start(run, 1)
    (run.generations / "000001.json").rename(run.generations / "000003.json")
    with pytest.raises(ValueError, match="it speaks of generation 1"):
        run.chain()


def test_a_checkpoint_set_aside_frees_its_name_and_says_why(run: RunDir) -> None:
    start(run, 1)
    for _ in range(3):
        commit(run, 10)
        assert run.set_aside(checkpoint_name(10), BAD, "a bit was flipped") is not None
    names = sorted(path.name for path in run.checkpoints.iterdir() if path.is_dir())
    assert names == [f"{checkpoint_name(10)}{ending}" for ending in (".bad", ".bad.1", ".bad.2")]
    assert "a bit was flipped" in (run.checkpoints / f"{checkpoint_name(10)}.bad.why.json").read_text()
    assert run.checkpoint_names() == []
    commit(run, 10)
    assert run.set_aside(checkpoint_name(10), STALE) == run.checkpoints / f"{checkpoint_name(10)}.stale"


def test_who_comes_second_to_set_aside_is_told(run: RunDir) -> None:
    assert run.set_aside(checkpoint_name(10)) is None


def test_a_checkpoint_that_is_gone_is_not_called_broken(run: RunDir) -> None:
    with pytest.raises(FileNotFoundError):
        run.manifest(checkpoint_name(10))
    run.checkpoint(checkpoint_name(10)).mkdir()
    with pytest.raises(Broken):
        run.manifest(checkpoint_name(10))


def test_the_newest_checkpoint_is_hinted_at_for_other_programs(run: RunDir) -> None:
    reference = CheckpointRef(name=checkpoint_name(10), step=10, generation=1)
    run.hint_latest(reference)
    assert CheckpointRef.read(read_json(run.latest_file)) == reference


def test_the_end_is_said_once(run: RunDir) -> None:
    reference = CheckpointRef(name=checkpoint_name(10), step=10, generation=1)
    assert not run.ended()
    run.mark_failed("Diverged", "the loss is NaN", 65)
    run.mark_failed("Other", "later", 1)
    assert run.ended()
    assert (run.failed() or {})["reason"] == "Diverged"
    run.mark_done(reference, why="complete")
    assert (run.done() or {})["final"] == reference.dump()
    assert (run.done() or {})["why"] == "complete"


def test_a_failure_can_be_marked_where_nothing_was_made_yet(tmp_path: Path) -> None:
    run = RunDir(tmp_path / "never/made")
    run.mark_failed("Config", "no data", 78)
    assert run.ended()


def test_a_job_file_of_a_newer_version_is_read_as_far_as_it_is_known(tmp_path: Path) -> None:
    run_dir = manifests.run_directory(tmp_path / "run", manifests.job("digits"))
    job = run_dir.read_job()
    newer = json.loads(run_dir.job_file.read_text())
    newer["spec"]["trainer"]["neverHeardOf"] = {"a": 1}
    newer["spec"]["moon"] = "full"
    run_dir.job_file.write_text(json.dumps(newer))
    assert run_dir.read_job() == job


def test_a_job_file_says_only_what_is_no_default(tmp_path: Path) -> None:
    job = manifests.job("digits", elasticity={"hangSeconds": 300.0, "maxRestarts": 3})
    run_dir = manifests.run_directory(tmp_path / "run", job)
    assert json.loads(run_dir.job_file.read_text())["spec"]["elasticity"] == {"maxRestarts": 3}
    assert run_dir.read_job() == job


def test_records_of_a_newer_version_keep_the_lineage(tmp_path: Path) -> None:
    run_dir = RunDir(tmp_path)
    run_dir.create()
    record = GenerationRecord(generation=1, world_size=2, started_at=1.0)
    run_dir.record_generation(record)
    path = run_dir.generations / "000001.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"region": "north"}))
    assert run_dir.generation_records() == [record]
