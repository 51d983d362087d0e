"""What carries the label of a job and is not the job's takes next to nothing of the operator's memory."""

from typing import Any

import pytest

from tandem.job.labels import JOB as LABEL
from tandem_operator import kinds, names
from tandem_operator.informer import Cache
from tests.support.worlds.operator_world import JOB, KEY, LOOP, NAME, NAMESPACE, World


def labelled(name: str, job: str = NAME, namespace: str = NAMESPACE, owner: str = "") -> dict[str, Any]:
    owners = [{"kind": kinds.JOB.name, "controller": True, "uid": owner}] if owner else []
    labels = {LABEL: job, names.ROLE: names.WORKER, names.INDEX: "0"}
    metadata = {"namespace": namespace, "name": name, "uid": f"{namespace}/{name}", "resourceVersion": "1"}
    return {"metadata": {**metadata, "labels": labels, "ownerReferences": owners}, "status": {}}


def known(namespace: str = NAMESPACE, uid: str = "u") -> dict[str, Any]:
    return {**JOB, "metadata": {**JOB["metadata"], "namespace": namespace, "uid": uid, "resourceVersion": "1"}}


def held(cache: Cache) -> int:
    return len(cache._entries)


def test_objects_of_no_job_and_objects_that_no_job_has_are_not_held() -> None:
    cache = Cache()
    cache.upsert(kinds.JOB, known())
    for kind in (kinds.CONFIG_MAP, kinds.SERVICE, kinds.CLAIM, kinds.NETWORK_POLICY):
        for number in range(100):
            cache.upsert(kind, labelled(f"any-{number}"))
            cache.upsert(kind, labelled(names.job_file(f"none-{number}"), job=f"none-{number}"))
    assert held(cache) == 0
    assert cache.upsert(kinds.CONFIG_MAP, labelled(names.job_file(NAME))) == [KEY]
    assert cache.remove(kinds.JOB, *KEY, "u") == KEY
    assert held(cache) == 0


def test_pods_that_are_nobodys_are_bounded_and_take_no_room_of_those_that_are_a_jobs() -> None:
    cache = Cache(max_pods=20, max_stray_pods=10)
    cache.upsert(kinds.JOB, known())
    for number in range(100):
        cache.upsert(kinds.POD, labelled(f"stray-{number}", owner="somebody else's"))
    assert held(cache) == 5
    for number in range(10):
        assert cache.upsert(kinds.POD, labelled(f"own-{number}", owner="u")) == [KEY]
    assert len(cache.children(KEY).pods(names.WORKER, "u")) == 10


def test_a_namespace_with_too_many_pods_leaves_room_for_others_and_its_job_is_not_decided_about() -> None:
    cache = Cache(max_pods=20)
    cache.upsert(kinds.JOB, known())
    cache.upsert(kinds.JOB, known("others", "v"))
    for number in range(100):
        cache.upsert(kinds.POD, labelled(f"own-{number}", owner="u"))
    for number in range(5):
        cache.upsert(kinds.POD, labelled(f"own-{number}", namespace="others", owner="v"))
    assert (cache.is_overfull(KEY), cache.is_overfull(("others", NAME))) == (True, False)
    there = [one.uid for one in cache.children(KEY).pods(names.WORKER, "u")]
    assert len(there) == 10
    # Two lists later none that had no room is there any more.
    everyone = {*there, *(one.uid for one in cache.children(("others", NAME)).pods(names.WORKER, "v"))}
    for full in (True, False):
        list(cache.prune(kinds.POD, "", everyone, 1))
        assert cache.is_overfull(KEY) == full


def test_what_a_job_had_before_it_was_seen_is_found_when_it_is_wanted() -> None:
    world = World()
    world.settle()
    pods = {pod["metadata"]["name"] for pod in world.cluster.pods()}
    world.cache.remove(kinds.JOB, *KEY, world.cluster.objects[kinds.JOB, *KEY]["metadata"]["uid"])
    world.cache.upsert(kinds.JOB, world.cluster.objects[kinds.JOB, *KEY])
    for _ in range(3):
        LOOP.run(world.controller.sync(KEY))
    assert {pod["metadata"]["name"] for pod in world.cluster.pods()} == pods, "no pod was made a second time"
    assert world.status.phase == "Running"


def test_a_job_whose_pods_have_no_room_says_so_and_makes_no_more(monkeypatch: pytest.MonkeyPatch) -> None:
    world = World()
    world.cache._pods._capacity = 4
    for _ in range(3):
        world.relist()
        world.look()
        world.cluster.tick()
    made = len(world.cluster.pods())
    reasons = {one.type: one.reason for one in world.status.conditions}
    assert (reasons["Ready"], made <= 6) == ("NoRoom", True)
    world.cache._pods._capacity = 100
    for _ in range(4):
        world.relist()
        world.look()
        world.cluster.tick()
    assert world.status.phase == "Running"
