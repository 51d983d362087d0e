"""The played week: that its fast model admits what the operator and Kueue do, and its verdict."""

import random

import pytest

from benchmarks.goals import Outcome, exit_code
from benchmarks.queue_play import HOUR, LEAVE_SECONDS, REGROUP_SECONDS, START_SECONDS, Queue, QueuedJob, judge, play
from tests.support.worlds.queued_jobs import QueuedJobs

CLASSES = {"batch": "", "research": "urgent"}
"""Priority classes with the values of these."""
NOMINAL = 12


def settle(queue: Queue, now: float) -> None:
    """Whoever is evicted leaves at once, until nothing changes."""
    while (step := queue.step(now)) is not None:
        now += 1.0
        for claim in step[1]:
            queue.give_back(claim)


@pytest.mark.parametrize("elastic", [True, False])
@pytest.mark.parametrize(
    "seed",
    [*range(6), *(pytest.param(seed, marks=pytest.mark.full("benchmarks", "operator")) for seed in range(6, 200))],
)
def test_the_model_admits_what_the_operator_and_kueue_do(elastic: bool, seed: int) -> None:
    chance = random.Random(seed)
    world, queue, now = QueuedJobs(NOMINAL), Queue(NOMINAL, elastic), 0.0
    for number in range(8):
        now += 1000.0
        if number >= 3 and queue.jobs and chance.random() < 0.4:
            name = chance.choice(sorted(queue.jobs))
            queue.remove(name)
            world.jobs[name].complete = True
        else:
            name, kind, most = f"job-{number}", chance.choice(sorted(CLASSES)), chance.choice([1, 2, 4, 8, 12])
            least = max(1, most // 4) if elastic else most
            queue.submit(QueuedJob(name, kind, now, HOUR, least, most), now)
            world.submit(name, least, most, CLASSES[kind])
        settle(queue, now)
        world.settle()
        sizes = {name: len(world.jobs[name].using) for name in queue.jobs}
        assert {name: queue.size(name) for name in queue.jobs} == sizes


def test_a_job_makes_room_by_its_last_workers_and_grows_again() -> None:
    first = QueuedJob("first", "batch", 0.0, 100 * HOUR, 1, 4)
    second = QueuedJob("second", "batch", 10 * HOUR, 10 * HOUR, 1, 4)
    elastic, late = play([first, second], 4, elastic=True)
    whole, waits = play([first, second], 4, elastic=False)
    assert late.first_step is not None
    assert late.first_step - second.arrival == pytest.approx(START_SECONDS + LEAVE_SECONDS)
    assert (elastic.shrinks, elastic.preemptions, whole.preemptions) == (2, 0, 0)
    assert waits.waited == pytest.approx(15 * HOUR + START_SECONDS)
    # Two by two until the second has ended, then all four.
    pauses = 4 * REGROUP_SECONDS + 2 * START_SECONDS + LEAVE_SECONDS
    assert elastic.ended == pytest.approx(10 * HOUR + 5 * HOUR + 12.5 * HOUR, abs=pauses + 10 * START_SECONDS)
    assert all(run.done == pytest.approx(run.job.work) for run in (elastic, late, whole, waits))


def test_a_job_of_higher_priority_takes_a_whole_job_only_if_it_has_to() -> None:
    low = QueuedJob("low", "batch", 0.0, 100 * HOUR, 2, 4)
    high = QueuedJob("high", "research", HOUR, 2 * HOUR, 2, 2)
    runs = {elastic: play([low, high], 4, elastic)[0] for elastic in (True, False)}
    assert (runs[True].preemptions, runs[True].shrinks, runs[True].waited) == (0, 2, 0.0)
    assert (runs[False].preemptions, runs[False].shrinks) == (1, 0)
    assert runs[False].waited == pytest.approx(HOUR + START_SECONDS, abs=2 * LEAVE_SECONDS)


@pytest.mark.parametrize(
    ("elastic", "code"),
    [((100.0, 1.0, 5.0), 0), ((99.0, 1.0, 5.0), 1), ((100.0, 2.0, 5.0), 1), ((100.0, 1.0, 9.0), 1)],
)
def test_the_goal_is_more_work_and_shorter_waits(elastic: tuple[float, float, float], code: int) -> None:
    names = ("useful GPU hours", "waits, median", "waits, 95 %")
    whole = dict(zip(names, (100.0, 2.0, 9.0), strict=True))
    weeks = {"all-or-none": [whole] * 5, "elastic": [dict(zip(names, elastic, strict=True))] * 5}
    assert exit_code(judge(weeks)) == code
    few = {mode: of_mode[:4] for mode, of_mode in weeks.items()}
    assert {verdict.outcome for verdict in judge(few)} == {Outcome.UNJUDGED}
