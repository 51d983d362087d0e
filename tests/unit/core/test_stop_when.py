"""The scores at which training ends."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tandem.confidence import Estimate, Interval
from tandem.job.stop_when import StopWhen


def scores(*pairs: tuple[int, float | None]) -> list[tuple[int, Estimate | None]]:
    return [(step, None if value is None else Estimate(value)) for step, value in pairs]


SCORES = scores((10, 0.5), (20, 0.7), (30, None), (40, 0.7), (50, 0.69), (60, 0.705))


@pytest.mark.parametrize(
    ("rule", "reason"),
    [
        ({"reaches": 0.7}, "accuracy is 70.00 % at step 20"),
        ({"reaches": 0.71}, ""),
        ({"noBetterFor": 3}, "accuracy has not become better than 70.00 % (step 20) in 3 evaluations"),
        ({"noBetterFor": 4}, ""),
        ({"noBetterFor": 4, "minImprovement": 0.01}, "better than 70.00 % (step 20) in 4 evaluations"),
        ({"noBetterFor": 4, "reaches": 0.6}, "accuracy is 70.00 % at step 20"),
    ],
)
def test_training_ends_by_the_scores_so_far(rule: dict[str, float], reason: str) -> None:
    seen = SCORES[:5] if rule == {"noBetterFor": 3} else SCORES
    said = StopWhen.parse(rule).reason(seen, "accuracy", "Maximize")
    assert reason in said
    assert bool(reason) == bool(said)


def test_less_is_better_where_the_goal_says_so() -> None:
    losses = scores((1, 2.0), (2, 1.0), (3, 1.5))
    assert StopWhen.parse({"reaches": 1.2}).reason(losses, "loss", "Minimize") == "loss is 1.000 at step 2"
    assert "better than 1.000 (step 2)" in StopWhen.parse({"noBetterFor": 1}).reason(losses, "loss", "Minimize")
    assert StopWhen.parse({"noBetterFor": 2}).reason(losses, "loss", "Minimize") == ""


def test_scores_that_are_never_finite_end_nothing() -> None:
    assert StopWhen.parse({"noBetterFor": 1, "reaches": 0.0}).reason([(1, None), (2, None)], "f1", "Maximize") == ""


def test_a_rise_within_chance_is_no_improvement_until_it_adds_up() -> None:
    rising = [(step, Estimate(value, Interval(value - 0.02, value + 0.02))) for step, value in
              ((1, 0.50), (2, 0.51), (3, 0.52), (4, 0.53), (5, 0.54))]  # fmt: skip
    patient = StopWhen.parse({"noBetterFor": 3, "beyondChance": True})
    assert patient.reason(rising, "accuracy", "Maximize") == "", "step 4 differs from step 1 by more than 0.0283"
    stale = patient.reason([*rising[:3], (4, rising[2][1])], "accuracy", "Maximize")
    assert stale == "accuracy has not become better than 50.00 % (step 1), by more than chance, in 3 evaluations"
    by_value = StopWhen.parse({"noBetterFor": 3})
    assert by_value.reason([*rising[:3], (4, rising[2][1])], "accuracy", "Maximize") == ""


def test_scores_without_intervals_are_compared_by_value() -> None:
    patient = StopWhen.parse({"noBetterFor": 2, "beyondChance": True})
    assert patient.reason(scores((1, 0.5), (2, 0.51), (3, 0.52)), "f1", "Maximize") == ""
    assert patient.reason(scores((1, 0.5), (2, 0.5), (3, 0.5)), "f1", "Maximize")


@given(st.lists(st.floats(-10, 10), max_size=30), st.integers(1, 5), st.sampled_from(["Maximize", "Minimize"]))
def test_it_ends_when_the_best_of_the_last_ones_is_not_better_than_what_was_before(
    values: list[float], patience: int, goal: str
) -> None:
    sign = 1 if goal == "Maximize" else -1
    reason = StopWhen(no_better_for=patience).reason(scores(*enumerate(values)), "height", goal)  # type: ignore[arg-type]
    before, last = values[:-patience], values[-patience:]
    is_stale = bool(before) and max(sign * value for value in last) <= max(sign * value for value in before)
    assert bool(reason) == is_stale
