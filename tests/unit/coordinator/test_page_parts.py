"""What the page says: everything that matters, nothing that is dangerous, and never too much."""

import json
import re
from html.parser import HTMLParser
from pathlib import Path

import pytest

from tandem.rundir.durable import replace_json
from tandem.rundir.layout import RunDir
from tandem.wire.queue_view import QueueView
from tandem.wire.status import (
    CheckpointRef,
    Event,
    GenerationView,
    Members,
    MemberView,
    Progress,
    RankView,
    Score,
    Snapshot,
    Status,
    Straggler,
)
from tandem_coordinator.charts.chart import NARROW, WIDE
from tandem_coordinator.page import parts
from tandem_coordinator.page.parts import Glance
from tandem_coordinator.page.timeline import Timeline
from tests.support.worlds.simulated_run import T0, add_base, make_run

EVIL = '"><script>alert(1)</script><img src=x onerror=alert(2)>'


class Elements(HTMLParser):
    """Every element and attribute that a browser would find."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.names: set[str] = set()
        self.attributes: set[str] = set()
        self.words = ""
        self.feed(html)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.names.add(tag)
        self.attributes |= {name for name, _ in attrs}

    def handle_data(self, data: str) -> None:
        self.words += data + " "


QUEUE = QueueView.parse(
    {
        **{"name": "gpus", "integration": "Workload", "position": 2},
        "missing": [{"resource": "nvidia.com/gpu", "flavor": EVIL, "amount": 1.0}],
        "holders": [{"kind": "Job", "name": EVIL, "amount": 3.0}],
    }
)


def snapshot(name: str = "digits", text: str = "the job starts", **status: object) -> Snapshot:
    told = {
        **{"phase": "Running", "generation": 2, "restarts": 1, "loss": 0.25, "throughput": 1234.0, "world_size": 2},
        **{"workers": Members(desired=3, ready=2), "message": text if text != "the job starts" else None},
        **{"progress": Progress(step=400, total_steps=1000, percent=40.0, epoch=2.5, remaining_seconds=90.0)},
        **{"best_checkpoint": Score(name="step-000000200", step=200, metric="accuracy", value=0.9)},
        **{"latest_checkpoint": CheckpointRef(name="step-000000400", step=400, generation=2)},
    }
    ranks = [RankView(rank=0, step=400, cpu=0.9)]
    return Snapshot(
        job=name,
        time=T0,
        status=Status(**{**told, **status}),  # type: ignore[arg-type]
        members=[MemberView(replica=name, address=name, state="running", silent_seconds=0.1, ranks=ranks)],
        generations=[
            GenerationView(generation=2, world_size=2, members=[name], opened_at=T0, reason="MemberLost", detail=text)
        ],
        events=[Event(at=T0, kind="warning", text=text)],
    )


def everything(glance: Glance, timeline: Timeline | None) -> str:
    said = parts.texts(glance, timeline)
    if timeline is not None:
        said |= parts.charts(glance, timeline, WIDE) | parts.charts(glance, timeline, NARROW)
    return "\n".join(said.values())


@pytest.fixture(scope="module")
def timeline(tmp_path_factory: pytest.TempPathFactory) -> Timeline:
    path = make_run(tmp_path_factory.mktemp("run") / "run", steps=400, kills={230: "WorkerFailed"})
    found = Timeline(RunDir(path))
    found.follow(60.0, rest_factor=0.0)
    return found


class TestThePage:
    def test_says_how_it_gets_on(self, timeline: Timeline) -> None:
        said = Elements(everything(Glance(snapshot(), 1), timeline)).words.replace("\u00a0", " ")
        for words in (
            *("digits", "Running", "step 400 of 1,000", "epoch 2.5", "about 1 min 30 s left", "0.2500", "1,234"),
            *(
                "2 of 3",
                "world size 2",
                "1 restart",
                "90.00 %",
                "at step 200",
                "step 400",
                "member lost: the job starts",
            ),
            *("Training loss", "Test accuracy", "Throughput (samples/s)", "World size (ranks)", "rank 0", "rank 1"),
            *("worker failed", "evaluated"),
        ):
            assert words in said, words

    def test_says_why_a_job_waits_in_its_queue(self, timeline: Timeline) -> None:
        head = parts.texts(Glance(snapshot(queue=QUEUE), 1), timeline)["head"]
        assert '<p class="note">queue: place 2 in gpus</p>' in head
        assert "in use by: Job" in head
        assert "queue" not in parts.texts(Glance(snapshot(), 1), timeline)["head"]

    def test_says_how_many_tokens_a_second_where_samples_are_text(self, tmp_path: Path) -> None:
        path = make_run(tmp_path / "run", steps=20)
        (log,) = RunDir(path).training_logs().values()
        for tokens, words in ((None, "samples a second"), (64.5, "samples a second · 79,593 tokens")):
            lines = [json.loads(line) for line in log.read_text().splitlines()]
            start = [line | {"tokensPerSample": tokens} if line["kind"] == "start" else line for line in lines]
            log.write_text("".join(f"{json.dumps(line)}\n" for line in start))
            timeline = Timeline(RunDir(path))
            timeline.follow(60.0, rest_factor=0.0)
            said = Elements(parts.texts(Glance(snapshot(throughput=1234.0), 1), timeline)["tiles"]).words
            assert f"Throughput 1,234 {words} Workers" in " ".join(said.split())

    def test_names_the_metric_of_the_job_before_anything_is_scored(self, tmp_path: Path) -> None:
        path = make_run(tmp_path / "run", steps=40, every=20, evaluators=0)
        job = json.loads((path / "job.json").read_text())
        job["spec"] |= {"trainer": {"task": "causal-lm"}, "evaluators": {"metric": "perplexity"}}
        (path / "job.json").write_text(json.dumps(job))
        timeline = Timeline(RunDir(path))
        timeline.follow(60.0, rest_factor=0.0)
        unscored = snapshot(best_checkpoint=None, latest_evaluation=None)
        table = Elements(parts.texts(Glance(unscored, 1), timeline)["checkpoints"]).words
        assert "perplexity" in table
        assert "Accuracy" not in table

    def test_says_by_which_score_on_validation_data_the_best_was_chosen(self, tmp_path: Path) -> None:
        timeline = Timeline(RunDir(make_run(tmp_path / "run", steps=100, every=50, holds_out=True)))
        timeline.follow(60.0, rest_factor=0.0)
        best = Score(name="step-000000050", step=50, metric="accuracy", value=0.9)
        said = parts.texts(Glance(snapshot(best_checkpoint=best), 1), timeline)
        assert "at step 50 · 70.00 % on validation data" in Elements(said["tiles"]).words
        table = " ".join(Elements(said["checkpoints"]).words.split())
        assert "Accuracy Validation Loss" in table
        assert re.search(r"\d % 50\.00 % \d", table), "of the last one, too"

    def test_has_the_intervals_and_marks_what_was_better_than_all_before(self, tmp_path: Path) -> None:
        path = make_run(tmp_path / "run", steps=150, every=50)
        for step, value in ((50, 0.5), (100, 0.9), (150, 0.91)):
            (file,) = (path / "evaluations" / f"step-{step:09d}").glob("g??????.json")
            intervals = {"accuracy": [value - 0.03, value + 0.03]}
            scores = {"metrics": {"accuracy": value, "loss": 1.0}, "intervals": intervals}
            file.write_text(json.dumps(json.loads(file.read_text()) | scores))
        timeline = Timeline(RunDir(path))
        timeline.follow(60.0, rest_factor=0.0)
        best = Score(name="step-000000150", step=150, metric="accuracy", value=0.91, low=0.88, high=0.94, tied=1)
        told = parts.texts(Glance(snapshot(best_checkpoint=best), 1), timeline)
        assert "at step 150 · 88.00 % to 94.00 % · tied with 1 other" in Elements(told["tiles"]).words
        table = " ".join(Elements(told["checkpoints"]).words.split())
        assert "Accuracy 95 % interval Loss" in table
        assert "90.00 % 87.00 % to 93.00 %" in table
        assert table.count("better than all before") == 1

    def test_without_validation_data_says_nothing_of_it(self, timeline: Timeline) -> None:
        assert "alidation" not in Elements(everything(Glance(snapshot(), 1), timeline)).words

    def test_has_a_chart_of_what_is_logged_and_none_of_what_is_not(self, tmp_path: Path) -> None:
        path = make_run(tmp_path / "run", steps=60, gpus=True)
        glance = Glance(snapshot(), 1)
        timeline = Timeline(RunDir(path))
        timeline.follow(60.0, rest_factor=0.0)
        drawn = parts.charts(glance, timeline, WIDE)
        assert "Learning rate" in drawn["optimization"]
        assert "Gradient norm" in drawn["optimization"]
        for title in ("Throughput per rank (samples/s)", "Own work in a step (ms)", "GPU memory (GB)"):
            assert title in drawn["ranks"]
        for file in path.glob("log/*.jsonl"):
            file.write_text(
                re.sub(r'"(lr|gradientNorm|busySeconds|gpuMemory|throughput)":', '"not":', file.read_text())
            )
        timeline = Timeline(RunDir(path))
        timeline.follow(60.0, rest_factor=0.0)
        drawn = parts.charts(glance, timeline, WIDE)
        assert (drawn["optimization"], drawn["ranks"]) == ("", "")

    def test_has_a_chart_of_what_a_script_logs_beside_its_loss(self, tmp_path: Path) -> None:
        path = make_run(tmp_path / "run", steps=60)
        with (path / "log/train-g000001.jsonl").open("a") as log:
            for step, value in ((20, "3.5"), (40, "NaN"), (60, "2.5")):
                values = f'{{"perplexity": {value}, "<b>": 1.0}}'
                print(f'{{"kind": "values", "time": 1.0, "step": {step}, "values": {values}}}', file=log)
        timeline = Timeline(RunDir(path))
        timeline.follow(60.0, rest_factor=0.0)
        drawn = parts.charts(Glance(snapshot(), 1), timeline, WIDE)
        assert "perplexity" in drawn["values"]
        assert "b>" not in Elements(drawn["values"]).words
        assert timeline.values["perplexity"].means() == [(20.0, 3.5), (60.0, 2.5)]

    def test_a_step_without_a_loss_is_not_one_whose_loss_is_not_finite(self, tmp_path: Path) -> None:
        path = make_run(tmp_path / "run", steps=60)
        with (path / "log/train-g000001.jsonl").open("a") as log:
            print('{"kind": "step", "time": 1.0, "step": 61}', file=log)
            print('{"kind": "step", "time": 1.0, "step": 62, "loss": NaN}', file=log)
        timeline = Timeline(RunDir(path))
        timeline.follow(60.0, rest_factor=0.0)
        assert list(timeline.not_finite) == [62]

    def test_names_a_straggler_and_who_is_silent(self, timeline: Timeline) -> None:
        told = snapshot(stragglers=[Straggler(rank=1, replica="digits", ratio=1.62)])
        told = told.model_copy(update={"members": [told.members[0].model_copy(update={"silent_seconds": 7.0})]})
        said = Elements(everything(Glance(told, 1), timeline)).words
        assert "1.6 times as slow as the others" in said
        assert "1.6× slow" in said
        assert "7 s" in said

    def test_before_anything_has_happened_says_so(self, tmp_path: Path) -> None:
        empty = Glance(Snapshot(job="new", time=T0, status=Status()), 0)
        for timeline in (None, Timeline(RunDir(tmp_path))):
            said = Elements(everything(empty, timeline)).words
            assert "No worker has come yet." in said
            assert "Pending" in said

    def test_of_a_script_that_logs_nothing_has_no_step_and_says_when_its_checkpoints_are_listed(
        self, tmp_path: Path
    ) -> None:
        """Its files are counted, so "none was written" would contradict the tile."""
        told = snapshot(progress=None, best_checkpoint=None, latest_evaluation=None)
        ranks = [rank.model_copy(update={"step": 0}) for rank in told.members[0].ranks]
        told = told.model_copy(update={"members": [told.members[0].model_copy(update={"ranks": ranks})]})
        said = parts.texts(Glance(told, 1), Timeline(RunDir(tmp_path)))
        assert "step 400" in said["tiles"]
        assert "once it has been evaluated" in said["checkpoints"]
        # Its rank, its step, and that it is not silent.
        assert "0 – –" in " ".join(Elements(said["members"]).words.split())

    def test_after_the_end_does_not_speak_of_workers_to_come(self, timeline: Timeline) -> None:
        told = snapshot(phase="Succeeded").model_copy(update={"members": []})
        assert "No worker is here now." in parts.texts(Glance(told, 0), timeline)["members"]

    def test_tells_that_the_run_directory_cannot_be_read(self) -> None:
        assert "Stale file handle" in parts.texts(Glance(snapshot(), 1), None, "Stale file handle")["note"]

    def test_only_the_newest_generation_goes_on(self, timeline: Timeline) -> None:
        """A coordinator that was started again does not know the ends of earlier ones; the log may, or may not."""
        views = [
            GenerationView(generation=n, world_size=1, members=["a"], opened_at=T0 + n, reason="Started")
            for n in (1, 2)
        ]
        told = snapshot().model_copy(update={"generations": views})
        for known, lasted in ((timeline, r"\d s"), (None, "–")):
            said = parts.texts(Glance(told, 1), known)["generations"]
            second, first = re.findall(r"<tr[^>]*>.*?</tr>", said.partition("</thead>")[2] or said)[-2:]
            assert "goes on" in second
            assert re.search(lasted, Elements(first).words), first
            assert "goes on" not in first
            assert "best" not in first

    def test_has_a_bounded_number_of_rows_and_names_what_it_leaves_out(self, timeline: Timeline) -> None:
        views = [
            GenerationView(generation=n, world_size=2, members=["a"] * 5000, opened_at=T0, reason="MemberLost")
            for n in range(1, 101)
        ]
        member = snapshot().members[0]
        told = snapshot().model_copy(update={"generations": views, "members": [member] * 50})
        said = parts.texts(Glance(told, 10_000), timeline)
        assert said["generations"].count("<tr") == 31
        assert "and 4994 more" in said["generations"]
        assert "And 9,950 more" in said["members"]
        assert sum(len(part) for part in said.values()) < 64_000


class TestWhatARunSays:
    def test_never_becomes_a_part_of_the_page(self, tmp_path: Path) -> None:
        path = make_run(tmp_path / "run", steps=100, kills={60: EVIL})
        for file in path.glob("log/coordinator.jsonl"):
            for line in (
                {"kind": "event", "time": T0 + 1, "level": EVIL, "text": EVIL},
                {"kind": "generation", "time": T0 + 50, "generation": 9, "worldSize": 1, "members": [EVIL],
                 "reason": EVIL, "detail": EVIL},
                {"kind": "sample", "time": T0 + 51, "trainerCpu": {EVIL: 1.0}, "evaluatorCpu": {EVIL: 1.0},
                 "busySeconds": {EVIL: 1.0}, "gpuMemory": {EVIL: 1}},
            ):  # fmt: skip
                with file.open("a") as log:
                    log.write(json.dumps(line) + "\n")
        with (path / "log" / "train-g000001.jsonl").open("a") as log:
            log.write(json.dumps({"kind": "checkpoint", "time": T0 + 52, "name": EVIL, "step": 100}) + "\n")
        timeline = Timeline(RunDir(path))
        timeline.follow(60.0, rest_factor=0.0)
        evil = Score(name=EVIL, step=1, metric=EVIL, value=0.5)
        html = everything(Glance(snapshot(EVIL, EVIL, best_checkpoint=evil), 1), timeline)
        html += parts.texts(Glance(snapshot(), 1), timeline, EVIL)["note"]
        html += parts.texts(Glance(snapshot(queue=QUEUE), 1), timeline)["head"]
        found = Elements(html)
        assert "alert(1)" in found.words
        assert not found.names & {"script", "img", "iframe", "style", "link", "a", "object", "base", "form"}
        assert not [name for name in found.attributes if name.startswith("on") or name in ("style", "href", "src")]

    def test_is_cut_where_it_is_very_long(self, timeline: Timeline) -> None:
        assert len(parts.texts(Glance(snapshot(text="x" * 100_000), 1), timeline)["events"]) < 2_000 + 60 * 300


def test_times_say_the_second_they_mean_and_are_read_in_utc_without_the_script(timeline: Timeline) -> None:
    found = re.search(
        r'<time data-at="([0-9.]+)" title="([^"]+) UTC">([0-9:]+)</time>',
        parts.texts(Glance(snapshot(), 1), timeline)["events"],
    )
    assert found[2].endswith(found[3])


@pytest.fixture(scope="module")
def told(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    path = make_run(tmp_path_factory.mktemp("run") / "run", steps=150, every=50)
    add_base(path, {"accuracy": 0.5, "loss": 2.0, "macroF1": 0.25}, {"What?": f"This {EVIL}\x1b[2J", EVIL: "a\nb"})
    replace_json(path / "best.json", {"name": "step-000000100", "step": 100, "generation": 1}, durable=False)
    timeline = Timeline(RunDir(path))
    timeline.follow(60.0, rest_factor=0.0)
    best = Score(name="step-000000100", step=100, metric="accuracy", value=0.9)
    return parts.texts(Glance(snapshot(best_checkpoint=best), 1), timeline) | {
        "losses": parts.charts(Glance(snapshot(best_checkpoint=best), 1), timeline, WIDE)["losses"]
    }


class TestBesideTheBaseModel:
    def test_a_change_is_a_line_of_its_own_so_that_four_metrics_fit(self, told: dict[str, str]) -> None:
        assert re.search(r'<td class="n">[\d.]+ % <span class="difference">\(\+', told["checkpoints"])

    def test_scores_stand_beside_their_change(self, told: dict[str, str]) -> None:
        table = " ".join(Elements(told["checkpoints"]).words.split())
        assert re.search(r"base model – 50\.00 % 2\.000 25\.00 % – – – evaluated$", table)
        assert len(re.findall(r"\d % \([+−]\d+\.\d\d points\)", table)) == 2 * 3
        assert len(re.findall(r"\d \([+−]\d+\.\d %\)", table)) == 3

    def test_texts_of_base_best_and_newest_stand_side_by_side_and_do_no_harm(self, told: dict[str, str]) -> None:
        found = Elements(told["completions"])
        words = " ".join(found.words.split())
        assert words.startswith("Prompt Base model Step 100, the best Step 150 What? This")
        assert found.names == {"div", "table", "thead", "tbody", "tr", "th", "td"}
        assert found.attributes == {"class"}
        assert "100: This" in words
        assert "150: This" in words
        assert "\x1b" not in told["completions"]
        assert "\ufffd[2J" in told["completions"]

    def test_the_curves_begin_with_it(self, told: dict[str, str]) -> None:
        assert "Training loss" in told["losses"]

    def test_a_run_without_one_has_no_row_and_no_texts(self, timeline: Timeline) -> None:
        said = parts.texts(Glance(snapshot(), 1), timeline)
        assert "base model" not in said["checkpoints"]
        assert said["completions"] == ""

    def test_long_texts_and_many_prompts_are_cut(self, tmp_path: Path) -> None:
        path = make_run(tmp_path / "run", steps=50, every=50)
        add_base(path, {"accuracy": 0.5}, {f"{number} {'p' * 1900}": "t" * 8000 for number in range(60)})
        timeline = Timeline(RunDir(path))
        timeline.follow(60.0, rest_factor=0.0)
        drawn = parts.texts(Glance(snapshot(), 1), timeline)["completions"]
        assert len(drawn) < 16 * 3 * parts.MAX_TEXT_LENGTH + 5000
        assert "And 44 more prompts" in drawn
