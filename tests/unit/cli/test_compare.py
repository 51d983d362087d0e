"""`tandem compare`: runs side by side, with the numbers of their reports."""

import json
import re
from dataclasses import replace
from pathlib import Path

import pytest
from typer.testing import CliRunner

from tandem.errors import UserError
from tandem_cli.commands.compare import MOST
from tandem_cli.main import application
from tandem_cli.report import clock
from tandem_cli.report.comparison import outcome, winner
from tandem_cli.report.reading import read
from tandem_cli.report.summary import summarize
from tests.support.worlds.simulated_run import make_run


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Two runs whose jobs differ in two fields."""
    folder = tmp_path_factory.mktemp("runs")
    made = [make_run(folder / name, steps=steps, every=20) for name, steps in (("one", 60), ("other", 100))]
    changed = made[1] / "job.json"
    job = json.loads(changed.read_text())
    job["metadata"]["name"] = "other"
    job["spec"]["trainer"]["config"]["epochs"] = 9
    job["spec"]["trainer"]["config"]["optimizer"] = {"learningRate": 0.5}
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
    assert found["trainer.config.epochs"][1] == "9"
    assert found["trainer.config.optimizer.learningRate"][1] == "0.5"
    assert "trainer.config.seed" not in found, "what is equal is not told"
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


def test_programs_read_the_numbers_of_the_reports(runs: list[Path]) -> None:
    told = json.loads(said(*runs, "-o", "json"))
    assert set(told["differences"]) == {"trainer.config.epochs", "trainer.config.optimizer.learningRate"}
    assert told["differences"]["trainer.config.epochs"][1] == 9
    for path, one in zip(runs, told["runs"], strict=True):
        run = read(path)
        summary = summarize(run, clock.of(run.marks))
        assert run.best is not None
        assert (one["steps"], one["best"], one["evaluated"]) == (summary.steps, run.best.name, summary.evaluated)
        assert one["seconds"] == pytest.approx(summary.seconds)
        assert one["throughput"] == pytest.approx(summary.throughput)
        assert one["path"] == str(path)


def test_a_run_that_has_made_nothing_is_compared_all_the_same(runs: list[Path], tmp_path: Path) -> None:
    (tmp_path / "job.json").write_text((runs[0] / "job.json").read_text())
    told = json.loads(said(runs[0], tmp_path, "-o", "json"))
    assert (told["runs"][1]["steps"], told["runs"][1]["score"], told["differences"]) == (0, None, {})
    assert "–" in said(runs[0], tmp_path)


@pytest.mark.parametrize("count", [1, MOST + 1])
def test_it_takes_two(runs: list[Path], count: int) -> None:
    with pytest.raises(UserError, match="can be compared"):
        said(*([runs[0]] * count))
