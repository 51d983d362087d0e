"""What the recovery benchmark concludes from the writers' logs."""

import pytest

from benchmarks.recovery.analysis import (
    Line,
    longest_pause,
    lost_steps,
    overlaps,
    parse,
    phases,
    repeated_steps,
    steady,
    stretches,
)
from benchmarks.recovery.table import cell, quantile, written


def steps(group: str, world: int, start: float, first: int, count: int, every: float = 0.1) -> list[Line]:
    """A writer's steps, evenly spaced."""
    return [Line(start + index * every, "step", group, world, 0, first + index) for index in range(count)]


def saved(group: str, at: float, step: int) -> Line:
    return Line(at, "saved", group, 2, 0, step)


def test_a_log_line_that_is_still_being_written_is_passed_over() -> None:
    text = "10.0 step a 2 0 1\n10.1 step a 2 0 2\n10.2 step a 2"
    assert [line.step for line in parse(text, "worker-0", 7)] == [1, 2]
    assert parse(text, "worker-0", 7)[0] == Line(10.0, "step", "a", 2, 0, 1, "worker-0", 7)


def test_a_pause_divides_a_groups_steps_into_two_stretches() -> None:
    found = stretches(steps("a", 2, 10, 1, 5) + steps("a", 2, 13, 6, 5))
    assert [(stretch.first, stretch.last) for stretch in found] == [(1, 5), (6, 10)]


def test_only_rank_0_speaks_for_a_group() -> None:
    assert stretches([Line(10, "step", "a", 2, 1, 1)]) == []


def test_recovery_ends_with_the_first_step_of_the_group_that_then_goes_on() -> None:
    lines = steps("a", 2, 0, 1, 100) + steps("brief", 2, 12, 101, 3) + steps("b", 2, 14, 101, 30)
    found = steady(lines, 10.0, world=2, seconds=1.0)
    assert (found.group, found.start) == ("b", 14)


def test_a_group_that_has_not_gone_on_for_long_enough_is_no_recovery_yet() -> None:
    assert steady(steps("b", 2, 14, 1, 5), 10.0, world=2, seconds=1.0) is None


def test_a_group_of_another_size_is_no_recovery() -> None:
    assert steady(steps("b", 1, 14, 1, 50), 10.0, world=2, seconds=1.0) is None


def test_a_group_that_was_not_disturbed_is_recovered_since_before_the_fault() -> None:
    assert steady(steps("a", 2, 0, 1, 200), 10.0, world=2, seconds=5.0).start < 10.0


def test_what_a_dying_group_did_before_the_fault_does_not_count_as_recovery() -> None:
    assert steady(steps("a", 2, 0, 1, 101), 10.0, world=2, seconds=1.0) is None


def test_groups_one_after_the_other_do_not_overlap() -> None:
    assert overlaps(steps("a", 2, 0, 1, 10) + steps("b", 1, 2, 11, 10)) == []


def test_two_groups_that_take_turns_overlap_and_it_is_told_whether_the_older_one_saved() -> None:
    lines = steps("a", 1, 0, 1, 50) + steps("b", 1, 3, 10, 50)
    (silent,) = overlaps(lines)
    assert (silent.older, silent.newer, silent.older_saved) == ("a", "b", False)
    assert silent.seconds == pytest.approx(1.9)
    (writing,) = overlaps([*lines, saved("a", 4.5, 45)])
    assert writing.older_saved


def test_a_save_of_the_older_group_after_the_newer_ones_first_step_is_an_overlap_even_without_steps() -> None:
    (found,) = overlaps([*steps("a", 1, 0, 1, 10), *steps("b", 1, 2, 11, 10), saved("a", 2.5, 10)])
    assert found.older_saved


def test_steps_between_the_checkpoint_and_the_fault_are_repeated_and_none_is_lost() -> None:
    lines = [*steps("a", 2, 0, 1, 60), saved("a", 5.0, 50), *steps("b", 2, 10, 51, 20)]
    assert repeated_steps(lines, 6.0) == 10
    assert lost_steps(lines, 6.0) == 0


def test_a_group_that_goes_back_behind_a_committed_checkpoint_has_lost_steps() -> None:
    lines = [*steps("a", 2, 0, 1, 60), saved("a", 5.0, 50), *steps("b", 2, 10, 26, 20)]
    assert lost_steps(lines, 6.0) == 25


def test_a_group_that_began_before_the_fault_repeats_nothing_because_of_it() -> None:
    assert repeated_steps([*steps("a", 2, 0, 1, 60), *steps("b", 2, 10, 51, 20)], 11.0) == 0


def test_the_longest_pause_counts_from_the_fault_on() -> None:
    lines = steps("a", 2, 0, 1, 11) + steps("b", 2, 4, 11, 11)
    assert longest_pause(lines, 0.5, 5.0) == pytest.approx(3.0)
    assert longest_pause([], 0.0, 7.0) == 7.0


def test_the_phases_of_a_recovery_add_up_to_it() -> None:
    def rank(number: int, pid: int, late: float) -> list[Line]:
        events = [("born", "-", 10.2), ("imported", "-", 11.3), ("joined", "b", 11.5), ("restored", "b", 11.6)]
        return [Line(at + late, event, group, 2, number, 0, "worker", pid) for event, group, at in events]

    lines = rank(0, 7, 0.0) + rank(1, 8, 0.1) + steps("b", 2, 11.8, 1, 20)
    found = steady(lines, 10.0, 2, 1.0)
    assert found is not None
    spent = phases(lines, 10.0, found)
    assert sum(spent.values()) == pytest.approx(1.8)
    assert spent["start and import"] == pytest.approx(1.1)


def test_a_group_that_was_there_before_the_fault_has_no_phases() -> None:
    lines = steps("a", 2, 0, 1, 200)
    found = steady(lines, 10.0, 2, 1.0)
    assert found is not None
    assert phases(lines, 10.0, found) == {}


def test_a_failure_counts_as_longer_than_any_recovery() -> None:
    assert quantile([1.0, 2.0, 3.0, 4.0], 0, 0.5) == 2.5
    assert quantile([1.0, 2.0, 3.0], 1, 0.5) == 2.0
    assert quantile([1.0, 2.0, 3.0], 1, 0.95) is None
    assert quantile([1.0], 3, 0.5) is None
    assert quantile([], 0, 0.5) is None


def shot(side: str, seconds: float | None, **more: object) -> dict[str, object]:
    facts = {
        "pauseSeconds": 1.0,
        "split": False,
        "overlaps": [],
        "repeatedSteps": 3,
        "lostSteps": 0,
        "orphans": [],
        "gaveUp": 0,
    }
    stages = [{"name": "recovery", "seconds": seconds, "phases": {}}]
    return {"kind": "shot", "fault": "worker-kill", "side": side, "stages": stages} | facts | more


def test_the_table_counts_failures_and_splits() -> None:
    records = [
        shot("tandem", 1.0),
        shot("tandem", 2.0),
        shot("c10d", 5.0),
        shot("c10d", None, split=True, overlaps=[1]),
    ]
    ours, theirs = (cell(records, ("worker-kill", "recovery"), side) for side in ("tandem", "c10d"))
    assert theirs is not None
    assert (ours.shots, ours.failures, ours.splits) == (2, 0, 0)
    assert (theirs.shots, theirs.failures, theirs.splits) == (2, 1, 1)
    text = written(records, ["tandem", "c10d"])
    assert "2 of 2; 1.50, 2.00" in text
    assert "1 of 2; 5.00, never" in text
    assert "SPLIT, both wrote: 1" in text


def test_a_job_that_got_stuck_before_a_shot_is_a_failure_of_its_side() -> None:
    records = [shot("c10d", 5.0), {"kind": "stuck", "fault": "worker-kill", "side": "c10d"}]
    found = cell(records, ("worker-kill", "recovery"), "c10d")
    assert (found.shots, found.failures) == (2, 1)
