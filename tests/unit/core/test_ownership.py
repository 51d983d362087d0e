"""Whose a run directory is when a job comes to it, and what becomes of what it holds."""

from pathlib import Path
from typing import Any

import pytest

from tandem.job.resource import DistributedTrainingJob, OnExisting
from tandem.rundir import ownership
from tandem.rundir.durable import replace_json
from tandem.rundir.layout import RunDir
from tandem.rundir.lineage import GenerationRecord
from tandem.rundir.ownership import (
    JobFileUnreadable,
    OwnershipDecision,
    RunDirOccupied,
    apply_decision,
    complete_moves,
    decide_ownership,
    differences,
    goes_further,
)
from tandem.wire.status import CheckpointRef
from tests.support import manifests
from tests.support.manifests import images


def job(name: str = "digits", **config: Any) -> DistributedTrainingJob:
    return manifests.job(name, trainer=images(config))


def script(*command: str, **trainer: Any) -> DistributedTrainingJob:
    return manifests.job("digits", trainer={"command": list(command), **trainer})


@pytest.fixture
def there(tmp_path: Path) -> RunDir:
    """A run that has begun three generations, and saved nothing."""
    found = manifests.run_directory(tmp_path / "digits", job())
    for number in (1, 2, 3):
        found.record_generation(GenerationRecord(generation=number, world_size=1, started_at=0.0))
    replace_json(found.coordinator_file, {"generation": 4, "failures": 11, "owner": "a"})
    return found


def saved(run_dir: RunDir) -> None:
    (run_dir.checkpoints / "step-000000500").mkdir()


class TestWhereNothingWasSaved:
    def test_the_same_job_goes_on(self, there: RunDir) -> None:
        assert decide_ownership(there, job(), "Resume") == OwnershipDecision()

    @pytest.mark.parametrize("on_existing", ["Resume", "Fresh", "Refuse"])
    def test_any_other_job_takes_it(self, there: RunDir, on_existing: OnExisting) -> None:
        assert decide_ownership(there, job("other", model="baby-cnn"), on_existing) == OwnershipDecision("attempt")
        assert decide_ownership(there, script("python", "train.py"), on_existing) == OwnershipDecision("attempt")

    def test_what_failed_begins_anew_and_leaves_its_logs(self, there: RunDir) -> None:
        there.mark_failed("Diverged", "the loss is NaN", 65)
        replace_json(there.rewinds / "000001.json", {"number": 1})
        (there.log / "worker-0.txt").write_text("KeyError")
        apply_decision(there, decide_ownership(there, job(), "Resume"))
        there.create()
        assert there.failed() is None
        assert there.generation_records() == []
        assert list(there.rewinds.iterdir()) == []
        assert (there.path / "attempt" / "log" / "worker-0.txt").read_text() == "KeyError"
        assert (RunDir(there.path / "attempt").failed() or {})["reason"] == "Diverged"
        assert RunDir(there.path / "attempt").read_job() == job()

    def test_generations_are_not_counted_from_1_again(self, there: RunDir) -> None:
        apply_decision(there, OwnershipDecision("attempt"))
        assert there.first_generation() == 5
        there.create()
        there.write_job(job())
        apply_decision(there, OwnershipDecision("attempt"))
        assert there.first_generation() == 5

    def test_nor_is_it_anybodys_for_a_report_or_an_export_of_what_failed(self, there: RunDir) -> None:
        for name in ("report.html", "report", "csv", "tensorboard"):
            (there.path / name).mkdir()
        assert decide_ownership(there, job(seed=7), "Resume") == OwnershipDecision("attempt")
        apply_decision(there, OwnershipDecision("attempt"))
        assert {path.name for path in there.path.iterdir()} == {"attempt", "numbering.json"}

    def test_every_name_that_tandem_gives_is_known(self) -> None:
        given = {path.name for key, path in vars(RunDir("run")).items() if key != "path"}
        assert given <= {*ownership.TANDEM_NAMES, *ownership.UNMOVED_NAMES, "job.json"}

    def test_a_damaged_job_is_nobodys(self, there: RunDir) -> None:
        there.job_file.write_text("{")
        assert decide_ownership(there, job(), "Resume") == OwnershipDecision("attempt")

    def test_a_new_folder_is_as_it_is(self, tmp_path: Path) -> None:
        found = RunDir(tmp_path)
        assert decide_ownership(found, job(), "Refuse") == OwnershipDecision()
        assert found.first_generation() == 1


class TestWhereSomethingWasSaved:
    def test_the_same_job_goes_on_with_its_whole_budget(self, there: RunDir) -> None:
        saved(there)
        there.mark_failed("RestartsExhausted", "too many failures", 1)
        replace_json(there.beside_coordinator_file, {"owner": "a", "leftOut": [{"replica": "worker-1"}]})
        found = decide_ownership(there, job(epochs=9, optimizer={"learningRate": 0.1}), "Resume")
        assert found == OwnershipDecision(tries_again=True)
        apply_decision(there, found)
        assert there.failed() is None
        assert '"failures": 0' in there.coordinator_file.read_text()
        assert '"generation": 4' in there.coordinator_file.read_text()
        assert '"leftOut": []' in there.beside_coordinator_file.read_text()
        assert len(there.generation_records()) == 3

    def test_one_that_trains_on_other_data_is_told_what_differs(self, there: RunDir) -> None:
        saved(there)
        with pytest.raises(RunDirOccupied) as refusal:
            decide_ownership(there, job(seed=7), "Resume")
        assert refusal.value.saved == "step-000000500"
        assert refusal.value.differs == ["spec.trainer.loop.seed: there 0, now 7"]

    def test_refuse_leaves_it_alone(self, there: RunDir) -> None:
        saved(there)
        with pytest.raises(RunDirOccupied) as refusal:
            decide_ownership(there, job(), "Refuse")
        assert refusal.value.differs == []

    def test_fresh_moves_all_of_it_and_keeps_one(self, there: RunDir) -> None:
        for step in ("step-000000500", "step-000000700"):
            there.create()
            there.write_job(job())
            (there.checkpoints / step).mkdir()
            (there.path / "mine.csv").touch()
            (there.path / ownership.LOCK).touch()
            apply_decision(there, decide_ownership(there, job(seed=7), "Fresh"))
        assert {path.name for path in there.path.iterdir()} == {"previous", "numbering.json", ownership.LOCK}
        previous = RunDir(there.path / "previous")
        assert previous.checkpoint_names() == ["step-000000700"]
        assert (previous.path / "mine.csv").exists()

    def test_an_attempt_does_not_take_the_place_of_what_was_saved(self, there: RunDir) -> None:
        saved(there)
        apply_decision(there, decide_ownership(there, job(seed=7), "Fresh"))
        there.create()
        there.write_job(job(seed=7))
        there.mark_failed("WorkerFailed", "a typo", 1)
        apply_decision(there, decide_ownership(there, job(seed=8), "Fresh"))
        assert RunDir(there.path / "previous").checkpoint_names() == ["step-000000500"]
        assert RunDir(there.path / "attempt").failed()

    def test_damaged_checkpoints_are_something_that_was_saved(self, there: RunDir) -> None:
        saved(there)
        there.set_aside("step-000000500", why="a bit")
        there.job_file.write_text("{")
        with pytest.raises(JobFileUnreadable):
            decide_ownership(there, job(), "Resume")

    def test_what_a_crash_interrupts_is_completed(self, there: RunDir, monkeypatch: pytest.MonkeyPatch) -> None:
        saved(there)
        moved: list[str] = []

        def rename(path: Path, target: Path) -> Path:
            if len(moved) == 3:
                raise KeyboardInterrupt
            moved.append(path.name)
            return original(path, target)

        original = Path.rename
        with monkeypatch.context() as patch:
            patch.setattr(Path, "rename", rename)
            with pytest.raises(KeyboardInterrupt):
                apply_decision(there, OwnershipDecision("previous"))
        complete_moves(there)
        assert not there.job_file.exists()
        assert RunDir(there.path / "previous").read_job() == job()
        assert RunDir(there.path / "previous").checkpoint_names() == ["step-000000500"]
        assert there.first_generation() == 5


class TestACompleteRun:
    def test_goes_on_with_more_epochs_and_not_without(self, tmp_path: Path) -> None:
        run_dir = manifests.run_directory(tmp_path, job(epochs=5))
        run_dir.mark_done(None)
        run_dir.mark_broken_off(CheckpointRef(name="step-000000500", step=500, generation=1))
        assert decide_ownership(run_dir, job(epochs=5), "Resume") == OwnershipDecision()
        assert decide_ownership(run_dir, job(epochs=4), "Resume") == OwnershipDecision()
        found = decide_ownership(run_dir, job(epochs=6), "Resume")
        assert found == OwnershipDecision(reopens=True)
        apply_decision(run_dir, found)
        assert run_dir.done() is None
        assert (run_dir.log / "done-1.json").exists()
        assert not run_dir.broken_off_file.exists()

    def test_of_a_script_goes_on_when_it_is_given_something_else(self, tmp_path: Path) -> None:
        there = manifests.run_directory(tmp_path, script("python", "train.py", args=["--epochs=3"]))
        there.mark_done(None)
        assert (
            decide_ownership(there, script("python", "train.py", args=["--epochs=3"]), "Resume") == OwnershipDecision()
        )
        assert decide_ownership(
            there, script("python", "train.py", args=["--epochs=4"]), "Resume"
        ) == OwnershipDecision(reopens=True)


class TestAScriptsOwnFiles:
    def test_stay_when_it_failed_and_is_given_something_else(self, tmp_path: Path) -> None:
        there = manifests.run_directory(tmp_path, script("python", "train.py"))
        (tmp_path / "model.pt").touch()
        there.mark_failed("WorkerFailed", "a typo", 1)
        apply_decision(
            there, decide_ownership(there, script("python", "train.py", env=[{"name": "LR", "value": "1"}]), "Resume")
        )
        assert (tmp_path / "model.pt").exists()
        assert RunDir(tmp_path / "attempt").failed()

    def test_are_something_that_was_saved_for_a_job_of_another_kind(self, tmp_path: Path) -> None:
        there = manifests.run_directory(tmp_path, script("python", "train.py"))
        (tmp_path / "model.pt").touch()
        with pytest.raises(RunDirOccupied, match=r"model\.pt"):
            decide_ownership(there, job(), "Resume")


EXACT: list[tuple[dict[str, Any], bool]] = [
    ({"epochs": 9}, True),
    ({"maxSteps": 9}, True),
    ({"optimizer": {"learningRate": 0.1}}, True),
    ({"schedule": {"name": "cosine"}}, True),
    ({"emaDecay": 0.9}, True),
    ({"microBatchSize": 8}, True),
    ({"data": {"download": False}}, True),
    ({"data": {"name": "digits"}}, False),
    ({"data": {"end": 100}}, False),
    ({"globalBatchSize": 32}, False),
    ({"dropLast": True}, False),
    ({"seed": 1}, False),
    ({"initialWeights": "w.safetensors"}, False),
    ({"optimizer": {"name": "sgd"}}, False),
    ({"optimizer": {"weightDecay": 0.1}}, False),
]


@pytest.mark.parametrize(("config", "goes_on"), EXACT)
def test_what_may_change(config: dict[str, Any], goes_on: bool) -> None:
    assert (differences(job(), job(**config)) == []) == goes_on


def test_fewer_epochs_and_more_steps_go_further() -> None:
    assert goes_further(job(epochs=5, maxSteps=10), job(epochs=4))
    assert not goes_further(job(epochs=5), job(epochs=5, maxSteps=10))


def own_task(parameters: dict[str, Any], **loop: Any) -> DistributedTrainingJob:
    return manifests.job("digits", trainer={"task": "a.b:C", "parameters": parameters, "loop": loop})


def test_a_task_of_one_s_own_goes_on_with_other_parameters_and_not_with_other_batches() -> None:
    there = own_task({"width": 1}, globalBatchSize=8)
    assert differences(there, own_task({"width": 2}, globalBatchSize=8, epochs=9)) == []
    found = differences(there, own_task({"width": 1}, globalBatchSize=16))
    assert found == ["spec.trainer.loop.globalBatchSize: there 8, now 16"]
    assert goes_further(there, own_task({"width": 1}, globalBatchSize=8, epochs=9))
    assert not goes_further(there, own_task({"width": 2}, globalBatchSize=8, epochs=5))
