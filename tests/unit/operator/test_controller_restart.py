"""An operator that starts again, wherever a job is in its life, changes nothing: what it knew is in the objects."""

import copy
import time
from collections.abc import Callable

import pytest

from tandem_operator import kinds, names
from tandem_operator.replicas import MAX_FAILURES
from tests.support.worlds.operator_world import KEY, NAME, NAMESPACE, World, live

THEN = 1_767_225_600.0
"""When everything in the played cluster happens: 2026-01-01."""


def fails(world: World, role: str, failures: int = 0) -> None:
    """The first of the live pods of a role ends soon after its start, as so many before it did."""
    pod = next(pod for pod in world.cluster.pods(role) if pod["status"]["phase"] == "Running")
    place = (kinds.POD, NAMESPACE, pod["metadata"]["name"])
    world.cluster.objects[place]["metadata"]["annotations"][names.FAILURES] = str(failures)
    world.cluster.pod(place, "Failed", code=1)


def edits(world: World, **spec: object) -> None:
    world.cluster.edit(kinds.JOB, NAME, spec)


def silences(world: World) -> None:
    world.cluster.mute = {pod["metadata"]["name"] for pod in world.cluster.pods(names.COORDINATOR)}


def completes(world: World) -> None:
    world.cluster.complete = True


def nothing(world: World) -> None:
    """It has only just been made."""


LIFE: dict[str, Callable[[World], None]] = {
    "it is made": nothing,
    "a worker fails": lambda world: fails(world, names.WORKER, 1),
    "and again": lambda world: fails(world, names.WORKER, MAX_FAILURES + 2),
    "an evaluator fails": lambda world: fails(world, names.EVALUATOR, 3),
    "it grows": lambda world: edits(world, workers={"replicas": 3}),
    "it is suspended": lambda world: edits(world, runPolicy={"suspend": True}),
    "it goes on": lambda world: edits(world, runPolicy={"suspend": False}),
    "its coordinator falls silent": silences,
    "a worker fails meanwhile": lambda world: fails(world, names.WORKER, MAX_FAILURES + 2),
    "its coordinator answers": lambda world: world.cluster.mute.clear(),
    "it is complete": completes,
}
MOMENTS = 6
"""After each of these, kubelets do so many things before everybody rests."""


def rests(world: World) -> None:
    """The operator has nothing to do until somebody else does something."""
    for _ in range(20):
        before = world.cluster.version
        world.resync()
        if world.cluster.version == before:
            return
    raise AssertionError("it never comes to rest")


@pytest.mark.parametrize("asks", [1, 3], ids=["once", "again and again"])
def test_a_restart_at_any_moment_of_a_jobs_life_changes_nothing(monkeypatch: pytest.MonkeyPatch, asks: int) -> None:
    monkeypatch.setattr(time, "time", lambda: THEN)
    world = World()
    for what, happens in LIFE.items():
        happens(world)
        for moment in range(MOMENTS):
            rests(world)
            before, writes = copy.deepcopy(world.cluster.objects), len(world.cluster.written)
            world.start()
            for _ in range(asks):
                world.look()
            assert world.cluster.written[writes:] == [], f"{what}, moment {moment}"
            assert world.cluster.objects == before
            world.cluster.tick()
    assert world.cluster.objects[kinds.JOB, *KEY]["status"]["phase"] == "Succeeded"


def test_a_job_that_trains_with_a_place_in_back_off_outlives_a_restart_whose_first_questions_are_not_answered(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(time, "time", lambda: THEN)
    world = World()
    world.settle()
    fails(world, names.WORKER, MAX_FAILURES + 2)
    silences(world)
    world.start()
    for _ in range(10):
        world.look()
    assert world.cluster.objects[kinds.JOB, *KEY]["status"]["phase"] == "Running"
    assert len(live(world, names.WORKER)) == 1
