"""Which worker pods are made and removed."""

import pytest

from tandem.processes.exitcode import ExitCode
from tandem_operator.observed import MAX_AVOIDED, Pod
from tandem_operator.pod_ends import ROOMY_SECONDS, PodEnd
from tandem_operator.replicas import (
    FIRST_PAUSE,
    MAX_FAILURES,
    MAX_NEW_PODS,
    MAX_PAUSE,
    NewPod,
    ReplicaPolicy,
    RolePlan,
    pause,
    plan,
)
from tests.support.worlds.operator_job import ENDPOINT, NOW, ended, worker


def planned(*pods: Pod, replicas: int = 2, now: float = NOW, **more: object) -> RolePlan:
    policy = ReplicaPolicy(indices=range(replicas), is_current=lambda pod: pod.endpoint == ENDPOINT, **more)  # type: ignore[arg-type]
    return plan(pods, policy, now)


def names_of(pods: tuple[Pod, ...]) -> list[str]:
    return [pod.name for pod in pods]


def test_every_place_is_filled() -> None:
    assert planned().create == (NewPod(0, 0), NewPod(1, 0))
    assert planned(worker(0)).create == (NewPod(1, 0),)
    assert planned(worker(0), worker(1)) == RolePlan(running=(0, 1))


def test_of_thousands_one_look_makes_some_and_the_next_one_more() -> None:
    first = planned(replicas=10_000)
    assert (len(first.create), first.requeue_after) == (MAX_NEW_PODS, 0.0)
    there = [worker(new.index) for new in first.create]
    assert planned(*there, replicas=10_000).create[0] == NewPod(MAX_NEW_PODS, 0)
    assert planned(*there, replicas=MAX_NEW_PODS).requeue_after is None


@pytest.mark.parametrize(
    "gone",
    [
        worker(0, deleting=True),
        worker(0, silent=True, ready=False),
        ended(0, ended_by=PodEnd.DISRUPTED),
        ended(0, started=NOW - 100),
    ],
    ids=["deleted", "its node is silent", "evicted", "failed after a healthy life"],
)
def test_who_is_lost_is_replaced_at_once(gone: Pod) -> None:
    assert [new.index for new in planned(gone, worker(1)).create] == [0]


def test_a_pod_on_a_silent_node_is_removed_and_one_that_terminates_is_left_alone() -> None:
    assert names_of(planned(worker(0, silent=True), worker(1)).delete) == ["digits-worker-0-aaaaa"]
    assert planned(worker(0, deleting=True), worker(1)).delete == ()


def test_a_pod_that_fails_soon_after_its_start_again_and_again_waits_longer_each_time() -> None:
    first = planned(ended(0), worker(1))
    assert first.create == (NewPod(0, 1),)
    second = planned(ended(0, failures=1), worker(1))
    assert (second.create, second.requeue_after) == ((), FIRST_PAUSE)
    assert planned(ended(0, failures=1), worker(1), now=NOW + FIRST_PAUSE).create == (NewPod(0, 2),)
    third = planned(ended(0, failures=2), worker(1))
    assert third.requeue_after == 2 * FIRST_PAUSE
    assert pause(50) == MAX_PAUSE


def test_a_pod_that_was_in_the_group_did_start_well() -> None:
    pod = ended(0, failures=3)
    assert planned(pod, worker(1), proven={pod.name}).create == (NewPod(0, 1),)


def test_want_of_memory_counts_although_the_pod_was_at_work() -> None:
    pod = ended(0, failures=1, started=NOW - ROOMY_SECONDS + 1, ended_by=PodEnd.OVER_LIMIT)
    assert planned(pod, worker(1), proven={pod.name}).create == ()


def test_want_of_memory_after_a_long_healthy_life_counts_from_one_again() -> None:
    pod = ended(0, failures=MAX_FAILURES, started=NOW - ROOMY_SECONDS, ended_by=PodEnd.OVER_LIMIT)
    found = planned(pod, worker(1))
    assert (found.create, found.stuck) == ((NewPod(0, 1),), ())


def test_a_place_that_cannot_be_filled_is_told() -> None:
    pod = ended(0, failures=MAX_FAILURES - 1)
    assert planned(pod, worker(1)).stuck == (pod,)
    assert planned(ended(0, failures=MAX_FAILURES - 2), worker(1)).stuck == ()
    assert planned(ended(0, failures=MAX_FAILURES), worker(0, "digits-worker-0-later"), worker(1)).stuck == ()


def test_the_last_pod_that_ended_stays_for_its_logs_and_the_ones_before_go() -> None:
    old, newer = ended(0, "old", finished=NOW - 100), ended(0, "newer")
    assert names_of(planned(old, newer, worker(0), worker(1)).delete) == ["old"]


def test_a_smaller_group_loses_its_highest_places_first() -> None:
    pods = [worker(index) for index in range(4)]
    assert [pod.index for pod in planned(*pods, replicas=2).delete] == [3, 2]


def test_of_two_pods_in_one_place_the_one_that_is_further_stays() -> None:
    late = worker(0, "digits-worker-0-zzzzz", created=NOW)
    assert names_of(planned(worker(0), late, worker(1)).delete) == [late.name]
    waiting = worker(0, "digits-worker-0-00000", phase="Pending", ready=False, created=NOW - 900)
    assert names_of(planned(waiting, worker(0), worker(1)).delete) == [waiting.name]


def test_a_pod_that_looks_for_the_coordinator_elsewhere_is_replaced() -> None:
    lost = Pod(name="lost", uid="u", role="worker", index=0, endpoint="10.0.0.1:7070", phase="Running", ready=True)
    found = planned(lost, worker(1))
    assert (names_of(found.delete), [new.index for new in found.create]) == (["lost"], [0])


def test_an_agent_that_ended_well_is_waited_for_because_the_coordinator_may_not_have_said_yet() -> None:
    done = ended(0, code=0)
    assert planned(done, worker(1)).create == ()
    assert planned(done, worker(1), now=NOW + 60).create == (NewPod(0, 0),)
    assert planned(done, worker(1), now=NOW + 60, completes=True) == RolePlan(running=(1,))


def test_who_was_left_out_of_the_group_is_replaced_at_once_on_another_node() -> None:
    out = ended(0, code=ExitCode.LEFT_OUT, node="node-3", failures=4, started=NOW - 5)
    assert planned(out, worker(1)).create == (NewPod(0, 0, ("node-3",)),)


def test_a_node_on_which_three_pods_of_a_place_failed_soon_after_their_start_is_rather_not_taken_again() -> None:
    twice = ended(0, node="node-3", failures=2, failed_on=("node-3", "node-4"))
    (new,) = planned(twice, worker(1), now=NOW + 60).create
    assert (new.failed_on, new.shuns) == (("node-3", "node-4", "node-3"), ())
    thrice = ended(0, node="node-3", failures=3, failed_on=new.failed_on)
    (new,) = planned(thrice, worker(1), now=NOW + 60).create
    assert (new.shuns, new.avoids) == (("node-3",), ())
    elsewhere = ended(0, node="node-5", failures=4, failed_on=new.failed_on)
    assert planned(elsewhere, worker(1), now=NOW + 60).create[0].shuns == ("node-3",)


@pytest.mark.parametrize(
    "gone",
    [{"started": NOW - 100}, {"ended_by": PodEnd.DISRUPTED}, {"code": ExitCode.LEFT_OUT}],
    ids=["a healthy life", "evicted", "left out"],
)
def test_what_is_no_failure_of_the_start_forgets_where_others_failed(gone: dict[str, object]) -> None:
    pod = ended(0, **{"node": "node-4", "failed_on": ("node-3",) * 3, "failures": 3, **gone})  # type: ignore[arg-type]
    (new,) = planned(pod, worker(1), now=NOW + 60).create
    assert (new.failed_on, new.shuns) == ((), ())


def test_a_place_goes_on_keeping_off_nodes_whatever_its_next_pods_end_of() -> None:
    lost = worker(0, deleting=True, avoids=("node-3",), node="node-4")
    assert planned(lost, worker(1)).create == (NewPod(0, 0, ("node-3",)),)
    again = ended(0, code=ExitCode.LEFT_OUT, node="node-4", avoids=("node-3",))
    assert planned(again, worker(1)).create == (NewPod(0, 0, ("node-3", "node-4")),)
    many = tuple(f"node-{number}" for number in range(MAX_AVOIDED))
    assert planned(ended(0, code=ExitCode.LEFT_OUT, node="last", avoids=many)).create[0].avoids == (*many[1:], "last")
