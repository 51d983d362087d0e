"""The verdict on short jobs, and that real ones are measured."""

import math
from pathlib import Path

import pytest

from benchmarks.goals import Outcome, exit_code
from benchmarks.short_jobs import SECONDS, Ended, judge, play, table


def ended(number: int, agents: float = 0.3, done: float = 0.2, problem: str = "", lost: bool = False) -> Ended:
    return Ended(number, agents, done, lost, problem)


def test_jobs_that_end_in_time_are_met_and_one_that_does_not_is_named() -> None:
    rows = [ended(number) for number in range(100)]
    assert exit_code(judge(rows)) == 0
    for wrong in (ended(7, agents=SECONDS + 0.1), ended(7, done=math.inf), ended(7, problem="ranks began [2] times")):
        verdicts = judge([*rows, wrong])
        missed = [verdict for verdict in verdicts if verdict.outcome is Outcome.MISSED]
        assert len(missed) == 1
        assert "job 7" in missed[0].reason
        assert exit_code(verdicts) == 1


def test_the_table_has_both_kinds_of_jobs() -> None:
    rows = [*(ended(number, agents=number / 100) for number in range(100)), ended(100, agents=2.0, lost=True)]
    head, *lines = table(rows).splitlines()
    assert [line.split()[-5:] for line in lines] == [
        ["100", "0.50", "0.99", "0.99", "0.20"],
        ["1", "2.00", "2.00", "2.00", "0.20"],
    ]
    assert len({len(line) for line in (head, *lines)}) == 1


@pytest.mark.full("benchmarks")
@pytest.mark.parametrize("lose", [False, True])
def test_a_job_is_played_to_its_end(tmp_path: Path, lose: bool) -> None:
    row = play(3, tmp_path / "job", "played", 2, lose, seed=1)
    assert row.problem == ""
    assert row.lost == lose
    assert max(row.agents_seconds, row.done_seconds) < math.inf
