"""What `tandem checkpoints ls` and `show` see in a run directory, and which checkpoint a word means."""

import hashlib
import json
from pathlib import Path

import pytest
from rich.text import Text

from tandem.errors import UserError
from tandem.rundir.checkpoint import FILE
from tandem.rundir.durable import replace_json
from tandem.rundir.lineage import DatasetCommit, GenerationRecord, Origin, Rewind
from tandem_cli.checkpoints import description, listing
from tandem_cli.checkpoints.inventory import Entry, Inventory, take_inventory
from tandem_cli.checkpoints.selector import choose, sound
from tests.support.worlds.small_run import SmallRun, messy

WIDTHS = [20, 40, 60, 80, 100, 160, None]


@pytest.fixture
def run(tmp_path: Path) -> SmallRun:
    return SmallRun(tmp_path / "run")


def by_name(inventory: Inventory) -> dict[str, Entry]:
    return {entry.name.removeprefix("step-000000"): entry for entry in inventory.entries}


def text(lines: list[Text]) -> str:
    return "\n".join(line.plain for line in lines)


class TestWhatIsThere:
    def test_each_checkpoint_has_its_state_and_the_newest_comes_first(self, tmp_path: Path) -> None:
        inventory = take_inventory(messy(tmp_path).rundir)
        states = {name: entry.state for name, entry in by_name(inventory).items()}
        assert list(states.items()) == [
            ("700", "damaged"),
            ("600", "counts"),
            ("600.stale", "stale"),
            ("500", "counts"),
            ("450", "off"),
            ("400", "counts"),
            ("300", "counts"),
            ("200", "counts"),
            ("150.bad", "bad"),
            ("100", "counts"),
        ]
        assert inventory.faults == ()

    def test_what_does_not_count_says_why(self, tmp_path: Path) -> None:
        found = by_name(take_inventory(messy(tmp_path).rundir))
        assert found["700"].why == "the manifest of step-000000700 does not match its own digest"
        assert found["600.stale"].why == "superseded by generation 2"
        assert found["450"].why == "of generation 1, steps after 300 were redone"
        assert found["150.bad"].why == "weights.safetensors does not match its checksum at byte 0"

    def test_a_generation_that_nobody_went_on_from_is_off_the_lineage(self, run: SmallRun) -> None:
        run.begin(1)
        parent = run.save(100)
        run.begin(2, parent)
        run.save(200, generation=2)
        run.begin(3, parent)
        run.save(300, generation=9)
        found = by_name(take_inventory(run.rundir))
        assert (found["200"].state, found["200"].why) == ("off", "no later generation went on from generation 2")
        assert (found["300"].state, found["300"].why) == ("off", "generation 9 has no record")

    def test_a_rewound_checkpoint_does_not_count(self, run: SmallRun) -> None:
        run.begin(1)
        run.save(100)
        run.save(200)
        rewind = Rewind(number=1, generation=1, bad_step=180, resume_before=150, skip_from=140, skip_to=190)
        run.rundir.record_rewind(rewind)
        found = by_name(take_inventory(run.rundir))
        assert (found["200"].state, found["100"].state, found["100"].is_latest) == ("rewound", "counts", True)

    def test_a_run_without_checkpoints_is_told_as_such(self, run: SmallRun) -> None:
        assert text(listing.lines(take_inventory(run.rundir), 200)).startswith("  total  no checkpoints in ")

    def test_temporary_names_are_counted(self, tmp_path: Path) -> None:
        inventory = take_inventory(messy(tmp_path).rundir)
        assert [(left.size, left.age > 3600) for left in inventory.leftovers] == [(1000, True), (1000, False)]
        assert "2 temporary folders, 2.0 kB" in text(listing.lines(inventory, None))


class TestWhileTheRunGoesOn:
    def test_a_checkpoint_of_a_generation_that_begins_during_the_look_counts(
        self, run: SmallRun, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        run.begin(1)
        parent = run.save(100)
        real = run.rundir.checkpoint_names

        def after_a_restart() -> list[str]:
            run.begin(2, parent)
            run.save(200, generation=2)
            return real()

        monkeypatch.setattr(run.rundir, "checkpoint_names", after_a_restart)
        assert [entry.state for entry in take_inventory(run.rundir).entries] == ["counts", "counts"]


class TestWhyItIsKept:
    def test_the_rules_of_the_job_are_named(self, tmp_path: Path) -> None:
        run = messy(tmp_path)
        with run.read("step-000000100"):
            found = by_name(take_inventory(run.rundir))
        kept = {name: entry.keep_reasons for name, entry in found.items() if entry.state == "counts"}
        assert kept == {
            "600": ("keepLast", "keepEvery"),
            "500": ("keepLast",),
            "400": (),
            "300": ("keepEvery", "resumed from"),
            "200": ("keepBest",),
            "100": ("leased",),
        }
        assert found["100"].readers == ("evaluate by somebody",)
        assert by_name(take_inventory(run.rundir))["100"].readers == ()

    def test_where_every_one_is_to_be_evaluated_those_that_wait_are_kept(self, tmp_path: Path) -> None:
        run = SmallRun(tmp_path / "run", evaluators={"policy": "Every"}, keepLast=1)
        run.begin(1)
        run.save(100, accuracy=0.5)
        run.save(200)
        run.save(300, accuracy=0.6)
        found = by_name(take_inventory(run.rundir))
        assert [found[name].keep_reasons for name in ("100", "200", "300")] == [
            (),
            ("waits for evaluation",),
            ("keepLast", "keepBest"),
        ]


class TestTheBest:
    def test_the_earlier_of_equals_is_the_best(self, run: SmallRun) -> None:
        run.begin(1)
        for step, accuracy in ((100, 0.5), (200, 0.8), (300, 0.8)):
            run.save(step, accuracy=accuracy)
        assert [entry.step for entry in take_inventory(run.rundir).entries if entry.is_best] == [200]

    def test_of_equals_the_one_with_the_lower_loss_is_the_best_and_is_kept(self, tmp_path: Path) -> None:
        run = SmallRun(tmp_path / "run", keepLast=1, keepBest=1)
        run.begin(1)
        for step, loss in ((100, 0.3), (200, 0.2), (300, 0.4)):
            run.evaluate(run.save(step), 0.8, loss=loss)
        found = by_name(take_inventory(run.rundir))
        assert [entry.step for entry in found.values() if entry.is_best] == [200]
        assert found["200"].keep_reasons == ("keepBest",)

    def test_validation_data_decides_where_there_is_some(self, run: SmallRun) -> None:
        run.begin(1)
        for step, accuracy, held_out in ((100, 0.9, 0.6), (200, 0.7, 0.8)):
            run.evaluate(run.save(step), accuracy, validation={"metrics": {"accuracy": held_out, "loss": 1.0}})
        assert [entry.step for entry in take_inventory(run.rundir).entries if entry.is_best] == [200]

    def test_one_whose_loss_is_not_finite_is_not_the_best(self, run: SmallRun) -> None:
        run.begin(1)
        run.save(100, accuracy=0.5)
        run.evaluate(run.save(200), 0.9, loss=None)
        assert [entry.step for entry in take_inventory(run.rundir).entries if entry.is_best] == [100]

    def test_where_less_is_better_the_least_is_the_best(self, tmp_path: Path) -> None:
        run = SmallRun(tmp_path / "run", evaluators={"metric": "loss"})
        run.begin(1)
        run.evaluate(run.save(100), 0.5, loss=0.1)
        run.evaluate(run.save(200), 0.9, loss=0.2)
        assert [entry.step for entry in take_inventory(run.rundir).entries if entry.is_best] == [100]

    def test_a_best_one_that_is_gone_is_named(self, run: SmallRun) -> None:
        run.begin(1)
        run.save(100)
        replace_json(run.rundir.best_file, {"name": "step-000000050", "metric": "accuracy", "value": 0.9})
        inventory = take_inventory(run.rundir)
        assert "the best of the run, step-000000050, no longer exists" in text(listing.lines(inventory, None))
        with pytest.raises(UserError, match=r"the best checkpoint of .*, step-000000050, no longer exists"):
            choose(inventory, "best")


class TestWhatCannotBeRead:
    def test_a_damaged_generation_record_leaves_all_unknown_and_is_named(self, run: SmallRun) -> None:
        run.begin(1)
        run.save(100)
        (run.rundir.generations / "000001.json").write_text("{")
        inventory = take_inventory(run.rundir)
        assert [entry.state for entry in inventory.entries] == ["unknown"]
        assert "000001.json is damaged" in inventory.faults[0]
        assert "lineage unknown" in text(listing.lines(inventory, 80))

    def test_without_the_job_the_rest_is_told(self, run: SmallRun) -> None:
        run.begin(1)
        run.save(100, accuracy=0.7)
        run.rundir.job_file.unlink()
        inventory = take_inventory(run.rundir)
        assert inventory.faults == ("job.json is missing, so the job's retention policy is unknown",)
        assert by_name(inventory)["100"].is_best
        assert text(description.lines(inventory.entries[0], inventory, 80))

    def test_a_checkpoint_that_vanishes_while_it_is_listed_is_no_fault(
        self, run: SmallRun, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        run.begin(1)
        run.save(100)
        monkeypatch.setattr(run.rundir, "checkpoint_names", lambda: ["step-000000050", "step-000000100"])
        assert [entry.step for entry in take_inventory(run.rundir).entries] == [100]


class TestTheWordForIt:
    @pytest.mark.parametrize(
        ("word", "name"),
        [
            ("latest", "step-000000600"),
            ("best", "step-000000200"),
            ("400", "step-000000400"),
            ("step-000000400", "step-000000400"),
            ("step-000000150.bad", "step-000000150.bad"),
        ],
    )
    def test_means_a_checkpoint(self, tmp_path: Path, word: str, name: str) -> None:
        assert choose(take_inventory(messy(tmp_path).rundir), word).name == name

    def test_final_is_the_one_that_training_ended_with(self, run: SmallRun) -> None:
        run.begin(1)
        run.save(100)
        last = run.save(200)
        with pytest.raises(UserError, match="has no final checkpoint: training is not complete"):
            choose(take_inventory(run.rundir), "final")
        run.rundir.mark_done(last)
        assert choose(take_inventory(run.rundir), "final").step == 200

    @pytest.mark.parametrize(
        ("word", "hint"),
        [
            ("410", "has no checkpoint of step 410. The nearest: step-000000400, step-000000450"),
            ("150", "Did you mean step-000000150.bad?"),
            ("step-0000400", "Did you mean step-000000400?"),
            ("lastest", "Did you mean latest?"),
            ("zzz", "give a name, a step, or one of latest, best, final"),
            ("../../etc", "has no checkpoint ../../etc"),
        ],
    )
    def test_that_means_none_is_answered_with_what_is_near(self, tmp_path: Path, word: str, hint: str) -> None:
        with pytest.raises(UserError) as error:
            choose(take_inventory(messy(tmp_path).rundir), word)
        assert hint in str(error.value)
        assert "\n" not in str(error.value)

    def test_one_that_is_damaged_cannot_be_read_from(self, tmp_path: Path) -> None:
        inventory = take_inventory(messy(tmp_path).rundir)
        with pytest.raises(UserError, match="step-000000700 cannot be used: the manifest"):
            sound(inventory, "700")
        with pytest.raises(UserError, match=r"step-000000150\.bad was set aside: weights"):
            sound(inventory, "step-000000150.bad")


class TestTheTable:
    @pytest.mark.parametrize("width", WIDTHS)
    def test_fits_the_terminal_and_always_names_score_and_state(self, tmp_path: Path, width: int | None) -> None:
        inventory = take_inventory(messy(tmp_path).rundir)
        lines = [line.plain for line in listing.lines(inventory, width)]
        if width is not None and width >= 60:
            assert max(len(line) for line in lines) <= width
        assert {"NAME", "ACCURACY", "STATE"} <= set(lines[0].split())
        for entry in inventory.entries:
            assert any(entry.name in line.split() for line in lines)

    def test_is_one_line_for_each_where_there_is_no_terminal(self, tmp_path: Path) -> None:
        lines = [line.plain for line in listing.lines(take_inventory(messy(tmp_path).rundir), None)]
        assert len(lines) == 1 + 10 + 1
        assert "\u00a0" not in "".join(lines)

    def test_has_no_control_characters_of_foreign_files(self, run: SmallRun) -> None:
        run.begin(1)
        run.rundir.set_aside(run.save(100).name, why="\x1b[2J\nbad")
        inventory = take_inventory(run.rundir)
        shown = [line.plain for line in listing.lines(inventory, None)]
        shown += [line.plain for line in description.lines(inventory.entries[0], inventory, None)]
        assert not any("\x1b" in line or "\n" in line for line in shown)

    def test_a_clock_that_is_behind_gives_no_age(self, run: SmallRun) -> None:
        run.begin(1)
        run.save(100)
        inventory = take_inventory(run.rundir)
        (entry,) = inventory.entries
        assert listing.age(entry, inventory.now) != "–"
        assert listing.age(entry, inventory.now - 7200) == "–"

    def test_has_the_intervals_and_says_with_how_many_the_best_is_tied(self, run: SmallRun) -> None:
        run.begin(1)
        for step, accuracy in ((100, 0.5), (200, 0.89), (300, 0.9)):
            interval = [accuracy - 0.03, accuracy + 0.03]
            run.evaluate(run.save(step), accuracy, intervals={"accuracy": interval})
        inventory = take_inventory(run.rundir)
        told = text(listing.lines(inventory, None))
        assert "95 % INTERVAL" in told
        assert "90.00 %*  87.00 % to 93.00 %" in told
        assert "step-000000300 is tied with 1 other" in told
        best = next(one for one in listing.as_json(inventory)["checkpoints"] if one["best"])
        assert best["intervals"] == {"accuracy": [0.87, 0.93]}
        assert "accuracy 90.00 % (87.00 % to 93.00 %), loss" in text(
            description.lines(choose(inventory, "300"), inventory, None)
        )

    def test_the_same_for_programs_is_json(self, tmp_path: Path) -> None:
        found = json.loads(json.dumps(listing.as_json(take_inventory(messy(tmp_path).rundir))))
        best = next(one for one in found["checkpoints"] if one["best"])
        assert (best["name"], best["score"], best["state"]) == ("step-000000200", 0.9, "counts")
        assert found["bytes"] == sum(one["bytes"] for one in found["checkpoints"])


class TestTheStory:
    def test_tells_position_lineage_scores_and_files(self, tmp_path: Path) -> None:
        inventory = take_inventory(messy(tmp_path).rundir)
        told = text(description.lines(choose(inventory, "400"), inventory, None))
        assert "4 epochs complete; order of seed 0" in told
        assert "step 400 by generation 2 with 2 ranks, from step-000000300 of generation 1" in told
        assert "step 300 by generation 1 with 2 ranks, from the beginning" in told
        assert "accuracy 85.00 %, loss 0.5000, macro F1 85.00 % over 20 samples" in told
        assert "nothing: the next save deletes it" in told
        assert "weights.safetensors" in told
        assert "tandem 0.1.0" in told

    def test_tells_the_score_on_validation_data_by_which_the_best_is_chosen(self, run: SmallRun) -> None:
        run.begin(1)
        for step, accuracy, held_out in ((100, 0.9, 0.6), (200, 0.7, 0.8)):
            run.evaluate(run.save(step), accuracy, validation={"metrics": {"accuracy": held_out, "loss": 1.0}})
        run.save(300, accuracy=0.5)
        inventory = take_inventory(run.rundir)
        told = text(description.lines(choose(inventory, "200"), inventory, None))
        assert "accuracy 70.00 %, loss 0.5000, macro F1 70.00 % over 20 samples; the best accuracy there is" in told
        assert "validation   accuracy 80.00 %, loss 1.000, by which the best is chosen" in told
        assert "validation" not in text(description.lines(choose(inventory, "300"), inventory, None))
        shown = {one["step"]: one["validation"] for one in listing.as_json(inventory)["checkpoints"]}
        assert shown == {100: {"accuracy": 0.6, "loss": 1.0}, 200: {"accuracy": 0.8, "loss": 1.0}, 300: None}

    def test_the_lineage_tells_where_the_weights_of_the_beginning_come_from(self, run: SmallRun) -> None:
        reference = run.save(100)
        for origin, told in (
            (
                Origin(path="/runs/first/checkpoints/step-000000007", job="first", checkpoint=reference),
                "step 100 of first",
            ),
            (Origin(path="/data/w.pt"), "from the weights of /data/w.pt"),
        ):
            record = GenerationRecord(generation=1, origin=origin, world_size=2, started_at=1.0)
            assert told in description.lineage(run.rundir.manifest(reference.name), [record])[0]

    def test_the_lineage_tells_the_commits_of_data_sets_where_they_are_read_first(self, run: SmallRun) -> None:
        reference = run.save(100)
        run.begin(2, reference)
        later = run.save(200, 2)
        talk = DatasetCommit(id="org/talk", commit="1" * 40)
        many = [DatasetCommit(id=f"org/part-{number}", revision="v1", commit="2" * 40) for number in range(9)]
        first = GenerationRecord(generation=1, world_size=2, started_at=1.0, datasets=[talk])
        records = [first, first.model_copy(update={"generation": 2, "resumed_from": reference})]
        told = description.lineage(run.rundir.manifest(later.name), records)
        assert told == [
            "step 200 by generation 2 with 2 ranks, from step-000000100 of generation 1",
            f"step 100 by generation 1 with 2 ranks, from the beginning; data of org/talk at commit {'1' * 40}",
        ]
        other = records[1].model_copy(update={"datasets": [talk, *many]})
        (changed, _) = description.lineage(run.rundir.manifest(later.name), [first, other])
        assert f"; data of org/part-0 at commit {'2' * 40}, " in changed
        assert changed.endswith(", 1 more")

    def test_a_lost_record_ends_the_lineage_where_it_is_lost(self, tmp_path: Path) -> None:
        run = messy(tmp_path)
        (run.rundir.generations / "000001.json").unlink()
        inventory = take_inventory(run.rundir)
        told = text(description.lines(choose(inventory, "400"), inventory, None))
        assert "step 300 by generation 1; its record is missing" in told

    def test_a_long_lineage_is_told_by_its_ends(self, run: SmallRun) -> None:
        run.begin(1)
        parent = run.save(1)
        for generation in range(2, 41):
            run.begin(generation, parent)
            parent = run.save(generation, generation=generation)
        inventory = take_inventory(run.rundir)
        told = text(description.lines(choose(inventory, "latest"), inventory, None))
        assert "… 28 generations more …" in told
        assert "step 1 by generation 1 with 2 ranks, from the beginning" in told
        assert len(description.lineage(sound(inventory, "latest")[1], inventory.records)) == 40

    def test_every_checkpoint_can_be_shown_in_every_width(self, tmp_path: Path) -> None:
        inventory = take_inventory(messy(tmp_path).rundir)
        for entry in inventory.entries:
            for width in WIDTHS:
                assert entry.name in text(description.lines(entry, inventory, width))
            json.dumps(description.as_json(entry, inventory))

    def test_a_format_of_another_version_is_called_so(self, run: SmallRun) -> None:
        run.begin(1)
        run.save(100)
        path = run.rundir.checkpoint("step-000000100") / FILE
        body = json.loads(path.read_text()) | {"format": 1}
        del body["digest"]
        digest = hashlib.sha256(json.dumps(body, sort_keys=True, separators=(",", ":")).encode()).hexdigest()
        path.write_text(json.dumps(body | {"digest": digest}))
        (entry,) = take_inventory(run.rundir).entries
        assert (entry.state, entry.why) == (
            "unreadable",
            "step-000000100 is of format 1, and this version reads formats 3 to 4",
        )
