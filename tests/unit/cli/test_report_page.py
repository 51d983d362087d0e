"""The page and the pictures: complete, self-contained, safe, and really drawn."""

import base64
import hashlib
import json
import re
import shutil
from collections import Counter
from dataclasses import replace
from pathlib import Path
from xml.etree import ElementTree

import numpy as np
import pytest
from PIL import Image

from tandem.rundir import evaluations
from tandem.rundir.layout import RunDir
from tandem_cli.commands.report import report as report_command
from tandem_cli.report import clock, raster
from tandem_cli.report.figures import curves, pictures, processors
from tandem_cli.report.reading import read
from tandem_cli.report.run import EvaluationWork, RunData, Steps, Use
from tandem_cli.report.summary import summarize
from tandem_cli.report.writing import Report, write
from tandem_coordinator import charts
from tandem_coordinator.charts import chart, drawing
from tandem_coordinator.charts.chart import DARK, LIGHT
from tests.support.worlds.simulated_run import T0, add_base, add_histograms, make_run


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> Report:
    """The report of a run with everything in it."""
    path = tmp_path_factory.mktemp("runs") / "digits"
    kills = {230: "WorkerFailed"}
    return write(make_run(path, steps=400, kills=kills, gpus=True, nan_steps=frozenset({300})))


@pytest.fixture(scope="module")
def text(report: Report) -> str:
    """Its page."""
    return report.page.read_text("utf-8")


def tree(page: str) -> ElementTree.Element:
    """The page as a tree; it is written so that it is XML as well."""
    return ElementTree.fromstring(page.removeprefix("<!DOCTYPE html>\n"))


def cells(page: str) -> list[list[str]]:
    """The rows of all tables."""
    return [["".join(cell.itertext()) for cell in row.iter("td")] for row in tree(page).iter("tr")]


def said(page: str) -> str:
    """All that a reader of the page can read, on one line."""
    return " ".join("".join(tree(page).itertext()).split())


class TestThePage:
    def test_is_well_formed(self, text: str) -> None:
        assert tree(text).tag == "html"

    def test_asks_for_nothing_from_anywhere(self, text: str) -> None:
        assert "://" not in text
        assert not re.search(r"<(link|img|iframe|object|embed)\b", text)
        assert not re.search(r"@import|url\((?!#)|\bsrc=", text)
        assert all(target.startswith("#") for target in re.findall(r'href="([^"]*)"', text))

    def test_runs_the_one_script_that_its_policy_names_by_its_hash(self, text: str) -> None:
        (script,) = re.findall(r"<script[^>]*>(.*?)</script>", text, re.DOTALL)
        digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
        (policy,) = re.findall(r'http-equiv="Content-Security-Policy" content="([^"]*)"', text)
        assert policy.startswith("default-src 'none'; ")
        assert f"script-src 'sha256-{digest}';" in policy
        assert charts.script() in script
        assert not re.search(r"\bon[a-z]+=|javascript:", text.replace(script, ""))

    def test_has_every_id_once_and_every_reference_leads_to_one(self, text: str) -> None:
        text = re.sub(r"<script>.*</script>", "", text, flags=re.DOTALL)
        ids = Counter(re.findall(r'\bid="([^"]+)"', text))
        assert ids
        assert set(ids.values()) == {1}
        told = " ".join(re.findall(r'aria-labelledby="([^"]+)"', text)).split()
        assert {*re.findall(r'(?:url\(#|href="#)([^")]+)', text), *told} == set(ids)

    def test_leads_to_each_section_from_its_contents(self, text: str) -> None:
        (contents,) = (part for part in tree(text).iter("nav") if part.get("class") == "contents")
        sections = {f"#{part.get('id')}": part.findtext("h2") for part in tree(text).iter("section") if part.get("id")}
        assert {link.get("href"): link.text for link in contents} == sections
        assert {"Checkpoints", "Generations", "Training loss and evaluation score"} <= {*sections.values()}

    def test_holds_each_picture_for_a_desk_and_for_a_phone(self, text: str) -> None:
        for kind in ("wide", "narrow"):
            found = [part for part in tree(text).iter("div") if part.get("class") == kind]
            assert [len(part.findall("svg")) for part in found] == [1] * 8
            drawings = [part.find("svg") for part in found]
            labels = [f"{one.findtext('title', '')}. {one.findtext('desc', '')}" for one in drawings if one is not None]
            assert all(label and len(label) > 20 for label in labels)
            assert sum(one is not None and len(one.findtext("desc", "")) > 20 for one in drawings) == 8

    def test_has_text_as_text(self, text: str) -> None:
        words = {"".join(part.itertext()).strip() for part in tree(text).iter("text")}
        assert {
            "Test accuracy",
            "rank 0",
            "GPU 1",
            "evaluator 0-1",
            "checkpoints",
            "TRAINING",
            "World size (ranks)",
        } <= words

    def test_takes_all_colours_from_variables_that_dark_pages_set_too(self, text: str) -> None:
        drawings = "".join(re.findall(r"<svg.*?</svg>", text, re.DOTALL))
        assert not re.search(r"#[0-9a-fA-F]{6}\b", drawings)
        assert set(re.findall(r"var\(--([a-z]+)\)", drawings)) <= {*LIGHT, "font"}
        assert LIGHT.keys() == DARK.keys()
        assert len(set(LIGHT.values())) == len(LIGHT)
        dark = text.split("prefers-color-scheme: dark", 1)[1].split("}", 1)[0]
        assert all(f"--{role}: {color};" in dark for role, color in DARK.items())

    def test_names_job_result_steps_best_and_stalls(self, text: str, report: Report) -> None:
        words = said(text)
        best = report.run.best
        assert best.evaluation is not None
        assert "digits" in words
        assert "Succeeded" in words
        assert f"{100 * best.evaluation.metrics['accuracy']:.2f} %" in words
        assert f"at step {best.step}" in words
        assert "30 done again" in words
        assert "It was not finite in 1 step." in words
        assert re.search(r"A checkpoint stalled it for \d\.\d ms \(median; at most \d\.\d ms\)", words)

    def test_has_a_row_for_each_checkpoint_and_generation(self, text: str, report: Report) -> None:
        rows = [len(list(table.iter("tr"))) - 1 for table in tree(text).iter("table")]
        assert rows == [len(report.run.checkpoints), 10, len(report.run.generations)] == [8, 10, 2], (
            "and for each class"
        )
        assert "worker failed: WorkerFailed of worker-1" in said(text)

    def test_has_the_job_folded_in_it(self, text: str) -> None:
        folded = {part.findtext("summary"): part for part in tree(text).iter("details")}
        assert folded["The job"].get("open") is None
        assert "everySteps: 50" in folded["The job"].findtext("pre", "")


def test_nothing_that_a_run_says_becomes_part_of_the_page(tmp_path: Path) -> None:
    path = make_run(tmp_path / "run", steps=60, every=20, kills={50: "<script>alert(1)</script>"})
    evil = '"><script>alert(2)</script><b a="'
    job = json.loads((path / "job.json").read_text())
    job["metadata"]["name"] = evil
    (path / "job.json").write_text(json.dumps(job))
    (path / "DONE").unlink()
    (path / "FAILED.json").write_text(json.dumps({"reason": evil, "message": evil, "at": T0 + 9}))
    with (path / "log" / "coordinator.jsonl").open("a") as log:
        log.write(json.dumps({"kind": "event", "time": T0 + 5, "level": evil, "text": evil}) + "\n")
    with (path / "log" / "evaluator-evaluator-0-0.jsonl").open("a") as log:
        log.write(json.dumps({"kind": "bad", "time": T0 + 50, "checkpoint": "step-000000020", "why": evil}) + "\n")
    shutil.move(path / "log" / "evaluator-evaluator-0-1.jsonl", path / "log" / "evaluator-<script>$x$.jsonl")
    page = write(path, png=False).page.read_text("utf-8")
    (script,) = tree(page).iter("script")
    assert (script.text or "").strip("\n/") == charts.script().strip("\n/")
    assert not list(tree(page).iter("b"))
    assert page.count("&lt;script&gt;alert(2)") >= 4


class TestThePictures:
    def test_lie_beside_the_page_in_a_folder_of_its_name(self, report: Report) -> None:
        folder = report.page.parent / "report"
        names = ["training", "optimization", "processors", "world", "ranks", "phases", "waterfall", "confusion"]
        assert report.pictures == tuple(folder / f"{name}.png" for name in names)
        assert sorted(folder.iterdir()) == sorted(report.pictures)

    def test_are_large_and_not_blank(self, report: Report) -> None:
        for path in report.pictures:
            with Image.open(path) as image:
                assert image.width == round((chart.WIDE.width + 2 * raster.MARGIN) * raster.SCALE)
                assert image.height > 300
                # One number a pixel: rows of an array are sorted 30 times as slowly as numbers.
                pixels = np.asarray(image.convert("RGBA")).view(np.uint32).ravel()
            assert (pixels != pixels[0]).mean() > 0.03, path
            assert len(np.unique(pixels)) > 50, path

    def test_show_trainers_checkpoints_and_evaluators_in_their_colours(self, report: Report) -> None:
        path = next(path for path in report.pictures if path.stem == "processors")
        with Image.open(path) as image:
            pixels = np.asarray(image.convert("RGB")).reshape(-1, 3).astype(int)
        for role, share in (("trainer", 0.02), ("gpu", 0.02), ("evaluator", 0.005), ("checkpoint", 0.0003)):
            color = np.array([int(LIGHT[role][at : at + 2], 16) for at in (1, 3, 5)])
            # Filled areas are drawn at three quarters of their strength.
            blends = [color * alpha + 254 * (1 - alpha) for alpha in (1.0, 0.72)]
            near = np.any([np.abs(pixels - blend).max(axis=1) < 12 for blend in blends], axis=0)
            assert near.mean() > share, role


def test_runs_of_one_manifest_are_told_apart_by_their_directories(tmp_path: Path) -> None:
    texts = [
        write(make_run(tmp_path / name, steps=20, every=10), png=False).page.read_text("utf-8")
        for name in ("digits", "larger")
    ]
    assert [re.findall("<title>(.*?)</title>|<h1>(.*?)</h1>", text) for text in texts] == [
        [("digits · Tandem", ""), ("", "digits")],
        [("digits (larger) · Tandem", ""), ("", "digits (larger)")],
    ]


def test_histograms_of_the_best_checkpoint_are_drawn_and_told(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = make_run(tmp_path / "run", steps=60, every=20)
    add_histograms(path, {"errors": {"counts": [0, 1, 2], "edges": [0, 1, 2, 3]}, "damaged": {"counts": [1]}})
    report_command(path, tmp_path / "out")
    assert (tmp_path / "out" / "report" / "histograms.png").exists()
    assert "Of the best checkpoint, at step 60." in (tmp_path / "out" / "report.html").read_text("utf-8")
    told = "histogram errors at step 60:  ▄█ 3 values from 0 to 3, median 2.25, 90 % below 2.85"
    assert told in capsys.readouterr().out


@pytest.mark.parametrize("has_browser", [True, False])
def test_the_page_is_opened_where_there_is_a_browser(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], has_browser: bool
) -> None:
    opened: list[str] = []
    monkeypatch.setattr("webbrowser.open", lambda address: opened.append(address) or has_browser)
    path = make_run(tmp_path / "run", steps=20)
    report_command(path, png=False)
    assert opened == []
    report_command(path, png=False, open_it=True)
    assert opened == [(path / "report.html").as_uri()]
    output = capsys.readouterr()
    assert ("no browser" in output.out + output.err) == (not has_browser)


class TestWhereItIsWritten:
    def test_into_another_folder(self, tmp_path: Path) -> None:
        path = make_run(tmp_path / "run", steps=20)
        written = write(path, tmp_path / "new" / "folder", png=False)
        assert written.page == tmp_path / "new" / "folder" / "report.html"
        assert written.pictures == ()
        assert [file.name for file in written.page.parent.iterdir()] == ["report.html"]
        assert not (path / "report.html").exists()

    def test_into_a_file(self, tmp_path: Path) -> None:
        path = make_run(tmp_path / "run", steps=20)
        written = write(path, tmp_path / "digits.html")
        assert written.page == tmp_path / "digits.html"
        assert {picture.parent for picture in written.pictures} == {tmp_path / "digits"}

    def test_again_over_the_one_before_with_the_same_content(self, tmp_path: Path) -> None:
        path = make_run(tmp_path / "run", steps=20)
        first = write(path, png=False).page.read_bytes()
        assert write(path, png=False).page.read_bytes() == first


def small(path: Path, **script: object) -> str:
    """The words of a page of a run after a script."""
    return said(write(make_run(path, **script), png=False).page.read_text("utf-8"))


class TestOddRuns:
    def test_of_one_step(self, tmp_path: Path) -> None:
        assert "Steps 1 of 1" in _spaced(small(tmp_path, steps=1))

    def test_without_evaluators(self, tmp_path: Path) -> None:
        words = small(tmp_path, steps=60, evaluators=0)
        assert "nothing evaluated" in words
        assert "EVALUATION" not in words

    def test_with_validation_data_say_by_which_score_the_best_was_chosen(self, tmp_path: Path) -> None:
        path = make_run(tmp_path / "held-out", steps=100, every=50, holds_out=True)
        page = tree(write(path, png=False).page.read_text("utf-8"))
        assert "at step 50 · 70.00 % on validation data" in "".join(page.itertext())
        head, *rows = list(next(page.iter("table")).iter("tr"))
        place = [cell.text for cell in head].index("Validation")
        assert head[place - 1].text == "Accuracy"
        assert [row[place].text for row in rows] == ["70.00 %", "50.00 %"]
        without = small(tmp_path / "all", steps=100, every=50)
        assert "Validation" not in without
        assert "on validation data" not in without

    def test_of_hundreds_of_ranks_and_dozens_of_evaluators_have_a_dozen_rows_each(self, tmp_path: Path) -> None:
        words = small(tmp_path, steps=100, workers=100, evaluators=30)
        assert "rank 0 to 8" in words
        assert "rank 99" in words
        assert "evaluator 0-0 to 0-2" in words

    def test_with_a_thousand_classes(self, tmp_path: Path) -> None:
        words = small(tmp_path, steps=40, every=40, classes=1000)
        assert "F1, the 20 worst of 1000 classes" in words

    def test_without_anything_but_a_job_say_so(self, tmp_path: Path) -> None:
        whole = make_run(tmp_path / "whole", steps=20)
        (tmp_path / "new").mkdir()
        shutil.copy(whole / "job.json", tmp_path / "new")
        assert "Nothing was logged yet" in said(write(tmp_path / "new").page.read_text("utf-8"))

    def test_with_all_losses_infinite(self, tmp_path: Path) -> None:
        words = small(tmp_path, steps=40, nan_steps=frozenset(range(1, 41)), evaluators=0)
        assert "It was not finite in 40 steps." in words

    def test_that_went_on_after_a_night_have_the_night_cut_out(self, tmp_path: Path) -> None:
        path = make_run(tmp_path, steps=200, kills={100: "Started"})
        second = read(path).generations[1].opened_at
        assert second is not None
        for file in [*path.glob("log/*.jsonl"), *path.glob("evaluations/*/*.json")]:
            file.write_text(
                re.sub(
                    r"(\"(?:time|startedAt|finishedAt)\": )([0-9.]+)",
                    lambda match: f"{match[1]}{float(match[2]) + (36_000 if float(match[2]) >= second - 0.01 else 0)}",
                    file.read_text(),
                )
            )
        page = write(path, png=False).page.read_text("utf-8")
        words = said(page).replace("a pause of 10 h", "")
        assert words != said(page)
        assert "pauses left out" in words
        assert not re.findall(r".{60}\d h\b", words), (
            "one clock: the night is training's nowhere, and no part of any time"
        )

    def test_of_a_script_that_says_nothing_tell_by_which_line_it_would(self, tmp_path: Path) -> None:
        path = make_run(tmp_path / "run", steps=60, every=20)
        job = json.loads((path / "job.json").read_text())
        job["spec"] = {"trainer": {"command": ["train.py"]}, "evaluators": {"command": ["score.py"]}}
        (path / "job.json").write_text(json.dumps(job))
        for log in path.glob("log/train-*"):
            log.unlink()
        words = said(write(path, png=False).page.read_text("utf-8"))
        assert "tandem.log(step=step, loss=loss)" in words
        assert "Steps –" in _spaced(words).replace("Steps–", "Steps –")
        assert "steps of training" not in words

    def test_of_which_many_checkpoints_became_the_same_have_one_row_for_them(self, tmp_path: Path) -> None:
        path = make_run(tmp_path / "run", steps=400, every=20, evaluators=0)
        rows = cells(write(path, png=False).page.read_text("utf-8"))
        assert ["20 to 400", "20 checkpoints: not evaluated"] in [[row[0], row[-1]] for row in rows if row]


def _spaced(words: str) -> str:
    return re.sub(r"(?<=[a-z])(?=[0-9])|(?<=[0-9])(?=[a-z])", " ", words)


class TestLongRuns:
    def long(self, run: RunData, count: int) -> RunData:
        steps = np.arange(1, count + 1)
        time = T0 + steps * 0.1
        noise = np.random.default_rng(0).lognormal(size=count)
        seconds = np.arange(T0, time[-1], 1.0)
        uses = tuple(Use(str(rank), "trainer", seconds, np.full(len(seconds), 0.9)) for rank in range(2))
        ends = T0 + np.arange(100, count, 100) * 0.1
        works = tuple(EvaluationWork("evaluator-0-0", "c", 1, 100, float(end) - 5, float(end)) for end in ends)
        return replace(
            run,
            model_steps=Steps(steps, time, noise),
            superseded=(),
            uses=uses,
            works=works,
            marks=seconds,
            checkpoints=(),
        )

    def test_a_million_steps_make_a_picture_no_larger_than_a_page(self, report: Report) -> None:
        run = self.long(report.run, 1_000_000)
        ticks = clock.make_clock(run.marks)
        drawn = processors.draw("long", "long", "", run, ticks, chart.WIDE)
        assert drawn is not None
        assert len(drawn) < 300_000
        assert len(drawing.draw("long", "long", "", curves.training(run, ticks), chart.WIDE)) < 100_000

    def test_many_checkpoints_get_a_closer_look(self, tmp_path: Path) -> None:
        run = read(make_run(tmp_path, steps=2000, every=20, evaluation_seconds=0.3))
        ticks = clock.make_clock(run.marks)
        found = {picture.name: picture for picture in pictures(run, ticks, summarize(run, ticks))}
        assert found["close"].draw("narrow", chart.NARROW)
        window = processors.close_window(run)
        assert window is not None
        inside = [c for c in run.checkpoints if c.written_at is not None and window[0] <= c.written_at <= window[1]]
        assert processors.CLOSE_CHECKPOINTS <= len(inside) <= processors.CLOSE_CHECKPOINTS + 2


def test_scores_have_their_intervals_and_what_was_better_than_all_before_is_marked(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", steps=150, every=50)
    for step, value in ((50, 0.5), (100, 0.9), (150, 0.91)):
        (file,) = (run / "evaluations" / f"step-{step:09d}").glob("g??????.json")
        intervals = {"accuracy": [value - 0.03, value + 0.03]}
        scores = {"metrics": {"accuracy": value, "loss": 1.0}, "intervals": intervals}
        file.write_text(json.dumps(json.loads(file.read_text()) | scores))
    add_base(run, {"accuracy": 0.5, "loss": 2.0}, {})
    text = write(run, png=False).page.read_text("utf-8")
    rows = {row[0]: row for row in cells(text) if row}
    assert [rows[step][-1].endswith("better than all before") for step in ("50", "100", "150")] == [False, True, False]
    assert rows["100"][3] == "87.00 % to 93.00 %"
    assert len(rows["base model"]) == len(rows["100"])
    assert "at step 150 · 88.00 % to 94.00 % · tied with 1 other" in said(text)
    assert "The best test accuracy is 91.00 % (88.00 % to 94.00 %), at step 150." in said(text)


def test_classes_that_became_worse_since_the_best_checkpoint_are_named(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", steps=100, every=50)
    matrices = {50: [[90, 10, 0], [20, 80, 0], [0, 0, 0]], 100: [[60, 40, 0], [15, 85, 0], [0, 0, 0]]}
    for step, confusion in matrices.items():
        (file,) = (run / "evaluations" / f"step-{step:09d}").glob("g??????.json")
        scores = {"metrics": {"accuracy": confusion[0][0] / 100, "loss": 1.0}, "confusion": confusion}
        file.write_text(json.dumps(json.loads(file.read_text()) | scores))
    text = write(run, png=False).page.read_text("utf-8")
    assert "Of 2 classes, 1 became worse by more than chance since step 50: 0." in said(text)
    told = cells(text)
    worse = told.index(["0", "100", "90.00 %", "60.00 %", "−30.00 points", "worse"])
    assert told[worse + 1] == ["1", "100", "80.00 %", "85.00 %", "+5.00 points", ""]
    for name, change in (("samples", [[91, 10, 0], [15, 85, 0], [0, 0, 0]]), ("none", None)):
        file.write_text(json.dumps(json.loads(file.read_text()) | {"confusion": change}))
        assert "since the best checkpoint" not in said(write(run, png=False).page.read_text("utf-8")), name


def test_scores_and_texts_stand_beside_those_of_the_base_model(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", steps=200, every=50)
    evil = '</td><script>alert(1)</script> & "quoted"\x00\x1b[31m'
    add_base(run, {"accuracy": 0.5, "loss": 2.0}, {"What is <this>?": evil})
    text = write(run, png=False).page.read_text("utf-8")
    told = cells(text)
    assert ["base model", "–", "50.00 %", "2.000", *["–"] * 4, "evaluated"] in told
    assert len(re.findall(r"% \([+−]\d+\.\d\d points\)", said(text))) == 4
    (row,) = (one for one in told if one[:1] == ["What is <this>?"])
    harmless = evil.replace("\x00", "\ufffd").replace("\x1b", "\ufffd")
    assert row == ["What is <this>?", harmless, f"50: {harmless}", f"200: {harmless}"]
    assert "the best" in said(text)
    assert "\x1b" not in text
    assert "<script>alert" not in text


def test_a_base_model_that_could_not_be_evaluated_says_why(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", steps=100, every=50)
    evaluations.record_failed_evaluation(RunDir(run), evaluations.BASE, "the hub is away")
    told = cells(write(run, png=False).page.read_text("utf-8"))
    assert ["base model", *["–"] * 7, "its evaluation failed: the hub is away"] in told
