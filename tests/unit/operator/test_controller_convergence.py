"""Whatever news is lost, late or told twice, and wherever the operator dies between two writes: it gets there."""

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from tandem_operator import kinds, liveness, names
from tandem_operator.objects import Peers
from tests.support.worlds.operator_world import KEY, NAME, NAMESPACE, STEPS, Step, World, happen, live

PEERS = Peers(({"podSelector": {}},))


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.lists(STEPS, max_size=40), st.integers(1, 4), st.sampled_from([None, PEERS]))
@example([Step("die", 1, flag=True)], 1, None)
def test_it_converges(steps: list[Step], replicas: int, peers: Peers | None) -> None:
    world = World()
    world.options = {"peers": peers}
    world.start()
    for step in steps:
        happen(world, step)
    world.cluster.edit(kinds.JOB, NAME, {"workers": {"replicas": replicas}, "runPolicy": {"suspend": False}})

    world.settle()
    status = world.cluster.objects[kinds.JOB, *KEY]["status"]
    assert (status["phase"], live(world, names.WORKER)) == ("Running", list(range(replicas)))
    assert live(world, names.COORDINATOR) == [0]
    assert live(world, names.EVALUATOR) == [0]
    policy = (kinds.NETWORK_POLICY, NAMESPACE, names.network_policy(NAME))
    assert (policy in world.cluster.objects) == (peers is not None)
    assert world.cluster.target in (0, replicas) if replicas == 2 else world.cluster.target == replicas
    quiet = len(world.cluster.written)
    world.look()
    assert world.cluster.written[quiet:] == []

    world.cluster.edit(kinds.JOB, NAME, {"runPolicy": {"suspend": True}})
    world.settle()
    assert world.cluster.objects[kinds.JOB, *KEY]["status"]["phase"] == "Suspended"
    assert world.cluster.pods() == []
    world.cluster.edit(kinds.JOB, NAME, {"runPolicy": {"suspend": False}})
    world.settle()

    world.cluster.complete = True
    world.settle()
    assert world.cluster.objects[kinds.JOB, *KEY]["status"]["phase"] == "Succeeded"
    assert [live(world, role) for role in names.ROLES] == [[], [], []]
    assert len(world.tokens) == 1, "the token has changed"
    assert ("delete", kinds.CLAIM, names.checkpoints(NAME)) not in world.cluster.written


def test_that_something_was_replaced_is_told_although_the_status_was_written_just_before() -> None:
    world = World()
    world.cluster.step = 1
    world.settle()
    (pod,) = world.cluster.pods(names.EVALUATOR)
    world.cluster.end((kinds.POD, NAMESPACE, pod["metadata"]["name"]))
    world.cluster.step = 2
    world.resync()
    assert world.cluster.told.count("EvaluatorReplaced") == 1
    assert world.cluster.objects[kinds.JOB, *KEY]["status"]["progress"]["step"] == 2


@settings(max_examples=20, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.lists(STEPS, max_size=25))
def test_of_a_job_that_is_deleted_at_any_moment_the_volume_alone_is_left(steps: list[Step]) -> None:
    world = World()
    for step in steps:
        happen(world, step)
    world.cluster.end((kinds.JOB, NAMESPACE, NAME))
    world.look()
    world.settle()
    left = {place[0] for place in world.cluster.objects}
    assert left <= {kinds.CLAIM}


def test_a_coordinator_that_does_not_answer_any_more_is_replaced_and_nothing_else(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(liveness, "SILENT_SECONDS", 0.0)
    world = World()
    world.settle()
    (before,), workers = called(world, names.COORDINATOR), called(world, names.WORKER)
    world.cluster.mute = {before}
    world.look()
    assert called(world, names.COORDINATOR) == [before], "it may have been asked at a bad moment"
    world.settle()
    (after,) = called(world, names.COORDINATOR)
    assert after != before
    assert called(world, names.WORKER) == workers

    # Where the new one never answers, it is left alone: it may be we who cannot reach it.
    world.cluster.mute = {before, after}
    world.start()
    world.settle()
    world.look()
    assert called(world, names.COORDINATOR) == [after]


def called(world: World, role: str) -> list[str]:
    """The names of a role's pods."""
    return sorted(pod["metadata"]["name"] for pod in world.cluster.pods(role))


def test_all_pods_of_a_new_job_are_made_in_its_first_look() -> None:
    world = World()
    world.look()
    assert sorted(pod["metadata"]["labels"][names.ROLE] for pod in world.cluster.pods()) == [
        names.COORDINATOR,
        names.EVALUATOR,
        names.WORKER,
        names.WORKER,
    ]
