"""The last words of `tandem run`."""

import io

import pytest
from rich.console import Console, Group

from tandem_cli.terminal.summary import RunResult, complete


def first_line(found: RunResult, seconds: float | None, before: int | None = None) -> str:
    told = complete("digits", found, "runs/digits", seconds, evaluates=True, before=before)
    return words(told).splitlines()[0]


def words(shown: Group) -> str:
    file = io.StringIO()
    Console(file=file, width=200).print(shown)
    return file.getvalue()


def test_what_is_to_be_typed_is_quoted_where_a_path_has_a_space() -> None:
    assert "tandem report 'runs/a b'\n" in words(complete("digits", RunResult(step=1), "runs/a b", 1.0, evaluates=True))
    assert "tandem report runs/ab\n" in words(complete("digits", RunResult(step=1), "runs/ab", 1.0, evaluates=True))


def test_a_run_that_took_fewer_steps_than_announced_is_not_called_complete() -> None:
    early = "stopped early after step 40 of 100: the loss has not fallen"
    assert first_line(RunResult(step=40, stopped_early=early), 25.2) == f"digits {early} in 25 s"


@pytest.mark.parametrize(
    ("steps", "seconds", "before", "words"),
    [
        (920, 25.2, None, "digits is complete: 920 steps in 25 s"),
        (1, 7.0, None, "digits is complete: 1 step in 7 s"),
        (2_300, 15.0, 560, "digits is complete: 2,300 steps, the last 1,740 in 15 s"),
        (2_300, 5.0, 2_300, "digits is complete: 2,300 steps; what was left took 5 s"),
        (2_300, None, 2_300, "digits is complete: 2,300 steps"),
        (None, 5.0, None, "digits is complete in 5 s"),
    ],
)
def test_the_time_is_that_of_the_steps_it_is_told_with(
    steps: int | None, seconds: float | None, before: int | None, words: str
) -> None:
    assert first_line(RunResult(step=steps), seconds, before) == words
