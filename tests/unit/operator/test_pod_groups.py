"""Which group the workers of a queued job are."""

import pytest

from tandem.job.resource import DistributedTrainingJob
from tandem.wire.reasons import Reason
from tandem_operator import kinds, names
from tandem_operator.kinds import POD
from tandem_operator.observed import Pod, PodGroup, observe
from tandem_operator.pod_ends import PodEnd
from tandem_operator.pod_groups import group_of
from tandem_operator.pod_starts import CREATING, POLL_AFTER_SECONDS
from tandem_operator.reporting import JobProblem
from tests.support.worlds.operator_job import (
    NOW,
    decided,
    ended,
    heard,
    initialized,
    job,
    made,
    reason,
    removed,
    surroundings,
    worker,
)

OURS = PodGroup("gpus", "digits-11111", 2)


def queued() -> DistributedTrainingJob:
    return job(status=initialized(), workers={"replicas": 2, "minReplicas": 1}, runPolicy={"queueName": "gpus"})


def groups(*workers: Pod) -> set[PodGroup | None]:
    """Those of the workers that are made beside these."""
    of = queued()
    made = [observe(POD, one) for one in decided(of, surroundings(of, *workers), snapshot=heard()).create_pods]
    return {pod.group for pod in made if isinstance(pod, Pod)}


def test_who_is_not_queued_has_no_group() -> None:
    assert group_of(job(), [worker(0, group=OURS)], "e") is None


def test_the_first_workers_are_one_new_group() -> None:
    (found,) = groups()
    assert (found.queue, found.size) == ("gpus", 2)
    of = queued()
    assert group_of(of, [], "e") == group_of(of, [], "e") != group_of(of, [], "f")


def test_a_replacement_joins_the_group_of_those_at_work_once_the_old_pod_has_ended() -> None:
    assert groups(worker(0, group=OURS), worker(1, group=OURS, deleting=True)) == set()
    assert groups(worker(0, group=OURS), worker(1, group=OURS, silent=True, ready=False)) == set()
    assert groups(worker(0, group=OURS), ended(1, group=OURS, ended_by=PodEnd.DISRUPTED)) == {OURS}
    assert groups(worker(0, group=OURS)) == {OURS}


def test_a_group_that_has_ended_as_a_whole_is_over() -> None:
    (found,) = groups(*(ended(place, group=OURS, ended_by=PodEnd.DISRUPTED) for place in range(2)))
    assert found != OURS


def test_who_has_been_told_to_go_is_not_joined_but_on_a_lost_node() -> None:
    (found,) = groups(ended(0, group=OURS, ended_by=PodEnd.DISRUPTED), worker(1, group=OURS, deleting=True))
    assert found != OURS
    lost = worker(1, group=OURS, deleting=True, silent=True, ready=False)
    assert groups(ended(0, group=OURS, ended_by=PodEnd.DISRUPTED), lost) == {OURS}


def test_who_joined_a_group_that_was_over_is_replaced_by_one_of_a_new_group() -> None:
    of, left = queued(), worker(0, group=OURS, phase="Pending", ready=False, abandoned=True)
    plan = decided(of, surroundings(of, left, ended(1, group=OURS, ended_by=PodEnd.DISRUPTED)), snapshot=heard())
    assert removed(plan) == [left.name]
    (found,) = (pod.group for one in plan.create_pods if isinstance(pod := observe(POD, one), Pod))
    assert found not in (None, OURS)


@pytest.mark.parametrize("other", [PodGroup("gpus", "digits-11111", 1), PodGroup("others", "digits-11111", 2)])
def test_workers_of_another_size_or_queue_leave_and_are_queued_anew(other: PodGroup) -> None:
    of = queued()
    plan = decided(of, surroundings(of, worker(0, group=other), worker(1, group=other)), snapshot=heard())
    assert removed(plan) == ["digits-worker-1-aaaaa", "digits-worker-0-aaaaa"]
    assert made(plan) == []
    (found,) = groups(worker(1, group=other, deleting=True))
    assert found not in (None, other)


@pytest.mark.parametrize(
    ("gates", "finalizers", "unqueued"),
    [([], [], True), ([{"name": names.GATE}], [names.FINALIZER], False), ([], [names.FINALIZER], False)],
)
def test_a_worker_that_names_a_queue_and_was_not_held_there_is_told_of(
    gates: list[dict[str, str]], finalizers: list[str], unqueued: bool
) -> None:
    labels = {names.JOB: "digits", names.ROLE: names.WORKER, names.QUEUE: "gpus", names.GROUP: "g"}
    metadata = {"name": "p", "uid": "u", "labels": labels, "finalizers": finalizers}
    pod = observe(kinds.POD, {"metadata": metadata, "spec": {"schedulingGates": gates}, "status": {"phase": "Pending"}})
    assert isinstance(pod, Pod)
    assert pod.unqueued == unqueued
    of = job(status=initialized(), runPolicy={"queueName": "gpus"})
    there = surroundings(of, worker(0, group=OURS, unqueued=pod.unqueued), worker(1, group=OURS))
    plan = decided(of, there, snapshot=heard())
    assert reason(plan) == (Reason.NOT_QUEUED if unqueued else "Running")
    assert plan.status.message == (
        "the workers do not wait in the queue gpus: Kueue is not installed, or does not handle pods here"
        if unqueued
        else None
    )


@pytest.mark.parametrize(("obstacle", "is_progress"), [("Pulling", True), (CREATING, True), ("FailedMount", False)])
def test_a_pod_whose_image_is_pulled_does_not_hide_that_the_workers_do_not_wait_in_their_queue(
    obstacle: str, is_progress: bool
) -> None:
    of = job(status=initialized(), runPolicy={"queueName": "gpus"})
    starting = worker(1, group=OURS, phase="Pending", ready=False, started=None, placed=NOW - POLL_AFTER_SECONDS)
    there = surroundings(of, worker(0, group=OURS, unqueued=True), starting)
    plan = decided(of, there, snapshot=heard("Starting"), starts={starting.uid: JobProblem(obstacle, "its disk")})
    assert reason(plan) == (Reason.NOT_QUEUED if is_progress else obstacle)
