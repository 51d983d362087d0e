"""What the operator does about what is lost: workers, and coordinators that went with their node."""

import pytest

from tandem.wire.status import Snapshot
from tandem_operator.lifecycle import IDLE_ANSWERS, IDLE_SECONDS, Idle, idle
from tandem_operator.pod_ends import PodEnd
from tandem_operator.reconcile import SILENCE_POLL_SECONDS, TRANSITION_SECONDS
from tests.support.worlds.operator_job import (
    IDLE,
    NOW,
    coordinator,
    decided,
    ended,
    heard,
    initialized,
    job,
    made,
    removed,
    running,
    surroundings,
    worker,
)

COORDINATOR = "digits-coordinator-0-aaaaa"


def test_a_worker_that_is_lost_is_replaced_and_that_is_told() -> None:
    of = job(status=initialized())
    plan = decided(of, surroundings(of, worker(0, deleting=True), worker(1)), snapshot=heard())
    assert made(plan) == ["worker 0"]
    assert "worker 0 is replaced: digits-worker-0-aaaaa was deleted" in [notice.message for notice in plan.events]


def test_a_coordinator_that_is_silent_does_not_change_the_phase_and_workers_are_still_replaced() -> None:
    of = job(status=initialized(phase="Running"))
    plan = decided(of, surroundings(of, ended(0), worker(1)), snapshot=None)
    assert (plan.status.phase, made(plan)) == ("Running", ["worker 0"])


def test_workers_that_never_get_into_the_group_end_the_job() -> None:
    of = job(status=initialized(phase="Starting"), workers={"replicas": 2, "minReplicas": 2})
    pod = ended(0, failures=8, message="ModuleNotFoundError: No module named 'tandem_trainer'")
    plan = decided(of, surroundings(of, pod, worker(1)), snapshot=heard("Starting", worldSize=None), idle=IDLE)
    assert plan.status.phase == "Failed"
    assert "No module named" in (plan.status.message or "")


def test_a_place_that_cannot_be_filled_ends_no_job_as_long_as_the_others_may_be_enough() -> None:
    waits = {"phase": "Pending", "ready": False, "started": None, "waiting": "Unschedulable", "created": NOW - 150}
    pods = [STUCK, *(worker(index, **waits) for index in range(1, 8))]
    nobody = heard("Starting", worldSize=None, generation=0)
    for fewest, phase in ((1, "Starting"), (7, "Starting"), (8, "Failed")):
        workers = {"replicas": 8, "minReplicas": fewest}
        of = job(status=initialized(phase="Starting"), workers=workers)
        assert decided(of, surroundings(of, *pods), snapshot=nobody, idle=IDLE).status.phase == phase
    two = [STUCK, ended(1, failures=8), *pods[2:]]
    of = job(status=initialized(phase="Starting"), workers={"replicas": 8, "minReplicas": 7})
    assert decided(of, surroundings(of, *two), snapshot=nobody, idle=IDLE).status.phase == "Failed"


def test_as_long_as_others_train_a_place_that_cannot_be_filled_is_tried_again() -> None:
    of, _ = running()
    plan = decided(of, surroundings(job(), ended(0, failures=8), worker(1)), snapshot=heard())
    assert plan.status.phase == "Running"


def test_a_job_that_cannot_work_as_it_is_written_is_not_tried_again() -> None:
    of = job(status=initialized(phase="Starting"))
    said = heard("Failed", worldSize=None, message="no data set at /data")
    said = said.model_copy(update={"reason": "InvalidConfiguration"})
    plan = decided(of, surroundings(of, ended(0, code=78), worker(1)), snapshot=said)
    failed = next(one for one in plan.status.conditions if one.type == "Failed")
    assert (plan.status.phase, failed.reason) == ("Failed", "InvalidConfiguration")
    assert "no data set at /data" in failed.message
    assert made(plan) == []


@pytest.mark.parametrize(
    "said",
    [heard(), heard("Restarting", worldSize=None), None],
    ids=["the others train", "the others train again soon", "the coordinator does not answer"],
)
def test_that_one_worker_cannot_work_ends_nothing_unless_that_is_recorded(said: Snapshot | None) -> None:
    of = job(status=initialized())
    pod = ended(0, code=78, message="the mount is stale")
    plan = decided(of, surroundings(of, pod, worker(1)), snapshot=said, idle=None if said is None else IDLE)
    assert (plan.status.phase in ("Running", "Restarting"), made(plan), removed(plan)) == (True, ["worker 0"], [])


STUCK = ended(0, failures=8)


@pytest.mark.parametrize(
    "idle",
    [None, Idle(3, NOW - 9999, IDLE_ANSWERS - 1), Idle(3, NOW - IDLE_SECONDS + 1, 9999)],
    ids=["never", "not often enough", "not for long enough"],
)
def test_that_nobody_trains_has_to_be_said_over_several_looks(idle: Idle | None) -> None:
    of = job(status=initialized())
    there = surroundings(of, STUCK, worker(1))
    assert decided(of, there, idle=idle).status.phase == "Running", "silence is no evidence"
    plan = decided(of, there, snapshot=heard("Restarting", worldSize=None), idle=idle)
    assert (plan.status.phase, removed(plan)) == ("Restarting", [])


def test_a_group_that_was_there_between_two_answers_begins_the_time_anew() -> None:
    nobody = heard("Restarting", worldSize=None, generation=3)
    known = idle(idle(None, nobody, NOW), nobody, NOW + 1)
    assert known == Idle(3, NOW, 2)
    assert idle(known, None, NOW + 2) == known
    assert idle(known, heard("Restarting", worldSize=None, generation=4), NOW + 3) == Idle(4, NOW + 3)
    assert idle(known, heard(generation=4), NOW + 3) is None


def test_a_coordinator_that_does_not_answer_any_more_is_replaced_and_a_person_can_read_why() -> None:
    of, there = running(coordinator(uid="c"))
    plan = decided(of, there, unresponsive_coordinator="c", in_doubt=True)
    assert (made(plan), removed(plan)) == (["coordinator 0"], [COORDINATOR])
    notice = next(one for one in plan.events if one.reason == "CoordinatorReplaced")
    assert notice.warning
    assert notice.message == f"coordinator is replaced: {COORDINATOR} does not answer any more"
    assert plan.requeue_after == SILENCE_POLL_SECONDS


def test_a_coordinator_that_the_operator_cannot_reach_at_all_is_not_asked_more_often_than_others() -> None:
    assert decided(job(status={"phase": "Pending"})).requeue_after == TRANSITION_SECONDS
    of, there = running()
    assert decided(of, there).requeue_after == TRANSITION_SECONDS, (
        "it was silent for long, or says what nobody can read"
    )


@pytest.mark.parametrize("facts", [{"ready": False}, {"uid": "another"}], ids=["not ready", "another"])
def test_a_coordinator_is_left_alone_if_its_kubelet_knows_or_it_is_not_the_one_that_is_meant(
    facts: dict[str, object],
) -> None:
    of, there = running(coordinator(**{"uid": "c", **facts}))
    plan = decided(of, there, unresponsive_coordinator="c")
    assert (made(plan), removed(plan)) == ([], [])


@pytest.mark.parametrize(
    ("facts", "why", "goes"),
    [
        ({"ready": False, "silent": True}, "was lost with its node", [COORDINATOR]),
        ({"deleting": True}, "was deleted", []),
        ({"phase": "Failed", "ready": False, "ended_by": PodEnd.DISRUPTED, "finished": NOW - 1}, "was evicted", []),
    ],
    ids=["its node is gone", "it was deleted", "it was evicted"],
)
def test_a_coordinator_that_is_lost_is_replaced_at_once(facts: dict[str, object], why: str, goes: list[str]) -> None:
    of, there = running(coordinator(**facts))
    plan = decided(of, there)
    assert (made(plan), removed(plan)) == (["coordinator 0"], goes)
    assert f"coordinator is replaced: {COORDINATOR} {why}" in [notice.message for notice in plan.events]


def test_the_coordinator_of_a_job_that_has_ended_stays_until_its_workers_know_and_is_not_replaced_then() -> None:
    of, there = running(status={"phase": "Succeeded"})
    assert COORDINATOR not in removed(decided(of, there))
    gone = surroundings(of, ended(0, code=0), ended(1, code=0), coordinator(phase="Failed", ready=False))
    assert "coordinator 0" not in made(decided(of, gone))
