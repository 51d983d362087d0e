"""What a benchmark concludes from figures, and the exit codes that say so."""

import math

import pytest

from benchmarks.goals import Outcome, Verdict, exit_code, interval, judge_median


def verdict(outcome: Outcome) -> Verdict:
    return Verdict(outcome, "goal", "why")


def test_a_benchmark_ends_with_0_only_where_every_goal_is_met() -> None:
    met, missed, unjudged = (verdict(outcome) for outcome in (Outcome.MET, Outcome.MISSED, Outcome.UNJUDGED))
    assert exit_code([]) == 0
    assert exit_code([met, met]) == 0
    assert exit_code([met, missed, unjudged]) == 1
    assert exit_code([met, unjudged]) == 3


def test_five_values_hold_no_interval_of_95_percent_and_six_hold_one() -> None:
    assert interval([1.0, 2.0, 3.0, 4.0, 5.0]) is None
    assert interval([]) is None
    assert interval([6.0, 1.0, 5.0, 2.0, 4.0, 3.0]) == (1.0, 6.0)


@pytest.mark.parametrize(("count", "low", "high"), [(8, 1, 8), (9, 2, 8), (12, 3, 10), (20, 6, 15)])
def test_an_interval_leaves_out_the_values_of_the_sign_tests_table(count: int, low: int, high: int) -> None:
    assert interval([float(value) for value in range(1, count + 1)]) == (low, high)


def test_the_median_of_times_is_judged_and_a_failure_is_longer_than_any() -> None:
    assert judge_median("goal", [0.1, 0.2, 0.2, 0.2, 9.0], 0.2).outcome is Outcome.MET
    assert judge_median("goal", [0.1, 0.1, 0.3, 0.3, 0.3], 0.2).outcome is Outcome.MISSED
    missed = judge_median("goal", [0.1, 0.1, math.inf, math.inf, math.inf], 0.2)
    assert str(missed) == "missed: goal: median never of 5"


def test_a_few_times_are_not_judged() -> None:
    assert judge_median("goal", [9.0, 9.0, 9.0, 9.0], 0.2).outcome is Outcome.UNJUDGED
