"""When a job is over: what still runs, what is waited for, and what stays."""

import pytest

from tandem.formatting import rfc3339
from tandem.wire.reasons import Reason
from tandem_operator import kinds
from tandem_operator.job_memory import Attempt, terminate_key
from tandem_operator.observed import Children
from tandem_operator.reconcile import NO_COORDINATOR_SECONDS, TRANSITION_SECONDS, WORKER_GRACE_SECONDS, poll_interval
from tandem_operator.replicas import RESULT_SECONDS
from tests.support.worlds.operator_job import (
    NOW,
    SCRIPT,
    decided,
    ended,
    evaluator,
    heard,
    initialized,
    job,
    made,
    reason,
    removed,
    running,
    surroundings,
    worker,
)

DRAIN_SECONDS = 600.0
"""How long evaluators are waited for that do not get on, by default."""


def test_when_training_is_complete_evaluators_finish_what_is_left() -> None:
    of, there = running()
    plan = decided(of, there, snapshot=heard("Succeeded", completionTime="1970-01-12T13:46:40Z"))
    assert (plan.status.phase, made(plan), removed(plan)) == ("Draining", [], [])


def test_an_evaluator_that_is_lost_then_is_still_replaced_and_one_that_is_done_is_not() -> None:
    of = job(status=initialized(phase="Draining", completionTime="1970-01-12T13:46:40Z"), evaluators={"replicas": 2})
    done = evaluator(of, 1, phase="Succeeded", code=0, finished=NOW - 100)
    there = surroundings(of, evaluators=[evaluator(of, 0, deleting=True), done])
    plan = decided(of, there, snapshot=heard("Succeeded"))
    assert (plan.status.phase, made(plan), removed(plan)) == ("Draining", ["evaluator 0"], [])


def test_a_job_succeeds_when_its_evaluators_have_finished() -> None:
    of = job(status=initialized(phase="Draining"))
    done = evaluator(of, phase="Succeeded", code=0, finished=NOW - 1)
    there = surroundings(of, ended(0, code=0), ended(1, code=0), evaluators=[done])
    plan = decided(of, there, snapshot=heard("Succeeded"))
    assert plan.status.phase == "Succeeded"
    assert removed(plan) == ["digits-coordinator-0-aaaaa"]


@pytest.mark.parametrize(("seconds", "phase"), [(2, "Draining"), (60, "Succeeded")])
def test_the_coordinator_has_time_for_the_last_scores_after_the_end_of_the_evaluators(seconds: int, phase: str) -> None:
    of = job(status=initialized(phase="Draining", completionTime=rfc3339(NOW - 300)))
    done = evaluator(of, phase="Succeeded", code=0, finished=NOW - seconds)
    there = surroundings(of, ended(0, code=0), ended(1, code=0), evaluators=[done])
    assert decided(of, there, snapshot=heard("Draining")).status.phase == phase


def test_evaluators_that_find_no_place_do_not_keep_a_job_for_ever() -> None:
    of = job(status=initialized(phase="Draining", completionTime="1970-01-12T13:46:40Z"))
    assert decided(of, now=NOW + 1, snapshot=heard("Draining")).status.phase == "Draining"
    late = decided(of, now=NOW + DRAIN_SECONDS + 1, snapshot=heard("Draining"))
    condition = next(one for one in late.status.conditions if one.type == "Complete")
    assert (late.status.phase, condition.reason) == ("Succeeded", "EvaluationUnfinished")
    assert "digits-evaluator-0-aaaaa" in removed(late)


def test_evaluators_that_get_on_are_waited_for_however_long_that_takes() -> None:
    ended = {"phase": "Draining", "completionTime": rfc3339(NOW)}
    of = job(status=initialized(**ended), evaluators={"drainSeconds": 60})
    at_work = heard("Draining", evaluatedAt=rfc3339(NOW + 5000))
    assert decided(of, now=NOW + 5059, snapshot=at_work).status.phase == "Draining"
    assert decided(of, now=NOW + 5062, snapshot=at_work).status.phase == "Succeeded"
    remembered = job(status=initialized(**ended, evaluatedAt=rfc3339(NOW + 5000)), evaluators={"drainSeconds": 60})
    assert decided(remembered, now=NOW + 5059).status.phase == "Draining"


def test_evaluators_of_a_job_that_has_failed_get_as_long_to_finish() -> None:
    of = job(status=initialized(phase="Failed", completionTime="1970-01-12T13:46:40Z"))
    plan = decided(of, now=NOW + 1)
    assert (removed(plan), plan.requeue_after) == (["digits-coordinator-0-aaaaa"], DRAIN_SECONDS - 1)
    assert "digits-evaluator-0-aaaaa" in removed(decided(of, now=NOW + DRAIN_SECONDS))
    none_left = surroundings(of, evaluators=[])
    assert decided(of, none_left, now=NOW + DRAIN_SECONDS).requeue_after is None


def test_sidecars_that_go_on_keep_neither_a_script_nor_a_drain_from_its_end_and_are_ended() -> None:
    lingers = {"phase": "Running", "container_ended": True, "lingers": True}
    script = job(status=initialized(), trainer=SCRIPT)
    pods = [ended(index, code=0, **lingers) for index in (0, 1)]
    plan = decided(script, surroundings(script, *pods, evaluators=[]), snapshot=heard("Starting", worldSize=None))
    assert (plan.status.phase, removed(plan), list(plan.terminate)) == (
        "Succeeded",
        ["digits-coordinator-0-aaaaa"],
        pods,
    )

    of = job(status=initialized(phase="Draining"))
    done = evaluator(of, code=0, finished=NOW - 1, **lingers)
    there = surroundings(of, ended(0, code=0), ended(1, code=0), evaluators=[done])
    plan = decided(of, there, snapshot=heard("Succeeded"))
    assert (plan.status.phase, list(plan.terminate)) == ("Succeeded", [done])
    assert plan.status.message is None or "EvaluatorFailed" not in plan.status.message


def test_a_worker_that_crashed_beside_a_sidecar_is_replaced_at_once_and_ended() -> None:
    of = job(status=initialized())
    crashed = ended(0, phase="Running", container_ended=True, lingers=True)
    plan = decided(of, surroundings(of, crashed, worker(1)), snapshot=heard())
    assert (made(plan), removed(plan), list(plan.terminate)) == (["worker 0"], [], [crashed])
    # Until the kubelet has done so, it is not asked again and again.
    known = {terminate_key(crashed.name): Attempt(2, NOW)}
    plan = decided(of, surroundings(of, crashed, worker(1)), snapshot=heard(), now=NOW + 1, attempts=known)
    assert plan.terminate == ()


def test_without_evaluators_a_job_succeeds_with_its_training() -> None:
    of = job(status=initialized(), evaluators={"replicas": 0})
    assert decided(of, snapshot=heard("Succeeded")).status.phase == "Succeeded"


def test_a_script_of_the_users_own_is_complete_when_it_ended_well_everywhere() -> None:
    of = job(status=initialized(), trainer=SCRIPT)
    assert decided(of, surroundings(of, ended(0, code=0), worker(1)), snapshot=heard()).status.phase == "Running"
    through = surroundings(of, ended(0, code=0), ended(1, code=0))
    assert decided(of, through, snapshot=heard("Restarting")).status.phase == "Succeeded"


@pytest.mark.parametrize(
    ("finished", "filled"),
    [(0, ["worker 0"]), (1, []), (None, [])],
    ids=["its group failed", "its group goes on", "the coordinator is of the version before"],
)
def test_a_place_of_a_script_that_ended_well_is_filled_again_once_its_group_cannot_complete(
    finished: int | None, filled: list[str]
) -> None:
    of = job(status=initialized(), trainer=SCRIPT, workers={"replicas": 2, "minReplicas": 2})
    there = surroundings(of, ended(0, code=0), worker(1))
    for said in (heard("Restarting", worldSize=None), heard()):
        told = said.model_copy(update={"finished": finished})
        assert made(decided(of, there, snapshot=told, now=NOW + 1)) == [], "the coordinator may not have said yet"
        assert made(decided(of, there, snapshot=told, now=NOW + RESULT_SECONDS)) == filled
    assert made(decided(of, there, snapshot=None, now=NOW + 3600)) == []


def test_a_job_that_its_coordinator_gave_up_has_failed_and_says_why() -> None:
    of, there = running()
    plan = decided(of, there, snapshot=heard("Failed", message="the restart budget of 10 is used up"))
    assert (plan.status.phase, plan.status.message) == ("Failed", "the restart budget of 10 is used up")
    # They hear it from the coordinator, and end by themselves.
    assert removed(plan) == []


def test_workers_that_do_not_end_by_themselves_are_ended_and_then_the_coordinator() -> None:
    of, there = running(status={"phase": "Failed", "completionTime": "1970-01-12T13:46:40Z"})
    plan = decided(of, there, now=NOW + WORKER_GRACE_SECONDS + 1)
    assert removed(plan) == ["digits-worker-0-aaaaa", "digits-worker-1-aaaaa"]
    assert removed(decided(of, surroundings(job(), ended(0), ended(1)))) == ["digits-coordinator-0-aaaaa"]


def test_what_has_ended_stays_so_whatever_the_coordinator_says() -> None:
    of, there = running(status={"phase": "Succeeded", "completionTime": "1970-01-12T13:46:40Z"})
    plan = decided(of, there, snapshot=heard("Running"))
    assert (plan.status.phase, made(plan)) == ("Succeeded", [])


def test_a_job_is_deleted_when_its_time_after_the_end_is_over() -> None:
    policy = {"ttlSecondsAfterFinished": 60}
    of = job(status=initialized(phase="Succeeded", completionTime="1970-01-12T13:46:40Z"), runPolicy=policy)
    waiting = decided(of, now=NOW + 10)
    assert (waiting.expired, waiting.requeue_after) == (False, 50.0)
    assert decided(of, now=NOW + 61).expired


def test_a_deadline_counts_from_the_coordinators_first_answer() -> None:
    of = job(status=initialized(), runPolicy={"activeDeadlineSeconds": 3600})
    there = surroundings(of, worker(0), worker(1))
    assert decided(of, there, snapshot=heard()).status.phase == "Running"
    late = decided(of, there, now=NOW + 3600, snapshot=heard())
    assert (late.status.phase, len(late.delete), reason(late, "Failed")) == ("Failed", 3, Reason.DEADLINE_EXCEEDED)


def test_in_a_queue_a_deadline_counts_from_the_first_group() -> None:
    policy = {"activeDeadlineSeconds": 3600, "queueName": "gpus"}
    waiting = job(status=initialized(phase="Pending"), runPolicy=policy)
    assert decided(waiting, now=NOW + 9000).status.phase == "Pending"
    started = job(status=initialized(startTime=rfc3339(NOW + 9000)), runPolicy=policy)
    assert decided(started, now=NOW + 12_599).status.phase == "Running"
    assert decided(started, now=NOW + 12_600).status.phase == "Failed"


def test_a_job_that_is_about_to_become_something_else_is_looked_at_more_often() -> None:
    of, there = running()
    assert decided(of, there, snapshot=heard()).requeue_after == poll_interval(0) == 1.0
    assert decided(of, there, snapshot=heard(), answering=100).requeue_after == 2.0
    assert decided(of, there, snapshot=heard(), answering=9_999).requeue_after == 5.0
    assert decided(of, there, snapshot=heard("Restarting")).requeue_after == TRANSITION_SECONDS
    joining = heard(workers={"desired": 2, "ready": 1, "min": 1, "max": 2})
    assert decided(of, there, snapshot=joining).requeue_after == TRANSITION_SECONDS
    assert decided(of, there, snapshot=joining, answering=9_999).requeue_after == 2.5
    nobody_answers = {key: thing for key, thing in there.objects.items() if key[0] is not kinds.POD}
    assert decided(of, Children(nobody_answers)).requeue_after == NO_COORDINATOR_SECONDS


def test_a_job_that_took_fewer_steps_than_announced_says_so_also_when_its_coordinator_is_gone() -> None:
    early = "stopped early after step 40 of 100: the loss has not fallen"
    of, there = running()
    said = heard("Draining", message=early).model_copy(update={"reason": "StoppedEarly"})
    draining = decided(of, there, snapshot=said).status
    assert (draining.phase, draining.message) == ("Draining", f"{early}; evaluators finish what is left")
    of = job(status=draining)
    done = evaluator(of, phase="Succeeded", code=0, finished=NOW - 1)
    there = surroundings(of, ended(0, code=0), ended(1, code=0), evaluators=[done])
    over = decided(of, there, now=NOW + 60).status
    assert over.phase == "Succeeded"
    condition = next(one for one in over.conditions if one.type == "Complete")
    assert (condition.status, condition.reason) == ("True", "StoppedEarly")
    assert over.message == condition.message == f"{early}, and its checkpoints are evaluated"
