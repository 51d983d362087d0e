"""Changes of the group that lose nothing: shrinking and leaving save first; a hang tells where."""

from dataclasses import replace

import pytest

from tandem_coordinator.group_state import Hung, Retarget, Synced
from tests.support.worlds.membership_job import Job, formed, in_training, message


def two_of_which_one_must_go() -> Job:
    job = in_training(2)
    job.must_go("worker-1")
    return job


def test_a_member_that_must_go_leaves_when_the_group_has_saved_and_the_rest_go_on() -> None:
    job = in_training(3)
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
    job = two_of_which_one_must_go()
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


def test_a_script_that_only_logs_its_steps_is_not_waited_for_when_a_member_must_go() -> None:
    job = in_training(2)
    job.can_save, job.scripted = False, True
    job.passes(0.2)
    job.must_go("worker-1")
    job.passes(0.2)
    assert job.closings() == ["Preempted"], "it obeys no order to save, and gets its signal at once"


def two_that_are_about_to_be_one() -> Job:
    """Two train, one is wished for, and so the group is asked to save."""
    job = in_training(2)
    job.tell(Retarget(1))
    job.passes(0.2)
    return job


def test_who_must_go_while_the_group_saves_for_another_reason_is_part_of_it() -> None:
    job = two_that_are_about_to_be_one()
    assert job.runs("worker-0", 1).order == "save"
    job.must_go("worker-0")
    job.save_and_stop("worker-0", "worker-1", gone=("worker-0",))
    assert job.closings() == ["Preempted"]
    assert job.members() == ["worker-1"]


def test_who_must_go_when_others_have_saved_already_does_not_break_off_the_save() -> None:
    job = two_that_are_about_to_be_one()
    job.save_and_stop("worker-0")
    job.training = False  # worker-0's ranks have ended, and worker-1's report is late
    assert job.must_go("worker-1").order == "save"
    assert job.closings() == []


def test_a_group_that_was_closed_while_it_saved_is_not_asked_again_in_its_next_generation() -> None:
    job = two_that_are_about_to_be_one()
    job.runs("worker-0", 1, reason="WorkerFailed")
    job.training = False
    job.passes(0.5)
    assert job.state.number == 2
    assert job.runs("worker-0", 2).order == "run"
    assert job.state.saving is None


def test_nobody_is_told_to_abort_while_one_of_the_group_is_still_writing() -> None:
    job = two_of_which_one_must_go()
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
    job = two_of_which_one_must_go()
    job.passes(29.0)
    assert job.closings() == []
    job.passes(2.0)
    assert job.closings() == ["Preempted"]
    assert "worker-0, worker-1 did not save within 30 s" in job.state.cause.detail
    assert set(job.rejoins) == {"worker-0", "worker-1"}


def test_time_in_which_the_coordinator_stood_still_is_not_time_to_save() -> None:
    job = two_of_which_one_must_go()
    job.passes(5.0)
    job.now += 60.0
    job.tick()
    job.passes(5.0)
    assert job.closings() == []


def test_a_failure_while_the_group_saves_closes_it_at_once_and_counts() -> None:
    job = two_of_which_one_must_go()
    assert job.runs("worker-0", 1, reason="WorkerFailed").order == "rejoin"
    assert job.closings() == ["WorkerFailed"]
    assert job.state.failures == 1


def test_a_member_lost_while_the_group_saves_closes_it_at_once_unless_it_had_saved() -> None:
    job = in_training(3)
    job.must_go("worker-2")
    job.save_and_stop("worker-0")
    job.falls_silent("worker-0")
    job.passes(5.0)
    assert job.closings() == [], "its part is on the disk"
    job.falls_silent("worker-1")
    job.passes(4.0)
    assert job.closings() == ["MemberLost"]


def test_a_member_that_has_saved_may_be_replaced_while_the_others_still_save() -> None:
    job = two_of_which_one_must_go()
    job.save_and_stop("worker-0")
    job.joins("worker-0", incarnation="worker-0-b")
    assert job.closings() == []
    job.save_and_stop("worker-1", gone=("worker-1",))
    assert job.closings() == ["Preempted"]
    job.passes(4.0)
    assert job.members() == ["worker-0"]


def test_a_member_that_leaves_before_it_has_saved_closes_the_group_at_once() -> None:
    job = in_training(3)
    job.must_go("worker-2")
    job.say("worker-1", "leaving", generation=1)
    assert job.closings() == ["MemberLeft"]


def test_who_must_go_before_the_first_step_has_nothing_to_save() -> None:
    job = formed(2)
    assert job.must_go("worker-1").order == "rejoin"
    assert job.closings() == ["Preempted"]
    job.say("worker-1", "leaving", generation=1)
    job.passes(0.5)
    assert job.members() == ["worker-0"]
    assert job.state.failures == 0


def test_a_script_that_is_not_known_to_save_when_asked_is_asked_all_the_same_if_a_member_must_go() -> None:
    job = in_training(2)
    job.can_save = False
    assert job.must_go("worker-1").order == "save"


def test_the_next_generation_has_not_made_a_step_because_the_last_one_had() -> None:
    saved, failed = two_that_are_about_to_be_one(), Job(target=2)
    failed.trains("worker-0", "worker-1")
    failed.runs("worker-0", 1, reason="WorkerFailed")
    for job in (saved, failed):
        job.save_and_stop("worker-0", "worker-1")
        assert job.state.number == 2
        job.training = False
        job.passes(0.2)
        assert not job.state.training


def test_a_first_step_may_have_been_made_that_nobody_has_heard_of_yet() -> None:
    job = formed(2)
    job.can_save = True
    assert job.must_go("worker-1").order == "save"
    job.passes(1.0)
    job.training = True
    job.passes(20.0)
    assert job.closings() == [], "now it is known that there is something to save"

    job = formed(2)
    job.can_save = True
    assert job.must_go("worker-1").order == "save"
    job.passes(3.5)
    assert job.closings() == ["Preempted"], "it is only starting"
    assert job.state.cause.detail == "worker-1 has to leave; there was nothing to save yet"


def test_a_spare_that_comes_while_the_group_saves_takes_the_place_of_who_goes() -> None:
    job = two_of_which_one_must_go()
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
    job = formed(2)
    job.joins("worker-2")
    job.passes(60.0)
    assert job.members() == ["worker-0", "worker-1"]
    job.falls_silent("worker-0")
    job.passes(4.0)
    assert job.members() == ["worker-1", "worker-2"]


def test_a_changed_target_is_honoured_while_training() -> None:
    job = in_training(3)
    job.tell(Retarget(2))
    job.passes(0.5)
    assert job.closings() == [], "it saves first"
    job.save_and_stop("worker-0", "worker-1", "worker-2")
    assert job.members() == ["worker-0", "worker-1"]
    assert job.closings() == ["TargetChanged"]
    job.passes(0.5)
    job.tell(Retarget(3))
    job.passes(0.5)
    assert job.state.saving is not None
    job.save_and_stop("worker-0", "worker-1")
    assert job.members() == ["worker-0", "worker-1", "worker-2"]
    assert job.rejoins == []


def test_a_group_that_has_not_made_a_step_yet_has_nothing_to_save_and_soon_shrinks() -> None:
    job = formed(3)
    job.can_save = True
    job.tell(Retarget(2))
    job.passes(2.5)
    assert job.closings() == [], "it may have made one"
    job.passes(1.5)
    assert job.members() == ["worker-0", "worker-1"]


def test_a_script_that_cannot_be_asked_to_save_shrinks_at_once() -> None:
    job = formed(3)
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


def test_the_code_after_the_loop_is_not_cut_off_for_who_comes_or_must_go_or_for_another_target() -> None:
    job = in_training(2)
    job.finishing = job.pausing = True
    job.tell(Retarget(3))
    job.joins("worker-2")
    job.must_go("worker-1")
    job.passes(600.0)
    job.tell(Retarget(1))
    job.passes(600.0)
    assert job.closings() == []
    assert job.runs("worker-0", 1).order == "run"


def test_a_group_whose_steps_end_while_it_is_asked_to_save_is_left_alone() -> None:
    job = two_that_are_about_to_be_one()
    job.passes(1.0)
    job.finishing = job.pausing = True
    job.passes(600.0)
    assert job.closings() == []


def test_the_time_of_a_pause_is_not_time_to_save() -> None:
    job = in_training(2)
    job.pausing = True
    job.must_go("worker-1")
    job.passes(600.0)
    assert job.closings() == [], "it saves when the validation is over"
    job.pausing = False
    job.passes(20.0)
    assert job.closings() == []
    job.passes(12.0)
    assert job.closings() == ["Preempted"]


def test_a_group_that_writes_its_checkpoint_is_waited_for_however_long_that_takes() -> None:
    job = two_of_which_one_must_go()
    job.passes(5.0)
    job.saving = True
    job.passes(300.0)
    assert job.closings() == [], "14 GB take a while"
    job.save_and_stop("worker-0", "worker-1", gone=("worker-1",))
    assert job.closings() == ["Preempted"]
    assert job.state.cause.detail == "worker-1 has to leave"


def test_the_end_of_a_long_step_is_waited_for() -> None:
    job = in_training(2)
    job.step_seconds = 40.0
    job.must_go("worker-1")
    job.passes(100.0)
    assert job.closings() == []
    job.passes(60.0)
    assert job.closings() == ["Preempted"]
    assert "did not save within 150 s" in job.state.cause.detail


def test_a_group_saves_and_begins_anew_once_when_settings_have_changed_that_ranks_read_at_their_start() -> None:
    before = Job(target=2)
    number = before.forms("worker-0", "worker-1")
    words = "the job has changed checkpoint.everySteps"
    job = Job(target=2, generation=number, membership=before.state.latest, settings_changed=words)
    for replica in ("worker-0", "worker-1"):
        job.runs(replica, number)
    job.passes(0.2)
    assert job.members() == ["worker-0", "worker-1"]
    assert job.state.saving is None, "before its first step it may have read them after the change"
    job.training = job.can_save = True
    job.passes(0.2)
    assert job.state.saving.cause.is_planned
    job.save_and_stop("worker-0", "worker-1")
    assert job.closings() == ["SettingsChanged"]
    assert (job.members(), job.state.number) == (["worker-0", "worker-1"], number + 1)
    job.passes(5.0)
    assert job.state.saving is None
    assert job.opened()[-1].detail == words


def test_a_script_that_saves_by_itself_is_not_disturbed_by_settings_of_checkpoints() -> None:
    job = formed(1)
    job.state = replace(job.state, settings_changed="the job has changed checkpoint.everySteps")
    job.training = True
    job.passes(60.0)
    assert job.closings() == []
