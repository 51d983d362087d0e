"""The same for a job whose workers wait in a queue: wherever Kueue, kubelets and the operator are, no worker waits at
its gate for ever."""

import copy
from dataclasses import dataclass, field
from itertools import permutations
from typing import Any

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from tandem_operator import kinds, names
from tandem_operator.api import Object
from tandem_operator.kinds import Kind
from tests.support.worlds.operator_world import (
    KEY,
    LOOP,
    NAME,
    NAMESPACE,
    STEPS,
    Cluster,
    Place,
    Step,
    World,
    happen,
    live,
)

ENDED = ("Succeeded", "Failed")


@dataclass
class QueuedCluster(Cluster):
    """The small Kubernetes with a queue: Kueue as far as pod groups go, as its sources (0.14) have it.

    A pod of a queue is made with a gate and a finalizer. A group starts when all of its pods are there, or those of a
    replacement; it is over, for good, when all have ended, and then Kueue takes their finalizers and looks no further.
    What is too many of a group is deleted. One that has to give way has all of its pods deleted, and is queued again.
    """

    admitted: set[str] = field(default_factory=set)
    """Groups whose pods may start."""
    over: set[str] = field(default_factory=set)
    """Groups that are finished."""
    corrected: list[str] = field(default_factory=list)
    """Pods that were too many of their group."""

    async def create(self, kind: Kind, manifest: Object) -> Object:
        if kind is kinds.POD and names.GROUP in manifest["metadata"]["labels"]:
            manifest = copy.deepcopy(manifest)
            manifest["metadata"]["finalizers"] = [names.FINALIZER]
            manifest["spec"]["schedulingGates"] = [{"name": names.GATE}]
        return await super().create(kind, manifest)

    def tick(self) -> bool:
        before = self.version
        super().tick()
        for group in self.groups():
            self.review(group)
        return self.version != before

    def move(self, index: int) -> None:
        """Only one of them does what is next: a kubelet for a pod, or Kueue for a group."""
        moves = [*self.groups(), *(pod["metadata"]["name"] for pod in self.pods())]
        if moves and (which := moves[index % len(moves)]) in self.groups():
            self.review(which)
        elif moves:
            place = (kinds.POD, NAMESPACE, which)
            self._kubelet(place, self.objects[place])

    def preempt(self) -> None:
        """Somebody more important takes the place of those that have started."""
        for group in sorted(self.admitted - self.over):
            for pod in self.members(group):
                if not _gated(pod):
                    self.end(_place(pod))
        self.admitted.clear()

    def groups(self) -> list[str]:
        """Those that pods belong to."""
        found = {pod["metadata"]["labels"].get(names.GROUP, "") for pod in self.pods(names.WORKER)}
        return sorted(found - {""})

    def members(self, group: str) -> list[Object]:
        """The pods of a group that Kueue has not done with, and those that have joined one that is over."""
        return [pod for pod in self.pods(names.WORKER) if pod["metadata"]["labels"].get(names.GROUP) == group]

    def review(self, group: str) -> None:
        """Kueue looks at a group."""
        pods = [pod for pod in self.members(group) if names.FINALIZER in pod["metadata"]["finalizers"]]
        size = int(self.members(group)[0]["metadata"]["annotations"][names.GROUP_SIZE])
        unstarted = [pod for pod in pods if _gated(pod) and "deletionTimestamp" in pod["metadata"]]
        if group in self.over or (pods and all(_phase(pod) in ENDED for pod in pods)):
            self.over.add(group)
            for pod in pods:
                self._let_go(pod)
            return
        active = [pod for pod in pods if _phase(pod) != "Failed" and pod not in unstarted]
        active.sort(key=lambda pod: (_gated(pod), pod["metadata"]["creationTimestamp"]))
        for pod in active[size:]:
            self.corrected.append(pod["metadata"]["name"])
            self._let_go(pod)
            self.end(_place(pod))
        gone = [pod for pod in pods if _phase(pod) == "Failed"]
        for pod in [*unstarted, *gone[: max(0, len(gone) + len(active) - size)]]:
            self._let_go(pod)
        if len(active) >= size:
            self.admitted.add(group)
        if group in self.admitted:
            for pod in filter(_gated, active[:size]):
                new = copy.deepcopy(pod)
                new["spec"]["schedulingGates"] = []
                self._cache(_place(pod), new, "MODIFIED")

    def _let_go(self, pod: Object) -> None:
        new = copy.deepcopy(self.objects[_place(pod)])
        new["metadata"]["finalizers"] = []
        self._cache(_place(pod), new, "MODIFIED")
        if "deletionTimestamp" in new["metadata"] and (_phase(new) in ENDED or _gated(new)):
            self._remove(_place(pod))

    def _kubelet(self, place: Place, body: Object) -> None:
        if _phase(body) == "Running" and "deletionTimestamp" in body["metadata"] and _held(body):
            self.pod(place, "Failed", code=143)
        elif not _gated(body) and not ("deletionTimestamp" in body["metadata"] and _held(body)):
            super()._kubelet(place, body)

    def _remove(self, place: Place) -> None:
        body = self.objects[place]
        if not _held(body):
            super()._remove(place)
        elif "deletionTimestamp" not in body["metadata"]:
            new = copy.deepcopy(body)
            new["metadata"]["deletionTimestamp"] = new["metadata"]["creationTimestamp"]
            if not _gated(new) and _phase(new) == "Pending":
                new["status"] = {"phase": "Failed"}
            self._cache(place, new, "MODIFIED")


def _place(pod: Object) -> Place:
    return kinds.POD, NAMESPACE, pod["metadata"]["name"]


def _phase(pod: Object) -> str:
    return str(pod.get("status", {}).get("phase", "Pending"))


def _gated(pod: Object) -> bool:
    return bool(pod["spec"].get("schedulingGates"))


def _held(pod: Object) -> bool:
    return bool(pod["metadata"].get("finalizers"))


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


def test_no_worker_starts_on_the_quota_of_a_workload_that_was_deleted() -> None:
    """The watch may report that later than the job's next change."""
    cluster = Cluster()
    world = World(cluster, queueName="gpus")
    world.cache.served[kinds.WORKLOAD] = True
    cluster.put(kinds.RESOURCE_FLAVOR, {"metadata": {"name": "a100"}, "spec": {}})
    LOOP.run(world.controller.queueing.refresh())
    world.settle()
    place = (kinds.WORKLOAD, NAMESPACE, names.workload(NAME, 0))
    conditions = [{"type": kind, "status": "True", "reason": "Played"} for kind in ("QuotaReserved", "Admitted")]
    admission = {"podSetAssignments": [{"name": "workers", "flavors": {"nvidia.com/gpu": "a100"}}]}
    admitted = {**cluster.objects[place], "status": {"conditions": conditions, "admission": admission}}
    cluster._cache(place, copy.deepcopy(admitted), "MODIFIED")
    world.settle()
    assert live(world, names.WORKER) == [0]
    cluster.edit(kinds.JOB, NAME, {"runPolicy": {"suspend": True}})
    while place in cluster.objects:
        world.resync()
        cluster.tick()
    cluster.edit(kinds.JOB, NAME, {"runPolicy": {"suspend": False}})
    world.cache.upsert(kinds.JOB, cluster.objects[kinds.JOB, *KEY])
    world.look()
    assert cluster.pods(names.WORKER) == []
