"""The pure parts of `make bench`: what a step takes of the processors, and whether a side keeps up with a reference."""

import subprocess
import sys

import psutil
import pytest

from benchmarks.goals import Outcome, exit_code
from benchmarks.throughput.processors import Sample, Use, per_step, sample, steps_until
from benchmarks.throughput.sides import Measurement
from benchmarks.throughput.verdict import Goal, by_clock, by_processors, judge

GOAL = Goal("ours ≥ 0.99 of theirs", 0.99, lambda use: use.total)


def run(throughput: float, ranks: float, beside: float = 0.0, start: float = 5.0) -> Measurement:
    return Measurement(throughput, Use(ranks, beside), start)


def sides(throughput: float, ranks: float, beside: float = 0.0, count: int = 9) -> tuple[list[Measurement], ...]:
    """Ours, and a reference of 100 samples a second and 0.1 s a step, each swinging by a thousandth."""
    swings = [1 + (index - count // 2) / 1000 for index in range(count)]
    ours = [run(throughput * swing, ranks * swing, beside) for swing in swings]
    return ours, [run(100.0 * swing, 0.1, 0.0) for swing in swings]


def outcomes(ours: list[Measurement], theirs: list[Measurement]) -> list[Outcome]:
    return [verdict.outcome for verdict in judge(GOAL, ours, theirs)]


def test_the_goal_is_met_by_who_takes_no_more_processor_and_no_more_time() -> None:
    assert outcomes(*sides(100.0, 0.1)) == [Outcome.MET, Outcome.MET]
    assert exit_code(judge(GOAL, *sides(100.0, 0.1))) == 0


def test_the_goal_is_missed_where_the_ranks_take_more_processor() -> None:
    verdicts = judge(GOAL, *sides(100.0, 0.103))
    assert [verdict.outcome for verdict in verdicts] == [Outcome.MISSED, Outcome.MET]
    assert exit_code(verdicts) == 1
    assert "processor seconds: median of 9 ratios 0.971" in str(verdicts[0])


def test_what_is_beside_the_ranks_counts_where_it_shares_their_cores_and_else_not() -> None:
    ours, theirs = sides(100.0, 0.1, beside=0.003)
    assert outcomes(ours, theirs)[0] is Outcome.MISSED
    alone = Goal("with evaluators", 0.99, lambda use: use.ranks)
    assert [verdict.outcome for verdict in judge(alone, ours, theirs)] == [Outcome.MET, Outcome.MET]


def test_the_goal_is_missed_by_a_loop_that_waits_without_using_a_processor() -> None:
    assert outcomes(*sides(90.0, 0.1)) == [Outcome.MET, Outcome.MISSED]


def test_the_clock_alone_misses_a_goal_only_with_its_whole_interval() -> None:
    swinging = [0.90, 0.93, 0.94, 0.95, 0.96, 0.97, 0.98, 1.00, 1.05]
    assert by_clock("ours", 0.99, swinging).outcome is Outcome.MET
    assert by_clock("ours", 0.99, [ratio - 0.02 for ratio in swinging]).outcome is Outcome.MISSED


def test_a_clock_that_could_not_show_a_loss_of_a_tenth_judges_nothing() -> None:
    verdict = by_clock("ours", 0.99, [0.80, 0.85, 0.90, 0.95, 1.00, 1.05, 1.10, 1.15, 1.20])
    assert verdict.outcome is Outcome.UNJUDGED
    assert "too noisy to see a loss of 10%" in str(verdict)
    assert exit_code([verdict]) == 3


@pytest.mark.parametrize("median", [0.98, 1.00])
def test_processor_seconds_whose_interval_reaches_far_to_the_other_side_judge_nothing(median: float) -> None:
    ratios = [median + (index - 4) * 0.015 for index in range(9)]
    assert by_processors(GOAL, ratios).outcome is Outcome.UNJUDGED


@pytest.mark.parametrize(("median", "outcome"), [(0.989, Outcome.MISSED), (0.991, Outcome.MET)])
def test_the_median_of_processor_seconds_decides_where_their_interval_is_narrow(
    median: float, outcome: Outcome
) -> None:
    assert by_processors(GOAL, [median + (index - 4) * 0.005 for index in range(9)]).outcome is outcome


@pytest.mark.parametrize(("start", "outcome"), [(4.0, Outcome.MET), (5.0, Outcome.MET), (5.1, Outcome.MISSED)])
def test_a_start_that_comes_later_misses_a_goal_that_says_so(start: float, outcome: Outcome) -> None:
    goal = Goal("ours", 0.99, lambda use: use.total, start=True)
    verdicts = judge(goal, [run(100.0, 0.1, start=start)] * 9, [run(100.0, 0.1)] * 9)
    assert [verdict.outcome for verdict in verdicts] == [Outcome.MET, Outcome.MET, outcome]


def test_a_few_rounds_are_not_judged_however_clear_they_seem() -> None:
    assert outcomes(*sides(50.0, 0.2, count=5)) == [Outcome.UNJUDGED, Outcome.UNJUDGED]


def test_a_measurement_that_failed_is_counted_and_misses_the_goal() -> None:
    ours, theirs = sides(100.0, 0.1)
    (verdict,) = judge(GOAL, ours, [*theirs[:-1], None])
    assert verdict.outcome is Outcome.MISSED
    assert verdict.reason == "1 of 18 measurements failed"
    (verdict,) = judge(GOAL, ours, theirs, [None] * 9)
    assert verdict.reason == "9 of 27 measurements failed"


def test_a_step_takes_what_was_taken_between_two_looks_by_the_steps_between_them() -> None:
    ends = [float(second) for second in range(1, 11)]
    samples = [Sample(0.5, 0.0, 5.0), Sample(4.5, 10.0, 6.0), Sample(8.5, 14.0, 6.4), Sample(99.0, 50.0, 50.0)]
    found = per_step(samples, ends, skip=2)
    assert (found.ranks, found.beside, found.total) == pytest.approx((1.0, 0.1, 1.1))


def test_a_run_that_was_looked_at_once_tells_nothing_of_its_processors() -> None:
    assert per_step([Sample(4.5, 10.0, 6.0)], [float(second) for second in range(1, 11)], skip=2) is None


def test_the_step_under_way_counts_in_part() -> None:
    assert [steps_until([1.0, 2.0, 4.0], at) for at in (0.5, 1.0, 3.0, 9.0)] == [0.0, 1.0, 2.5, 3.0]


BUSY = """
import os, sys, time
child = os.fork()
if child == 0:
    while time.process_time() < 0.2:
        pass
    os._exit(0)
os.waitpid(child, 0)
print("ended", flush=True)
sys.stdin.read()
"""


def test_what_a_process_took_that_has_ended_is_not_lost_and_is_no_ranks() -> None:
    with subprocess.Popen([sys.executable, "-c", BUSY], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout.readline() == b"ended\n"
        measured = sample(psutil.Process(process.pid), lambda _: True)
        process.communicate()
    assert measured.other >= 0.15
    assert measured.ranks < 0.15


def test_the_peak_is_that_of_the_rank_that_took_most_and_no_others() -> None:
    own = psutil.Process()
    resident = own.memory_info().rss / 1e6
    assert sample(own, lambda process: process.pid == own.pid).peak >= resident
    assert sample(own, lambda _: False).peak == 0.0
