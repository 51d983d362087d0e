"""What `tandem checkpoints prune` may delete, and that it deletes nothing else however the run goes on meanwhile."""

import os
import time
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tandem.errors import UserError
from tandem.job.resource import CheckpointSpec, Evaluators
from tandem.rundir.checkpoint import FILE
from tandem.rundir.evaluations import Rank
from tandem.rundir.layout import RunDir
from tandem.rundir.retention import RetentionInputs, checkpoints_to_delete, retention_reasons
from tandem.wire.status import CheckpointRef
from tandem_cli.checkpoints import description, pruning
from tandem_cli.checkpoints.inventory import take_inventory
from tandem_cli.checkpoints.pruning import Pruning, carry_out, plan
from tests.support.worlds.small_run import SmallRun, messy

POLICY = CheckpointSpec(keep_last=2, keep_every=300)


@pytest.fixture
def run(tmp_path: Path) -> SmallRun:
    """Ten checkpoints that nobody has scored, and a policy that keeps all of them."""
    made = SmallRun(tmp_path / "run", keepLast=100)
    made.begin(1)
    for step in range(100, 1001, 100):
        made.save(step)
    return made


def planned(run: SmallRun, policy: CheckpointSpec = POLICY, everything: bool = False) -> Pruning:
    return plan(take_inventory(run.rundir), policy, everything)


def doomed(found: Pruning) -> list[str]:
    return [one.name for one in found.doomed]


def carried_out(
    run: SmallRun, agreed: Pruning, policy: CheckpointSpec = POLICY, everything: bool = False
) -> dict[str, str]:
    return spared(run, agreed, planned(run, policy, everything))


def spared(run: SmallRun, agreed: Pruning, again: Pruning) -> dict[str, str]:
    """Delete what was agreed on: of each why it was spared, if it was."""
    return {one.name: why for one, why in carry_out(run.rundir, agreed, again)}


class TestThePlan:
    def test_follows_the_policy_that_is_given(self, run: SmallRun) -> None:
        found = planned(run)
        assert doomed(found) == [f"step-00000{step:04d}" for step in (100, 200, 400, 500, 700, 800)]
        assert found.retained[0] == ("step-000001000", "keepLast")
        assert found.size == 6 * 264

    def test_without_everything_only_names_what_does_not_count(self, tmp_path: Path) -> None:
        run = messy(tmp_path)
        useless = [
            *("step-000000150.bad", "step-000000450", "step-000000600.stale", "step-000000700"),
            ".tmp-step-000000800-g000002-000009",
        ]
        found = planned(run)
        assert (doomed(found), [one.name for one in found.unneeded]) == (["step-000000100", "step-000000400"], useless)
        found = planned(run, everything=True)
        assert (doomed(found), found.unneeded) == (["step-000000100", "step-000000400", *useless], ())

    def test_spares_the_newest_the_one_resumed_from_the_final_one_and_what_is_read(self, tmp_path: Path) -> None:
        run = SmallRun(tmp_path / "run")
        run.begin(1)
        run.save(50)
        parent = run.save(100)
        final = run.save(200)
        run.begin(2, parent)
        run.save(150, generation=2)
        run.save(250, generation=2)
        run.save(300, generation=2)
        run.rundir.mark_done(final)
        with run.read("step-000000150"), run.read("step-000000200"):
            found = planned(run, CheckpointSpec(keep_last=1, keep_best=0), everything=True)
        assert doomed(found) == ["step-000000050", "step-000000250"]
        found = planned(run, CheckpointSpec(keep_last=1, keep_best=0), everything=True)
        assert doomed(found) == ["step-000000050", "step-000000150", "step-000000250"]

    def test_spares_what_may_belong_to_a_generation_whose_record_is_on_its_way(self, run: SmallRun) -> None:
        run.save(2000, generation=2)
        assert "step-000002000" not in doomed(planned(run, everything=True))

    def test_spares_what_is_read_also_where_it_does_not_count(self, tmp_path: Path) -> None:
        run = messy(tmp_path)
        assert "step-000000450" in doomed(planned(run, everything=True))
        with run.read("step-000000450", "export"):
            assert "step-000000450" not in doomed(planned(run, everything=True))

    def test_is_refused_where_nobody_can_tell_what_counts(self, run: SmallRun) -> None:
        (run.rundir.generations / "000001.json").write_text("{")
        with pytest.raises(UserError, match=r"nothing is deleted from .*000001\.json is damaged"):
            planned(run, everything=True)

    def test_is_refused_without_the_job(self, run: SmallRun) -> None:
        run.rundir.job_file.write_text("{}")
        with pytest.raises(UserError, match=r"nothing is deleted from .*job\.json is not a job"):
            planned(run)

    def test_is_told(self, tmp_path: Path) -> None:
        lines = [line.plain for line in description.plan(planned(messy(tmp_path)), 80)]
        assert lines[0].split() == ["TO", "DELETE", "SIZE", "WHY"]
        assert "  total  2 folders to delete, 528 B to be freed" in lines
        assert any("--all deletes it, too" in line for line in lines)


class TestCodeOfBefore:
    def pack(self, run: SmallRun, letter: str, hours: float = 2.0) -> str:
        """A pack that came so long ago; its digest."""
        digest = f"sha256:{letter * 64}"
        run.rundir.code.mkdir(exist_ok=True)
        run.rundir.pack(digest).write_bytes(b"packed")
        at = time.time() - 3600 * hours
        os.utime(run.rundir.pack(digest), (at, at))
        return digest

    def goes_on(self, run: SmallRun, digest: str, folder: str = "") -> None:
        """The job of the run, or of one that was moved aside in it, names this code."""
        rundir = RunDir(run.rundir.path / folder)
        rundir.path.mkdir(exist_ok=True)
        job = run.rundir.read_job()
        trainer = job.spec.trainer.model_copy(update={"code": digest})
        rundir.write_job(job.model_copy(update={"spec": job.spec.model_copy(update={"trainer": trainer})}))

    def there(self, run: SmallRun) -> str:
        """The letters of the packs that are there."""
        return "".join(path.name[0] for path in sorted(run.rundir.code.iterdir()))

    def test_is_deleted_with_everything_once_no_job_here_names_it(self, run: SmallRun) -> None:
        for letter, folder in (("b", "previous"), ("c", "attempt"), ("d", ".tmp-previous"), ("a", "")):
            self.goes_on(run, self.pack(run, letter), folder)
        self.pack(run, "e", hours=0.5)
        self.pack(run, "f")
        (run.rundir.code / "packages-0").mkdir()
        policy = CheckpointSpec(keep_last=100)
        assert [one.name for one in planned(run, policy).unneeded] == ["code/ffffffffffff…"]
        agreed = planned(run, policy, everything=True)
        assert (doomed(agreed), agreed.size) == (["code/ffffffffffff…"], 6)
        told = [line.plain for line in description.plan(agreed, 80)]
        assert "  total  1 pack of code to delete, 6 B to be freed" in told
        assert carried_out(run, agreed, policy, everything=True) == {"code/ffffffffffff…": ""}
        assert self.there(run) == "abcdep"

    @pytest.mark.parametrize("content", ["{", "[]", '{"spec": 1}'])
    def test_stays_where_a_job_cannot_be_read_that_may_name_it(self, run: SmallRun, content: str) -> None:
        self.pack(run, "f")
        (run.rundir.path / "previous").mkdir()
        (run.rundir.path / "previous" / "job.json").write_text(content)
        assert doomed(planned(run, CheckpointSpec(keep_last=100), everything=True)) == []

    def test_stays_if_the_run_goes_on_with_it_in_the_last_moment(self, run: SmallRun) -> None:
        earlier = self.pack(run, "f")
        self.goes_on(run, self.pack(run, "a"))
        agreed = again = planned(run, CheckpointSpec(keep_last=100), everything=True)
        self.goes_on(run, earlier)
        assert spared(run, agreed, again) == {"code/ffffffffffff…": "the run uses it"}
        run.rundir.job_file.unlink()
        assert spared(run, agreed, again) == {"code/ffffffffffff…": "the run uses it"}
        assert run.rundir.pack(earlier).read_bytes() == b"packed"
        assert self.there(run) == "af"
        run.rundir.pack(earlier).unlink()
        assert spared(run, agreed, again) == {"code/ffffffffffff…": "it is gone"}


class TestDeleting:
    def test_deletes_what_was_planned_and_nothing_else(self, run: SmallRun) -> None:
        agreed, before = planned(run), set(run.names())
        assert set(carried_out(run, agreed).values()) == {""}
        assert set(run.names()) == before - set(doomed(agreed))

    def test_deletes_notes_with_what_they_are_about(self, tmp_path: Path) -> None:
        run = messy(tmp_path)
        assert any(name.endswith(".why.json") for name in run.names())
        carried_out(run, planned(run, everything=True), everything=True)
        assert [name for name in run.names() if not name.startswith("step-")] == [".tmp-step-000000900-g000002-000010"]
        assert not any("." in name.removeprefix(".tmp") for name in run.names())

    def test_spares_what_is_read_since_it_was_planned(self, run: SmallRun) -> None:
        agreed = planned(run)
        with run.read("step-000000400"):
            spared = carried_out(run, agreed)
        assert spared["step-000000400"] == "it is needed, or gone, by now"
        assert "step-000000400" in run.names()

    def test_puts_back_what_somebody_began_to_read_in_the_last_moment(
        self, run: SmallRun, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        name = "step-000000100"
        plan, reading = planned(run), {name: ("evaluate by x",)}
        monkeypatch.setattr(RunDir, "readers", lambda rundir, **_: {} if rundir.checkpoint(name).exists() else reading)
        spared = carried_out(run, plan)
        assert spared["step-000000100"] == "it is being read now, or it was written again"
        assert run.rundir.manifest("step-000000100").step == 100
        assert "step-000000200" not in run.names()

    def test_puts_back_a_checkpoint_that_was_given_the_name_in_the_last_moment(
        self, run: SmallRun, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        real = os.utime

        def utime(path: Path) -> None:
            if path.name == "step-000000100":
                run.rundir.set_aside(path.name, ".stale")
                run.save(100, generation=7)
            real(path)

        agreed, again = planned(run), planned(run)
        monkeypatch.setattr(pruning.os, "utime", utime)
        assert spared(run, agreed, again)["step-000000100"] == "it is being read now, or it was written again"
        assert run.rundir.manifest("step-000000100").generation == 7

    def test_spares_a_name_that_belongs_to_another_checkpoint_since_it_was_planned(self, run: SmallRun) -> None:
        agreed, again = planned(run), planned(run)
        run.rundir.set_aside("step-000000100", ".stale")
        run.save(100, generation=7)
        assert spared(run, agreed, again)["step-000000100"] == "it has been replaced meanwhile"
        assert run.rundir.manifest("step-000000100").generation == 7

    def test_spares_a_sound_one_that_took_the_name_of_a_damaged_one(self, tmp_path: Path) -> None:
        run = messy(tmp_path)
        agreed, again = planned(run, everything=True), planned(run, everything=True)
        assert "step-000000700" in doomed(agreed)
        run.rundir.set_aside("step-000000700")
        run.save(700, generation=2)
        assert spared(run, agreed, again)["step-000000700"] == "it has been replaced meanwhile"
        assert run.rundir.manifest("step-000000700").step == 700

    def test_passes_over_what_retention_deleted_first(self, run: SmallRun) -> None:
        agreed = planned(run)
        carried_out(run, agreed)
        assert set(carried_out(run, agreed).values()) == {"it is needed, or gone, by now"}

    def test_a_folder_being_deleted_does_not_look_forgotten(
        self, run: SmallRun, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        for name in run.names():
            os.utime(run.rundir.checkpoint(name), (0, 0))
        ages = []
        monkeypatch.setattr(
            pruning.shutil, "rmtree", lambda path: ages.append(take_inventory(run.rundir).leftovers[-1].age < 3600)
        )
        carried_out(run, planned(run))
        assert ages
        assert all(ages)

    def test_a_disk_that_refuses_is_a_sentence(self, run: SmallRun, monkeypatch: pytest.MonkeyPatch) -> None:
        def refuse(path: Path) -> None:
            raise OSError(30, os.strerror(30), str(path))

        agreed, before = planned(run), run.names()
        monkeypatch.setattr(pruning.os, "utime", refuse)
        with pytest.raises(UserError, match="step-000000100 cannot be deleted: Read-only file system"):
            carried_out(run, agreed)
        assert run.names() == before

    def test_twice_in_a_row_changes_nothing_more(self, tmp_path: Path) -> None:
        run = messy(tmp_path)
        carried_out(run, planned(run, everything=True), everything=True)
        after = run.names()
        assert doomed(planned(run, everything=True)) == []
        assert run.names() == after
        assert all((run.rundir.checkpoint(name) / FILE).exists() for name in after if name.startswith("step"))


references = st.lists(st.integers(1, 60), unique=True, max_size=12).map(
    lambda steps: [
        CheckpointRef(name=f"step-{step:09d}", step=step, generation=1) for step in sorted(steps, reverse=True)
    ]
)


@settings(max_examples=200, deadline=None)
@given(
    references,
    st.integers(1, 4),
    st.integers(0, 3),
    st.sampled_from([None, 1, 5, 10]),
    st.sampled_from(["Latest", "Every"]),
    st.data(),
)
def test_what_has_a_reason_is_kept_and_what_has_none_is_not(
    newest_first: list[CheckpointRef], last: int, best: int, every: int | None, policy: str, data: st.DataObject
) -> None:
    names = [reference.name for reference in newest_first]
    some = st.sets(st.sampled_from(names)) if names else st.just(set())
    scores = {name: Rank(data.draw(st.floats(0, 1)), 0.5, 1, 1) for name in sorted(data.draw(some))}
    keepers = RetentionInputs(scores, names[-1] if names else None, data.draw(some))
    rules = CheckpointSpec(keep_last=last, keep_best=best, keep_every=every)
    evaluators = Evaluators.model_validate({"policy": policy})
    found = retention_reasons(newest_first, rules, evaluators, keepers)
    gone = checkpoints_to_delete(newest_first, rules, evaluators, keepers)
    assert list(found) == names
    assert gone == [name for name in reversed(names) if not found[name]]
    assert not set(names[:last]) & set(gone)
    assert sum("keepBest" in why for why in found.values()) == min(best, len(scores))
    assert all(("keepEvery" in found[one.name]) == bool(every and one.step % every == 0) for one in newest_first)
    assert not (set(gone) - set(scores) if policy == "Every" else set())
