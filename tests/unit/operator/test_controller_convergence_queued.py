"""The same for a job whose workers wait in a queue: wherever Kueue, kubelets and the operator are, no worker waits at
its gate for ever."""

from itertools import permutations
from typing import Any

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from tandem_operator import kinds, names
from tests.support.worlds.operator_cluster import NAMESPACE
from tests.support.worlds.operator_queue import QueuedCluster
from tests.support.worlds.operator_world import KEY, NAME, STEPS, Step, World, happen, live

QUEUED_STEPS = st.one_of(
    STEPS,
    st.builds(Step, st.just("move"), st.integers(0, 30)),
    st.builds(Step, st.just("move"), st.integers(0, 30)),
    st.builds(Step, st.just("preempt")),
)


def happens(world: World, cluster: QueuedCluster, step: Step) -> None:
    match step.what:
        case "move":
            cluster.move(step.index)
        case "preempt":
            cluster.preempt()
        case _:
            happen(world, step)


def _has_ended(pod: dict[str, Any]) -> bool:
    return pod["status"].get("phase") in ("Failed", "Succeeded")


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.lists(QUEUED_STEPS, max_size=40), st.integers(1, 4))
@example([Step("look"), Step("tick"), Step("tick"), Step("fail", 2)], 1)
def test_it_converges(steps: list[Step], replicas: int) -> None:
    cluster = QueuedCluster()
    world = World(cluster, queueName="gpus")
    for step in steps:
        happens(world, cluster, step)
    cluster.edit(kinds.JOB, NAME, {"workers": {"replicas": replicas}, "runPolicy": {"suspend": False}})

    world.settle()
    status = cluster.objects[kinds.JOB, *KEY]["status"]
    assert (status["phase"], live(world, names.WORKER)) == ("Running", list(range(replicas)))
    # A pod that has failed stays for its log, in the group that it was of, which is over.
    ended = {pod["metadata"]["labels"][names.GROUP] for pod in cluster.pods(names.WORKER) if _has_ended(pod)}
    (group,) = {*cluster.groups()} - (ended & cluster.over)
    assert group not in cluster.over

    cluster.preempt()
    world.settle()
    assert live(world, names.WORKER) == list(range(replicas))

    cluster.edit(kinds.JOB, NAME, {"runPolicy": {"suspend": True}})
    world.settle()
    assert cluster.pods() == []


@pytest.mark.parametrize("preempted", [True, False])
def test_in_whatever_order_all_of_a_group_end_and_are_seen_they_start_again(preempted: bool) -> None:
    for order in permutations(["first ends", "last ends", "Kueue looks", "news", "look"]):
        cluster = QueuedCluster()
        world = World(cluster, queueName="gpus")
        world.settle()
        (group,), (first, last) = cluster.groups(), cluster.pods(names.WORKER)
        if preempted:
            cluster.preempt()
        for what in order:
            match what:
                case "first ends":
                    cluster.pod((kinds.POD, NAMESPACE, first["metadata"]["name"]), "Failed", code=1)
                case "last ends":
                    cluster.pod((kinds.POD, NAMESPACE, last["metadata"]["name"]), "Failed", code=1)
                case "Kueue looks":
                    cluster.review(group)
                case "news":
                    world.relist()
                case _:
                    world.look()
        world.settle()
        started = [pod for pod in cluster.pods(names.WORKER) if pod.get("status", {}).get("phase") == "Running"]
        assert len(started) == 2, order
        assert cluster.corrected == []
