"""A small Kubernetes in memory, and a whole operator beside it, both driven step by step: that the operator converges
whatever news is lost, late or told twice, and wherever it dies between two writes.

The cluster stores objects with versions and UIDs, answers as the API server would (409 for a name that is taken, 404
for what is gone, 422 for a change that is not allowed), and plays the controllers and kubelets, one small step at a
time. Whatever has to be true of the real ones is tested on a real cluster, in tests/cluster/test_operator*.py.
"""

import asyncio
import copy
import time
from collections.abc import AsyncIterator, Callable, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType, SimpleNamespace
from typing import Any
from unittest import mock

from hypothesis import strategies as st

from tandem.formatting import rfc3339
from tandem.wire.queue_view import QueueView
from tandem.wire.status import GenerationView, Snapshot, Status
from tandem_operator import controller, kinds, names
from tandem_operator.api import ListPart, Object, RequestRefused, Unavailable
from tandem_operator.informer import Cache
from tandem_operator.kinds import Kind
from tandem_operator.operator_metrics import OperatorMetrics
from tests.support import manifests
from tests.support.worlds.operator_job import IMAGES, TASK, pod_status

Place = tuple[Kind, str, str]
NAMESPACE = "default"


class Died(BaseException):
    """The operator's process has ended, in the middle of what it did."""


@dataclass
class Cluster:
    """The objects, what happened to them, and the training that the pods do."""

    objects: dict[Place, Object] = field(default_factory=dict)
    news: list[tuple[Kind, str, Object]] = field(default_factory=list)
    """What watches would tell: kind, type, object."""
    version: int = 0
    dies_in: int | None = None
    """After so many writes the operator dies; the last of them happens if `last_counts`."""
    last_counts: bool = True
    target: int = 0
    """What the coordinator was told."""
    complete: bool = False
    """Training is."""
    failed: bool = False
    """The coordinator says so."""
    written: list[tuple[str, Kind, str]] = field(default_factory=list)
    """Verb, kind, name."""
    mute: set[str] = field(default_factory=set)
    """Coordinators' pods that do not answer."""
    told: list[str] = field(default_factory=list)
    """Reasons of Events."""
    step: int | None = None
    """What the coordinator says of it; None: nothing."""
    requests: int = 0
    known: set[str] = field(default_factory=set)
    """Workers that were in the group."""
    pod_events: list[Object] = field(default_factory=list)
    """Events of kubelets."""
    refuses: Callable[[str, Place, Object], Exception | None] = lambda verb, place, body: None
    """What is answered to a write instead of doing it: to its verb, its object's place, and what was sent."""

    elsewhere: set[str] = field(default_factory=set)
    """Namespaces in which another operator acts."""

    # What the operator asks

    def acts(self, namespace: str) -> bool:
        return namespace not in self.elsewhere

    async def get(self, kind: Kind, namespace: str, name: str) -> Object | None:
        return copy.deepcopy(self.objects.get((kind, namespace, name)))

    async def pages(self, kind: Kind, namespace: str = "", selector: str = "") -> AsyncIterator[ListPart]:
        found = [copy.deepcopy(body) for place, body in self.objects.items() if place[0] is kind]
        yield ListPart(
            [body for body in found if not selector or selector in body["metadata"].get("labels", {})], self.version
        )

    async def create(self, kind: Kind, manifest: Object) -> Object:
        if kind is kinds.EVENT:
            self.told.append(manifest["reason"])
            return manifest
        place = (kind, NAMESPACE, manifest["metadata"]["name"])
        with_effect = self._before("create", place, manifest)
        if place in self.objects:
            raise RequestRefused(409, "AlreadyExists", f"{place[2]} exists")
        owners = manifest["metadata"].get("ownerReferences", [])
        uids = [body["metadata"]["uid"] for body in self.objects.values()]
        if with_effect and all(owner["uid"] in uids for owner in owners):
            body = copy.deepcopy(manifest)
            self.version += 1
            body["metadata"] |= {"uid": f"uid-{self.version}", "creationTimestamp": rfc3339(time.time())}
            if kind is kinds.SERVICE:
                body["spec"]["clusterIP"] = f"10.0.0.{self.version % 250}"
            self._cache(place, body, "ADDED")
        self._after()
        return copy.deepcopy(self.objects.get(place, manifest))

    async def apply(self, kind: Kind, manifest: Object) -> Object:
        place = (kind, NAMESPACE, manifest["metadata"]["name"])
        with_effect = self._before("apply", place, manifest)
        body = self.objects.get(place)
        if body is None or body["metadata"]["uid"] != manifest["metadata"]["uid"]:
            raise RequestRefused(409, "Conflict", "no such object")
        if with_effect:
            new = copy.deepcopy(body)
            new["metadata"] |= {"annotations": manifest["metadata"]["annotations"]}
            new["spec" if "spec" in manifest else "data"] = {
                **body.get("spec" if "spec" in manifest else "data", {}),
                **copy.deepcopy(manifest.get("spec") or manifest["data"]),
            }
            self._cache(place, new, "MODIFIED")
        self._after()
        return copy.deepcopy(self.objects[place])

    async def patch_status(
        self, kind: Kind, namespace: str, name: str, changes: Object, version: str = ""
    ) -> Object | None:
        place = (kind, namespace, name)
        with_effect = self._before("status", place, changes)
        body = self.objects.get(place)
        if body is None:
            return None
        if version and version != body["metadata"]["resourceVersion"]:
            raise RequestRefused(409, "Conflict", "the object has been modified")
        if with_effect:
            new = copy.deepcopy(body)
            new["status"] = merged(new.get("status") or {}, changes)
            self._cache(place, new, "MODIFIED")
        self._after()
        return copy.deepcopy(self.objects[place])

    async def delete(self, kind: Kind, namespace: str, name: str, uid: str) -> None:
        place = (kind, namespace, name)
        with_effect = self._before("delete", place, {})
        body = self.objects.get(place)
        if body is not None and body["metadata"]["uid"] == uid and with_effect:
            self.end(place)
        self._after()

    async def events(self, namespace: str, uid: str) -> list[Object]:
        return [one for one in self.pod_events if one["involvedObject"]["uid"] == uid]

    async def terminate(self, kind: Kind, namespace: str, name: str, uid: str, annotations: Object) -> None:
        place = (kind, namespace, name)
        with_effect = self._before("end", place, {})
        body = self.objects.get(place)
        if body is not None and body["metadata"]["uid"] == uid and with_effect:
            new = copy.deepcopy(body)
            new["status"] = {**new.get("status", {}), "phase": "Failed", "reason": "DeadlineExceeded"}
            new["metadata"]["annotations"] = {**new["metadata"].get("annotations", {}), **annotations}
            self._cache(place, new, "MODIFIED")
        self._after()

    async def poll(self, endpoint: str, token: str) -> Snapshot | None:
        """The coordinator's answer."""
        pod = self._coordinator()
        if pod is None or not self._running(pod) or pod["metadata"]["name"] in self.mute:
            return None
        inside = [body for body in self.pods(names.WORKER) if self._running(body)]
        phase = "Succeeded" if self.complete else "Running" if inside else "Pending"
        phase = "Failed" if self.failed else phase
        wish = self.target or 2
        self.known |= {body["metadata"]["name"] for body in inside}
        view = GenerationView(generation=1, world_size=1, members=[*self.known], opened_at=0.0, reason="Started")
        status = Status.parse(
            {
                "phase": phase,
                "workers": {"desired": wish, "ready": len(inside), "min": 1, "max": 4},
                **({"worldSize": len(inside)} if inside else {}),
                **({"progress": {"step": self.step}} if self.step is not None else {}),
            }
        )
        return Snapshot(job="j", time=time.time(), status=status, generations=[view])

    async def set_target(self, endpoint: str, token: str, replicas: int) -> bool:
        """Tell the coordinator."""
        self.target = replicas
        return True

    async def report_queue(self, endpoint: str, token: str, view: QueueView) -> bool:
        """Tell the coordinator, which is of the version before."""
        return False

    # What people and Kubernetes do

    def put(self, kind: Kind, body: Object) -> None:
        """Somebody makes an object."""
        self.version += 1
        body = copy.deepcopy(body)
        body["metadata"] |= {"uid": f"uid-{self.version}", "generation": 1, "creationTimestamp": rfc3339(time.time())}
        self._cache((kind, NAMESPACE, body["metadata"]["name"]), body, "ADDED")

    def edit(self, kind: Kind, name: str, change: Object) -> None:
        place = (kind, NAMESPACE, name)
        body = copy.deepcopy(self.objects[place])
        body["spec"] = merged(body["spec"], change)
        body["metadata"]["generation"] += 1
        self._cache(place, body, "MODIFIED")

    def annotate(self, kind: Kind, name: str, annotations: Object) -> None:
        body = copy.deepcopy(self.objects[kind, NAMESPACE, name])
        body["metadata"]["annotations"] = annotations
        self._cache((kind, NAMESPACE, name), body, "MODIFIED")

    def end(self, place: Place) -> None:
        """An object is deleted: pods take a while, other things are gone, and what they own goes with them."""
        body = self.objects[place]
        if place[0] is kinds.POD and body.get("status", {}).get("phase", "Pending") == "Running":
            if "deletionTimestamp" not in body["metadata"]:
                new = copy.deepcopy(body)
                new["metadata"]["deletionTimestamp"] = _stamp(self.version)
                self._cache(place, new, "MODIFIED")
            return
        self._remove(place)

    def pods(self, role: str = "") -> list[Object]:
        found = [body for place, body in self.objects.items() if place[0] is kinds.POD]
        return [body for body in found if not role or body["metadata"]["labels"][names.ROLE] == role]

    def tick(self) -> bool:
        """Controllers and kubelets do what is next; False if there is nothing."""
        before = self.version
        for place in list(self.objects):
            if place in self.objects:
                self._tick(place, self.objects[place])
        return self.version != before

    def _tick(self, place: Place, body: Object) -> None:
        kind = place[0]
        if kind is kinds.POD:
            self._kubelet(place, body)

    def _kubelet(self, place: Place, body: Object) -> None:
        phase = body.get("status", {}).get("phase", "Pending")
        role = body["metadata"]["labels"][names.ROLE]
        if "deletionTimestamp" in body["metadata"]:
            self._remove(place)
        elif phase == "Pending":
            self.pod(place, "Running")
        elif phase == "Running" and self.complete and role != names.COORDINATOR:
            self.pod(place, "Succeeded", code=0)

    def pod(self, place: Place, phase: str, code: int | None = None) -> None:
        new = copy.deepcopy(self.objects[place])
        new["status"] = pod_status(new["metadata"]["labels"][names.ROLE], phase, _stamp(0), code)
        self._cache(place, new, "MODIFIED")

    def _coordinator(self) -> Object | None:
        found = [pod for pod in self.pods(names.COORDINATOR) if "deletionTimestamp" not in pod["metadata"]]
        return found[-1] if found else None

    @staticmethod
    def _running(pod: Object) -> bool:
        return bool(pod.get("status", {}).get("phase") == "Running" and "deletionTimestamp" not in pod["metadata"])

    def _cache(self, place: Place, body: Object, what: str) -> None:
        self.version += 1
        body["metadata"]["resourceVersion"] = str(self.version)
        self.objects[place] = body
        self.news.append((place[0], what, copy.deepcopy(body)))

    def _remove(self, place: Place) -> None:
        self.version += 1
        body = self.objects.pop(place)
        self.news.append((place[0], "DELETED", copy.deepcopy(body)))
        for other, owned in list(self.objects.items()):
            if _owner(owned) == body["metadata"]["uid"] and other in self.objects:
                self.end(other)

    # Its death

    def _before(self, verb: str, place: Place, body: Object) -> bool:
        """Count a write; whether it happens."""
        self.requests += 1
        self.written.append((verb, place[0], place[2]))
        if (answer := self.refuses(verb, place, body)) is not None:
            raise answer
        return self.dies_in is None or self.dies_in > 1 or self.last_counts

    def _after(self) -> None:
        if self.dies_in is not None:
            self.dies_in -= 1
            if self.dies_in <= 0:
                self.dies_in = None
                raise Died


def merged(old: Any, change: Any) -> Any:
    """A JSON merge patch."""
    if not isinstance(change, dict):
        return change
    base = dict(old) if isinstance(old, dict) else {}
    for key, value in change.items():
        if value is None:
            base.pop(key, None)
        else:
            base[key] = merged(base.get(key), value)
    return base


def _owner(body: Object) -> str:
    return next((one["uid"] for one in body["metadata"].get("ownerReferences", [])), "")


def _stamp(second: int) -> str:
    return f"2026-01-01T{second // 3600 % 24:02d}:{second // 60 % 60:02d}:{second % 60:02d}Z"


NAME = "j"
KEY = (NAMESPACE, NAME)
JOB = manifests.manifest(
    NAME, namespace=NAMESPACE, trainer=TASK, workers={"replicas": 2, "minReplicas": 1, "maxReplicas": 4}, runPolicy={}
)
LOOP = asyncio.Runner()
EVENTUALLY = 60
"""Rounds of everybody doing everything they can, after which nothing may be left to do."""


class World:
    """A cluster and an operator, which may be replaced by another at any time."""

    options: Mapping[str, Any] = MappingProxyType({})
    """What an operator is told, from its next start on."""

    def __init__(self, cluster: Cluster | None = None, job: dict[str, Any] = JOB, **policy: str) -> None:
        self.cluster = Cluster() if cluster is None else cluster
        self.cluster.put(kinds.JOB, merged(job, {"spec": {"runPolicy": policy}}))
        self.tokens: set[str] = set()
        self.passed = 0.0
        """Seconds that the operator's clock is ahead."""
        self.start()

    def start(self) -> None:
        """A new operator, which knows nothing."""
        self.cache = Cache()
        self.cache.served.update(dict.fromkeys(kinds.OPTIONAL, False))
        api: Any = self.cluster
        self.controller = controller.Controller(api, api, self.cache, IMAGES, OperatorMetrics(), b"key", **self.options)
        self.relist()

    def relist(self) -> None:
        """What the operator does at its start and every minute."""
        for kind in (kinds.JOB, *kinds.WATCHED):
            LOOP.run(self._list(kind))
        self.cluster.news.clear()

    async def _list(self, kind: kinds.Kind) -> None:
        async for page in self.cluster.pages(kind, "", "" if kind is kinds.JOB else names.JOB):
            for body in page.items:
                self.cache.upsert(kind, body)
            listed = {body["metadata"]["uid"] for body in page.items}
            list(self.cache.prune(kind, "", listed, page.version))

    def look(self, dies_in: int | None = None, last_counts: bool = True) -> float | None:
        """The operator looks at the job, and perhaps dies with one of its writes; when it would look again."""
        self.cluster.dies_in, self.cluster.last_counts = dies_in, last_counts
        again_in = None
        try:
            with mock.patch.object(controller, "time", self._clock()):
                again_in = LOOP.run(self.controller.sync(KEY))
        except Died:
            self.start()
        self.cluster.dies_in = None
        secret = self.cluster.objects.get((kinds.SECRET, NAMESPACE, names.token(NAME)))
        if secret is not None:
            self.tokens.add(secret["data"]["token"])
        return again_in

    def _retry_in(self) -> float | None:
        """Seconds until the operator repeats a request that was not answered; None: there is none."""
        memory = self.controller._memories.get(KEY)
        due = [attempt.due for attempt in memory.attempts.values() if attempt.trouble is None] if memory else []
        now = time.time() + self.passed
        return max(0.0, min(due) - now) if due else None

    def _clock(self) -> SimpleNamespace:
        return SimpleNamespace(time=lambda: time.time() + self.passed, monotonic=time.monotonic)

    def resync(self) -> float | None:
        """The operator looks at all that there is."""
        self.relist()
        return self.look()

    @property
    def status(self) -> Status:
        return Status.parse(self.cluster.objects[kinds.JOB, *KEY]["status"])

    def tell(self, which: list[int]) -> None:
        """The watches tell some of the news, in any order, some twice; the rest is lost."""
        news, self.cluster.news = self.cluster.news, []
        for index in which:
            if not news:
                return
            kind, what, body = news[index % len(news)]
            metadata = body["metadata"]
            if what == "DELETED":
                self.cache.remove(kind, metadata["namespace"], metadata["name"], metadata["uid"])
            elif kind is kinds.JOB or names.JOB in metadata.get("labels", {}):
                self.cache.upsert(kind, body)

    def hurt(self, what: str, index: int) -> None:
        """Something happens to one of the job's objects."""
        mine = [place for place in self.cluster.objects if place[0] not in (kinds.JOB, kinds.CLAIM)]
        pods = [(kinds.POD, NAMESPACE, pod["metadata"]["name"]) for pod in self.cluster.pods()]
        if what == "delete" and mine:
            self.cluster.end(mine[index % len(mine)])
        elif what == "fail" and pods:
            place = pods[index % len(pods)]
            if self.cluster.objects[place].get("status", {}).get("phase") == "Running":
                self.cluster.pod(place, "Failed", code=137)

    def settle(self) -> None:
        """Nothing is lost any more, until nobody does anything any more."""
        for _ in range(EVENTUALLY):
            before = self.cluster.version, len(self.cluster.written)
            try:
                self.resync()
            except Unavailable:
                # It looks again when a Secret of this name can only be the job's own.
                self.passed += controller.OLD_SECRET_SECONDS
                continue
            if self.cluster.tick() or before != (self.cluster.version, len(self.cluster.written)):
                continue
            if (retry_in := self._retry_in()) is None:
                return
            self.passed += retry_in
        raise AssertionError("it never comes to rest")


@dataclass(frozen=True)
class Step:
    what: str
    index: int = 0
    which: tuple[int, ...] = ()
    flag: bool = True


STEPS = st.one_of(
    st.builds(Step, st.just("look")),
    st.builds(Step, st.just("look")),
    st.builds(Step, st.just("die"), st.integers(1, 10), flag=st.booleans()),
    st.builds(Step, st.just("tick")),
    st.builds(Step, st.just("tick")),
    st.builds(Step, st.just("tell"), which=st.lists(st.integers(0, 30), max_size=30).map(tuple)),
    st.builds(Step, st.just("tell"), which=st.just(tuple(range(31)))),
    st.builds(Step, st.just("list")),
    st.builds(Step, st.just("restart")),
    st.builds(Step, st.sampled_from(["delete", "fail"]), st.integers(0, 30)),
    st.builds(Step, st.just("scale"), st.integers(1, 4)),
    st.builds(Step, st.just("suspend"), flag=st.booleans()),
)


def happen(world: World, step: Step) -> None:
    match step.what:
        case "look":
            _try_to_look(world)
        case "die":
            _try_to_look(world, step.index, step.flag)
        case "tick":
            world.cluster.tick()
        case "tell":
            world.tell(list(step.which))
        case "list":
            world.relist()
        case "restart":
            world.start()
        case "scale":
            world.cluster.edit(kinds.JOB, NAME, {"workers": {"replicas": step.index}})
        case "suspend":
            world.cluster.edit(kinds.JOB, NAME, {"runPolicy": {"suspend": step.flag}})
        case _:
            world.hurt(step.what, step.index)


def _try_to_look(world: World, dies_in: int | None = None, last_counts: bool = True) -> None:
    try:
        world.look(dies_in, last_counts)
    except Unavailable:
        # The operator's queue looks again later.
        pass


def live(world: World, role: str) -> list[int]:
    pods = [pod["metadata"] for pod in world.cluster.pods(role) if pod["status"]["phase"] == "Running"]
    assert not [pod["name"] for pod in pods if "deletionTimestamp" in pod]
    return sorted(int(pod["labels"].get(names.INDEX, 0)) for pod in pods)
