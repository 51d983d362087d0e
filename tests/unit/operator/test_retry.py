"""A failed job is tried again, in place, when somebody asks for it; and only then."""

import json
from typing import Any

import pytest

from tandem.processes.launch import UID_ANNOTATION
from tandem.wire.status import Status
from tandem_operator import kinds, names, pods
from tests.support.worlds.operator_world import KEY, NAME, NAMESPACE, Cluster, World, live

AT = "2026-11-23T04:00:00Z"


def failed() -> World:
    """A job that has trained and has failed."""
    world = World(Cluster())
    world.settle()
    world.cluster.failed = True
    world.settle()
    assert status(world).phase == "Failed"
    world.cluster.failed = False
    return world


def annotate(world: World, value: str) -> None:
    world.cluster.annotate(kinds.JOB, NAME, {names.RETRY_AT: value})


def status(world: World) -> Status:
    return Status.parse(world.cluster.objects[kinds.JOB, *KEY]["status"])


def recorded(world: World) -> str:
    """Which incarnation the coordinator is told."""
    config = world.cluster.objects[kinds.CONFIG_MAP, NAMESPACE, names.job_file(NAME)]
    return str(json.loads(config["data"][pods.JOB_FILE])["metadata"]["annotations"][UID_ANNOTATION])


def reasons(world: World) -> dict[str, tuple[str, str]]:
    return {one.type: (one.status, one.reason) for one in status(world).conditions}


def test_a_failed_job_goes_on_when_it_is_asked_to_with_other_pods_and_as_another_incarnation() -> None:
    world = failed()
    before, pods_before = recorded(world), {pod["metadata"]["uid"] for pod in world.cluster.pods()}
    world.cluster.written.clear()
    annotate(world, AT)
    world.settle()
    written = [(verb, kind) for verb, kind, _ in world.cluster.written]
    assert written.index(("apply", kinds.CONFIG_MAP)) < written.index(("create", kinds.POD)), "pods read it"
    now = status(world)
    assert (now.phase, now.retries, now.retried_at, now.completion_time) == ("Running", 1, AT, None)
    assert live(world, names.WORKER) == [0, 1]
    assert not pods_before & {pod["metadata"]["uid"] for pod in world.cluster.pods()}
    assert recorded(world) == f"{before}.1"
    assert reasons(world)["Failed"][0] == reasons(world)["Stalled"][0] == "False"
    assert reasons(world)["Ready"][0] == "True"
    assert "Retried" in world.cluster.told


def test_it_is_tried_once_for_each_value() -> None:
    world = failed()
    annotate(world, AT)
    world.settle()
    world.cluster.failed = True
    world.settle()
    assert (status(world).phase, status(world).retries) == ("Failed", 1)
    annotate(world, f"{AT} again")
    world.cluster.failed = False
    world.settle()
    assert (status(world).phase, status(world).retries) == ("Running", 2)


def test_what_was_asked_for_before_the_job_failed_has_no_effect() -> None:
    world = World(Cluster())
    world.settle()
    annotate(world, AT)
    world.settle()
    assert (status(world).phase, status(world).retries, status(world).retried_at) == ("Running", 0, AT)
    world.cluster.failed = True
    world.settle()
    assert (status(world).phase, status(world).retries) == ("Failed", 0)


@pytest.mark.parametrize("writes", range(1, 12))
def test_an_operator_that_dies_while_it_tries_again_is_taken_over_from(writes: int) -> None:
    world = failed()
    annotate(world, AT)
    world.relist()
    world.look(dies_in=writes)
    world.settle()
    assert (status(world).phase, status(world).retries) == ("Running", 1)


def test_only_failed_jobs_are_tried_again() -> None:
    world = World(Cluster())
    world.settle()
    world.cluster.complete = True
    world.settle()
    ended: Any = status(world).phase
    annotate(world, AT)
    world.settle()
    assert (ended, status(world).phase, status(world).retries) == ("Succeeded", "Succeeded", 0)
