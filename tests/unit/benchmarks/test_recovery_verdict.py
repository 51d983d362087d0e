"""What became of the goals for recovery, and which sides have which settings."""

from typing import Any

import pytest

from benchmarks.goals import Outcome, exit_code
from benchmarks.recovery.faults import FAULTS
from benchmarks.recovery.sides import SIDES, Coordinated
from benchmarks.recovery.verdict import judge

SOUND = {
    "kind": "shot",
    "pauseSeconds": 1.0,
    "split": False,
    "overlaps": [],
    "repeatedSteps": 3,
    "lostSteps": 0,
    "orphans": [],
    "gaveUp": 0,
}


def shots(side: str, *seconds: float | None, fault: str = "worker-kill", **more: Any) -> list[dict[str, Any]]:
    name = "the rest goes on" if fault == "node-loss" else "recovery"
    found = [[{"name": name, "seconds": one, "phases": {}}] for one in seconds]
    return [SOUND | {"fault": fault, "side": side, "stages": stages} | more for stages in found]


def missed(records: list[dict[str, Any]]) -> list[str]:
    return [str(verdict) for verdict in judge(records) if verdict.outcome is Outcome.MISSED]


def test_the_goals_are_met_by_who_is_quick_and_below_every_reference() -> None:
    records = shots("tandem", *[0.2] * 5) + shots("tandem-best", *[0.2] * 5) + shots("c10d", *[5.0] * 5)
    verdicts = judge(records)
    assert [verdict.outcome for verdict in verdicts] == [Outcome.MET] * 5
    assert exit_code(verdicts) == 0


def test_the_defaults_are_held_to_the_same_bound_as_the_best_settings() -> None:
    records = shots("tandem", *[0.4] * 5) + shots("tandem-best", *[0.2] * 5)
    assert missed(records) == ["missed: tandem, worker-kill: at most 0.3 s: median 0.4 s of 5"]


def test_who_starts_cold_and_who_is_no_side_of_ours_has_no_bound() -> None:
    assert missed(shots("tandem-cold-best", *[3.0] * 5)) == []
    assert judge(shots("c10d", *[None] * 5)) == []


def test_a_reference_that_was_quicker_in_the_same_run_misses_the_goal() -> None:
    records = shots("tandem", *[2.0] * 5, fault="node-loss") + shots("c10d-best", *[1.0] * 5, fault="node-loss")
    assert missed(records) == [
        "missed: tandem, node-loss, the rest goes on: below c10d-best: medians 2.00 s and 1.00 s"
    ]


def test_a_reference_that_never_recovers_is_longer_than_anything() -> None:
    assert missed(shots("tandem", *[0.2] * 5) + shots("c10d", *[None] * 5)) == []


def test_ranks_that_keep_their_step_pause_shortly_and_take_none_again() -> None:
    quick = shots("tandem-regroup-best", *[0.9] * 5, pauseSeconds=0.2, repeatedSteps=0)
    assert missed(quick) == [], "the new member may take its time"
    slow = shots("tandem-regroup-best", *[0.2] * 5, pauseSeconds=0.5, repeatedSteps=0)
    assert missed(slow) == [
        "missed: tandem-regroup-best, worker-kill: the rest pauses for at most 0.35 s: median 0.5 s of 5"
    ]
    again = shots("tandem-regroup-best", 0.2, fault="node-loss", repeatedSteps=1)
    assert missed(again) == ["missed: tandem-regroup-best: no step is taken again: after 1 of 1 faults"]
    assert missed(shots("tandem-regroup-best", 0.2, fault="double-kill", repeatedSteps=1)) == []


def test_few_faults_are_not_judged_by_time() -> None:
    verdicts = judge(shots("tandem", 0.2) + shots("c10d", 5.0))
    assert [verdict.outcome for verdict in verdicts] == [Outcome.MET, Outcome.UNJUDGED, Outcome.UNJUDGED]
    assert exit_code(verdicts) == 3


@pytest.mark.parametrize(
    ("trouble", "words"),
    [
        ({"overlaps": [1]}, "with two groups at once"),
        ({"lostSteps": 1}, "went behind a checkpoint"),
        ({"orphans": ["python"]}, "left processes without an agent"),
    ],
)
def test_what_must_never_be_misses_the_goal_at_the_first_time(trouble: dict[str, Any], words: str) -> None:
    records = shots("tandem", *[0.2] * 9) + shots("tandem", 0.2, **trouble)
    (found,) = missed(records)
    assert f"tandem, worker-kill: 1 {words}" in found
    assert missed(shots("tandem", *[0.2] * 5) + shots("c10d", *[5.0] * 5, **trouble)) == []


def test_a_fault_of_any_kind_that_is_not_recovered_from_misses_the_goal() -> None:
    (found,) = missed(shots("tandem", 1.0, None, fault="agent-kill"))
    assert "tandem, agent-kill: 1 of 2 not recovered" in found
    (found,) = missed([{"kind": "stuck", "side": "tandem", "fault": "agent-kill", "why": ""}])
    assert "1 of 1 not recovered" in found
    (found,) = missed([{"kind": "end", "side": "tandem", "fault": "agent-kill", "left": ["port 1 at worker-0"]}])
    assert "tandem, agent-kill: left behind: port 1 at worker-0" in found


def test_sides_have_the_best_settings_if_their_name_says_so_and_the_defaults_otherwise() -> None:
    ours = {name: side for name, side in SIDES.items() if issubclass(side, Coordinated)}
    assert {"tandem", "tandem-best", "tandem-trainer", "tandem-trainer-best"} <= ours.keys()
    for name, side in ours.items():
        assert bool(side.elasticity) is name.endswith("-best"), name
        assert side.hang_seconds == side.elasticity.get("hangSeconds", 300.0)


def test_only_a_process_that_is_stopped_waits_for_the_time_of_a_hang() -> None:
    assert [name for name, fault in FAULTS.items() if fault.hangs] == ["stop"]
