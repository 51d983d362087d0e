"""How much of the specs of jobs the operator holds: nothing of a refused one, and of all together no more than fits."""

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tandem.wire.reasons import Reason
from tandem_operator import kinds
from tandem_operator.bounded import Shares, size
from tandem_operator.informer import Cache
from tests.support import manifests
from tests.support.worlds.operator_job import TASK
from tests.support.worlds.operator_world import JOB, KEY, NAME, World

TEXT = "x" * 10_000
INVALID = {"trainer": {**TASK, "parameters": {"blob": TEXT}}, "workers": {"replicas": 9, "maxReplicas": 4}}


def job(namespace: str, name: str, text: str = TEXT, version: int = 1) -> dict[str, Any]:
    whole = manifests.manifest(name, namespace=namespace, trainer={**TASK, "parameters": {"blob": text}})
    whole["metadata"] |= {"uid": f"{namespace}/{name}", "resourceVersion": str(version), "generation": version}
    return whole


def held(cache: Cache) -> list[tuple[str, str]]:
    return [key for key in cache.job_keys() if (cache.job(key) or {})["spec"] is not None]


def holds_text(world: World) -> bool:
    memory = world.controller._memories.get(KEY)
    return TEXT in json.dumps(world.cache.job(KEY)) or (memory is not None and memory._spec is not None)


def conditions(world: World) -> dict[str, tuple[str, str]]:
    found = world.cluster.objects[kinds.JOB, *KEY]["status"]["conditions"]
    return {one["type"]: (one["status"], one["reason"]) for one in found}


@pytest.mark.parametrize("why", ["InvalidSpec", "TemplateRefused"])
def test_nothing_of_a_refused_spec_is_held_until_it_is_changed(why: str) -> None:
    template = {"metadata": {"annotations": {"blob": TEXT}}}
    spec = INVALID if why == "InvalidSpec" else {"workers": {"template": template}}
    world = World(job={**JOB, "spec": {**JOB["spec"], **spec}})
    world.controller._template_fields = ("spec.nodeSelector",)
    for _ in range(3):
        world.look()
        assert not holds_text(world)
        assert conditions(world)["Stalled"] == ("True", why)
        world.relist()
        assert not holds_text(world)
    changes = {"workers": {"replicas": 2, "template": None}, "trainer": {"parameters": None}}
    world.cluster.edit(kinds.JOB, NAME, changes)
    world.settle()
    assert world.cluster.objects[kinds.JOB, *KEY]["status"]["phase"] == "Running"


def test_a_namespace_that_takes_all_there_is_leaves_room_for_others() -> None:
    cache = Cache(max_spec_bytes=20 * size(job("a", "b")["spec"]))
    for namespace in ("many", "others"):
        for number in range(30):
            assert cache.upsert(kinds.JOB, job(namespace, str(number))) == [(namespace, str(number))]
    counts = [sum(key[0] == namespace for key in held(cache)) for namespace in ("many", "others")]
    assert counts[0] == 10
    assert 4 <= counts[1] <= 10
    # Those that have room keep it, and the news of a job that has grown takes no more than there is.
    before = held(cache)
    cache.upsert(kinds.JOB, job("many", "0", version=2))
    assert held(cache) == before
    cache.upsert(kinds.JOB, job("many", "0", TEXT * 20, version=3))
    assert held(cache) == before[1:]


def test_a_job_without_room_says_so_and_begins_once_there_is_some() -> None:
    world = World()
    world.cache._specs = Shares(size(JOB["spec"]) - 1)
    world.relist()
    world.look()
    assert conditions(world)["Ready"] == ("False", Reason.NO_ROOM)
    assert conditions(world)["Reconciling"] == ("True", Reason.NO_ROOM)
    message = world.cluster.objects[kinds.JOB, *KEY]["status"]["message"]
    assert "the specs of the jobs in the namespace default take" in message
    world.cache._specs = Shares(3 * size(JOB["spec"]))
    assert world.cache.upsert(kinds.JOB, world.cluster.objects[kinds.JOB, *KEY]) == [KEY]
    world.settle()
    assert world.cluster.objects[kinds.JOB, *KEY]["status"]["phase"] == "Running"


@given(st.lists(st.tuples(st.sampled_from("abc"), st.sampled_from("12345"), st.integers(0, 60)), max_size=60))
def test_all_together_never_take_more_than_there_is(steps: list[tuple[str, str, int]]) -> None:
    found, model = Shares(100), dict[tuple[str, str], int]()
    for namespace, name, wanted in steps:
        taken = found.take((namespace, name), wanted)
        model[namespace, name] = wanted if taken else 0
        assert sum(model.values()) <= 100
        assert found.used(namespace) == sum(count for key, count in model.items() if key[0] == namespace)
