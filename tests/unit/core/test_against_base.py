"""Scores beside those of the base model, and when training counts as making them worse."""

from typing import Literal

import pytest

from tandem.formatting import change
from tandem.rundir.against_base import (
    MAX_COUNT,
    compare_with_base,
    count_worse,
    format_comparisons,
    worse_than_base_message,
)
from tandem.wire.status import Compared, Score

BASE = {"accuracy": 0.5, "loss": 2.0, "perplexity": 8.0}


def scored(*values: float) -> list[Score]:
    return [
        Score(name=f"step-{step:09d}", step=step, metric="perplexity", value=value)
        for step, value in enumerate(values, start=1)
    ]


def test_the_metric_that_decides_comes_first_and_a_missing_score_is_none() -> None:
    found = compare_with_base(BASE, {"perplexity": 6.0, "accuracy": 0.6}, "perplexity")
    assert found == [
        Compared(metric="perplexity", base=8.0, value=6.0),
        Compared(metric="accuracy", base=0.5, value=0.6),
        Compared(metric="loss", base=2.0),
    ]
    assert (
        format_comparisons(found)
        == "perplexity 8.000 → 6.000 (−25.0 %), accuracy 50.00 % → 60.00 % (+10.00 points), loss 2.000"
    )


def test_of_many_metrics_some_are_compared() -> None:
    assert len(compare_with_base({f"m{n}": 1.0 for n in range(60)}, {}, "m3")) == MAX_COUNT


@pytest.mark.parametrize(
    ("metric", "before", "after", "words"),
    [
        ("loss", 2.0, 1.0, "−50.0 %"),
        ("loss", -2.0, -1.0, "+50.0 %"),
        ("loss", 0.0, 0.25, "+0.2500"),
        ("accuracy", 0.5, 0.25, "−25.00 points"),
        ("loss", 1.0, float("inf"), "– %"),
    ],
)
def test_a_change_is_a_share_of_what_was_or_points(metric: str, before: float, after: float, words: str) -> None:
    assert change(metric, before, after) == words


@pytest.mark.parametrize(
    ("values", "goal", "is_over", "count"),
    [
        ((9.0, 9.0, 9.0), "Minimize", False, 3),
        ((9.0, 9.0), "Minimize", False, 0),
        ((9.0, 9.0), "Minimize", True, 2),
        ((9.0, 8.0, 9.0), "Minimize", False, 0),
        ((9.0, 7.0), "Minimize", True, 0),
        ((), "Minimize", True, 0),
        ((7.0, 7.0, 7.0), "Maximize", False, 3),
        ((9.0, 9.0, 9.0), "Maximize", False, 0),
    ],
)
def test_three_in_a_row_are_worse_or_at_the_end_all_that_there_are(
    values: tuple[float, ...], goal: Literal["Maximize", "Minimize"], is_over: bool, count: int
) -> None:
    assert count_worse(BASE, scored(*values), goal, is_over) == count


def test_without_a_score_of_the_base_model_nothing_is_worse() -> None:
    assert count_worse({}, scored(9.0, 9.0, 9.0), "Minimize", False) == 0


def test_the_sentence_names_the_newest() -> None:
    assert worse_than_base_message(BASE, scored(9.0, 10.0, 11.0)) == (
        "the last 3 evaluated checkpoints are worse than the base model: perplexity 11.0 at step 3, 8.000 of the base"
    )
    assert worse_than_base_message(BASE, scored(9.0)).startswith(
        "the last evaluated checkpoint is worse than the base model: "
    )
