"""Membership decides alone: each situation as a table of what agents say, with a clock that the test moves."""

from dataclasses import replace
from typing import Any

import pytest

from tandem.messages import Answer, Sync
from tandem_coordinator.group import (
    Action,
    Cause,
    Close,
    Disconnected,
    Event,
    Fail,
    Hung,
    Open,
    Over,
    Retarget,
    Rules,
    Say,
    Synced,
    Tick,
)
from tandem_coordinator.membership import answer, says_nothing_new, start, step

RULES = Rules(
    minimum=1, maximum=4, lost_after=3.0, grow_cooldown=10.0, grow_after=30.0, max_restarts=2, restart_window=100.0
)


class Job:
    """A job whose agents are driven by hand: `joins`, `runs`, `leaves`, and the time that passes."""

    def __init__(self, target: int = 2, rules: Rules = RULES, **left_behind: Any) -> None:
        self.now = 1000.0
        self.state = start(rules, target, self.now, **left_behind)
        self.actions: list[Action] = []
        self.beats: dict[str, Sync] = {}
        self.training = self.can_save = False
        self.checkpoint: int | None = None
        self.leaving: set[str] = set()
        self.rejoins: list[str] = []

    def tick(self) -> None:
        self.tell(Tick(checkpoint=self.checkpoint, training=self.training, can_save=self.can_save))

    def tell(self, event: Event) -> None:
        self.state, actions = step(self.state, event, self.now)
        self.actions += actions
        for action in actions:
            if isinstance(action, Fail):
                self.tell(Over(action.cause))

    def say(self, replica: str, state: str, **more: Any) -> Answer:
        sync = message(replica, state, **more)
        self.tell(Synced(sync))
        if state == "leaving":
            self.beats.pop(replica, None)
        else:
            self.beats[replica] = replace_reason(sync)
        self.tick()
        return answer(self.state, sync, recorded=self.state.number)

    def joins(self, replica: str, **more: Any) -> Answer:
        return self.say(replica, "joining", **more)

    def runs(self, replica: str, generation: int, **more: Any) -> Answer:
        return self.say(replica, "running", generation=generation, **more)

    def falls_silent(self, *replicas: str) -> None:
        for replica in replicas:
            self.beats.pop(replica, None)

    def passes(self, seconds: float) -> None:
        """Time passes in small ticks; every agent that is not silent repeats itself, and does what it is told."""
        until = self.now + seconds
        while self.now < until - 1e-9:
            self.now = min(until, self.now + 0.1)
            for replica, sync in list(self.beats.items()):
                self.tell(Synced(sync))
                told = answer(self.state, sync, recorded=self.state.number)
                if told.order == "run" and told.membership is not None:
                    self.beats[replica] = message(
                        replica,
                        "running",
                        incarnation=sync.incarnation,
                        port=sync.port,
                        generation=told.membership.generation,
                    )
                elif told.order == "rejoin":
                    self.rejoins.append(replica)
                    self.beats[replica] = message(
                        replica,
                        "joining",
                        incarnation=sync.incarnation,
                        port=sync.port,
                        generation=sync.generation,
                        reason="MembershipChanged",
                    )
            self.tick()

    def forms(self, *replicas: str) -> int:
        """These agents join and run; the number of their generation."""
        for replica in replicas:
            self.joins(replica)
        self.passes(0.2)
        assert self.members() == list(replicas)
        return self.state.number

    def trains(self, *replicas: str) -> int:
        """They form a group whose ranks make steps, and save when asked."""
        number = self.forms(*replicas)
        self.training = self.can_save = True
        self.passes(0.2)
        return number

    def must_go(self, replica: str) -> Answer:
        return self.runs(replica, self.state.number, leaving=True)

    def save_and_stop(self, *replicas: str, gone: tuple[str, ...] = ()) -> None:
        """Their ranks have saved and ended: the agents come back, but for those that are gone."""
        for replica in replicas:
            number = self.state.number
            if replica in gone:
                self.say(replica, "leaving", generation=number)
            else:
                self.joins(replica, generation=number, reason="MembershipChanged")

    def members(self) -> list[str]:
        if not self.state.open or self.state.latest is None:
            return []
        return [member.replica for member in self.state.latest.members]

    def closings(self) -> list[str]:
        return [action.cause.reason for action in self.actions if isinstance(action, Close)]

    def failed(self) -> bool:
        return any(isinstance(action, Fail) for action in self.actions)


def message(replica: str, state: str, **more: Any) -> Sync:
    fields = {"incarnation": f"{replica}-a", "address": "10.0.0.1", "port": 4000, "processes": 1} | more
    return Sync(replica=replica, state=state, **fields)  # type: ignore[arg-type]


def replace_reason(sync: Sync) -> Sync:
    """What the agent repeats afterwards: a wish for a new generation is said once."""
    return sync.model_copy(update={"reason": ""}) if sync.state == "running" else sync


def test_the_group_forms_at_once_when_all_that_are_wished_for_wait() -> None:
    job = Job(target=2)
    assert job.joins("worker-0").order == "wait"
    told = job.joins("worker-1")
    assert told.order == "run"
    assert told.membership is not None
    assert told.membership.generation == 1
    assert [member.replica for member in told.membership.members] == ["worker-0", "worker-1"]
    assert told.membership.reason == "Started"
    assert job.joins("worker-0").membership == told.membership


def test_ranks_follow_the_numbers_in_names() -> None:
    job = Job(target=3)
    for name in ("worker-10", "worker-1", "worker-2"):
        job.joins(name)
    assert job.members() == ["worker-1", "worker-2", "worker-10"]


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
    job = Job(target=2)
    job.forms("worker-0", "worker-1")
    job.falls_silent("worker-1")
    job.passes(2.9)
    assert job.members() == ["worker-0", "worker-1"]
    job.passes(0.6)
    assert job.members() == ["worker-0"]
    assert job.closings() == ["MemberLost"]
    assert job.state.latest is not None
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
    job = Job(target=2)
    job.forms("worker-0", "worker-1")
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
        again = job.joins("worker-0")
        assert again == first
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
    assert job.state.latest is not None
    assert job.state.latest.reason == "MemberLost"


def test_a_failure_reported_after_its_consequences_is_still_the_cause() -> None:
    job = Job(target=2)
    first = job.forms("worker-0", "worker-1")
    job.runs("worker-0", first, reason="MembershipChanged")
    job.runs("worker-1", first, reason="WorkerFailed")
    job.passes(0.5)
    assert job.state.failures == 1
    assert job.state.latest is not None
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
    assert job.failed()
    assert told.order == "end"
    assert "maxRestarts is 2" in told.why
    assert job.joins("worker-9").order == "end"


def test_an_agent_that_leaves_is_not_waited_for() -> None:
    job = Job(target=2)
    job.forms("worker-0", "worker-1")
    job.say("worker-1", "leaving", generation=1)
    job.passes(0.3)
    assert job.members() == ["worker-0"]
    assert job.closings() == ["MemberLeft"]


def test_a_newcomer_waits_for_the_cool_down_then_the_group_saves_and_grows() -> None:
    job = Job(target=2)
    job.joins("worker-0")
    job.passes(4.0)
    assert job.members() == ["worker-0"]
    job.training = job.can_save = True
    job.joins("worker-1")
    job.passes(5.0)
    assert job.state.saving is None
    job.passes(5.0)
    assert job.members() == ["worker-0"], "it is still writing"
    assert job.runs("worker-0", 1).order == "save"
    job.save_and_stop("worker-0")
    assert job.members() == ["worker-0", "worker-1"]
    assert job.closings() == ["MemberJoined"]
    assert job.rejoins == [], "an abort would have cost the steps since the last checkpoint"


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
    """A script that cannot be asked to save trains alone beyond its cool-down, and a newcomer waits."""
    job = Job(target=2)
    job.joins("worker-0")
    job.passes(20.0)
    assert job.members() == ["worker-0"]
    job.checkpoint = 500
    job.passes(1.0)
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
    job = Job(target=2, rules=replace(RULES, grow_cooldown=20.0))
    job.joins("worker-0")
    job.passes(4.0)
    job.joins("worker-1")
    job.passes(1.0)
    job.checkpoint = 500
    job.passes(20.0)
    assert job.members() == ["worker-0"]
    job.checkpoint = 1000
    job.passes(0.5)
    assert job.members() == ["worker-0", "worker-1"]


def test_a_member_that_must_go_leaves_when_the_group_has_saved_and_the_rest_go_on() -> None:
    job = Job(target=3)
    job.trains("worker-0", "worker-1", "worker-2")
    told = job.must_go("worker-1")
    assert (told.order, told.why) == ("save", "worker-1 has to leave")
    assert job.runs("worker-0", 1).order == "save"
    job.passes(3.0)
    assert job.closings() == []
    job.save_and_stop("worker-0", "worker-1", "worker-2", gone=("worker-1",))
    assert job.members() == ["worker-0", "worker-2"]
    assert job.closings() == ["Preempted"]
    assert job.state.cause.detail == "worker-1 has to leave"
    assert job.state.failures == 0
    assert job.rejoins == []


def test_several_that_must_go_are_all_named_and_all_may_go() -> None:
    job = Job(target=2)
    job.trains("worker-0", "worker-1")
    job.must_go("worker-1")
    job.passes(1.0)
    job.must_go("worker-0")
    job.save_and_stop("worker-0", "worker-1", gone=("worker-0", "worker-1"))
    assert job.closings() == ["Preempted"]
    assert job.state.cause.detail == "worker-0, worker-1 have to leave"
    assert not job.state.agents
    assert job.state.number == 1
    job.training = False
    assert job.joins("worker-2").order == "wait"
    job.passes(4.0)
    assert job.members() == ["worker-2"]


def test_who_must_go_while_the_group_saves_for_another_reason_is_part_of_it() -> None:
    job = Job(target=2)
    job.trains("worker-0", "worker-1")
    job.tell(Retarget(1))
    job.passes(0.2)
    assert job.runs("worker-0", 1).order == "save"
    job.must_go("worker-0")
    job.save_and_stop("worker-0", "worker-1", gone=("worker-0",))
    assert job.closings() == ["Preempted"]
    assert job.members() == ["worker-1"]


def test_who_must_go_when_others_have_saved_already_does_not_break_off_the_save() -> None:
    job = Job(target=2)
    job.trains("worker-0", "worker-1")
    job.tell(Retarget(1))
    job.passes(0.2)
    job.save_and_stop("worker-0")
    job.training = False  # worker-0's ranks have ended, and worker-1's report is late
    assert job.must_go("worker-1").order == "save"
    assert job.closings() == []


def test_a_group_that_was_closed_while_it_saved_is_not_asked_again_in_its_next_generation() -> None:
    job = Job(target=2)
    job.trains("worker-0", "worker-1")
    job.tell(Retarget(1))
    job.passes(0.2)
    job.runs("worker-0", 1, reason="WorkerFailed")
    job.training = False
    job.passes(0.5)
    assert job.state.number == 2
    assert job.runs("worker-0", 2).order == "run"
    assert job.state.saving is None


def test_nobody_is_told_to_abort_while_one_of_the_group_is_still_writing() -> None:
    job = Job(target=2)
    job.trains("worker-0", "worker-1")
    job.must_go("worker-1")
    job.training = False  # the ranks that have ended do not report any more
    assert job.runs("worker-0", 1, reason="MembershipChanged").order == "save"
    assert job.joins("worker-0", generation=1, reason="MembershipChanged").order == "wait"
    job.passes(10.0)
    assert job.runs("worker-1", 1, leaving=True, reason="MembershipChanged").order == "save"
    assert job.closings() == []
    job.say("worker-1", "leaving", generation=1)
    assert job.closings() == ["Preempted"]
    assert job.members() == ["worker-0"]


def test_a_save_that_does_not_come_is_not_waited_for() -> None:
    job = Job(target=2)
    job.trains("worker-0", "worker-1")
    job.must_go("worker-1")
    job.passes(29.0)
    assert job.closings() == []
    job.passes(2.0)
    assert job.closings() == ["Preempted"]
    assert "worker-0, worker-1 did not save within 30 s" in job.state.cause.detail
    assert set(job.rejoins) == {"worker-0", "worker-1"}


def test_time_in_which_the_coordinator_stood_still_is_not_time_to_save() -> None:
    job = Job(target=2)
    job.trains("worker-0", "worker-1")
    job.must_go("worker-1")
    job.passes(5.0)
    job.now += 60.0
    job.tick()
    job.passes(5.0)
    assert job.closings() == []


def test_a_failure_while_the_group_saves_closes_it_at_once_and_counts() -> None:
    job = Job(target=2)
    job.trains("worker-0", "worker-1")
    job.must_go("worker-1")
    assert job.runs("worker-0", 1, reason="WorkerFailed").order == "rejoin"
    assert job.closings() == ["WorkerFailed"]
    assert job.state.failures == 1


def test_a_member_lost_while_the_group_saves_closes_it_at_once_unless_it_had_saved() -> None:
    job = Job(target=3)
    job.trains("worker-0", "worker-1", "worker-2")
    job.must_go("worker-2")
    job.save_and_stop("worker-0")
    job.falls_silent("worker-0")
    job.passes(5.0)
    assert job.closings() == [], "its part is on the disk"
    job.falls_silent("worker-1")
    job.passes(4.0)
    assert job.closings() == ["MemberLost"]


def test_a_member_that_has_saved_may_be_replaced_while_the_others_still_save() -> None:
    job = Job(target=2)
    job.trains("worker-0", "worker-1")
    job.must_go("worker-1")
    job.save_and_stop("worker-0")
    job.joins("worker-0", incarnation="worker-0-b")
    assert job.closings() == []
    job.save_and_stop("worker-1", gone=("worker-1",))
    assert job.closings() == ["Preempted"]
    job.passes(4.0)
    assert job.members() == ["worker-0"]


def test_a_member_that_leaves_before_it_has_saved_closes_the_group_at_once() -> None:
    job = Job(target=3)
    job.trains("worker-0", "worker-1", "worker-2")
    job.must_go("worker-2")
    job.say("worker-1", "leaving", generation=1)
    assert job.closings() == ["MemberLeft"]


def test_who_must_go_before_the_first_step_has_nothing_to_save() -> None:
    job = Job(target=2)
    job.forms("worker-0", "worker-1")
    assert job.must_go("worker-1").order == "rejoin"
    assert job.closings() == ["Preempted"]
    job.say("worker-1", "leaving", generation=1)
    job.passes(0.5)
    assert job.members() == ["worker-0"]
    assert job.state.failures == 0


def test_a_script_that_is_not_known_to_save_when_asked_is_asked_all_the_same_if_a_member_must_go() -> None:
    job = Job(target=2)
    job.trains("worker-0", "worker-1")
    job.can_save = False
    assert job.must_go("worker-1").order == "save"


def test_the_next_generation_has_not_made_a_step_because_the_last_one_had() -> None:
    saved, failed = Job(target=2), Job(target=2)
    for job in (saved, failed):
        job.trains("worker-0", "worker-1")
    saved.tell(Retarget(1))
    saved.passes(0.2)
    failed.runs("worker-0", 1, reason="WorkerFailed")
    for job in (saved, failed):
        job.save_and_stop("worker-0", "worker-1")
        assert job.state.number == 2
        job.training = False
        job.passes(0.2)
        assert not job.state.training


def test_a_first_step_may_have_been_made_that_nobody_has_heard_of_yet() -> None:
    job = Job(target=2)
    job.forms("worker-0", "worker-1")
    job.can_save = True
    assert job.must_go("worker-1").order == "save"
    job.passes(1.0)
    job.training = True
    job.passes(20.0)
    assert job.closings() == [], "now it is known that there is something to save"

    job = Job(target=2)
    job.forms("worker-0", "worker-1")
    job.can_save = True
    assert job.must_go("worker-1").order == "save"
    job.passes(3.5)
    assert job.closings() == ["Preempted"], "it is only starting"
    assert job.state.cause.detail == "worker-1 has to leave; there was nothing to save yet"


def test_a_spare_that_comes_while_the_group_saves_takes_the_place_of_who_goes() -> None:
    job = Job(target=2)
    job.trains("worker-0", "worker-1")
    job.must_go("worker-1")
    assert job.joins("worker-2").order == "wait"
    job.save_and_stop("worker-0", "worker-1", gone=("worker-1",))
    assert job.members() == ["worker-0", "worker-2"]


def test_a_group_that_hangs_is_closed_with_the_stacks_of_all_ranks_and_counts_as_failed() -> None:
    job = Job(target=2)
    first = job.trains("worker-0", "worker-1")
    job.tell(Hung(first, "rank 1 is stuck"))
    told = job.runs("worker-0", first)
    assert (told.order, told.stacks, told.why) == ("rejoin", True, "rank 1 is stuck")
    assert job.closings() == ["Hung"]
    assert job.state.failures == 1
    job.passes(0.5)
    assert job.members() == ["worker-0", "worker-1"]
    assert job.state.latest is not None
    assert job.state.latest.reason == "Hung"
    job.tell(Hung(first, "an old story"))
    assert job.closings() == ["Hung"], "what is said of an older generation closes nothing"
    job.runs("worker-0", first + 1, reason="WorkerFailed")
    assert not job.runs("worker-1", first + 1).stacks


def test_after_a_hang_agents_get_time_to_write_their_stacks() -> None:
    job = Job(target=2)
    first = job.trains("worker-0", "worker-1")
    job.tell(Hung(first, "rank 1 is stuck"))
    job.joins("worker-0", generation=first, reason="MembershipChanged")
    until = job.now + 11.5
    while job.now < until:
        job.now += 0.1
        job.tell(Synced(message("worker-1", "running", generation=first)))
        job.tell(Synced(job.beats["worker-0"]))
        job.tick()
    assert job.members() == []
    job.passes(1.0)
    assert job.members() != []


def test_more_agents_than_wished_for_wait_as_spares() -> None:
    job = Job(target=2)
    job.forms("worker-0", "worker-1")
    job.joins("worker-2")
    job.passes(60.0)
    assert job.members() == ["worker-0", "worker-1"]
    job.falls_silent("worker-0")
    job.passes(4.0)
    assert job.members() == ["worker-1", "worker-2"]


def test_a_changed_target_is_honoured_while_training() -> None:
    job = Job(target=3)
    job.trains("worker-0", "worker-1", "worker-2")
    job.tell(Retarget(2))
    job.passes(0.5)
    assert job.closings() == [], "it saves first"
    job.save_and_stop("worker-0", "worker-1", "worker-2")
    assert job.members() == ["worker-0", "worker-1"]
    assert job.closings() == ["TargetChanged"]
    job.tell(Retarget(3))
    job.passes(11.0)
    job.save_and_stop("worker-0", "worker-1")
    assert job.members() == ["worker-0", "worker-1", "worker-2"]
    assert job.rejoins == []


def test_a_group_that_has_not_made_a_step_yet_has_nothing_to_save_and_soon_shrinks() -> None:
    job = Job(target=3)
    job.forms("worker-0", "worker-1", "worker-2")
    job.can_save = True
    job.tell(Retarget(2))
    job.passes(2.5)
    assert job.closings() == [], "it may have made one"
    job.passes(1.5)
    assert job.members() == ["worker-0", "worker-1"]


def test_a_script_that_cannot_be_asked_to_save_shrinks_at_once() -> None:
    job = Job(target=3)
    job.forms("worker-0", "worker-1", "worker-2")
    job.training = True
    job.tell(Retarget(2))
    job.passes(0.5)
    assert job.members() == ["worker-0", "worker-1"]
    assert job.closings() == ["TargetChanged"]


@pytest.mark.parametrize(("asked", "granted"), [(0, 1), (99, 4), (3, 3)])
def test_the_target_stays_within_the_bounds_of_the_job(asked: int, granted: int) -> None:
    job = Job(target=2)
    job.tell(Retarget(asked))
    assert job.state.target == granted


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
    assert told.membership is not None
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
    after = Job(target=2, number=first, latest=before.state.latest)
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
    after = Job(target=2, number=first, latest=before.state.latest)
    after.runs("worker-0", first)
    after.passes(2.9)
    assert after.members() == []
    after.passes(0.5)
    assert after.members() == ["worker-0"]
    assert after.state.number == first + 1


def test_a_restarted_coordinator_forms_no_group_before_it_has_looked_who_is_there() -> None:
    before = Job(target=3)
    first = before.forms("worker-0", "worker-1", "worker-2")
    after = Job(target=3, number=first, latest=before.state.latest)
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
    number = before.forms("worker-0", "worker-1")
    assert number == 42
    after = Job(target=2, number=1)
    for name in ("worker-0", "worker-1"):
        assert after.runs(name, 42, membership=before.state.latest).order == "run"
    assert after.members() == ["worker-0", "worker-1"]
    after.joins("worker-0", generation=42, reason="WorkerFailed")
    after.passes(0.5)
    assert after.state.number == 43


def test_a_job_that_is_started_again_does_not_wait_for_a_group_that_is_gone() -> None:
    before = Job(target=2)
    first = before.forms("worker-0", "worker-1")
    again = Job(target=2, number=first, latest=before.state.latest)
    again.joins("worker-0", incarnation="worker-0-b")
    told = again.joins("worker-1", incarnation="worker-1-b")
    assert told.membership is not None
    assert told.membership.generation == first + 1


def test_the_end_is_told_to_everybody() -> None:
    job = Job(target=2)
    first = job.forms("worker-0", "worker-1")
    job.tell(Over(Cause("Done", "training is complete")))
    assert job.runs("worker-0", first).order == "end"
    assert job.joins("worker-1", generation=first).order == "end"


def test_what_agents_say_after_the_end_is_no_trouble_any_more() -> None:
    job = Job(target=2)
    first = job.forms("worker-0", "worker-1")
    job.tell(Over(Cause("Done", "training is complete")))
    assert job.closings() == ["Done"]
    job.runs("worker-0", first, reason="WorkerFailed")
    job.say("worker-1", "leaving", generation=first)
    job.falls_silent("worker-0")
    job.passes(10.0)
    assert job.closings() == ["Done"]
    assert job.state.failures == 0
    assert not [action for action in job.actions if isinstance(action, Say)]
    assert list(job.state.agents) == ["worker-0"]


def test_a_failure_that_is_told_after_the_end_is_not_counted() -> None:
    job = Job(target=2)
    first = job.forms("worker-0", "worker-1")
    job.tell(Synced(message("worker-0", "running", generation=first, reason="MembershipChanged")))
    assert job.closings() == ["PeerLost"]
    job.tell(Over(Cause("Done", "training is complete")))
    job.tell(Synced(message("worker-1", "running", generation=first, reason="WorkerFailed")))
    assert job.state.failures == 0


def test_a_wish_that_is_repeated_says_nothing_new_and_a_changed_one_does() -> None:
    job = Job(target=2)
    first = job.forms("worker-0", "worker-1")
    job.joins("worker-2")
    assert says_nothing_new(job.state, message("worker-2", "joining"))
    assert not says_nothing_new(job.state, message("worker-2", "joining", port=4001))
    assert not says_nothing_new(job.state, message("worker-2", "joining", generation=first))
    assert not says_nothing_new(job.state, message("worker-2", "leaving"))
    assert not says_nothing_new(job.state, message("worker-1", "joining", generation=first))
    assert not says_nothing_new(job.state, message("worker-1", "running", generation=first + 1))


def test_a_quiet_heartbeat_is_recognised_and_keeps_its_sender_alive() -> None:
    job = Job(target=2)
    first = job.forms("worker-0", "worker-1")
    quiet = message("worker-1", "running", generation=first)
    assert says_nothing_new(job.state, quiet)
    assert not says_nothing_new(job.state, message("worker-1", "running", generation=first, reason="WorkerFailed"))
    assert not says_nothing_new(job.state, message("worker-1", "running", generation=first, leaving=True))
    assert not says_nothing_new(job.state, message("worker-1", "joining", generation=first))
    assert not says_nothing_new(job.state, message("worker-1", "running", generation=first, incarnation="other"))
    job.falls_silent("worker-1")
    for _ in range(100):
        job.now += 0.1
        job.tell(Synced(message("worker-0", "running", generation=first)))
        job.tell(Tick(heard={"worker-1": job.now}))
    assert job.members() == ["worker-0", "worker-1"]
