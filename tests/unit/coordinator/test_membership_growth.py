"""When a group grows: at once, at a checkpoint, or after a while, whichever costs least."""

from dataclasses import replace
from typing import Any

import pytest

from tandem.wire.protocol import Failure
from tandem_coordinator.group_state import Disconnected, Retarget
from tests.support.worlds.membership_job import RULES, Job, formed, in_training


def test_a_newcomer_joins_at_once_and_the_next_one_waits_for_the_cool_down() -> None:
    job = Job(target=3)
    job.joins("worker-0")
    job.passes(4.0)
    assert job.members() == ["worker-0"]
    job.training = job.can_save = True
    job.joins("worker-1")
    job.passes(2.5)
    assert job.state.saving is None, "the other one that is missing may be about to come"
    job.passes(1.0)
    assert job.members() == ["worker-0"], "it is still writing"
    assert job.runs("worker-0", 1).order == "save"
    job.save_and_stop("worker-0")
    assert job.members() == ["worker-0", "worker-1"]
    assert job.closings() == ["MemberJoined"]
    assert job.rejoins == [], "an abort would have cost the steps since the last checkpoint"
    job.training = job.can_save = True
    job.joins("worker-2")
    job.passes(RULES.grow_cooldown - 1.0)
    assert job.state.saving is None
    job.passes(1.0)
    assert job.state.saving is not None


@pytest.mark.parametrize("apart", [0.5, 2.5])
def test_newcomers_beyond_the_size_of_the_group_join_together(apart: float) -> None:
    job = in_training(2, rules=replace(RULES, grow_cooldown=30.0))
    job.passes(100.0)
    job.tell(Retarget(4))
    job.joins("worker-2")
    job.passes(apart)
    assert job.state.saving is None
    job.joins("worker-3")
    job.passes(0.2)
    assert job.state.saving is not None
    job.save_and_stop("worker-0", "worker-1")
    assert job.members() == [f"worker-{number}" for number in range(4)]


@pytest.mark.parametrize("lived", [1.0, 5.0, 100.0])
def test_a_group_is_back_at_its_size_as_soon_as_the_replacements_are_there_whenever_it_began(lived: float) -> None:
    job = Job(target=4, rules=replace(RULES, grow_cooldown=30.0))
    job.trains(*(f"worker-{number}" for number in range(4)))
    job.passes(lived)
    job.falls_silent("worker-2", "worker-3")
    job.passes(4.0)
    assert job.members() == ["worker-0", "worker-1"]
    job.training = job.can_save = True
    size = 2
    for newcomer in ("worker-4", "worker-5"):
        job.joins(newcomer)
        job.passes(1.0)
        if job.state.saving is not None:
            job.save_and_stop(*job.members())
        size += 1
        assert len(job.members()) == size
        job.training = job.can_save = True


def test_the_late_ones_of_the_first_group_do_not_wait_for_the_cool_down() -> None:
    job = Job(target=2, rules=replace(RULES, grow_cooldown=30.0))
    job.joins("worker-0")
    job.passes(4.0)
    job.training = job.can_save = True
    job.joins("worker-1")
    job.passes(0.2)
    assert job.state.saving is not None


def test_what_replaces_a_lost_member_joins_at_once_but_one_that_was_cut_off_and_is_back_waits_for_the_cool_down() -> (
    None
):
    job = Job(target=2)
    job.joins("worker-0")
    job.joins("worker-1")
    job.passes(30.0)
    job.training = job.can_save = True

    def is_lost_and_replaced(lost: str, by: str, **more: Any) -> None:
        job.falls_silent(lost)
        job.passes(4.0)
        assert job.members() == ["worker-0"]
        job.training = job.can_save = True
        job.joins(by, **more)
        job.passes(0.5)

    is_lost_and_replaced("worker-1", by="worker-2")
    assert job.state.saving is not None
    job.save_and_stop("worker-0")
    assert job.members() == ["worker-0", "worker-2"]

    is_lost_and_replaced("worker-2", by="worker-2", generation=job.state.number)
    assert job.state.saving is None
    job.passes(4.0)
    assert job.state.saving is None, "the group grew 9 s ago"
    job.passes(2.0)
    assert job.state.saving is not None


def test_a_group_that_has_not_made_a_step_yet_is_not_disturbed_by_newcomers() -> None:
    job = Job(target=2)
    job.joins("worker-0")
    job.passes(4.0)
    job.can_save = True
    job.joins("worker-1")
    job.passes(120.0)
    assert job.members() == ["worker-0"], "it may be compiling"
    job.training = True
    job.passes(0.2)
    assert job.state.saving is not None


def a_script_with_a_newcomer() -> Job:
    """A script that cannot be asked to save has more to lose than it may, and a newcomer waits."""
    job = Job(target=2)
    job.joins("worker-0")
    job.passes(20.0)
    assert job.members() == ["worker-0"]
    job.checkpoint = 500
    job.passes(40.0)
    job.joins("worker-1")
    return job


def test_a_script_that_cannot_be_asked_to_save_grows_right_after_its_next_checkpoint() -> None:
    job = a_script_with_a_newcomer()
    job.passes(20.0)
    assert job.members() == ["worker-0"], "the steps since checkpoint 500 would be lost"
    job.checkpoint = 1000
    job.passes(0.5)
    assert job.members() == ["worker-0", "worker-1"]


def test_a_script_whose_checkpoints_nobody_sees_does_not_stay_too_small_for_ever() -> None:
    job = a_script_with_a_newcomer()
    job.passes(29.0)
    assert job.members() == ["worker-0"]
    job.passes(2.0)
    assert job.members() == ["worker-0", "worker-1"]


def test_a_checkpoint_within_the_cool_down_is_no_reason_to_grow_long_after_it() -> None:
    job = Job(target=3, rules=replace(RULES, grow_cooldown=20.0))
    job.joins("worker-0")
    job.passes(4.0)
    job.joins("worker-1")
    job.passes(4.0)
    assert job.members() == ["worker-0", "worker-1"]
    job.joins("worker-2")
    job.passes(1.0)
    job.checkpoint = 500
    job.passes(10.0)
    assert job.members() == ["worker-0", "worker-1"]
    job.passes(10.0)
    assert len(job.members()) == 3, "less is at stake than growAfterSeconds"


@pytest.mark.parametrize("at_stake", [0.0, 5.0, 29.0])
def test_a_script_grows_at_once_as_long_as_little_is_at_stake(at_stake: float) -> None:
    job = formed(2)
    job.passes(100.0)
    job.falls_silent("worker-1")
    job.passes(3.5)
    assert job.members() == ["worker-0"]
    job.passes(at_stake)
    job.joins("worker-2")
    job.passes(0.5)
    assert job.members() == ["worker-0", "worker-2"]


def a_script_that_saves_every(seconds: float) -> Job:
    job = formed(3)
    job.passes(100.0)
    job.falls_silent("worker-2")
    job.passes(3.5)
    for number in range(3):
        job.checkpoint = number
        job.passes(seconds)
    job.checkpoint = 3
    return job


def test_where_checkpoints_come_regularly_a_script_waits_for_the_next_if_that_costs_less() -> None:
    job = a_script_that_saves_every(20.0)
    job.passes(8.0)
    job.joins("worker-3")
    job.passes(0.5)
    assert job.members() == ["worker-0", "worker-1"], "16 s of work against 12 s of waiting"
    job.passes(11.0)
    assert job.members() == ["worker-0", "worker-1"]
    job.checkpoint = 4
    job.passes(0.5)
    assert job.members() == ["worker-0", "worker-1", "worker-3"]

    job = a_script_that_saves_every(20.0)
    job.passes(6.0)
    job.joins("worker-3")
    job.passes(0.5)
    assert job.members() == ["worker-0", "worker-1", "worker-3"], "12 s of work against 14 s of waiting"


PIPELINES = replace(RULES, minimum=2, multiple=2)
"""Of a job whose pipelines lie on two replicas each."""


def test_a_group_has_as_many_members_as_make_whole_pipelines_and_says_who_waits() -> None:
    job = Job(target=4, rules=PIPELINES)
    for number in range(3):
        job.joins(f"worker-{number}")
    job.passes(4.0)
    assert job.members() == ["worker-0", "worker-1"]
    assert job.opened()[-1].detail.endswith("; worker-2 waits, because 2 replicas make whole pipelines together")
    told = job.joins("worker-2")
    assert told.order == "wait"
    assert told.why == "the group is complete, or cannot grow yet, which it does by 2 replicas at a time"


def test_one_newcomer_does_not_disturb_pipelines_and_a_second_one_does() -> None:
    job = Job(target=4, rules=PIPELINES)
    job.joins("worker-0")
    job.joins("worker-1")
    job.passes(4.0)
    job.training = job.can_save = True
    job.joins("worker-2")
    job.passes(60.0)
    assert job.state.saving is None
    job.joins("worker-3")
    job.passes(0.5)
    assert job.state.saving is not None
    job.save_and_stop("worker-0", "worker-1")
    assert job.members() == [f"worker-{number}" for number in range(4)]


def test_a_pipeline_that_loses_a_member_goes_on_with_the_one_that_waits() -> None:
    job = Job(target=4, rules=PIPELINES)
    job.trains(*(f"worker-{number}" for number in range(4)))
    job.falls_silent("worker-1")
    job.passes(4.0)
    first, second = job.members()
    (spare,) = {"worker-0", "worker-2", "worker-3"} - {first, second}
    job.falls_silent(first)
    job.passes(4.0)
    assert job.members() == sorted([second, spare])


def test_half_a_pipeline_waits_for_its_other_half() -> None:
    job = in_training(2, rules=PIPELINES)
    job.falls_silent("worker-1")
    job.passes(30.0)
    assert job.members() == []
    assert not job.failed()
    job.joins("worker-2")
    assert job.members() == ["worker-0", "worker-2"]


def test_another_number_that_is_wished_for_is_rounded_to_whole_pipelines() -> None:
    job = Job(target=4, rules=PIPELINES)
    job.tell(Retarget(3))
    assert job.state.target == 2


def grown() -> Job:
    """A group whose ranks keep their state, after its first growth."""
    job = Job(target=2)
    job.joins("worker-0")
    job.passes(4.0)
    job.training = job.can_save = job.survive = True
    job.joins("worker-1")
    job.passes(1.0)
    return job


def test_a_group_that_keeps_its_state_grows_and_shrinks_without_a_save() -> None:
    job = grown()
    assert job.members() == ["worker-0", "worker-1"]
    job.training = job.can_save = True
    job.tell(Retarget(1))
    job.passes(0.5)
    assert job.members() == ["worker-0"]
    assert job.closings() == ["MemberJoined", "TargetChanged"]
    assert not any("saves first" in said for said in job.said())


@pytest.mark.parametrize("leaving", [("worker-1",), ("worker-0", "worker-1")])
def test_who_has_to_go_leaves_its_state_to_who_stays_and_all_together_save_it(leaving: tuple[str, ...]) -> None:
    job = in_training(2)
    job.survive = True
    job.passes(0.2)
    for replica in leaving:
        job.must_go(replica)
        job.passes(0.6)
    if len(leaving) == 1:
        assert job.closings() == [], "others may have to go, too"
        job.passes(0.6)
        assert job.closings() == ["Preempted"]
    else:
        assert job.closings() == []
        assert job.state.saving is not None


def test_who_has_to_go_lets_the_group_save_if_the_rest_is_too_small() -> None:
    job = in_training(2, rules=replace(RULES, minimum=2))
    job.survive = True
    job.passes(0.2)
    job.must_go("worker-1")
    job.passes(0.2)
    assert job.closings() == []
    assert job.state.saving is not None


def prepares(job: Job, replica: str, generation: int, code: int = -9, error: str = "killed by SIGKILL") -> None:
    """A rank of an agent has failed, and its new one is not ready yet."""
    failure = {"rank": 1, "code": code, "secondsAgo": 0.1, "error": error}
    failed = {"reason": "WorkerFailed", "failure": Failure.parse(failure)}
    job.joins(replica, standby="preparing", generation=generation, **failed)


def test_members_that_keep_their_state_go_on_while_another_one_prepares_new_ranks() -> None:
    job = grown()
    prepares(job, "worker-1", job.state.number)
    assert job.closings() == ["MemberJoined", "WorkerFailed"]
    job.passes(0.2)
    assert job.members() == ["worker-0"], "the other one would hold it up"
    assert job.opened()[-1].detail.endswith("; ranks that live keep their state")
    job.training = job.can_save = True
    job.passes(20.0)
    assert job.members() == ["worker-0"], "it is not ready"
    job.joins("worker-1", standby="new", generation=2)
    job.passes(0.5)
    assert job.members() == ["worker-0", "worker-1"]
    # And once more, within the cool-down.
    grew_at = job.now
    job.training = job.can_save = True
    prepares(job, "worker-1", job.state.number)
    job.passes(0.2)
    job.training = job.can_save = True
    job.joins("worker-1", standby="new", generation=job.state.number - 1)
    job.passes(0.5)
    assert job.members() == ["worker-0", "worker-1"]
    assert job.now - grew_at < RULES.grow_cooldown


def test_an_agent_that_comes_back_with_its_ranks_waits_for_the_cool_down() -> None:
    job = in_training(2)
    job.survive = True
    for _ in range(2):
        number = job.state.number
        job.falls_silent("worker-1")
        job.passes(4.0)
        assert job.members() == ["worker-0"]
        job.training = job.can_save = True
        job.joins("worker-1", generation=number)
        job.passes(0.5)
    assert job.members() == ["worker-0"], "a network that comes and goes"
    job.passes(RULES.grow_cooldown)
    assert job.members() == ["worker-0", "worker-1"]


@pytest.mark.parametrize("keeps", [True, False])
def test_members_that_keep_their_state_do_not_wait_for_an_agent_whose_connection_is_gone(keeps: bool) -> None:
    job = Job(target=2)
    number = job.trains("worker-0", "worker-1")
    job.survive = keeps
    job.passes(0.2)
    # A heartbeat that no tick has recorded yet must not count as one after the end of the connection.
    job.falls_silent("worker-1")
    job.tell(Disconnected("worker-1", "worker-1-a", heartbeat_at=job.now))
    job.joins("worker-0", generation=number, reason="MembershipChanged")
    assert job.members() == [], "it connects again whenever it has news"
    job.passes(0.2)
    assert job.members() == (["worker-0"] if keeps else [])
    job.passes(1.0)
    assert job.members() == ["worker-0"]
    assert job.opened()[-1].membership.reason == "MemberLost"
    assert not job.state.strikes


def test_where_nobody_keeps_a_state_those_that_prepare_wait_for_each_other() -> None:
    job = Job(target=2)
    number = job.trains("worker-0", "worker-1")
    job.survive = True
    prepares(job, "worker-0", number)
    prepares(job, "worker-1", number)
    job.joins("worker-0", standby="new", generation=number)
    job.passes(2.0)
    assert job.members() == []
    job.joins("worker-1", standby="new", generation=number)
    job.passes(0.2)
    assert job.members() == ["worker-0", "worker-1"]
    assert "keep" not in job.opened()[-1].detail


def test_the_others_go_on_without_an_agent_whose_ranks_fail_each_time() -> None:
    job = Job(target=2, rules=replace(RULES, max_restarts=20))
    job.nodes = {"worker-0": "node-0", "worker-1": "node-1"}
    job.trains("worker-0", "worker-1")
    job.survive = True
    job.passes(0.2)
    for _ in range(10):
        if job.state.exclusions:
            break
        number = job.state.number
        prepares(job, "worker-1", number, code=1, error="OSError: no such disk")
        # It has left its group before the other one says anything again.
        job.joins("worker-0", generation=number, reason="MembershipChanged")
        job.passes(0.3)
        assert job.members() == ["worker-0"]
        job.training = job.can_save = job.survive = True
        job.passes(0.3)
        job.joins("worker-1", standby="new", generation=number)
        # It fails before the first step.
        job.training = False
        job.passes(0.5)
    assert [exclusion.replica for exclusion in job.state.exclusions] == ["worker-1"]
    assert not job.failed()
    job.passes(0.3)
    assert job.members() == ["worker-0"]


def test_below_the_minimum_a_group_waits_for_ranks_that_prepare_themselves() -> None:
    job = Job(target=2, rules=replace(RULES, minimum=2))
    number = job.trains("worker-0", "worker-1")
    job.survive = True
    prepares(job, "worker-1", number)
    job.passes(20.0)
    assert job.members() == []
    job.joins("worker-1", standby="new", generation=number)
    job.passes(0.2)
    assert job.members() == ["worker-0", "worker-1"]


def test_a_coordinator_that_restarts_does_not_take_ranks_that_prepare_themselves_for_members() -> None:
    first = Job(target=2)
    number = first.trains("worker-0", "worker-1")
    assert first.state.latest is not None
    job = Job(target=2, generation=number, membership=first.state.latest)
    job.runs("worker-0", number, membership=first.state.latest)
    prepares(job, "worker-1", number)
    # Nor does it know any more that the ranks keep their state.
    job.passes(6.0)
    assert job.members() == []
    job.passes(10.0)
    assert job.members() == ["worker-0"]
