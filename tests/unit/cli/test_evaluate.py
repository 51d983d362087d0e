"""`tandem evaluate`: which words name checkpoints and which the program, and what is printed."""

from pathlib import Path

import pytest

from tandem.errors import UserError
from tandem_cli.checkpoints.inventory import Inventory, take_inventory
from tandem_cli.commands.evaluate import _chosen, _lines, _startable, split_args
from tests.support.worlds.small_run import SmallRun, messy


@pytest.fixture
def inventory(tmp_path: Path) -> Inventory:
    return take_inventory(messy(tmp_path).rundir)


@pytest.mark.parametrize(
    ("words", "names", "program"),
    [
        ([], [], []),
        (["best"], ["best"], []),
        (["latest", "400", "step-000000300"], ["latest", "400", "step-000000300"], []),
        (["evaluate.py", "--split", "hard"], [], ["evaluate.py", "--split", "hard"]),
        (["best", "python", "evaluate.py", "best"], ["best"], ["python", "evaluate.py", "best"]),
        (["all", "./score"], ["all"], ["./score"]),
    ],
)
def test_the_program_begins_with_the_first_word_that_names_no_checkpoint(
    inventory: Inventory, words: list[str], names: list[str], program: list[str]
) -> None:
    assert split_args(words, inventory) == (names, program)


def test_without_a_name_it_is_the_best_checkpoint(inventory: Inventory) -> None:
    assert [entry.step for entry in _chosen([], inventory)] == [200]


def test_without_scores_it_is_the_newest_one(tmp_path: Path) -> None:
    run = SmallRun(tmp_path)
    run.begin(1)
    run.save(100)
    run.save(200)
    assert [entry.step for entry in _chosen([], take_inventory(run.rundir))] == [200]


def test_all_are_those_that_count_and_each_is_taken_once(inventory: Inventory) -> None:
    assert [entry.step for entry in _chosen(["300", "all", "best"], inventory)] == [300, 100, 200, 400, 500, 600]


def test_a_program_that_is_not_there_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UserError, match=r"score.py: no such file, and no checkpoint of this run"):
        _startable(["score.py"])
    with pytest.raises(UserError, match="bset is neither a checkpoint of this run nor a program"):
        _startable(["bset"])
    (tmp_path / "score.py").touch()
    assert _startable(["score.py", "x"]) == ["score.py", "x"]


def test_new_scores_stand_beside_those_that_were_recorded() -> None:
    answer = {"checkpoint": "step-000000100", "metrics": {"accuracy": 0.5, "loss": None}, "seconds": 2.0}
    same = answer | {"recorded": {"accuracy": 0.5}}
    assert _lines(same, is_other=False) == [
        "step-000000100  accuracy 50.00 %, loss not finite  in 2.0 s",
        "  as recorded",
    ]
    other = answer | {"recorded": {"accuracy": 0.75}, "note": "a note"}
    assert _lines(other, is_other=True)[1:] == ["  a note", "  recorded: accuracy 75.00 %"]
    assert _lines(answer | {"recorded": {}}, is_other=False)[1:] == ["  not recorded yet"]
    failed = {"checkpoint": "step-000000100", "failed": "there is no such checkpoint"}
    assert _lines(failed, is_other=False) == ["step-000000100  not evaluated: there is no such checkpoint"]
