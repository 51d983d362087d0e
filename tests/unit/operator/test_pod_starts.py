"""A pod of which nothing begins: the status says why in the kubelet's words, and after a quarter of an hour it has
failed."""

import time

import pytest

from tandem.formatting import rfc3339
from tandem_operator import kinds, names
from tandem_operator.api import Object, RequestRefused
from tandem_operator.pod_starts import CREATING, MAX_EVENT_REQUESTS, MAX_START_SECONDS, explained
from tandem_operator.replicas import MAX_FAILURES, MAX_PAUSE
from tests.support.clock import Clock
from tests.support.worlds.operator_world import KEY, LOOP, NAMESPACE, World

THEN = 1_767_225_600.0
WORDS = 'MountVolume.SetUp failed for volume "data" : configmap "setup" not found'


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    found = Clock(THEN)
    monkeypatch.setattr(time, "time", found)
    monkeypatch.setattr(time, "monotonic", found)
    return found


def stuck(world: World, clock: Clock, role: str) -> None:
    """Pods of a role have a node, and their volume does not mount; other pods run."""
    for pod in world.cluster.pods(role):
        if "status" not in pod:
            scheduled = {"type": "PodScheduled", "status": "True", "lastTransitionTime": rfc3339(clock.now)}
            waits = [{"name": role, "state": {"waiting": {"reason": CREATING}}}]
            pod["status"] = {"phase": "Pending", "conditions": [scheduled], "containerStatuses": waits}
            world.cluster.pod_events.append(event(pod["metadata"]["uid"], "FailedMount", WORDS, clock.now))
    for pod in world.cluster.pods():
        if "status" not in pod:
            world.cluster.pod((kinds.POD, NAMESPACE, pod["metadata"]["name"]), "Running")


def event(uid: str, reason: str, message: str, at: float) -> Object:
    return {"involvedObject": {"uid": uid}, "reason": reason, "message": message, "lastTimestamp": rfc3339(at)}


def passes(world: World, clock: Clock, role: str, seconds: float) -> None:
    until = clock.now + seconds
    while clock.now < until:
        world.relist()
        LOOP.run(world.controller.sync(KEY))
        stuck(world, clock, role)
        clock.now += 5


def test_a_volume_that_does_not_mount_is_said_and_ends_the_job_after_six_pods(clock: Clock) -> None:
    world = World()
    passes(world, clock, names.WORKER, 30)
    assert WORDS in (world.status.message or "")
    assert {one.reason for one in world.status.conditions if one.type == "Ready"} == {"FailedMount"}
    assert "FailedMount" in world.cluster.told
    passes(world, clock, names.WORKER, MAX_FAILURES * (MAX_START_SECONDS + MAX_PAUSE))
    assert (world.status.phase, WORDS in (world.status.message or "")) == ("Failed", True)
    assert {one.reason for one in world.status.conditions if one.type == "Failed"} == {"DoesNotStart"}


def test_events_are_read_rarely_and_of_few_pods(clock: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
    world, asked = World(), 0

    async def events(namespace: str, uid: str) -> list[Object]:
        nonlocal asked
        asked += 1
        raise RequestRefused(403, "Forbidden", "an older role")

    monkeypatch.setattr(world.cluster, "events", events, raising=False)
    passes(world, clock, names.WORKER, 100)
    assert 0 < asked <= MAX_EVENT_REQUESTS * 100 / 20
    assert "its Events cannot be read" in (world.status.message or "")


def test_the_newest_event_explains() -> None:
    older, newer = event("u", "FailedMount", "old", THEN), event("u", "Pulling", 'Pulling image "x"', THEN + 60)
    series = {"involvedObject": {"uid": "u"}, "reason": "a b", "message": "s", "series": {"lastObservedTime": "2027"}}
    assert explained([newer, older]).reason == "Pulling"
    assert (explained([series, newer]).reason, explained([series, newer]).message) == (CREATING, "s")
    assert explained([]).reason == CREATING
