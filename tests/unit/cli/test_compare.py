"""`tandem compare`: runs side by side, with the numbers of their reports."""

import io
import json
import re
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import numpy as np
import pytest
from PIL import Image
from rich.console import Console
from typer.testing import CliRunner

from tandem.confidence import Interval
from tandem.errors import UserError
from tandem_cli.commands.compare import MAX_RUNS, _table
from tandem_cli.main import application
from tandem_cli.report import clock
from tandem_cli.report.comparison import certainty, outcome, rows, winner
from tandem_cli.report.comparison_page import ComparisonPage
from tandem_cli.report.figures.compared import compared, labels
from tandem_cli.report.reading import read
from tandem_cli.report.summary import summarize
from tandem_coordinator.charts.chart import LIGHT
from tests.support.worlds.simulated_run import add_base, make_run


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Two runs whose jobs differ in two fields."""
    folder = tmp_path_factory.mktemp("runs")
    made = [make_run(folder / name, steps=steps, every=20) for name, steps in (("one", 60), ("other", 100))]
    changed = made[1] / "job.json"
    job = json.loads(changed.read_text())
    job["metadata"]["name"] = "other"
    job["spec"]["trainer"]["loop"]["epochs"] = 9
    job["spec"]["trainer"]["loop"]["optimizer"] = {"learningRate": 0.5}
    changed.write_text(json.dumps(job))
    return made


def said(*words: object) -> str:
    words_ = ["compare", *map(str, words)]
    result = CliRunner().invoke(application(words_), words_, catch_exceptions=False)
    assert result.exit_code == 0
    return result.output


def test_what_differs_and_what_became_of_each(runs: list[Path]) -> None:
    head, *lines = said(*runs).splitlines()
    found = {label: values for label, *values in (re.split(r" {2,}", line.strip()) for line in lines)}
    assert head.split() == [read(runs[0]).name, "other"]
    assert found["trainer.loop.epochs"][1] == "9"
    assert found["trainer.loop.optimizer.learningRate"][1] == "0.5"
    assert "trainer.loop.seed" not in found, "what is equal is not told"
    assert [steps.partition(" of ")[0] for steps in found["steps"]] == ["60", "100"]
    assert all(score.endswith(" %") for score in found["best accuracy"])


def test_the_best_score_is_one_runs_alone(runs: list[Path]) -> None:
    found = [read(path) for path in runs]
    one, other = (replace(outcome(run, ""), score=score) for run, score in zip(found, (0.5, 0.75), strict=True))
    assert winner(found, [one, other]) == 1
    assert winner(found, [replace(one, metric="loss"), replace(other, metric="loss")]) is not None
    assert winner(found, [one, replace(other, metric="loss")]) is None, "nobody can say which is better"
    assert winner(found, [one, replace(other, score=0.5)]) is None
    assert winner(found, [one, replace(other, score=None)]) is None


def test_the_best_score_is_called_ahead_only_where_it_differs_by_more_than_chance(runs: list[Path]) -> None:
    results = [replace(outcome(read(path), ""), score=score) for path, score in zip(runs, (0.5, 0.75), strict=True)]
    assert certainty(results, 1) == "", "no interval is known"
    narrow = [replace(result, interval=Interval(result.score - 0.1, result.score + 0.1)) for result in results]
    assert certainty(narrow, 1) == "is ahead of all others by more than chance"
    wide = [replace(result, interval=Interval(result.score - 0.2, result.score + 0.2)) for result in results]
    assert certainty(wide, 1) == "differs from 1 other by no more than chance"


def texts(run: Path, data: dict[str, Any]) -> Path:
    """A run that has fine-tuned a language model on this data."""
    trainer = {"task": "causal-lm", "parameters": {"pretrained": "model", "data": data}}
    return changed(run, lambda job: job["spec"].update(trainer=trainer))


@pytest.mark.parametrize(
    ("one", "other", "same"),
    [
        ({"path": "a.jsonl"}, {"path": "b.jsonl"}, False),
        ({"path": "a.jsonl", "test": "held-out.jsonl"}, {"path": "b.jsonl", "test": "held-out.jsonl"}, True),
        ({"path": "a.jsonl", "test": 0.1}, {"path": "a.jsonl", "test": 0.2}, False),
        ({"path": "a.jsonl"}, {"path": "a.jsonl", "end": 500}, False),
        (
            {"mixture": [{"path": "a.jsonl", "weight": 1}, {"path": "b.jsonl", "weight": 1}]},
            {"mixture": [{"path": "a.jsonl", "weight": 3}, {"path": "b.jsonl", "weight": 1}]},
            True,
        ),
    ],
)
def test_scores_on_other_held_out_documents_are_not_compared(
    tmp_path: Path, one: dict[str, Any], other: dict[str, Any], same: bool
) -> None:
    paths = [
        texts(make_run(tmp_path / name, steps=steps, every=20), data)
        for name, steps, data in (("one", 60, one), ("other", 100, other))
    ]
    found = [read(path) for path in paths]
    assert (winner(found, [outcome(run, "") for run in found]) is None) == (not same)
    sentence = "evaluated on different data (trainer.parameters.data), so their scores cannot be compared"
    assert (sentence in said(*paths)) == (sentence in words(page_of(tmp_path, *paths))) == (not same)
    assert (sentence in json.loads(said(*paths, "-o", "json"))["warning"]) == (not same)


def test_slices_and_validation_of_images_leave_the_test_data_as_it_is(runs: list[Path], tmp_path: Path) -> None:
    other = shutil.copytree(runs[1], tmp_path / "other")
    changed(other, lambda job: job["spec"]["trainer"]["parameters"]["data"].update(validation=0.1, end=900))
    assert "warning" not in said(runs[0], other)
    assert json.loads(said(runs[0], other, "-o", "json"))["warning"] == ""


def test_scores_over_other_numbers_of_samples_are_not_compared(runs: list[Path], tmp_path: Path) -> None:
    other = shutil.copytree(runs[1], tmp_path / "other")
    for file in other.glob("evaluations/*/*.json"):
        result = json.loads(file.read_text())
        file.write_text(json.dumps(result | {"samples": 77}))
    assert "evaluated on different data (360 and 77 samples), so their scores" in said(runs[0], other)


def test_only_the_best_score_and_its_run_are_bold(runs: list[Path]) -> None:
    found = [read(path) for path in runs]
    outcomes = [outcome(run, str(path)) for run, path in zip(found, runs, strict=True)]
    best = winner(found, outcomes)
    console = Console(file=io.StringIO(), force_terminal=True, color_system="standard", width=200)
    console.print(_table(outcomes, rows(found, outcomes), best, None))
    bold = re.findall(r"\x1b\[1m(.*?)\x1b\[0m", console.file.getvalue())
    assert [text.strip() for text in bold if text.strip()] == [
        found[best].name,
        dict(rows(found, outcomes))["best accuracy"][best],
    ]


def test_programs_read_the_numbers_of_the_reports(runs: list[Path]) -> None:
    told = json.loads(said(*runs, "-o", "json"))
    assert set(told["differences"]) == {"trainer.loop.epochs", "trainer.loop.optimizer.learningRate"}
    assert told["differences"]["trainer.loop.epochs"][1] == 9
    for path, one in zip(runs, told["runs"], strict=True):
        run = read(path)
        summary = summarize(run, clock.make_clock(run.marks))
        assert (one["steps"], one["best"], one["evaluated"]) == (summary.steps, run.best.name, summary.evaluated)
        assert one["seconds"] == pytest.approx(summary.seconds)
        assert one["throughput"] == pytest.approx(summary.throughput)
        assert one["path"] == str(path)


def test_a_run_that_has_made_nothing_is_compared_all_the_same(runs: list[Path], tmp_path: Path) -> None:
    (tmp_path / "job.json").write_text((runs[0] / "job.json").read_text())
    told = json.loads(said(runs[0], tmp_path, "-o", "json"))
    assert (told["runs"][1]["steps"], told["runs"][1]["score"], told["differences"]) == (0, None, {})
    assert "–" in said(runs[0], tmp_path)


@pytest.mark.parametrize("count", [1, MAX_RUNS + 1])
def test_it_takes_two(runs: list[Path], count: int) -> None:
    with pytest.raises(UserError, match="can be compared"):
        said(*([runs[0]] * count))


# --- page and picture


def changed(path: Path, change: Callable[[dict[str, Any]], None]) -> Path:
    """A run whose job is another one."""
    job = json.loads((path / "job.json").read_text())
    change(job)
    (path / "job.json").write_text(json.dumps(job))
    return path


def page_of(tmp_path: Path, *paths: Path) -> str:
    said(*paths, "--html", tmp_path / "deep" / "page.html")
    return (tmp_path / "deep" / "page.html").read_text("utf-8")


def tree(page: str) -> ElementTree.Element:
    return ElementTree.fromstring(page.removeprefix("<!DOCTYPE html>\n"))


def words(page: str) -> str:
    """All that a reader can read."""
    return " ".join("".join(tree(page).itertext()).split())


def panels(page: str) -> list[tuple[str, set[tuple[str, str]]]]:
    """Of the drawing for a wide screen: the title of each panel, and label and colour of its curves."""
    (wide,) = tree(page).iterfind(".//div[@class='wide']")
    return [
        (
            panel.attrib["data-title"],
            {
                (curve.attrib["data-label"], curve.attrib["data-color"])
                for curve in panel.iterfind(".//g[@class='curve']")
            },
        )
        for panel in wide.iterfind(".//g[@class='panel']")
    ]


def test_the_page_has_loss_and_score_over_steps_and_over_time_with_a_colour_for_each_run(
    runs: list[Path], tmp_path: Path
) -> None:
    page = page_of(tmp_path, *runs)
    name = read(runs[0]).name
    both = {(name, "trainer"), ("other", "evaluator")}
    assert panels(page) == [("Training loss", both), ("Test accuracy", both)] * 2
    (wide,) = tree(page).iterfind(".//div[@class='wide']")
    axes = [chart.attrib["data-axis"] for chart in wide.iterfind(".//g[@class='chart']")]
    assert axes == ["step", "time since the beginning of each run (s)"]
    assert "trainer.loop.optimizer.learningRate" in words(page)
    assert "://" not in page
    assert not re.search(r"<(link|img|iframe|object|embed)\b", page)


def test_time_begins_at_0_for_each_run_in_one_unit(runs: list[Path]) -> None:
    found = [read(path) for path in runs]
    late = replace(found[1], marks=found[1].marks + 86400.0)
    moved = replace(late, model_steps=replace(late.model_steps, time=late.model_steps.time + 86400.0))
    for one in (found[1], moved):
        _, over_time = compared([found[0], one], ["a", "b"])
        firsts = [curve.points[0][0] for curve in over_time.panels[0].curves]
        assert all(0 <= first < 10 for first in firsts)
        assert over_time.axis.high == pytest.approx(compared([found[0], found[1]], ["a", "b"])[1].axis.high)


def test_a_run_of_seconds_and_one_of_hours_have_one_axis(runs: list[Path]) -> None:
    short, other = (read(path) for path in runs)
    marks = other.marks[0] + np.arange(0.0, 7200.0, 60.0)
    long = replace(
        other, marks=marks, model_steps=replace(other.model_steps, time=np.linspace(marks[0], marks[-1], 100))
    )
    _, over_time = compared([short, long], ["a", "b"])
    assert over_time.axis.label == "time since the beginning of each run (min)"
    ends = [curve.points[-1][0] for curve in over_time.panels[0].curves]
    assert ends[0] < 1
    assert ends[1] > 100


def test_twelve_runs_are_told_apart(runs: list[Path]) -> None:
    run = read(runs[0])
    (chart, _) = compared([run] * MAX_RUNS, labels([f"run-{index}" for index in range(MAX_RUNS)]))
    looks = [(curve.color, curve.dashed) for curve in chart.panels[0].curves]
    assert len(set(looks)) == len(looks) == MAX_RUNS
    assert [curve.label for curve in chart.panels[1].curves] == [f"run-{index}" for index in range(MAX_RUNS)]


def test_names_in_the_legend_are_short_harmless_and_no_two_alike() -> None:
    found = labels(["a", "a", "x" * 90 + "1", "x" * 90 + "1", "\x1b[2Jred", ""])
    assert len(set(found)) == len(found)
    assert all(name.isprintable() and 0 < len(name) < 36 for name in found)


def test_the_picture_is_painted_in_the_colours_of_the_runs(runs: list[Path], tmp_path: Path) -> None:
    said(*runs, "--png", tmp_path / "runs.png")
    with Image.open(tmp_path / "runs.png") as image:
        pixels = np.asarray(image.convert("RGB")).reshape(-1, 3).astype(int)
    for role in ("trainer", "evaluator"):
        color = [int(LIGHT[role][at : at + 2], 16) for at in (1, 3, 5)]  # type: ignore[index]
        assert (np.abs(pixels - color).max(axis=1) < 12).sum() > 400


def test_different_metrics_stand_in_panels_of_their_own_and_that_is_said(runs: list[Path], tmp_path: Path) -> None:
    other = shutil.copytree(runs[1], tmp_path / "other")
    changed(other, lambda job: job["spec"].setdefault("evaluators", {}).update(metric="loss"))
    page = page_of(tmp_path, runs[0], other)
    assert [title for title, _ in panels(page)][:3] == ["Training loss", "Test accuracy", "Test loss"]
    assert [len(curves) for _, curves in panels(page)][:3] == [2, 1, 1]
    assert "The runs are scored by different metrics, so their scores cannot be compared (accuracy: " in words(page)


def test_what_a_run_says_can_neither_run_nor_steer_and_secrets_are_hidden(runs: list[Path], tmp_path: Path) -> None:
    hostile = shutil.copytree(runs[1], tmp_path / "hostile")
    bad = "<script>alert(1)</script>\x1b[2J\x00]]>"

    def change(job: dict[str, Any]) -> None:
        job["spec"]["trainer"]["env"] = [{"name": "HF_TOKEN", "value": "very-secret"}, {"name": "A", "value": bad[:-4]}]

    changed(hostile, change)
    page = page_of(tmp_path, runs[0], hostile)
    assert len(list(tree(page).iter("script"))) == 1
    assert "<script>alert" not in page
    assert "\x1b" not in page
    for text in (page, said(runs[0], hostile), said(runs[0], hostile, "-o", "json")):
        assert "very-secret" not in text
    assert "HF_TOKEN=(hidden)" in words(page)
    outcomes = [outcome(read(path), str(path)) for path in (runs[0], hostile)]
    whole = ComparisonPage([read(path) for path in (runs[0], hostile)], outcomes, [(bad, (bad, bad))], [bad, bad])
    assert len(list(tree(whole.html()).iter("script"))) == 1
    assert whole.png().startswith(b"\x89PNG")


@pytest.mark.parametrize("end", ["open", "failed"])
def test_runs_that_were_killed_or_have_made_nothing_are_drawn_as_far_as_they_came(
    runs: list[Path], tmp_path: Path, end: str
) -> None:
    killed = make_run(tmp_path / "killed", steps=100, stop_after=37, end=end, name="killed")
    empty = tmp_path / "empty"
    empty.mkdir()
    changed_job = json.loads((runs[0] / "job.json").read_text())
    changed_job["metadata"]["name"] = "empty"
    (empty / "job.json").write_text(json.dumps(changed_job))
    page = page_of(tmp_path, runs[0], killed, empty)
    assert {label for label, _ in panels(page)[0][1]} == {read(runs[0]).name, "killed"}
    assert "Without a step or a score so far: empty." in words(page)


def test_where_there_is_nothing_to_draw_the_page_says_so_and_the_picture_is_refused(
    runs: list[Path], tmp_path: Path
) -> None:
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "job.json").write_text((runs[0] / "job.json").read_text())
    assert "None of these runs has logged a step or a score yet." in words(
        page_of(tmp_path, tmp_path / "a", tmp_path / "b")
    )
    with pytest.raises(UserError, match="nothing to draw"):
        said(tmp_path / "a", tmp_path / "b", "--png", tmp_path / "c.png")


def test_a_file_that_cannot_be_written_is_told(runs: list[Path], tmp_path: Path) -> None:
    with pytest.raises(UserError, match="is a folder; give the name of a file"):
        said(*runs, "--html", tmp_path)
    (tmp_path / "file").touch()
    with pytest.raises(UserError, match="cannot be written: "):
        said(*runs, "--png", tmp_path / "file" / "x.png")


def test_the_base_models_score_stands_below_the_best_where_one_was_evaluated(runs: list[Path], tmp_path: Path) -> None:
    tuned = make_run(tmp_path / "tuned", steps=40, every=20)
    add_base(tuned, {"accuracy": 0.25})
    (line,) = (line for line in said(runs[0], tuned).splitlines() if "base model's accuracy" in line)
    assert line.split()[-2:] == ["25.00", "%"]
    assert "base model" not in said(*runs)


def test_the_best_score_is_bold_and_not_all_that_became_of_its_run(runs: list[Path]) -> None:
    """A bold duration or loss would read as the better one."""
    found = [read(path) for path in runs]
    outcomes = [outcome(run, str(path)) for run, path in zip(found, runs, strict=True)]
    assert winner(found, outcomes) is not None
    page = tree(ComparisonPage(found, outcomes, rows(found, outcomes), ["a", "b"]).html())
    bold = [
        "".join(row[0].itertext())
        for row in page.iter("tr")
        for cell in row
        if cell.tag == "td" and cell.find("b") is not None
    ]
    assert bold == ["best accuracy"]
