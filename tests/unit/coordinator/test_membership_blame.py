"""Failures that are due to one replica or node, and ends that mean that the job is complete."""

from dataclasses import replace

import pytest

from tandem_coordinator.failures import MAX_EXCLUSION_LENGTH, describe_exclusions
from tandem_coordinator.group_state import Complete, Hung
from tandem_coordinator.state_store import exclusion_records
from tests.support.worlds.membership_job import RULES, Job

FOUR = ("worker-0", "worker-1", "worker-2", "worker-3")
PATIENT = replace(RULES, max_restarts=10)


EACH_ON_ITS_OWN = {name: f"node-{name[-1]}" for name in FOUR}


def group_of_four(nodes: dict[str, str] = EACH_ON_ITS_OWN, **rules: object) -> Job:
    job = Job(target=4, rules=replace(PATIENT, **rules))  # type: ignore[arg-type]
    job.nodes = dict(nodes)
    job.forms(*FOUR)
    return job


def fails(job: Job, replica: str, reason: str = "WorkerFailed") -> str:
    """A failure of this replica in mid-training, told by it first; what it is told once the next generation runs."""
    number = job.state.number
    job.training = True
    job.tick()
    job.training = False
    job.runs(replica, number, reason=reason)
    told = job.joins(replica, generation=number, reason=reason)
    job.passes(12.0)
    return told.order


def test_after_three_failures_in_a_row_the_others_go_on_without_the_replica() -> None:
    job = group_of_four()
    assert fails(job, "worker-2") == "wait"
    assert fails(job, "worker-2") == "wait"
    assert job.members() == list(FOUR)
    assert fails(job, "worker-2") == "end"
    assert job.members() == ["worker-0", "worker-1", "worker-3"]
    assert job.state.failures == 0, "what was due to it is given back"
    assert not job.failed()
    told = job.joins("worker-2", incarnation="b")
    assert (told.order, told.left_out) == ("end", True)
    assert "worker-2 (node node-2) is left out: the group failed 3 times in a row" in told.why
    assert "a training process of worker-2 failed" in told.why
    assert describe_exclusions(job.state).startswith("worker-2 (node node-2) is left out: the group failed 3 times")
    assert describe_exclusions(replace(job.state, exclusions=())) == ""
    several = replace(job.state, exclusions=job.state.exclusions * 3)
    assert describe_exclusions(several).count("worker-2 (node node-2)") == 3, "each is named where there is little room"
    assert len(describe_exclusions(several)) <= MAX_EXCLUSION_LENGTH


def test_a_node_is_left_out_whose_replicas_fail_in_turn() -> None:
    job = group_of_four(dict.fromkeys(FOUR[:2], "bad") | dict.fromkeys(FOUR[2:], "good"))
    for replica in ("worker-0", "worker-1", "worker-0"):
        fails(job, replica)
    assert job.members() == ["worker-2", "worker-3"]
    job.nodes["worker-4"] = "bad"
    assert job.joins("worker-4").order == "end", "whatever is placed there"
    job.nodes["worker-5"] = "good"
    job.joins("worker-5")
    job.passes(31.0)
    assert job.members() == ["worker-2", "worker-3", "worker-5"]


EIGHT = tuple(f"worker-{index}" for index in range(8))


def group_of(nodes: dict[str, str]) -> Job:
    job = Job(target=len(nodes), rules=replace(PATIENT, maximum=len(nodes)))
    job.nodes = nodes
    job.forms(*nodes)
    return job


def group_of_eight() -> Job:
    return group_of({name: f"node-{name[-1]}" for name in EIGHT})


def test_bad_nodes_that_fail_in_turn_are_left_out_one_after_the_other() -> None:
    job = group_of_eight()
    for replica in ("worker-0", "worker-1") * 2:
        fails(job, replica)
    assert job.members() == list(EIGHT), "nobody has failed three times"
    assert fails(job, "worker-0") == "end"
    assert job.members() == list(EIGHT[1:])
    assert job.state.failures == 2, "those of the other one still count"
    assert any("(node node-0) is left out: the group failed 3 of the last 5 times" in text for text in job.said())
    assert fails(job, "worker-1") == "end"
    assert job.members() == list(EIGHT[2:])
    assert job.state.failures == 0


def test_a_node_among_several_bad_ones_is_left_out_whose_replicas_fail_in_turn() -> None:
    names = tuple(f"worker-{index}" for index in range(12))
    job = group_of({name: f"node-{name}" for name in names} | dict.fromkeys(names[:2], "bad"))
    for replica in ("worker-0", "worker-2", "worker-1", "worker-2", "worker-0"):
        fails(job, replica)
    assert job.members() == list(names[2:])


def test_what_fails_on_all_of_a_few_large_nodes_leaves_nobody_out() -> None:
    job = group_of(dict.fromkeys(EIGHT[:4], "one") | dict.fromkeys(EIGHT[4:], "other"))
    for pair in zip(EIGHT[:4], EIGHT[4:], strict=True):
        for replica in pair:
            fails(job, replica)
    assert job.members() == list(EIGHT)


def test_who_fails_once_in_between_does_not_spare_who_fails_again_and_again() -> None:
    job = group_of_eight()
    for replica in ("worker-3", "worker-3", "worker-5"):
        fails(job, replica)
    assert fails(job, "worker-3") == "end"
    assert job.members() == [name for name in EIGHT if name != "worker-3"]
    assert job.state.failures == 1


@pytest.mark.parametrize("size", [4, 8])
def test_failures_of_more_replicas_than_can_be_left_out_leave_nobody_out(size: int) -> None:
    job, everyone = (group_of_four(), FOUR) if size == 4 else (group_of_eight(), EIGHT)
    for number in range(10):
        fails(job, everyone[number % 3])
    assert job.members() == list(everyone)
    fails(job, "worker-0")
    assert job.failed(), "the budget is what ends a job whose code is wrong"


def test_nobody_is_left_out_if_too_few_would_remain() -> None:
    job = group_of_four(minimum=4)
    for _ in range(10):
        fails(job, "worker-2")
    assert job.members() == list(FOUR)


def test_at_most_a_quarter_is_left_out_whatever_fails() -> None:
    job = group_of_four(restart_window=3600.0)
    for _ in range(3):
        fails(job, "worker-0")
    assert job.members() == list(FOUR[1:])
    for _ in range(11):
        fails(job, "worker-1")
    assert job.members() == []
    assert job.failed(), "a mistake in the code meets every replica"


def test_who_is_left_out_may_come_back_after_a_healthy_time() -> None:
    job = group_of_four()
    for _ in range(3):
        fails(job, "worker-2")
    assert job.joins("worker-2", incarnation="b").order == "end"
    job.falls_silent("worker-2")
    job.passes(PATIENT.restart_window)
    job.joins("worker-2", incarnation="c")
    job.passes(31.0)
    assert job.members() == list(FOUR)


def test_a_member_that_cannot_reach_the_store_is_to_blame_and_not_its_owner() -> None:
    job = group_of_four()
    for _ in range(3):
        fails(job, "worker-3", reason="StoreUnreachable")
    assert job.members() == list(FOUR[:3])
    assert any("left out" in text and "worker-3 cannot reach the store of worker-0" in text for text in job.said())
    assert not job.failed()


def test_a_store_that_most_cannot_reach_is_its_owners_fault() -> None:
    job = group_of_four()
    for _ in range(3):
        number = job.state.number
        for replica in ("worker-2", "worker-1"):
            job.joins(replica, generation=number, reason="StoreUnreachable")
        job.passes(12.0)
    assert job.members() == list(FOUR[1:])
    assert any("2 of 3 members cannot reach the store of worker-0" in text for text in job.said())


def test_the_replica_whose_ranks_alone_are_stuck_is_to_blame_for_a_hang() -> None:
    job = group_of_four()
    for _ in range(3):
        job.tell(Hung(job.state.number, "no step", "worker-1"))
        job.passes(20.0)
    assert job.members() == ["worker-0", "worker-2", "worker-3"]


def test_a_silent_member_explains_broken_connections_however_late_its_loss_is_known() -> None:
    job = group_of_four(lost_after=60.0)
    job.falls_silent("worker-3")
    number = job.state.number
    job.passes(2.0)
    job.runs("worker-0", number, reason="MembershipChanged")
    for replica in FOUR[:3]:
        job.joins(replica, generation=number, reason="MembershipChanged")
    job.passes(15.0)
    assert job.members() == list(FOUR[:3])
    assert job.state.failures == 0
    assert job.state.cause.reason == "MemberLost"


def test_what_silence_cost_nothing_of_is_not_given_back_to_the_budget() -> None:
    job = group_of_four(lost_after=60.0, restart_window=3600.0)
    fails(job, "worker-1")
    for _ in range(3):
        job.falls_silent("worker-3")
        number = job.state.number
        job.passes(2.0)
        for replica in FOUR[:3]:
            job.joins(replica, generation=number, reason="MembershipChanged")
        job.passes(15.0)
        assert job.members() == list(FOUR[:3])
        job.joins("worker-3")
        job.passes(35.0)
    assert job.members() == list(FOUR[:3]), "it is left out"
    assert job.state.failures == 1, "the failure of another replica still counts"


def test_a_failure_is_forgiven_in_time_however_often_members_come_and_go() -> None:
    job = group_of_four()
    fails(job, "worker-2")
    assert job.state.failures == 1
    for _ in range(5):
        job.say("worker-3", "leaving", generation=job.state.number)
        job.passes(15.0)
        job.joins("worker-3")
        job.passes(15.0)
    assert job.state.failures == 0


def test_what_was_left_out_is_remembered_over_the_death_of_the_coordinator() -> None:
    job = group_of_four()
    for _ in range(3):
        fails(job, "worker-2")
    again = Job(target=4, rules=PATIENT, generation=job.state.number, exclusions=exclusion_records(job.state, job.now))
    told = again.joins("worker-2")
    assert (told.order, told.left_out) == ("end", True)


# Scripts that end


def a_script() -> Job:
    return group_of_four(completes_on_exit=True)


def ends_well(job: Job, replica: str) -> None:
    job.say(replica, "leaving", generation=job.state.number, finished=True)


def test_a_script_is_complete_when_all_ranks_of_a_generation_have_ended_with_zero() -> None:
    job = a_script()
    for replica in FOUR[:3]:
        ends_well(job, replica)
        job.passes(0.5)
    assert job.closings() == [], "the last one may still be at work"
    ends_well(job, "worker-3")
    assert [action.cause.reason for action in job.actions if isinstance(action, Complete)] == ["Completed"]
    assert job.joins("worker-4").order == "end", "a late newcomer must not begin it anew"


def test_a_newcomer_does_not_have_a_script_begin_again_that_is_about_to_end() -> None:
    job = a_script()
    job.passes(100.0)
    job.falls_silent("worker-3")
    job.passes(4.0)
    assert job.members() == list(FOUR[:3])
    ends_well(job, "worker-0")
    job.joins("worker-4")
    job.passes(60.0)
    assert job.closings() == ["MemberLost"]


def test_a_script_of_which_a_part_failed_is_not_complete() -> None:
    job = a_script()
    for replica in FOUR[:3]:
        ends_well(job, replica)
    fails(job, "worker-3")
    assert not any(isinstance(action, Complete) for action in job.actions)
    assert job.members() == ["worker-3"]


def restarted(job: Job) -> Job:
    """The coordinator after it has died and was started again."""
    state = job.state
    return Job(
        target=4,
        rules=state.rules,
        generation=state.number,
        membership=state.latest,
        finished=list(state.finished),
    )


def test_who_has_finished_is_remembered_over_the_death_of_the_coordinator() -> None:
    job = a_script()
    for replica in FOUR[:3]:
        ends_well(job, replica)
    again = restarted(job)
    again.runs("worker-3", job.state.number)
    again.passes(20.0)
    assert again.members() == list(FOUR)
    assert again.rejoins == [], "the script would begin anew"
    assert any("but for worker-0, worker-1, worker-2, which finished" in one.detail for one in again.opened())
    ends_well(again, "worker-3")
    assert again.closings() == ["Completed"]


def test_the_last_one_may_finish_before_the_new_coordinator_has_heard_of_it() -> None:
    job = a_script()
    for replica in FOUR[:3]:
        ends_well(job, replica)
    again = restarted(job)
    ends_well(again, "worker-3")
    assert again.state.end.reason == "Completed"


def test_a_coordinator_that_died_before_it_could_say_so_completes_the_job_when_it_is_back() -> None:
    job = a_script()
    for replica in FOUR:
        ends_well(job, replica)
    again = restarted(job)
    again.tick()
    assert again.state.end.reason == "Completed"


def test_who_has_finished_is_forgotten_where_the_group_cannot_go_on() -> None:
    job = a_script()
    for replica in FOUR[:2]:
        ends_well(job, replica)
    again = restarted(job)
    again.runs("worker-2", job.state.number)
    again.passes(20.0)
    assert again.members() == ["worker-2"], "worker-3 did not come back"
    assert not again.state.finished


@pytest.mark.parametrize("finished", [None, False])
def test_who_leaves_without_having_finished_closes_the_group(finished: bool | None) -> None:
    job = a_script()
    job.say("worker-1", "leaving", generation=job.state.number, finished=finished)
    assert job.closings() == ["MemberLeft"]
