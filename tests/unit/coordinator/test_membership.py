"""Membership decides alone: who is in the group, who is lost, what counts as a failure, what a restart may trust."""

from dataclasses import replace

from tandem_coordinator.group_state import Announce, Cause, Disconnected, Open, Retarget, RunEnded, Synced, Tick
from tandem_coordinator.membership import answer, is_redundant, quiet_seconds
from tests.support.worlds.membership_job import RULES, Job, formed, message


def test_the_group_forms_at_once_when_all_that_are_wished_for_wait() -> None:
    job = Job(target=2)
    assert job.joins("worker-0").order == "wait"
    told = job.joins("worker-1")
    assert told.order == "run"
    assert told.membership.generation == 1
    assert [member.replica for member in told.membership.members] == ["worker-0", "worker-1"]
    assert told.membership.reason == "Started"
    assert job.joins("worker-0").membership == told.membership


def test_ranks_follow_the_numbers_in_names() -> None:
    job = Job(target=3)
    for name in ("worker-10", "worker-1", "worker-2"):
        job.joins(name)
    assert job.members() == ["worker-1", "worker-2", "worker-10"]


def test_replicas_of_a_node_stand_side_by_side_where_the_first_of_them_would() -> None:
    job = Job(target=4)
    job.nodes = {"worker-0": "a", "worker-1": "b", "worker-3": "a"}
    for number in (3, 2, 1, 0):
        job.joins(f"worker-{number}")
    assert job.members() == ["worker-0", "worker-3", "worker-1", "worker-2"]


def test_a_job_that_starts_waits_a_little_for_all_of_its_agents_and_then_goes_on_with_those_that_came() -> None:
    job = Job(target=3)
    job.joins("worker-0")
    job.passes(2.0)
    job.joins("worker-1")
    job.passes(2.5)
    assert job.members() == [], "a third agent is probably importing torch still"
    job.passes(1.0)
    assert job.members() == ["worker-0", "worker-1"]


def test_fewer_than_the_minimum_never_form_a_group() -> None:
    job = Job(target=3, rules=replace(RULES, minimum=2))
    job.joins("worker-0")
    job.passes(60)
    assert job.members() == []
    assert job.state.number == 0


def test_a_silent_member_is_lost_and_the_rest_go_on_without_waiting_for_another() -> None:
    job = formed(2)
    job.falls_silent("worker-1")
    job.passes(2.9)
    assert job.members() == ["worker-0", "worker-1"]
    job.passes(0.6)
    assert job.members() == ["worker-0"]
    assert job.closings() == ["MemberLost"]
    assert job.state.latest.reason == "MemberLost"
    assert job.state.failures == 0, "a lost node is not a failure"


def test_the_first_to_fall_silent_is_not_lost_when_it_is_the_coordinator_that_is_cut_off() -> None:
    job = Job(target=3)
    number = job.forms("worker-0", "worker-1", "worker-2")
    for replica in ("worker-1", "worker-2", "worker-0"):
        job.passes(0.4)
        job.falls_silent(replica)
    job.passes(20.0)
    assert job.closings() == []
    job.runs("worker-0", number)
    job.passes(0.5)
    for replica in ("worker-1", "worker-2"):
        job.runs(replica, number)
    job.passes(2.0)
    assert job.closings() == []
    assert job.members() == ["worker-0", "worker-1", "worker-2"]


def test_a_silent_member_is_lost_also_where_two_missed_beats_are_all_it_may_miss() -> None:
    job = Job(target=2, rules=replace(RULES, lost_after=2.0, heartbeat=1.0))
    number = job.forms("worker-0", "worker-1")
    for tick in range(30):
        job.now += 0.1
        if tick % 10 == 3:
            job.tell(Synced(message("worker-0", "running", generation=number)))
        job.tick()
    assert job.closings() == ["MemberLost"]


def test_a_broken_connection_is_a_loss_within_a_second_unless_the_agent_comes_back() -> None:
    job = formed(2)
    job.tell(Disconnected("worker-1", "worker-1-a"))
    job.passes(2.0)
    assert job.members() == ["worker-0", "worker-1"], "it has spoken again"
    job.falls_silent("worker-1")
    job.tell(Disconnected("worker-1", "worker-1-a"))
    job.passes(1.4)
    assert job.members() == ["worker-0"]


def test_a_failed_worker_closes_the_generation_and_all_come_back_in_the_next() -> None:
    job = Job(target=2)
    first = job.forms("worker-0", "worker-1")
    assert job.runs("worker-0", first, reason="WorkerFailed").order == "rejoin"
    assert job.runs("worker-1", first).order == "rejoin"
    job.passes(0.5)
    assert job.members() == ["worker-0", "worker-1"]
    assert job.state.number == first + 1
    assert job.state.failures == 1


def test_one_failure_is_counted_once_however_many_agents_report_it() -> None:
    job = Job(target=2)
    first = job.forms("worker-0", "worker-1")
    job.runs("worker-0", first, reason="WorkerFailed")
    job.runs("worker-1", first, reason="WorkerFailed")
    job.joins("worker-0", generation=first, reason="WorkerFailed")
    job.joins("worker-1", generation=first, reason="WorkerFailed")
    assert job.state.failures == 1
    assert job.members() == ["worker-0", "worker-1"]


def test_a_slow_stopper_is_waited_for_but_not_for_ever() -> None:
    job = Job(target=2)
    first = job.forms("worker-0", "worker-1")
    job.joins("worker-0", generation=first, reason="WorkerFailed")
    job.beats["worker-1"] = message("worker-1", "running", generation=first)

    def stuck(seconds: float) -> None:
        until = job.now + seconds
        while job.now < until:
            job.now += 0.1
            for sync in job.beats.values():
                job.tell(Synced(sync))
            job.tell(Tick())

    stuck(9.0)
    assert job.members() == []
    stuck(2.0)
    assert job.members() == ["worker-0"]


def test_a_lost_answer_is_given_again_and_a_repeated_wish_is_no_new_one() -> None:
    job = Job(target=1)
    first = job.joins("worker-0")
    for _ in range(3):
        assert job.joins("worker-0") == first
    assert job.state.number == 1
    assert job.joins("worker-0", generation=1, reason="WorkerFailed").membership is not None
    assert job.state.number == 2


def test_nobody_learns_of_a_generation_before_its_number_is_durable() -> None:
    job = Job(target=1)
    sync = message("worker-0", "joining")
    job.tell(Synced(sync))
    job.tell(Tick())
    assert job.state.number == 1
    assert answer(job.state, sync, recorded=0).order == "wait"
    assert answer(job.state, sync, recorded=1).order == "run"


def test_broken_connections_count_as_a_failure_only_if_nothing_explains_them() -> None:
    job = Job(target=2)
    first = job.forms("worker-0", "worker-1")
    job.runs("worker-0", first, reason="MembershipChanged")
    assert job.closings() == ["PeerLost"]
    assert job.state.failures == 0
    job.passes(0.5)
    assert job.state.failures == 1, "both came back and nobody said why: that must not go on for ever"

    second = job.state.number
    job.falls_silent("worker-1")
    job.runs("worker-0", second, reason="MembershipChanged")
    job.passes(4.0)
    assert job.members() == ["worker-0"]
    assert job.state.failures == 1, "the lost member explains it"
    assert job.state.latest.reason == "MemberLost"


def test_a_failure_reported_after_its_consequences_is_still_the_cause() -> None:
    job = Job(target=2)
    first = job.forms("worker-0", "worker-1")
    job.runs("worker-0", first, reason="MembershipChanged")
    job.runs("worker-1", first, reason="WorkerFailed")
    job.passes(0.5)
    assert job.state.failures == 1
    assert job.state.latest.reason == "WorkerFailed"


def test_too_many_failures_end_the_job_and_healthy_time_forgives_them() -> None:
    job = Job(target=1)
    for _ in range(2):
        job.passes(0.2)
        job.joins("worker-0", generation=job.state.number or None, reason="WorkerFailed")
        job.passes(0.2)
        job.joins("worker-0", generation=job.state.number, reason="WorkerFailed")
        job.passes(101.0)
        assert job.state.failures == 0
    for _ in range(3):
        assert not job.failed()
        told = job.joins("worker-0", generation=job.state.number, reason="WorkerFailed")
        job.passes(5.0)
    assert job.failed()
    assert told.order == "end"
    assert "maxRestarts is 2" in told.why
    assert job.joins("worker-9").order == "end"


def test_an_agent_that_leaves_is_not_waited_for() -> None:
    job = formed(2)
    job.say("worker-1", "leaving", generation=1)
    job.passes(0.3)
    assert job.members() == ["worker-0"]
    assert job.closings() == ["MemberLeft"]


def test_a_restarted_agent_replaces_its_old_process_which_must_not_come_back() -> None:
    job = Job(target=2)
    first = job.forms("worker-0", "worker-1")
    job.joins("worker-1", incarnation="worker-1-b")
    assert job.closings() == ["MemberLost"]
    job.passes(0.5)
    assert job.members() == ["worker-0", "worker-1"]
    old = message("worker-1", "running", generation=first)
    job.tell(Synced(old))
    assert answer(job.state, old, recorded=99).order == "end"
    assert job.members() == ["worker-0", "worker-1"], "the old process changes nothing"
    assert job.state.agents["worker-1"].member.incarnation == "worker-1-b"


def test_a_member_reached_at_another_port_than_it_said_makes_a_new_generation() -> None:
    job = Job(target=1)
    job.joins("worker-0", port=4000)
    told = job.joins("worker-0", port=4001)
    assert (told.membership.generation, told.membership.members[0].port) == (2, 4001)


def test_an_agent_thought_lost_that_was_only_cut_off_must_join_again() -> None:
    job = Job(target=2)
    first = job.forms("worker-0", "worker-1")
    job.falls_silent("worker-1")
    job.passes(4.0)
    assert job.members() == ["worker-0"]
    assert job.runs("worker-1", first).order == "rejoin"
    assert job.members() == ["worker-0"]


def test_when_nobody_is_heard_the_coordinator_suspects_itself() -> None:
    job = Job(target=2)
    first = job.forms("worker-0", "worker-1")
    beats = dict(job.beats)
    job.falls_silent("worker-0", "worker-1")
    job.passes(30.0)
    assert job.members() == ["worker-0", "worker-1"], "closing would help no one"
    job.beats = {"worker-0": beats["worker-0"]}
    job.passes(1.0)
    job.beats = dict(beats)
    job.passes(10.0)
    assert job.state.number == first, "all came back and no step is lost"
    job.falls_silent("worker-0", "worker-1")
    job.passes(30.0)
    job.beats = {"worker-0": beats["worker-0"]}
    job.passes(4.0)
    assert job.members() == ["worker-0"], "one came back, the other did not"


def test_a_coordinator_that_was_stopped_itself_loses_nobody() -> None:
    job = Job(target=2)
    first = job.forms("worker-0", "worker-1")
    job.now += 60.0
    job.tell(Tick())
    job.runs("worker-0", first)
    job.passes(1.0)
    assert job.state.number == first
    assert job.members() == ["worker-0", "worker-1"]


def test_nobody_is_lost_for_a_time_in_which_the_coordinator_did_not_listen() -> None:
    job = Job(target=2)
    first = job.forms("worker-0", "worker-1")
    job.now += 60.0
    job.tell(Synced(message("worker-0", "running", generation=first)))
    job.tell(Tick())
    assert job.members() == ["worker-0", "worker-1"], "what worker-1 said is still to be read"
    job.falls_silent("worker-1")
    job.passes(4.0)
    assert job.members() == ["worker-0"]


def test_a_restarted_coordinator_adopts_what_all_members_still_run() -> None:
    before = Job(target=2)
    first = before.forms("worker-0", "worker-1")
    after = Job(target=2, generation=first, membership=before.state.latest)
    assert after.runs("worker-0", first).order == "run"
    assert after.members() == []
    assert after.runs("worker-1", first).order == "run"
    assert after.members() == ["worker-0", "worker-1"]
    assert [action.adopted for action in after.actions if isinstance(action, Open)] == [True]
    after.passes(10.0)
    assert after.state.number == first


def test_a_restarted_coordinator_closes_what_not_all_members_run_and_never_goes_back() -> None:
    before = Job(target=2)
    first = before.forms("worker-0", "worker-1")
    after = Job(target=2, generation=first, membership=before.state.latest)
    after.runs("worker-0", first)
    after.passes(2.9)
    assert after.members() == []
    after.passes(0.5)
    assert after.members() == ["worker-0"]
    assert after.state.number == first + 1


def test_a_restarted_coordinator_that_is_found_late_gives_the_others_as_long_as_the_first() -> None:
    before = Job(target=2)
    first = before.forms("worker-0", "worker-1")
    after = Job(target=2, generation=first, membership=before.state.latest)
    after.passes(20.0)
    assert after.runs("worker-0", first).order == "run", "nobody could reach it, and nobody has to stop for that"
    after.passes(1.5)
    assert after.runs("worker-1", first).order == "run"
    assert after.members() == ["worker-0", "worker-1"]
    assert after.state.number == first


def test_agents_get_the_time_to_come_back_however_short_silence_may_be() -> None:
    before = Job(target=2)
    first = before.forms("worker-0", "worker-1")
    after = Job(target=2, generation=first, membership=before.state.latest, rules=replace(RULES, lost_after=0.5))
    after.passes(20.0)
    after.runs("worker-0", first)
    after.passes(2.0)
    after.runs("worker-1", first)
    assert after.members() == ["worker-0", "worker-1"]


def test_a_restarted_coordinator_forms_no_group_before_it_has_looked_who_is_there() -> None:
    before = Job(target=3)
    first = before.forms("worker-0", "worker-1", "worker-2")
    after = Job(target=3, generation=first, membership=before.state.latest)
    after.joins("worker-0", generation=first, reason="WorkerFailed")
    after.passes(2.0)
    assert after.members() == [], "the others may have to find it first"
    after.runs("worker-1", first)
    after.runs("worker-2", first)
    after.passes(2.0)
    assert after.members() == ["worker-0", "worker-1", "worker-2"]
    assert after.state.number == first + 1


def test_a_coordinator_that_lost_its_memory_learns_the_number_from_the_agents() -> None:
    before = Job(target=2)
    before.state = replace(before.state, number=41)
    assert before.forms("worker-0", "worker-1") == 42
    after = Job(target=2, generation=1)
    for name in ("worker-0", "worker-1"):
        assert after.runs(name, 42, membership=before.state.latest).order == "run"
    assert after.members() == ["worker-0", "worker-1"]
    after.joins("worker-0", generation=42, reason="WorkerFailed")
    after.passes(0.5)
    assert after.state.number == 43


def test_a_job_that_is_started_again_does_not_wait_for_a_group_that_is_gone() -> None:
    before = Job(target=2)
    first = before.forms("worker-0", "worker-1")
    again = Job(target=2, generation=first, membership=before.state.latest)
    again.joins("worker-0", incarnation="worker-0-b")
    assert again.joins("worker-1", incarnation="worker-1-b").membership.generation == first + 1


def test_the_end_is_told_to_everybody() -> None:
    job = Job(target=2)
    first = job.forms("worker-0", "worker-1")
    job.tell(RunEnded(Cause("Done", "training is complete")))
    assert job.runs("worker-0", first).order == "end"
    assert job.joins("worker-1", generation=first).order == "end"


def test_what_agents_say_after_the_end_is_no_trouble_any_more() -> None:
    job = Job(target=2)
    first = job.forms("worker-0", "worker-1")
    job.tell(RunEnded(Cause("Done", "training is complete")))
    assert job.closings() == ["Done"]
    job.runs("worker-0", first, reason="WorkerFailed")
    job.say("worker-1", "leaving", generation=first)
    job.falls_silent("worker-0")
    job.passes(10.0)
    assert job.closings() == ["Done"]
    assert job.state.failures == 0
    assert not [action for action in job.actions if isinstance(action, Announce)]
    assert list(job.state.agents) == ["worker-0"]


def test_a_failure_that_is_told_after_the_end_is_not_counted() -> None:
    job = Job(target=2)
    first = job.forms("worker-0", "worker-1")
    job.tell(Synced(message("worker-0", "running", generation=first, reason="MembershipChanged")))
    assert job.closings() == ["PeerLost"]
    job.tell(RunEnded(Cause("Done", "training is complete")))
    job.tell(Synced(message("worker-1", "running", generation=first, reason="WorkerFailed")))
    assert job.state.failures == 0


def test_a_wish_that_is_repeated_says_nothing_new_and_a_changed_one_does() -> None:
    job = Job(target=2)
    first = job.forms("worker-0", "worker-1")
    job.joins("worker-2")
    assert is_redundant(job.state, message("worker-2", "joining"))
    assert not is_redundant(job.state, message("worker-2", "joining", port=4001))
    assert not is_redundant(job.state, message("worker-2", "joining", generation=first))
    assert not is_redundant(job.state, message("worker-2", "leaving"))
    assert not is_redundant(job.state, message("worker-1", "joining", generation=first))
    assert not is_redundant(job.state, message("worker-1", "running", generation=first + 1))


def test_a_quiet_heartbeat_is_recognised_and_keeps_its_sender_alive() -> None:
    job = Job(target=2)
    first = job.forms("worker-0", "worker-1")
    assert is_redundant(job.state, message("worker-1", "running", generation=first))
    assert not is_redundant(job.state, message("worker-1", "running", generation=first, reason="WorkerFailed"))
    assert not is_redundant(job.state, message("worker-1", "running", generation=first, leaving=True))
    assert not is_redundant(job.state, message("worker-1", "joining", generation=first))
    assert not is_redundant(job.state, message("worker-1", "running", generation=first, incarnation="other"))
    job.falls_silent("worker-1")
    for _ in range(100):
        job.now += 0.1
        job.tell(Synced(message("worker-0", "running", generation=first)))
        job.tell(Tick(heartbeats={"worker-1": job.now}))
    assert job.members() == ["worker-0", "worker-1"]


def test_time_decides_nothing_in_a_whole_group_that_runs_until_somebody_may_be_lost() -> None:
    job = Job(target=2)
    assert quiet_seconds(job.state, job.now) == 0
    job.forms("worker-0", "worker-1")
    job.tick()
    assert RULES.lost_after - 1 <= quiet_seconds(job.state, job.now) <= RULES.lost_after
    job.falls_silent("worker-1")
    job.tell(Disconnected("worker-1", "worker-1-a"))
    assert quiet_seconds(job.state, job.now) <= 1
    job.passes(1.4)
    assert job.members() == ["worker-0"]
    assert quiet_seconds(job.state, job.now) == 0, "one is missing"


def test_time_may_decide_something_while_a_newcomer_waits_or_the_group_saves() -> None:
    job = formed(2)
    assert quiet_seconds(job.state, job.now) > 0
    job.tell(Retarget(3))
    job.joins("worker-2")
    assert quiet_seconds(job.state, job.now) == 0
    job = formed(2)
    job.tell(Retarget(1))
    assert quiet_seconds(job.state, job.now) == 0
