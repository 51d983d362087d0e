"""The simulation of saves and failures."""

from dataclasses import replace

import pytest

from benchmarks.goals import Outcome
from benchmarks.save_interval import (
    HOUR,
    RESTART_SECONDS,
    Result,
    Trace,
    failures_of,
    result_of,
    simulate,
    trace_of,
    verdict,
)

QUIET = Trace("chance", 1e9, 10 * HOUR, 2.0, 5.0, 0.0, seed=1)
TROUBLED = replace(QUIET, between_seconds=HOUR)


def test_without_failures_a_run_takes_its_steps_and_its_saves() -> None:
    course = simulate(QUIET, 600.0)
    assert (course.failures, course.repeated, course.saves) == (0, 0.0, 59)
    assert course.seconds == pytest.approx(QUIET.work_seconds + 59 * 2.0, rel=0.001)


def test_a_failure_costs_the_steps_since_the_last_save_that_was_on_the_disk_and_a_restart() -> None:
    course = simulate(TROUBLED, 60.0)
    assert course.failures > 3
    assert course.repeated <= course.failures * (60.0 + 4 * 2.0 + 5.0)
    stalls = course.seconds - TROUBLED.work_seconds - course.repeated - course.failures * RESTART_SECONDS
    assert stalls == pytest.approx(course.saves * 2.0, rel=0.05)


def test_a_survived_failure_repeats_nothing() -> None:
    course = simulate(replace(TROUBLED, survived=1.0), 60.0)
    assert (course.failures, course.repeated) == (0, 0.0)


def test_failures_are_the_same_for_every_rule() -> None:
    first, second = failures_of(TROUBLED), failures_of(TROUBLED)
    late = second(5 * HOUR)
    assert [first(hour * HOUR) for hour in range(6)][-1] == late
    assert second(0.0) == failures_of(TROUBLED)(0.0)


def test_traces_are_drawn_by_their_seed() -> None:
    assert trace_of(3) == trace_of(3) != trace_of(4)


def test_auto_is_within_one_percent_on_a_trace_and_the_verdict_says_when_it_is_not() -> None:
    result = result_of(replace(TROUBLED, work_seconds=20 * HOUR))
    assert verdict([result]).outcome is Outcome.MET
    slow = replace(result.auto, seconds=1.02 * result.best.seconds)
    missed = verdict([result, Result(result.trace, slow, result.best_interval, result.best, result.default)])
    assert missed.outcome is Outcome.MISSED
    assert "+2.00% at most" in missed.reason
