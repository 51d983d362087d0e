"""Where a job's time goes."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tandem.wire.metrics import TIME_PHASES
from tandem.wire.wall_time import CAUSES, Cause, WallTime
from tandem_coordinator.goodput import (
    AFTER_LOOP,
    ENDED,
    FINAL_SAVE,
    MAX_ABSENCE_SECONDS,
    SETTLE_SECONDS,
    SILENT,
    STEPPING,
    Goodput,
)

WORK: tuple[Cause, ...] = ("training", "recomputed", "data", "checkpoint", "script")


def of_causes(**seconds: float) -> dict[str, float]:
    return dict.fromkeys(CAUSES, 0.0) | seconds


def test_each_moment_belongs_to_what_the_job_was_about() -> None:
    goodput = Goodput(0.0)
    for now, activity in [(3.0, "rendezvous"), (4.0, "restore"), (6.5, STEPPING)]:
        goodput.update(now, activity, {})
    assert goodput.seconds == {
        **dict.fromkeys(("data", "compute", "checkpoint"), 0.0),
        **{"idle": 3.0, "rendezvous": 1.0, "restore": 2.5},
    }
    assert goodput.wall_time == of_causes(queue=3.0, start=3.5)


def test_what_steps_took_is_what_their_rank_wrote_down() -> None:
    goodput = Goodput(0.0)
    goodput.update(0.0, STEPPING, {})
    goodput.update(10.0, STEPPING, {"data": 1.0, "training": 8.0, "checkpoint": 0.5})
    assert goodput.wall_time["restart"] == 0.0, "the last half second is not written down yet"
    goodput.update(10.5, "rendezvous", {"data": 1.1, "training": 8.9, "checkpoint": 0.5})
    assert goodput.wall_time == of_causes(data=1.1, training=8.9, checkpoint=0.5)
    assert sum(goodput.seconds.values()) == 10.5


def test_a_group_that_hung_lost_the_time_a_little_after_its_last_lines_were_read() -> None:
    goodput = Goodput(0.0)
    goodput.update(0.0, STEPPING, {})
    goodput.update(310.0, "rendezvous", {"training": 10.0})
    goodput.update(310.0 + SETTLE_SECONDS, "rendezvous", {"training": 10.0})
    assert goodput.seconds["idle"] == 300.0
    assert goodput.wall_time["restart"] == 300.0 + SETTLE_SECONDS


def test_what_is_written_down_late_is_counted_once() -> None:
    goodput = Goodput(0.0)
    goodput.update(0.0, STEPPING, {})
    goodput.update(10.0, "rendezvous", {"training": 9.5})
    goodput.update(11.0, STEPPING, {"training": 10.0})
    goodput.update(21.0, "rendezvous", {"training": 19.25})
    goodput.close(21.0)
    assert goodput.seconds["compute"] == 19.25
    assert goodput.seconds["idle"] == 0.75
    assert sum(goodput.seconds.values()) == 21.0


def test_a_first_step_that_is_seen_late_is_no_time_of_the_start() -> None:
    goodput = Goodput(0.0)
    goodput.update(0.0, "restore", {})
    goodput.update(5.0, STEPPING, {})
    goodput.update(15.0, STEPPING, {"training": 12.0})
    assert goodput.wall_time == of_causes(start=3.0, training=12.0)


def test_the_time_of_a_worker_that_had_not_reported_yet_is_none_of_a_queue() -> None:
    goodput = Goodput(0.0, absence=100.0)
    goodput.add_worker(20.0, None)
    goodput.update(20.0, "rendezvous", {})
    goodput.add_worker(21.0, 5.0)
    goodput.update(22.0, "rendezvous", {})
    assert goodput.wall_time == of_causes(queue=116.0, start=6.0)


def test_what_remains_at_the_end_is_the_last_save() -> None:
    goodput = Goodput(0.0)
    goodput.update(0.0, STEPPING, {})
    goodput.update(10.0, FINAL_SAVE, {"training": 9.0})
    goodput.update(12.0, AFTER_LOOP, {"training": 9.0})
    goodput.update(15.0, ENDED, {"training": 9.0})
    assert goodput.wall_time == of_causes(training=9.0, other=3.0, script=3.0)
    assert goodput.seconds["checkpoint"] == 3.0


def test_a_share_of_the_steps_is_the_stragglers() -> None:
    goodput = Goodput(0.0)
    goodput.update(0.0, STEPPING, {})
    goodput.update(10.0, STEPPING, {"training": 6.0, "recomputed": 4.0}, straggler_share=0.25)
    assert goodput.wall_time == of_causes(training=4.5, recomputed=4.0, stragglers=1.5)
    assert goodput.seconds["compute"] == 10.0


def test_a_script_that_reports_no_steps_has_no_ratio_and_a_job_that_is_over_costs_no_time() -> None:
    goodput = Goodput(0.0)
    goodput.update(0.0, SILENT, {})
    goodput.update(100.0, ENDED, {})
    goodput.update(200.0, ENDED, {})
    assert sum(goodput.seconds.values()) == 0.0
    assert goodput.wall_time == of_causes(unreported=100.0)
    assert WallTime(**goodput.wall_time).ettr is None


def test_a_script_is_starting_until_it_reports_its_first_step() -> None:
    goodput = Goodput(0.0)
    goodput.update(0.0, SILENT, {})
    goodput.update(7.0, STEPPING, {})
    goodput.update(10.0, STEPPING, {"training": 3.0})
    assert goodput.wall_time == of_causes(start=7.0, training=3.0)


@pytest.mark.parametrize("unsettled", [-2.0, 0.0, 4.0])
@pytest.mark.parametrize("is_stepping", [False, True])
def test_a_coordinator_goes_on_where_the_one_before_ended(unsettled: float, is_stepping: bool) -> None:
    before = WallTime(training=50.0, start=10.0, restart=5.0)
    goodput = Goodput(0.0, before, unsettled, absence=7.0, is_stepping=is_stepping)
    expected = of_causes(training=50.0, start=10.0, restart=5.0)
    # A group that may have stepped meanwhile is believed until it is known.
    expected["training" if is_stepping else "other"] += 7.0 + (min(0.0, unsettled) if is_stepping else 0.0)
    expected["restart"] -= min(0.0, unsettled) if is_stepping else 0.0
    assert sum(goodput.wall_time.values()) == pytest.approx(72.0)
    assert goodput.wall_time == expected or (unsettled < 0 and not is_stepping)
    goodput.update(SETTLE_SECONDS, "idle", {})
    goodput.close(SETTLE_SECONDS)
    assert sum(goodput.wall_time.values()) == pytest.approx(72.0 + SETTLE_SECONDS)


def test_a_run_that_was_stopped_for_a_weekend_has_not_lost_it_but_steps_without_a_coordinator_count() -> None:
    before, weekend = WallTime(training=50.0), 172_800.0
    goodput = Goodput(0.0, before, absence=weekend, is_stepping=True)
    goodput.update(5.0, "rendezvous", {})
    assert sum(goodput.wall_time.values()) == pytest.approx(55.0)
    goodput = Goodput(0.0, before, absence=MAX_ABSENCE_SECONDS + 80.0, is_stepping=True)
    goodput.update(5.0, STEPPING, {"training": 195.0})
    assert goodput.wall_time == of_causes(training=245.0)


@given(
    st.lists(
        st.tuples(
            st.sampled_from(["idle", "rendezvous", "restore", STEPPING, SILENT, FINAL_SAVE, AFTER_LOOP, "worker"]),
            st.floats(0.0, 100.0),
            st.sampled_from(WORK),
            st.floats(0.0, 100.0),
            st.floats(0.0, 2.0),
        ),
        max_size=50,
    ),
    st.floats(0.0, 1e4),
    st.floats(-5.0, 5.0),
    st.booleans(),
    st.booleans(),
)
def test_the_causes_add_up_to_the_time_that_has_passed_whatever_events_come(
    events: list[tuple[str, float, Cause, float, float]],
    absence: float,
    unsettled: float,
    is_stepping: bool,
    has_predecessor: bool,
) -> None:
    before = WallTime(training=30.0, start=20.0, restart=10.0) if has_predecessor else None
    goodput = Goodput(0.0, before, unsettled if before else 0.0, absence, is_stepping)
    is_counted = absence < MAX_ABSENCE_SECONDS if before else not is_stepping
    passed = (60.0 if before else 0.0) + (absence if is_counted else 0.0)
    now, logged = 0.0, dict[Cause, float]()
    previous, phases = goodput.settled_seconds, goodput.seconds
    for activity, seconds, cause, worked, slow in events:
        now += seconds
        if activity == "worker":
            goodput.add_worker(now, worked)
            goodput.update(now, "rendezvous", logged)
        else:
            logged[cause] = logged.get(cause, 0.0) + worked
            goodput.update(now, activity, logged, slow)
        assert all(amount >= previous[name] - 1e-6 for name, amount in goodput.settled_seconds.items()), "counters grow"
        assert all(goodput.seconds[name] >= phases[name] - 1e-6 for name in TIME_PHASES), "counters grow"
        previous, phases = goodput.settled_seconds, goodput.seconds
        total = sum(goodput.wall_time.values())
        assert all(amount >= 0.0 for amount in goodput.wall_time.values())
        if absence < MAX_ABSENCE_SECONDS or not before:
            assert total == pytest.approx(passed + now, abs=1e-6)
        else:
            assert passed + now - 1e-6 <= total <= passed + now + absence + 1e-6
