"""What a report reads from a run directory, whole, unfinished and damaged."""

import fcntl
import json
import math
import random
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tandem.rundir import lineage as authority
from tandem.rundir.durable import replace_json
from tandem.rundir.layout import RunDir
from tandem.rundir.lineage import GenerationRecord
from tandem.rundir.ownership import LOCK
from tandem.rundir.provenance import START, EndEntry, chained, sha256
from tandem.rundir.training_log import counted_until
from tandem.wire.measures import Generation
from tandem.wire.status import CheckpointRef, Corruption, Troubles, phase_word
from tandem.wire.status import trouble_messages as told_of
from tandem_cli.report import clock, generations
from tandem_cli.report.figures import curves, pictures, processors
from tandem_cli.report.folder import NoRun
from tandem_cli.report.logs import busy_cores, natural, read_train_log
from tandem_cli.report.page import page
from tandem_cli.report.reading import read
from tandem_cli.report.run import RunData, Steps, Use
from tandem_cli.report.summary import summarize, time_by_phase
from tests.support.worlds.simulated_run import T0, make_run


@pytest.fixture(scope="module")
def broken_twice(tmp_path_factory: pytest.TempPathFactory) -> RunData:
    """A run of 600 steps that was broken after steps 230 and 410, with checkpoints every 50."""
    path = tmp_path_factory.mktemp("runs") / "broken"
    kills = {230: "WorkerFailed", 410: "MemberLost"}
    make_run(path, steps=600, kills=kills, sizes={1: 1, 2: 2}, gpus=True, evaluation_seconds=4.5)
    return read(path)


class TestARunThatWasRestarted:
    def test_every_step_counts_once_and_none_is_missing(self, broken_twice: RunData) -> None:
        assert broken_twice.model_steps.step.tolist() == list(range(1, 601))

    def test_of_a_step_that_was_done_twice_the_later_generation_counts(self, broken_twice: RunData) -> None:
        second = broken_twice.generations[1]
        assert second.opened_at is not None
        times = dict(zip(broken_twice.model_steps.step.tolist(), broken_twice.model_steps.time.tolist(), strict=True))
        assert times[200] < second.opened_at < times[201]

    def test_what_was_done_again_is_kept_apart(self, broken_twice: RunData) -> None:
        assert [steps.step.tolist() for steps in broken_twice.superseded] == [
            list(range(201, 231)),
            list(range(401, 411)),
        ]

    def test_generations_know_who_why_and_from_where(self, broken_twice: RunData) -> None:
        told = [(g.number, g.world_size, g.reason, g.resumed_step, g.last_step) for g in broken_twice.generations]
        assert told == [(1, 2, "Started", 0, 230), (2, 1, "WorkerFailed", 200, 410), (3, 2, "MemberLost", 400, 600)]
        assert broken_twice.generations[0].ended == "rank 1 of worker-1 ended with signal 9"
        assert broken_twice.generations[2].members == ("worker-0", "worker-1")

    def test_the_summary_counts_restarts_and_repeated_steps(self, broken_twice: RunData) -> None:
        summary = summarize(broken_twice, clock.make_clock(broken_twice.marks))
        assert (summary.steps, summary.restarts, summary.redone) == (600, 2, 40)
        assert summary.checkpoints == 12
        assert summary.evaluated + summary.skipped == 12
        assert 0.002 <= summary.stall_median <= 0.006
        assert summary.lag_seconds >= 1.0

    def test_the_time_of_restarts_is_told_apart_from_that_of_training(self, broken_twice: RunData) -> None:
        total = time_by_phase(broken_twice, clock.make_clock(broken_twice.marks))
        first, second, third = broken_twice.generations
        expected = 0.0
        for before, after in ((first, second), (second, third)):
            expected += after.first_step_at - before.last_step_at
        assert total["restart"] == pytest.approx(expected)
        assert 0.9 < total["compute"] / (total["compute"] + total["data"] + total["checkpoint"]) < 0.97

    def test_ranks_that_were_not_there_have_no_use(self, broken_twice: RunData) -> None:
        rank_1 = next(use for use in broken_twice.uses if (use.kind, use.name) == ("trainer", "1"))
        second = broken_twice.generations[1]
        during = (rank_1.time > second.first_step_at) & (rank_1.time < second.last_step_at)
        assert during.sum() > 5
        assert np.isnan(rank_1.busy[during]).all()
        assert np.nanmean(rank_1.busy) == pytest.approx(0.97, abs=0.02)

    def test_rows_are_trainers_then_gpus_then_evaluators(self, broken_twice: RunData) -> None:
        assert [(use.kind, use.name) for use in broken_twice.uses] == [
            *(("trainer", "0"), ("trainer", "1"), ("gpu", "0"), ("gpu", "1")),
            *(("evaluator", "evaluator-0-0"), ("evaluator", "evaluator-0-1")),
        ]

    def test_a_score_that_was_skipped_says_why(self, broken_twice: RunData) -> None:
        skipped = [c for c in broken_twice.checkpoints if c.skipped]
        assert skipped
        assert all(c.evaluation is None and c.skipped == "a newer checkpoint was there" for c in skipped)

    def test_only_the_last_checkpoints_are_still_on_the_disk(self, broken_twice: RunData) -> None:
        assert [c.step for c in broken_twice.checkpoints if c.on_disk] == [500, 550, 600]

    def test_the_result_is_told(self, broken_twice: RunData) -> None:
        assert (broken_twice.name, broken_twice.result) == ("digits", "Succeeded")
        assert broken_twice.faults == ()


class TestTheBestCheckpoint:
    def test_is_the_one_with_the_highest_accuracy(self, broken_twice: RunData) -> None:
        scores = [c.evaluation.metrics["accuracy"] for c in broken_twice.checkpoints if c.evaluation]
        assert broken_twice.best.evaluation.metrics["accuracy"] == max(scores)
        assert broken_twice.best.evaluation.confusion.shape == (10, 10)

    def test_is_of_equal_ones_the_one_with_the_lower_loss(self, tmp_path: Path) -> None:
        path = make_run(tmp_path, steps=100, every=20, evaluation_seconds=0.05)
        _score(path, accuracy=0.9, loss=0.2)
        _score(path, accuracy=0.9, loss=0.1, steps={60, 80})
        assert read(path).best.step == 60

    def test_is_not_what_best_json_says_against_the_evaluations(self, tmp_path: Path) -> None:
        path = make_run(tmp_path, steps=100, every=20, evaluation_seconds=0.05)
        _score(path, accuracy=0.1, steps={20})
        replace_json(path / "best.json", {"name": "step-000000020", "step": 20, "generation": 1})
        assert read(path).best.step != 20

    def test_has_a_finite_loss(self, tmp_path: Path) -> None:
        path = make_run(tmp_path, steps=100, every=20, evaluation_seconds=0.05)
        _score(path, accuracy=1.0, loss=None, steps={60})
        assert read(path).best.step != 60

    def test_is_never_one_that_a_restart_left_behind(self, tmp_path: Path) -> None:
        path = make_run(tmp_path, steps=100, every=20, evaluation_seconds=0.05)
        RunDir(path).record_generation(
            GenerationRecord(
                generation=2,
                resumed_from=CheckpointRef(name="step-000000040", step=40, generation=1),
                world_size=2,
                started_at=T0 + 50,
            )
        )
        run = read(path)
        assert run.best.step <= 40
        assert [c.counts for c in run.checkpoints] == [True, True, False, False, False]


def _score(path: Path, accuracy: float, loss: float | None = 0.1, steps: set[int] | None = None) -> None:
    for file in path.glob("evaluations/*/g000001.json"):
        data = json.loads(file.read_text())
        if steps is None or data["step"] in steps:
            data["metrics"] |= {"accuracy": accuracy, "loss": loss}
            file.write_text(json.dumps(data))


class TestARunThatDidNotEnd:
    def test_is_running_while_its_logs_grow(self, tmp_path: Path) -> None:
        path = make_run(tmp_path, steps=200, stop_after=120, end="open")
        last = read(path).ended_at
        run = read(path, now=lambda: last + 3)
        assert run.result == "Running"
        assert run.total_steps == 200
        assert run.model_steps.step[-1] == 120

    def test_is_stopped_when_they_have_been_silent(self, tmp_path: Path) -> None:
        path = make_run(tmp_path, steps=200, stop_after=120, end="open")
        run = read(path, now=lambda: T0 + 3600)
        assert run.result == "Stopped"
        assert "goes on from the last checkpoint" in run.message
        assert "no process of the run has logged anything since 20" in run.message
        assert "for 59 min" in run.message

    def test_that_was_killed_on_this_machine_is_stopped_at_once(self, tmp_path: Path) -> None:
        path = make_run(tmp_path, steps=200, stop_after=120, end="open")
        (path / LOCK).write_text("{}")
        last = read(path).ended_at
        assert read(path, now=lambda: last + 0.5).result == "Stopped"

    def test_is_running_while_its_lock_is_held_however_silent_it_is(self, tmp_path: Path) -> None:
        path = make_run(tmp_path, steps=200, stop_after=120, end="open")
        with (path / LOCK).open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            assert read(path, now=lambda: T0 + 3600).result == "Running"

    def test_that_was_stopped_in_good_order_says_so_at_once_and_runs_when_it_goes_on(self, tmp_path: Path) -> None:
        path = make_run(tmp_path, steps=200, stop_after=120, end="open")
        last = float(read(path).marks[-1])
        log = path / "log" / "coordinator.jsonl"
        with log.open("a") as file:
            file.write(json.dumps({"kind": "end", "time": last + 0.5}) + "\n")
        assert read(path, now=lambda: last + 1).result == "Stopped"
        with log.open("a") as file:
            file.write(json.dumps({"kind": "sample", "time": last + 5}) + "\n")
        assert read(path, now=lambda: last + 6).result == "Running"

    def test_tells_what_went_wrong_and_did_not_end_it(self, tmp_path: Path) -> None:
        path = make_run(tmp_path, steps=200)
        told = {"savesFailed": 24, "savesFailedInARow": 24, "saveMessage": "no space left", "linesLost": 1275}
        with (path / "log" / "coordinator.jsonl").open("a") as file:
            file.write(json.dumps({"kind": "troubles", "time": T0 + 20, **told}) + "\n")
        troubles = read(path).troubles
        assert (troubles.saves_failed, troubles.lines_lost) == (24, 1275)
        assert "the last 24 saves have failed: no space left" in [one.text for one in told_of(troubles)]

    def test_tells_each_message_that_the_coordinator_has_last_told(self, tmp_path: Path) -> None:
        path = make_run(tmp_path, steps=200)
        told = Troubles(samples_message="of 9, 2 are empty", upload_message="it is away", tracking_message="refused")
        with (path / "log" / "coordinator.jsonl").open("a") as file:
            file.write(json.dumps({"kind": "troubles", "time": T0 + 20, **told.dump()}) + "\n")
        assert list(told_of(read(path).troubles)) == list(told_of(told))

    def test_tells_the_wrong_numbers_of_all_logs_once_also_without_a_coordinator(self, tmp_path: Path) -> None:
        path = make_run(tmp_path, steps=20)

        def log(name: str, reason: str, message: str) -> None:
            with (path / "log" / name).open("a") as file:
                record = {"kind": "corruption", "time": T0 + 20, "reason": reason, "message": message}
                file.write(json.dumps(record) + "\n")

        log("train-g000001.jsonl", "RanksDiffer", "rank 1 (worker-1 on a) differs")
        log("train-g000001.jsonl", "RanksDiffer", "rank 2 (worker-2 on a) differs")
        log("evaluator-evaluator-0-0.jsonl", "ScoresDiffer", "it scored another")
        counted = [Corruption(reason="RanksDiffer", message="older"), Corruption(reason="OptimizerDiffers", count=2)]
        with (path / "log" / "coordinator.jsonl").open("a") as file:
            told = Troubles(corruptions=counted).dump()
            file.write(json.dumps({"kind": "troubles", "time": T0 + 20, **told}) + "\n")
        assert {one.reason: (one.count, one.message) for one in read(path).troubles.corruptions} == {
            "RanksDiffer": (2, "rank 2 (worker-2 on a) differs"),
            "ScoresDiffer": (1, "it scored another"),
            "OptimizerDiffers": (2, ""),
        }

    def test_that_failed_says_why(self, tmp_path: Path) -> None:
        run = read(make_run(tmp_path, steps=60, end="failed"))
        assert run.result == "Failed"
        assert run.message == "RestartBudgetSpent: 11 failures of training processes"

    def test_that_only_has_a_job_is_a_run_without_anything(self, tmp_path: Path) -> None:
        whole = make_run(tmp_path / "whole", steps=20)
        (tmp_path / "new").mkdir()
        shutil.copy(whole / "job.json", tmp_path / "new")
        run = read(tmp_path / "new")
        assert (run.name, len(run.model_steps), run.checkpoints, run.best) == ("digits", 0, (), None)


class TestDamage:
    def test_a_line_that_is_being_written_is_not_a_fault(self, tmp_path: Path) -> None:
        path = make_run(tmp_path, steps=60)
        with (path / "log" / "train-g000001.jsonl").open("ab") as log:
            log.write(b'{"kind": "step", "time": 17800')
        run = read(path)
        assert run.faults == ()
        assert len(run.model_steps) == 60

    def test_a_torn_line_in_the_middle_is_passed_over_and_named(self, tmp_path: Path) -> None:
        path = make_run(tmp_path, steps=60)
        log = path / "log" / "train-g000001.jsonl"
        lines = log.read_bytes().splitlines(keepends=True)
        torn = next(index for index, line in enumerate(lines) if b'"step": 30,' in line and b'"loss"' in line)
        lines[torn] = lines[torn][:25] + b"\n"
        log.write_bytes(b"".join(lines))
        run = read(path)
        assert 30 not in run.model_steps.step
        assert len(run.model_steps) == 59
        assert run.faults == ("log/train-g000001.jsonl has 1 line that is not a record; passed over",)

    def test_a_record_whose_entries_do_not_follow_is_named_and_its_end_is_there(self, tmp_path: Path) -> None:
        path = make_run(tmp_path, steps=20)
        assert read(path).provenance is None
        entries = [EndEntry(time=T0, generation=1, failed=False, reason="Done", message=text) for text in "abc"]
        lines = [chained(entries[0], 1, START)]
        for number, entry in enumerate(entries[1:], 2):
            lines.append(chained(entry, number, sha256(lines[-1])))
        record = RunDir(path).provenance
        record.write_bytes(b"".join(line + b"\n" for line in lines))
        run = read(path)
        assert run.provenance is not None
        assert (run.provenance.entries, run.provenance.head, run.faults) == (3, sha256(lines[-1]), ())
        axis = clock.make_clock(run.marks)
        html = page(run, summarize(run, axis), axis, [], "runs/digits", "0.1.0")
        assert f"has 3 entries, the last {run.provenance.head}: tandem prove verifies it" in html
        record.write_bytes(record.read_bytes().replace(b'"message":"a"', b'"message":"x"'))
        (fault,) = read(path).faults
        assert fault.startswith("the record of the run: entry 2 does not follow the one before")

    def test_losses_that_are_not_numbers_stay_so(self, tmp_path: Path) -> None:
        run = read(make_run(tmp_path, steps=60, nan_steps=frozenset({20, 21})))
        assert run.model_steps.step[np.isnan(run.model_steps.loss)].tolist() == [20, 21]

    def test_without_generation_records_the_logs_tell_which_steps_count(self, tmp_path: Path) -> None:
        path = make_run(tmp_path, steps=200, kills={130: "WorkerFailed"})
        whole = read(path)
        shutil.rmtree(path / "generations")
        bare = read(path)
        assert bare.model_steps.time.tolist() == whole.model_steps.time.tolist()
        assert [len(steps) for steps in bare.superseded] == [30]

    def test_a_checkpoint_that_was_set_aside_is_bad_and_says_why(self, tmp_path: Path) -> None:
        path = make_run(tmp_path, steps=200)
        RunDir(path).set_aside("step-000000150", why="weights.safetensors does not match its checksum")
        bad = [(c.step, c.bad) for c in read(path).checkpoints if c.bad]
        assert bad == [(150, "weights.safetensors does not match its checksum")]

    def test_a_broken_manifest_is_a_bad_checkpoint(self, tmp_path: Path) -> None:
        path = make_run(tmp_path, steps=200)
        (path / "checkpoints" / "step-000000200" / "manifest.json").write_text("{")
        bad = [(c.step, c.bad) for c in read(path).checkpoints if c.bad]
        assert bad == [(200, "the manifest of step-000000200 is not JSON")]

    def test_what_an_evaluator_could_not_read_is_bad(self, tmp_path: Path) -> None:
        path = make_run(tmp_path, steps=200)
        with (path / "log" / "evaluator-evaluator-0-0.jsonl").open("a") as log:
            line = {"kind": "bad", "time": T0 + 99, "checkpoint": "step-000000100", "why": "a flipped bit"}
            log.write(json.dumps(line) + "\n")
        assert [(c.step, c.bad) for c in read(path).checkpoints if c.bad] == [(100, "a flipped bit")]

    @pytest.mark.parametrize("seed", range(30))
    def test_any_loss_and_damage_of_files_leaves_something_to_report(self, tmp_path: Path, seed: int) -> None:
        path = make_run(tmp_path, steps=60, every=20, kills={50: "WorkerFailed"}, evaluation_seconds=0.3)
        chance = random.Random(seed)
        files = sorted(file for file in path.rglob("*") if file.is_file())
        for file in chance.sample(files, chance.choice([1, 3, len(files) // 2])):
            chance.choice(DAMAGES)(file, chance)
        (path / "generations").mkdir(exist_ok=True)
        run = read(path)
        ticks = clock.make_clock(run.marks)
        assert all(isinstance(picture.finding, str) for picture in pictures(run, ticks, summarize(run, ticks)))
        assert np.isfinite(ticks.axis(run.marks)).all()
        assert (np.diff(run.model_steps.step) > 0).all()


def _cut(file: Path, chance: random.Random) -> None:
    data = file.read_bytes()
    file.write_bytes(data[: chance.randrange(len(data) + 1)])


def _garble(file: Path, chance: random.Random) -> None:
    file.write_bytes(chance.randbytes(300))


def _thin(file: Path, chance: random.Random) -> None:
    file.write_bytes(b"".join(line for line in file.read_bytes().splitlines(keepends=True) if chance.random() < 0.6))


def _falsify(file: Path, chance: random.Random) -> None:
    lies = ["NaN", "-1", "null", "1e308", '"x"', "[]", "{}", "9" * 30, "Infinity", "true"]
    words = file.read_text().replace(": ", ":  ").split(" ")
    file.write_text(
        " ".join(chance.choice(lies) if word[:1].isdigit() and chance.random() < 0.1 else word for word in words)
    )


DAMAGES: list[Callable[[Path, random.Random], object]] = [
    lambda file, _: file.unlink(),
    lambda file, _: file.write_bytes(b""),
    *(_cut, _garble, _thin, _falsify),
]


class TestNoRun:
    def test_a_folder_that_is_not_there(self, tmp_path: Path) -> None:
        with pytest.raises(NoRun, match="does not exist"):
            read(tmp_path / "nothing")

    def test_an_empty_folder(self, tmp_path: Path) -> None:
        with pytest.raises(NoRun, match="is not a run directory"):
            read(tmp_path)

    def test_a_file(self, tmp_path: Path) -> None:
        file = tmp_path / "run.txt"
        file.write_text("")
        with pytest.raises(NoRun, match="is a file; a run is a folder"):
            read(file)


@st.composite
def histories(draw: st.DrawFn) -> list[GenerationRecord]:
    """Generations, each resumed from the beginning or from a checkpoint that counted when it began."""
    records: list[GenerationRecord] = []
    reached: dict[int, int] = {}
    for number in range(1, draw(st.integers(1, 8)) + 1):
        links = authority.chain(records)
        candidates: list[CheckpointRef | None] = [None]
        for generation, limit in links.items():
            parent = next(record.resumed_from for record in records if record.generation == generation)
            first = parent.step if parent else 0
            last = reached[generation] if limit is None else min(limit, reached[generation])
            candidates += [CheckpointRef(name="c", step=s, generation=generation) for s in range(first + 1, last + 1)]
        resumed = draw(st.sampled_from(candidates))
        records.append(GenerationRecord(generation=number, resumed_from=resumed, world_size=1, started_at=0.0))
        reached[number] = (resumed.step if resumed else 0) + draw(st.integers(0, 5))
    return records


@given(histories())
def test_the_steps_that_count_are_those_of_the_lineage(records: list[GenerationRecord]) -> None:
    links = authority.chain(records)
    began = {record.generation: record.resumed_from.step if record.resumed_from else 0 for record in records}
    bounds = counted_until(began)
    for generation, first in began.items():
        for step in range(first + 1, first + 8):
            reference = CheckpointRef(name="c", step=step, generation=generation)
            assert generations.counts(bounds, generation, step) == authority.counts(links, reference)


def test_a_generation_that_died_before_its_first_step_takes_no_step_away() -> None:
    steps = {
        1: Steps(np.arange(1, 31), np.arange(30.0), np.ones(30)),
        3: Steps(np.arange(21, 41), np.arange(20.0), np.ones(20)),
    }
    counted, lost = generations.resolve(steps, counted_until({1: 0, 2: 20, 3: 20}))
    assert counted.step.tolist() == list(range(1, 41))
    assert [part.step.tolist() for part in lost] == [list(range(21, 31))]


def test_what_else_was_logged_of_steps_goes_with_them_and_is_nan_where_it_was_not() -> None:
    steps = {
        1: Steps(np.arange(1, 4), np.arange(3.0), np.ones(3)),
        2: Steps(np.arange(3, 5), np.arange(2.0), np.ones(2), {"lr": np.array([0.5, 0.25])}),
    }
    counted, lost = generations.resolve(steps, counted_until({1: 0, 2: 2}))
    assert counted.step.tolist() == [1, 2, 3, 4]
    assert counted.measures["lr"].tolist() == pytest.approx([np.nan, np.nan, 0.5, 0.25], nan_ok=True)
    assert [part.measures for part in lost] == [{}]


def test_a_run_tells_learning_rates_norms_and_each_ranks_work_and_memory(tmp_path: Path) -> None:
    run = read(make_run(tmp_path / "run", steps=120, gpus=True))
    assert run.model_steps.measures["lr"][[49, 119]].tolist() == pytest.approx([5e-4, 1e-3])
    assert np.flatnonzero(np.isfinite(run.model_steps.measures["gradientNorm"]))[:2].tolist() == [4, 9]
    (chart,) = curves.optimization(run)
    rates, norms = (panel.curves[0].points for panel in chart.panels)
    assert (len(rates), len(norms)) == (120, 24)
    assert all(y is not None for _, y in norms), "a norm is measured now and then, which is no gap"
    assert [one.rank for one in run.busy] == [one.rank for one in run.memory] == ["0", "1"]
    assert np.nanmedian(run.busy[1].value) == pytest.approx(0.022, abs=0.003)
    assert np.nanmax(run.memory[1].value) == pytest.approx(6.1e9, rel=0.02)


def test_a_run_that_took_fewer_steps_than_announced_is_not_called_complete(tmp_path: Path) -> None:
    early = "stopped early after step 60 of 100: the loss has not fallen"
    path = make_run(tmp_path / "run", steps=60, every=20)
    replace_json(path / "DONE", {**json.loads((path / "DONE").read_text()), "stoppedEarly": early}, durable=False)
    run = read(path)
    assert (run.result, run.message) == ("Succeeded", early)
    assert phase_word(run.result, run.message) == "Stopped early"


def script_run(path: Path, *lines: str) -> RunData:
    """A run whose script has logged these lines; steps 1 to 4, and 3 to 6 by its second generation."""
    log = make_run(path, steps=60) / "log"
    for file in log.glob("train-g*.jsonl"):
        file.unlink()
    start = '{"kind": "start", "time": 5.0, "step": %d}'
    first = [start % 0, *(f'{{"kind": "step", "time": 5.0, "step": {n}, "loss": 0.5}}' for n in (1, 2, 3, 4)), *lines]
    (log / "train-g000001.jsonl").write_text("".join(f"{line}\n" for line in first))
    second = [start % 2, *(f'{{"kind": "step", "time": 6.0, "step": {n}, "samples": 8}}' for n in (3, 4, 5, 6))]
    second.append('{"kind": "values", "time": 6.0, "step": 6, "values": {"accuracy": 0.9}}')
    (log / "train-g000002.jsonl").write_text("".join(f"{line}\n" for line in second))
    for record in (path / "generations").iterdir():
        record.unlink()
    return read(path)


def values_line(step: int, values: str) -> str:
    return f'{{"kind": "values", "time": 5.0, "step": {step}, "values": {values}}}'


def test_tokens_a_second_follow_from_the_tokens_of_a_sample(tmp_path: Path) -> None:
    path = make_run(tmp_path / "run", steps=60)
    file = path / "log" / "train-g000001.jsonl"
    first, *rest = file.read_text().splitlines()
    told = {**json.loads(first), "tokensPerSample": 60.5, "learnedPerSample": 20}
    file.write_text("".join(f"{line}\n" for line in (json.dumps(told), *rest)))
    run = read(path)
    summary = summarize(run, clock.make_clock(run.marks))
    assert (summary.tokens, summary.learned_tokens) == (60.5 * summary.throughput, 20 * summary.throughput)
    other = read(make_run(tmp_path / "other", steps=60))
    assert summarize(other, clock.make_clock(other.marks)).tokens is None


def test_what_a_script_logs_beside_its_loss_stands_with_its_steps(tmp_path: Path) -> None:
    run = script_run(
        tmp_path / "run", values_line(1, '{"accuracy": 0.1, "reward": NaN}'), values_line(2, '{"reward": -2.5}')
    )
    assert run.model_steps.step.tolist() == [1, 2, 3, 4, 5, 6]
    nan = math.nan
    assert run.model_steps.measures["accuracy"].tolist() == pytest.approx([0.1, nan, nan, nan, nan, 0.9], nan_ok=True)
    assert run.model_steps.measures["reward"].tolist() == pytest.approx([nan, -2.5, nan, nan, nan, nan], nan_ok=True)
    assert run.model_steps.broken.tolist() == [False] * 6, "no loss was logged of the last steps, which is no NaN"
    panels = [panel for chart in curves.values(run) for panel in chart.panels]
    assert {panel.title: list(panel.curves[0].points) for panel in panels} == {
        "accuracy": [(1.0, 0.1), (6.0, 0.9)],
        "reward": [(2.0, -2.5)],
    }
    ticks = clock.make_clock(run.marks)
    found = {one.name: one.finding for one in pictures(run, ticks, summarize(run, ticks))}
    assert found["values"] == "accuracy went from 0.1000 to 0.9000. reward stayed at -2.500."
    assert "not finite" not in found["training"]


def test_names_of_values_are_bounded_whatever_a_log_holds(tmp_path: Path) -> None:
    lines = [values_line(1, f'{{"name{number}": 1.0, "no name{number}": 1.0}}') for number in range(100)]
    run = script_run(tmp_path / "run", *lines)
    assert len(run.model_steps.measures) <= 18
    assert len(read_train_log(tmp_path / "run/log/train-g000001.jsonl", 1, []).steps.measures) <= 18
    assert all(name.isidentifier() for name in run.model_steps.measures)


def test_a_loss_that_was_logged_as_nan_is_told(tmp_path: Path) -> None:
    run = script_run(tmp_path / "run", '{"kind": "step", "time": 5.0, "step": 2, "loss": NaN}')
    assert run.model_steps.broken.tolist() == [False, True, False, False, False, False]


@pytest.mark.parametrize(
    ("rates", "said"),
    [
        ([0.001, 0.001], "The learning rate stayed at 0.001."),
        ([0.0, 0.002, 0.001], "The learning rate went from 0.0000 to 0.001."),
        ([0.001, 0.002, 0.001], "The learning rate began and ended at 0.001, between 0.001 and 0.002."),
    ],
)
def test_a_learning_rate_that_stays_went_nowhere(tmp_path: Path, rates: list[float], said: str) -> None:
    run = read(make_run(tmp_path / "run", steps=120))
    count = len(rates)
    steps = Steps(np.arange(1, count + 1), np.arange(count) * 1.0, np.ones(count), {"lr": np.array(rates)})
    ticks = clock.make_clock(run.marks)
    found = pictures(replace(run, model_steps=steps), ticks, summarize(run, ticks))
    assert next(one.finding for one in found if one.name == "optimization") == said


class TestTheBarOfARank:
    """Samples come now and then: a bar reaches from a generation's first step to its last line all the same."""

    ONE = Generation(1, world_size=2, first_step_at=10.0, last_line_at=14.0)

    def bar(self, times: list[float], busy: list[float], *some: Generation, name: str = "0") -> list[list[float]]:
        """Where it is drawn, and how high."""
        use = processors.at_work(Use(name, "trainer", np.array(times), np.array(busy)), some or (self.ONE,))
        found: list[list[float]] = []
        for begin, end, value in zip(use.time, use.time[1:], use.busy[1:], strict=False):
            if np.isfinite(value) and end > begin:
                found.append([begin, end, value])
        return found

    def test_reaches_from_the_first_step_to_the_last_line_at_the_use_of_the_nearest_sample(self) -> None:
        bar = self.bar([9.5, 11.5, 12.5, 13.5, 14.5], [np.nan, 0.5, 1.0, 0.75, np.nan])
        assert bar == [[10.0, 11.5, 0.5], [11.5, 12.5, 1.0], [12.5, 13.5, 0.75], [13.5, 14.0, 0.75]]

    def test_has_no_hole_where_a_sample_is_missing(self) -> None:
        bar = self.bar([9.5, 11.0, 12.0, 13.0, 14.5], [np.nan, 0.5, np.nan, 1.0, np.nan])
        assert [(begin, end) for begin, end, _ in bar] == [(10.0, 11.0), (11.0, 12.0), (12.0, 13.0), (13.0, 14.0)]

    def test_keeps_what_was_measured_before_and_after(self) -> None:
        bar = self.bar([8.5, 9.5, 11.0, 14.5], [0.2, 0.3, 1.0, 0.1])
        assert bar == [[8.5, 9.5, 0.3], [9.5, 10.0, 1.0], [10.0, 11.0, 1.0], [11.0, 14.0, 0.1], [14.0, 14.5, 0.1]]

    def test_ends_where_a_generation_was_killed_and_begins_again_with_the_next(self) -> None:
        two = Generation(2, world_size=2, first_step_at=16.0, last_line_at=18.0)
        bar = self.bar([9.0, 11.0, 13.0, 15.0, 17.0], [np.nan, 1.0, 1.0, np.nan, 0.5], self.ONE, two)
        assert [(begin, end) for begin, end, _ in bar] == [
            (10.0, 11.0),
            (11.0, 13.0),
            (13.0, 14.0),
            (16.0, 17.0),
            (17.0, 18.0),
        ]

    def test_is_not_drawn_for_a_rank_that_was_not_in_the_group_or_was_never_heard(self) -> None:
        assert self.bar([9.0, 11.0], [np.nan, 1.0], name="2") == [[9.0, 11.0, 1.0]]
        assert self.bar([9.0, 11.0], [np.nan, np.nan]) == []

    def test_has_every_checkpoint_below_it(self, tmp_path: Path) -> None:
        run = read(make_run(tmp_path / "run", steps=60, every=20, step_seconds=0.02))
        use = processors.at_work(run.uses[0], run.generations)
        known = np.flatnonzero(np.isfinite(use.busy))
        begin, end = use.time[known[0] - 1], use.time[known[-1]]
        assert all(begin <= one.written_at <= end for one in run.checkpoints if one.written_at is not None)


class TestProcessorUse:
    def test_is_the_growth_of_the_cpu_clock(self) -> None:
        busy = busy_cores(np.array([0.0, 1.0, 3.0]), np.array([2.0, 2.5, 4.5]))
        assert np.isnan(busy[0])
        assert busy[1:].tolist() == [0.5, 1.0]

    def test_of_a_process_that_took_the_name_over_starts_again(self) -> None:
        assert busy_cores(np.array([0.0, 2.0]), np.array([50.0, 1.0]))[1] == 0.5

    def test_is_not_known_over_a_long_silence(self) -> None:
        assert np.isnan(busy_cores(np.array([0.0, 100.0]), np.array([1.0, 2.0]))[1])

    def test_rank_10_stands_after_rank_9(self) -> None:
        assert sorted(["10", "9", "evaluator-0-11", "evaluator-0-2"], key=natural) == [
            *("9", "10", "evaluator-0-2", "evaluator-0-11")
        ]
