"""What is refused for long, or made again and again in vain, is tried less and less often and holds up nothing else."""

import copy
import time
from collections.abc import Callable

import pytest

from tandem_operator import kinds, names
from tandem_operator.api import Object, RequestRefused, Unavailable
from tandem_operator.job_memory import BATCH_SIZE, MAX_PAUSE_SECONDS
from tandem_operator.reconcile import TRANSITION_SECONDS
from tests.support.clock import Clock
from tests.support.worlds.operator_job import IMAGES
from tests.support.worlds.operator_world import KEY, LOOP, NAME, NAMESPACE, Cluster, Place, World, live

THEN = 1_767_225_600.0
"""When everything in the played cluster begins: 2026-01-01."""
HOUR = 3600.0
QUOTA = RequestRefused(403, "Forbidden", "exceeded quota: few")


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    found = Clock(THEN)
    monkeypatch.setattr(time, "time", found)
    monkeypatch.setattr(time, "monotonic", found)
    return found


def passes(world: World, clock: Clock, seconds: float, pause: float = 4 * TRANSITION_SECONDS) -> list[float | None]:
    """Time in which the operator looks again and again; how long it would have waited after each look."""
    found = []
    for _ in range(int(seconds / pause)):
        clock.now += pause
        world.relist()
        found.append(LOOP.run(world.controller.sync(KEY)))
        world.cluster.tick()
    return found


def tries(world: World, verb: str, kind: kinds.Kind, part: str) -> int:
    return sum(one[0] == verb and one[1] is kind and part in one[2] for one in world.cluster.written)


def status(world: World) -> Object:
    found: Object = world.cluster.objects[kinds.JOB, *KEY]["status"]
    return found


def refuses(what: Callable[[str, Place], bool], answer: Exception = QUOTA) -> Callable[..., Exception | None]:
    return lambda verb, place, body: answer if what(verb, place) else None


def worker_1(verb: str, place: Place) -> bool:
    return verb == "create" and place[0] is kinds.POD and "-worker-1-" in place[2]


def test_a_pod_that_is_refused_for_long_holds_up_neither_the_looks_nor_the_rest(clock: Clock) -> None:
    world = World()
    world.cluster.step = 1
    world.cluster.refuses = refuses(worker_1)
    pauses = passes(world, clock, HOUR)
    assert all(pause is not None and pause <= 10.0 for pause in pauses), "the job is looked at as often as others"
    assert live(world, names.WORKER) == [0], "what is not refused is there"
    assert tries(world, "create", kinds.POD, "-worker-1-") < 2 * HOUR / MAX_PAUSE_SECONDS
    assert status(world)["phase"] == "Running"
    assert [reason for reason in world.cluster.told if reason.endswith("Replaced")] == []
    assert world.cluster.told.count("QuotaExceeded") == 1
    assert tries(world, "status", kinds.JOB, "") < 20, "what stays as it is, is not written again"

    world.cluster.refuses = refuses(lambda verb, place: False)
    passes(world, clock, MAX_PAUSE_SECONDS + 5)
    assert live(world, names.WORKER) == [0, 1]
    assert world.controller._memories[KEY].attempts == {}


def test_of_hundreds_of_pods_that_are_refused_few_are_tried(clock: Clock) -> None:
    world = World()
    world.cluster.edit(kinds.JOB, NAME, {"workers": {"replicas": 200, "maxReplicas": 200}})
    world.cluster.refuses = refuses(lambda verb, place: verb == "create" and "-worker-" in place[2])
    passes(world, clock, 10 * MAX_PAUSE_SECONDS)
    assert tries(world, "create", kinds.POD, "-worker-") < 40 * BATCH_SIZE
    assert "exceeded quota" in status(world)["message"]

    world.cluster.edit(kinds.JOB, NAME, {"workers": {"replicas": 20, "maxReplicas": 200}})
    world.cluster.refuses = refuses(lambda verb, place: False)
    passes(world, clock, MAX_PAUSE_SECONDS + 5)
    assert len(live(world, names.WORKER)) == 20, "once there is room, all of them"


def test_of_a_quota_that_has_room_for_some_pods_the_coordinator_is_one(clock: Clock) -> None:
    world, room = World(), 2

    def quota(verb: str, place: Place, body: Object) -> Exception | None:
        return QUOTA if verb == "create" and place[0] is kinds.POD and len(world.cluster.pods()) >= room else None

    world.cluster.refuses = quota
    passes(world, clock, HOUR / 4)
    assert (live(world, names.COORDINATOR), live(world, names.WORKER)) == ([0], [0])
    # Another tenant takes what its eviction has freed; later there is room for one again.
    (lost,) = world.cluster.pods(names.COORDINATOR)
    room = 1
    world.cluster.end((kinds.POD, NAMESPACE, lost["metadata"]["name"]))
    passes(world, clock, 90)
    room = 2
    passes(world, clock, 2 * MAX_PAUSE_SECONDS)
    assert (live(world, names.COORDINATOR), live(world, names.WORKER)) == ([0], [0])


def test_a_replacement_that_is_refused_is_not_told_and_one_that_is_made_is(clock: Clock) -> None:
    world = World()
    world.settle()
    (evaluator,) = world.cluster.pods(names.EVALUATOR)
    world.cluster.refuses = refuses(lambda verb, place: verb == "create" and "-evaluator-" in place[2])
    world.cluster.end((kinds.POD, NAMESPACE, evaluator["metadata"]["name"]))
    passes(world, clock, HOUR / 2)
    assert "EvaluatorReplaced" not in world.cluster.told


@pytest.mark.parametrize(
    "kind", [kinds.CLAIM, kinds.CONFIG_MAP, kinds.SECRET, kinds.SERVICE], ids=lambda kind: kind.name
)
def test_pods_wait_for_what_they_read_and_are_made_once_it_is_there(kind: kinds.Kind, clock: Clock) -> None:
    world = World()
    world.cluster.refuses = refuses(lambda verb, place: verb == "create" and place[0] is kind)
    passes(world, clock, HOUR / 4)
    assert live(world, names.WORKER) == []
    assert world.cluster.pods() == [] or kind is kinds.SERVICE, "the coordinator needs no Service"
    assert tries(world, "create", kind, "") < 2 * HOUR / 4 / MAX_PAUSE_SECONDS + 8
    assert "exceeded quota" in status(world)["message"]
    assert tries(world, "status", kinds.JOB, "") < 10
    assert world.cluster.told.count("QuotaExceeded") == 1
    world.cluster.refuses = refuses(lambda verb, place: False)
    passes(world, clock, 2 * MAX_PAUSE_SECONDS)
    assert live(world, names.WORKER) == [0, 1]


def test_a_pod_that_may_not_be_deleted_holds_up_nothing_else(clock: Clock) -> None:
    world = World()
    world.settle()
    world.cluster.refuses = refuses(
        lambda verb, place: verb == "delete", RequestRefused(403, "Forbidden", "a webhook says no")
    )
    world.cluster.edit(kinds.JOB, NAME, {"workers": {"replicas": 1}})
    passes(world, clock, HOUR)
    assert tries(world, "delete", kinds.POD, "") < 2 * HOUR / MAX_PAUSE_SECONDS
    assert status(world)["phase"] == "Running"
    world.cluster.refuses = refuses(lambda verb, place: False)
    passes(world, clock, MAX_PAUSE_SECONDS + 5)
    assert live(world, names.WORKER) == [0]


class Meddled(Cluster):
    """A cluster in which somebody changes each worker as it is made, so that it is never what was asked for."""

    async def create(self, kind: kinds.Kind, manifest: Object) -> Object:
        if kind is kinds.POD and "-worker-" in manifest["metadata"]["name"]:
            manifest = copy.deepcopy(manifest)
            manifest["metadata"]["labels"][names.GROUP] = "somebody-elses"
        return await super().create(kind, manifest)


def test_pods_that_are_never_what_was_asked_for_are_replaced_less_and_less_often(clock: Clock) -> None:
    world = World(Meddled())
    passes(world, clock, HOUR)
    assert tries(world, "create", kinds.POD, "-worker-0-") < 2 * HOUR / MAX_PAUSE_SECONDS
    assert live(world, names.WORKER) == [0, 1], "what is there stays meanwhile"


def test_a_worker_that_is_killed_at_work_again_and_again_is_replaced_at_once_each_time(clock: Clock) -> None:
    world = World()
    world.settle()
    for _ in range(10):
        (first, *_) = world.cluster.pods(names.WORKER)
        world.cluster.end((kinds.POD, NAMESPACE, first["metadata"]["name"]))
        world.resync()
        world.cluster.tick()
        world.resync()
        world.cluster.tick()
    assert live(world, names.WORKER) == [0, 1]


# What a coordinator reads is written before its pod is made


class Ordered(Cluster):
    """A cluster that looks, whenever a coordinator's pod is made, what it will read."""

    read: dict[str, str]

    async def create(self, kind: kinds.Kind, manifest: Object) -> Object:
        if kind is kinds.POD and "-coordinator-" in manifest["metadata"]["name"]:
            there = self.objects[kinds.CONFIG_MAP, NAMESPACE, names.job_file(NAME)]
            self.read[manifest["metadata"]["annotations"][names.TEMPLATE]] = there["data"]["job.json"]
        return await super().create(kind, manifest)


FAULTS = {
    "refused": lambda: RequestRefused(403, "Forbidden", "a webhook says no"),
    "unavailable": lambda: Unavailable("it does not answer"),
}


@pytest.mark.parametrize("fault", [*FAULTS, "died before", "died after"])
def test_a_change_is_not_lost_whichever_write_fails(fault: str, clock: Clock) -> None:
    for number in range(1, 9):
        cluster = Ordered()
        cluster.read = {}
        world = World(cluster)
        world.settle()
        (before,) = cluster.read
        cluster.edit(kinds.JOB, NAME, {"elasticity": {"hangSeconds": 7.5}})
        world.relist()
        if fault in FAULTS:
            writes = iter(range(1, 1000))
            cluster.refuses = lambda verb, place, body, n=number, w=writes: FAULTS[fault]() if next(w) == n else None
            try:
                world.look()
            except Unavailable:
                pass
            cluster.refuses = refuses(lambda verb, place: False)
        else:
            world.look(dies_in=number, last_counts=fault == "died after")
        passes(world, clock, 30.0)
        world.settle()
        (after,) = (one for one in cluster.read if one != before)
        assert '"hangSeconds": 7.5' in cluster.read[after], f"{fault}, write {number}"
        (pod,) = cluster.pods(names.COORDINATOR)
        assert pod["metadata"]["annotations"][names.TEMPLATE] == after
        assert IMAGES.operator == pod["spec"]["containers"][0]["image"]
