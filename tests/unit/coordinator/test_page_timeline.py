"""A run as the live page knows it, from the logs alone."""

import json
from pathlib import Path

import pytest

from tandem.evaluation import Histogram
from tandem.rundir.layout import RunDir
from tandem.rundir.lineage import GenerationRecord
from tandem.wire.measures import outages
from tandem.wire.status import CheckpointRef
from tandem_coordinator.charts.chart import WIDE
from tandem_coordinator.page import pictures
from tandem_coordinator.page.timeline import Timeline
from tests.support.worlds.simulated_run import T0, add_histograms, make_run


def followed(path: Path) -> Timeline:
    timeline = Timeline(RunDir(path))
    assert timeline.follow(60.0, rest_factor=0.0)
    return timeline


def log(path: Path, *records: dict[str, object], name: str = "coordinator.jsonl") -> None:
    (path / "log").mkdir(parents=True, exist_ok=True)
    with (path / "log" / name).open("a") as file:
        file.writelines(json.dumps(timeline) + "\n" for timeline in records)


def formed(number: int, at: float, *members: str, reason: str = "Started") -> dict[str, object]:
    return {
        **{"kind": "generation", "time": at, "generation": number, "worldSize": len(members)},
        **{"members": members, "reason": reason, "detail": f"{reason} it was"},
    }


class TestTheWholeRun:
    def test_is_there_whenever_one_begins_to_look(self, tmp_path: Path) -> None:
        timeline = followed(make_run(tmp_path / "run", steps=400, kills={230: "WorkerFailed"}))
        assert timeline.loss.means()[0][0] == 1
        assert timeline.loss.last.x == 400
        assert [one.reason for one in timeline.generations.values()] == ["Started", "WorkerFailed"]
        assert timeline.generations[1].closed_at is not None
        assert timeline.generations[2].first_step_at is not None
        assert {"0", "1"} == timeline.use["trainer"].keys()
        assert [save.checkpoint.step for save in timeline.saves.values()][-1] == 400
        assert timeline.results
        assert timeline.share_read == 1.0

    def test_shows_each_step_once_and_what_was_done_again_apart(self, tmp_path: Path) -> None:
        timeline = followed(make_run(tmp_path / "run", steps=400, kills={230: "WorkerFailed"}))
        steps = [x for x, _ in timeline.loss.means()]
        assert steps == sorted(set(steps))
        assert [x for x, _ in timeline.redone[0]] == list(range(201, 231))

    def test_has_what_is_logged_of_each_step_and_of_each_rank(self, tmp_path: Path) -> None:
        timeline = followed(make_run(tmp_path / "run", steps=400, kills={230: "WorkerFailed"}, gpus=True))
        assert [x for x, _ in timeline.learning_rate.means()] == list(range(1, 401))
        assert [x for x, _ in timeline.gradient_norm.means()] == list(range(5, 401, 5)), "measured now and then"
        assert None not in [y for _, y in timeline.gradient_norm.means()]
        assert timeline.learning_rate.means()[49][1] == pytest.approx(5e-4)
        assert timeline.busy.keys() == timeline.memory.keys() == {"0", "1"}
        assert 10.0 <= (timeline.busy["0"].means()[-1][1] or timeline.busy["0"].means()[-2][1] or 0.0) <= 12.0
        assert timeline.memory["1"].means()[0][1] == pytest.approx(6.1, abs=0.1)
        alone = [y for _, y in timeline.rank_throughput.means() if y is not None]
        assert alone == [pytest.approx(64 / 0.04 / 2)] * len(alone)

    def test_grows_as_the_logs_do(self, tmp_path: Path) -> None:
        log(tmp_path, formed(1, T0, "worker-0"))
        timeline = followed(tmp_path)
        log(tmp_path, {"kind": "start", "time": T0, "step": 0}, name="train-g000001.jsonl")
        log(
            tmp_path,
            *({"kind": "step", "time": T0 + n, "step": n, "loss": 1.0} for n in (1, 2)),
            name="train-g000001.jsonl",
        )
        assert timeline.follow(10.0)
        assert [x for x, _ in timeline.loss.means()] == [1, 2]
        log(tmp_path, {"kind": "closed", "time": T0 + 3, "generation": 1})
        assert timeline.follow(10.0)
        assert timeline.generations[1].closed_at == T0 + 3

    def test_steps_that_end_when_their_hung_group_is_ended_do_not_shorten_the_outage(self, tmp_path: Path) -> None:
        hung = {"kind": "closed", "time": T0 + 30, "generation": 1, "reason": "Hung", "failedAt": T0 + 10.2}
        log(tmp_path, formed(1, T0, "worker-0"), hung, formed(2, T0 + 31, "worker-0"))
        for number, times in ((1, (9.0, 10.0, 30.1, 30.2)), (2, (33.0, 34.0))):
            steps = [{"kind": "step", "time": T0 + at, "step": 1 + place} for place, at in enumerate(times)]
            log(tmp_path, *steps, name=f"train-g{number:06}.jsonl")
        (outage,) = outages(followed(tmp_path).generations.values())
        assert (outage.begin, outage.end) == (T0 + 10.0, T0 + 33.0)

    def test_is_read_in_bites_so_that_heartbeats_have_their_turn(self, tmp_path: Path) -> None:
        lines = [{"kind": "step", "time": T0 + n, "step": n, "loss": 1.0} for n in range(20_000)]
        log(tmp_path, *lines, name="train-g000001.jsonl")
        timeline = Timeline(RunDir(tmp_path))
        assert not timeline.follow(0.0)
        assert 0.0 < timeline.share_read < 0.1
        timeline.hurry = True
        assert not timeline.follow(60.0)
        timeline.hurry = False
        assert timeline.follow(60.0, rest_factor=0.0)
        assert timeline.loss.last is not None
        assert len(timeline.loss) <= 1000

    def test_has_pauses_cut_out_of_its_time(self, tmp_path: Path) -> None:
        log(tmp_path, formed(1, T0, "a"))
        log(tmp_path, *({"kind": "sample", "time": T0 + n, "throughput": 5.0} for n in range(10)))
        log(tmp_path, formed(2, T0 + 36_000, "a"))
        timeline = followed(tmp_path)
        assert timeline.run_seconds(T0 + 36_000) == pytest.approx(9.0)
        assert timeline.run_seconds(T0 + 36_005) == pytest.approx(14.0)
        assert [seconds for _, seconds in timeline.pauses] == [pytest.approx(35_991.0)]

    def test_is_known_of_a_script_that_logs_nothing_by_what_the_coordinator_heard(self, tmp_path: Path) -> None:
        log(tmp_path, formed(1, T0, "a"))
        log(tmp_path, *({"kind": "sample", "time": T0 + n, "step": 10 * n, "loss": 1.0} for n in range(5)))
        log(tmp_path, {"kind": "sample", "time": T0 + 6, "step": 20, "loss": 3.0})
        assert followed(tmp_path).reported_loss.means() == [(0, 1.0), (10, 1.0), (20, 3.0)]

    def test_tells_which_checkpoints_count_after_a_restart(self, tmp_path: Path) -> None:
        rundir = RunDir(make_run(tmp_path / "run", steps=100, every=50))
        kept, lost = (CheckpointRef(name=f"step-{n:09d}", step=n, generation=1) for n in (50, 100))
        rundir.record_generation(GenerationRecord(generation=2, resumed_from=kept, world_size=1, started_at=T0))
        timeline = followed(rundir.path)
        assert timeline.counts(kept)
        assert not timeline.counts(lost)

    def test_has_the_histograms_of_the_best_checkpoint_and_of_the_newest_before(self, tmp_path: Path) -> None:
        path = make_run(tmp_path / "run", steps=60, every=20)
        add_histograms(path, {"errors": {"counts": [1, 2], "edges": [0, 1, 2]}, "damaged": {"counts": [1]}, "x": 3})
        (path / "best.json").unlink(missing_ok=True)
        timeline = followed(path)
        result, found = timeline.shown_histograms
        assert (result.checkpoint.step, found) == (60, {"errors": Histogram([1, 2], [0, 1, 2])})
        (path / "best.json").write_text('{"name": "step-000000040", "step": 40, "generation": 1}')
        assert timeline.follow(9.0)
        assert timeline.shown_histograms[0].checkpoint.step == 40
        assert "errors at step 40" in pictures.histograms(timeline, WIDE)

    def test_is_bounded_however_many_processes_and_generations_there_were(self, tmp_path: Path) -> None:
        log(tmp_path, *(formed(n, T0 + n, "a") for n in range(1, 500)))
        log(tmp_path, {"kind": "sample", "time": T0 + 600, "trainerCpu": {str(n): 1.0 for n in range(5000)}})
        timeline = followed(tmp_path)
        assert sorted(timeline.generations) == list(range(200, 500))
        assert len(timeline.use["trainer"]) == 32

    def test_has_the_newest_evaluations_of_very_many(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr("tandem_coordinator.page.timeline.MAX_FOLDERS", 5)
        path = make_run(tmp_path / "run", steps=500, every=50)
        timeline = Timeline(RunDir(path))
        timeline.follow(60.0, rest_factor=0.0)
        timeline.follow(60.0, rest_factor=0.0)
        assert sorted(result.checkpoint.step for result in timeline.results.values()) == [300, 350, 400, 450, 500]


class TestALogThatIsNotAsItShouldBe:
    def test_is_passed_over_line_by_line(self, tmp_path: Path) -> None:
        (tmp_path / "log").mkdir()
        garbage = b'{\n[]\n\xff\xfe\n{"kind": "generation", "time": NaN}\n{"kind": "closed", "time": 1}\n'
        (tmp_path / "log" / "coordinator.jsonl").write_bytes(
            garbage + b'{"kind": "generation", "time": 2.0, "generation": "x", "worldSize": 1}\n'
            b'{"kind": "sample", "time": 3.0, "trainerCpu": 5, "loss": "no"}\n' + b"[" * 5000 + b"\n"
        )
        log(tmp_path, formed(1, T0, "a"))
        (tmp_path / "log" / "train-g000001.jsonl").write_text(
            '{"kind": "step", "time": 1.0}\n{"kind": "start", "time": 1}\n'
        )
        assert followed(tmp_path).generations.keys() == {1}

    def test_is_waited_for_where_it_is_not_there(self, tmp_path: Path) -> None:
        timeline = Timeline(RunDir(tmp_path))
        assert timeline.follow(1.0)
        assert timeline.now == 0.0
