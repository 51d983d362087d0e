"""How the wall time is shown."""

import pytest

from tandem.wire.wall_time import CAUSE_MEANINGS, CAUSE_NAMES, CAUSES, WallTime, format_wall_time, losses


def test_every_cause_is_a_field_with_a_name_and_a_meaning() -> None:
    assert set(CAUSES) == set(CAUSE_NAMES) == set(CAUSE_MEANINGS)
    assert set(CAUSES) <= set(WallTime.model_fields)


def test_the_ratio_comes_first_and_then_the_losses_the_largest_first() -> None:
    wall = WallTime(training=3500.0, restart=60.0, start=120.0, data=1.0, saves=7)
    assert format_wall_time(wall) == "95 % of 1 h 1 min · start 3.3 % · restarts 1.6 %"
    assert wall.total == 3681.0
    assert [cause for cause, _ in losses(wall)] == ["start", "restart", "data"]


@pytest.mark.parametrize("wall", [None, WallTime(), WallTime(unreported=30.0, start=5.0)])
def test_without_steps_that_are_known_there_is_no_ratio(wall: WallTime | None) -> None:
    assert format_wall_time(wall) is None


def test_a_job_that_waits_has_a_ratio_of_nothing() -> None:
    assert format_wall_time(WallTime(queue=30.0)) == "0 % of 30 s · queue 100 %"


def test_amounts_are_never_negative() -> None:
    wall = WallTime(saves=3).with_causes({"training": 1.00049, "other": -1e-12})
    assert (wall.training, wall.other, wall.saves) == (1.0, 0.0, 3)
