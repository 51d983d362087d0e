"""How often to save."""

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tandem.wire.save_interval import (
    MAX_SECONDS,
    MIN_GAIN,
    MIN_SAVES,
    MIN_SECONDS,
    best_interval,
    cost_share,
    failure_rate,
    interval_advice,
)

HOUR = 3600.0


def test_the_interval_is_the_one_that_costs_least() -> None:
    interval = best_interval(2.0, 0.0, 10, 10 * HOUR)
    rate = failure_rate(10, 10 * HOUR)
    least = cost_share(interval, 2.0, rate)
    assert all(cost_share(interval * factor, 2.0, rate) > least for factor in (0.5, 0.9, 1.1, 2.0))
    assert interval == pytest.approx(120, rel=0.15)


def test_an_interval_has_bounds() -> None:
    assert best_interval(0.0001, 0.0, 100, HOUR) == MIN_SECONDS
    assert best_interval(60.0, 0.0, 0, 1000 * HOUR) == MAX_SECONDS
    assert best_interval(0.01, 40.0, 100, HOUR) == pytest.approx(40.01), "a save that falls due within one is skipped"


@given(st.floats(0, 100), st.floats(0, 1000), st.integers(0, 1000), st.floats(0, 1e7))
def test_more_failures_never_lengthen_it_and_dearer_saves_never_shorten_it(
    save: float, write: float, failures: int, seconds: float
) -> None:
    interval = best_interval(save, write, failures, seconds)
    assert MIN_SECONDS <= interval <= MAX_SECONDS
    assert best_interval(save, write, failures + 1, seconds) <= interval
    assert best_interval(save + 1, write, failures, seconds) >= interval


def advice(
    every: float, stall: float, failures: int, hours: float, step_seconds: float | None = None, saves: int | None = None
) -> str | None:
    """The advice for a run that saved every so many seconds."""
    training = hours * HOUR
    count = round(training / every) if saves is None else saves
    again = failures * every / 2
    total = training + count * stall + again
    return interval_advice(
        training_seconds=training,
        total_seconds=total,
        save_seconds=count * stall,
        recomputed_seconds=again,
        saves=count,
        setbacks=failures,
        step_seconds=step_seconds,
    )


def test_the_advice_names_both_costs_the_setting_and_what_it_would_save() -> None:
    sentence = advice(every=50.0, stall=0.5, failures=1, hours=10, step_seconds=1.0)
    assert sentence is not None
    pattern = r"saves every 50 steps cost (0\.99) % and failures cost (0\.069) % of the time: "
    pattern += r"checkpoint\.everySteps: (\d+) would save (0\.\d+) %"
    found = re.fullmatch(pattern, sentence)
    assert found, sentence
    assert 150 <= int(found[3]) <= 250
    sentence = advice(every=50.0, stall=0.5, failures=1, hours=10)
    assert sentence is not None
    assert "saves every 50 s cost" in sentence
    assert "checkpoint.everySeconds: " in sentence


def test_saves_that_are_too_rare_are_named_too() -> None:
    sentence = advice(every=1800.0, stall=0.2, failures=8, hours=20)
    assert sentence is not None
    assert re.search(r"checkpoint\.everySeconds: \d\d would save 1\d %", sentence) or "would save 9" in sentence, (
        sentence
    )


@pytest.mark.parametrize(
    "run",
    [
        {"every": 200.0, "stall": 0.5, "failures": 2, "hours": 20},
        {"every": 50.0, "stall": 0.5, "failures": 1, "hours": 10, "saves": MIN_SAVES - 1},
        # Of ten minutes without a failure nothing follows.
        {"every": 10.0, "stall": 0.1, "failures": 0, "hours": 0.1},
        # One failure in an hour may have been chance.
        {"every": 170.0, "stall": 0.1, "failures": 1, "hours": 1},
    ],
)
def test_without_enough_evidence_or_gain_there_is_no_advice(run: dict[str, float]) -> None:
    assert advice(**run) is None


@given(st.floats(5, 3000), st.floats(0.001, 20), st.integers(0, 50), st.floats(0.1, 500))
def test_the_advice_still_holds_after_another_failure(every: float, stall: float, failures: int, hours: float) -> None:
    sentence = advice(every, stall, failures, hours)
    if sentence is None:
        return
    seconds = int(sentence.split("everySeconds: ")[1].split()[0])
    training = hours * HOUR
    present = training / round(training / every)
    for count in (max(0, failures - 1), failures, failures + 1):
        rate = count / training
        gain = cost_share(present, stall, rate) - cost_share(seconds, stall, rate)
        # The sentence rounds the interval to seconds.
        assert gain > (MIN_GAIN if count == failures else 0.0) - 0.002
