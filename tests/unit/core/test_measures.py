"""What the numbers mean that several views show."""

import pytest

from tandem.wire.measures import Generation, Outage, Pace, is_restart, outages, restarts


def generation(
    reason: str,
    opened_at: float | None = None,
    closed_at: float | None = None,
    first_step_at: float | None = None,
    last_step_at: float | None = None,
) -> Generation:
    return Generation(
        1,
        opened_at=opened_at,
        closed_at=closed_at,
        reason=reason,
        first_step_at=first_step_at,
        last_step_at=last_step_at,
    )


FIRST = generation("Started", 0.0, 10.0, 2.0, 9.8)


def test_an_outage_is_from_the_last_step_to_the_first_one_after_it() -> None:
    second = generation("WorkerFailed", 10.1, None, 11.2, 30.0)
    assert outages([FIRST, second]) == [Outage("WorkerFailed", 9.8, 11.2)]
    assert outages([FIRST]) == []


def test_a_generation_without_a_step_lies_within_the_outage_around_it() -> None:
    crashed = generation("WorkerFailed", 10.1, 10.9)
    third = generation("MemberLost", 11.0, None, 12.3, 30.0)
    assert outages([FIRST, crashed, third]) == [Outage("WorkerFailed", 9.8, 12.3)]


def test_an_outage_that_goes_on_reaches_to_the_newest_generation() -> None:
    assert outages([FIRST, generation("Hung", 12.0)]) == [Outage("Hung", 9.8, 12.0)]


def test_of_a_script_that_logs_no_steps_it_is_the_time_between_two_generations() -> None:
    """And not the whole life of the first."""
    one, two = generation("Started", 0.0, 60.0), generation("MemberLost", 63.0, None)
    assert outages([one, two]) == [Outage("MemberLost", 60.0, 63.0, without="group")]


def test_a_change_that_lost_nothing_is_no_restart() -> None:
    """A lost worker is one restart, and not another one when its replacement joins; Ctrl-C and going on is none."""
    lost = [FIRST, generation("MemberLost", 11.0), generation("MemberJoined", 14.0), generation("Started", 60.0)]
    assert restarts(lost) == 1
    assert [reason for reason in ("Hung", "WorkerFailed", "TargetChanged", "Preempted") if is_restart(reason)] == [
        "Hung",
        "WorkerFailed",
    ]


def test_throughput_and_what_is_left_are_of_the_same_minute() -> None:
    pace = Pace()
    pace.add(0.0, 100)
    assert pace.steps_per_second is None
    for second in range(1, 91):
        pace.add(float(second), 100 + (40 if second <= 30 else 2) * second)
    throughput, left = pace.throughput(64.0), pace.remaining_seconds(1_000, 10_000)
    assert left * throughput == pytest.approx(9_000 * 64.0)
    assert pace.remaining_seconds(10_000, 10_000) == 0.0
    assert pace.remaining_seconds(5, None) is None
