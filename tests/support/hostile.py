"""What somebody hostile, or merely odd, may put before the operator and a coordinator, and an operator to take it in.

Real objects, each with something in it changed by chance, as JSON of no more than the API server and etcd let through.
"""

import asyncio
import json
import time
from collections.abc import Sequence
from copy import deepcopy
from random import Random
from typing import Any

from tandem.formatting import rfc3339
from tandem.wire.status import Snapshot
from tandem_operator import kinds, names
from tandem_operator.controller import Controller
from tandem_operator.informer import Cache, Informer, Key
from tandem_operator.kinds import Kind
from tandem_operator.operator_metrics import OperatorMetrics
from tests.support import manifests
from tests.support.worlds.operator_job import IMAGES, TASK
from tests.support.worlds.operator_world import JOB, World, merged

MAX_BYTES = 1_400_000
"""An object in etcd has a megabyte and a half at most."""
DEEPEST = 9_900
"""The API server takes 10,000 levels of JSON."""

SMALL: Sequence[Any] = (
    *(None, True, False, 0, -1, 2**53 + 1, 10**400, 1e308, -1e-308, "", " ", "\x00", "\ud7ff", "٣", "a/b", "../.."),
    *([], {}, [None], [[]], [{}], {"": None}, {"name": None}, {"name": []}, "1" * 5_000, "9" * 10, "null", "\x1b[2J"),
    *("0001-01-01T00:00:00Z", "9999-12-31T23:59:59+23:59", "2026-13-45T99:99:99Z", "0000-00-00", "1e999999999", "1Ei"),
)
CONTAINER = {
    "name": "worker",
    "resources": {"requests": {"cpu": "1"}, "limits": {"nvidia.com/gpu": 1}},
    "env": [{"name": "A", "value": "b"}],
    "volumeMounts": [{"name": "scratch", "mountPath": "/scratch"}],
    "ports": [{"containerPort": 1}],
    "securityContext": {"runAsUser": 1},
}
TEMPLATE = {
    "metadata": {"labels": {"team": "a"}, "annotations": {"note": "b"}},
    "spec": {
        "containers": [CONTAINER, {"name": "shipper", "image": "s", "resources": {"limits": {"example.org/nic": 1}}}],
        "initContainers": [{"name": "first", "image": "s"}],
        "volumes": [{"name": "scratch", "emptyDir": {}}],
        "nodeSelector": {"pool": "a100"},
        "tolerations": [{"key": "spot", "operator": "Exists"}],
        "topologySpreadConstraints": [{"topologyKey": "zone", "maxSkew": 1}],
        "affinity": {"nodeAffinity": {"preferredDuringSchedulingIgnoredDuringExecution": [{"weight": 1}]}},
        "schedulingGates": [{"name": "example.org/gate"}],
        "securityContext": {"fsGroup": 1},
        "terminationGracePeriodSeconds": 60,
    },
}
"""Fields of every kind that the operator reads, merges or counts."""
RICH = {
    "coordinator": {"template": TEMPLATE, "resources": {"requests": {"cpu": "1"}}},
    "workers": {
        **{"minReplicas": 2, "maxReplicas": 4, "template": TEMPLATE},
        "resources": {"limits": {"nvidia.com/gpu": 1}, "requests": {"memory": "1Gi"}},
    },
    "evaluators": {"template": {**TEMPLATE, "spec": {**TEMPLATE["spec"], "containers": [{"name": "evaluator"}]}}},
    "runPolicy": {"ttlSecondsAfterFinished": 10, "activeDeadlineSeconds": 10**8},
}
LARGE = ("deep objects", "deep lists", "objects", "lists", "text", "names", "numbers", "pairs")


def mutated(real: Any, chance: Random, large: float = 0.2, most: int = MAX_BYTES) -> bytes:
    """Its JSON with one to three things changed.

    Args:
        large: how often one of them becomes as large as there is room for.
        most: bytes.
    """
    found = json.loads(json.dumps(real))
    marker, kind = "\u0001here", ""
    for _ in range(chance.randint(1, 3)):
        places = list(_places(found))
        if not places:
            break
        where, key = chance.choice(places)
        what = chance.random()
        if what < 0.15:
            del where[key]
        elif what < 0.15 + large and not kind:
            where[key], kind = marker, chance.choice(LARGE)
        elif what < 0.5 + large and isinstance(where, dict):
            where[chance.choice(("", "name", "metadata", "x" * 300, str(key).upper()))] = deepcopy(chance.choice(SMALL))
        else:
            where[key] = deepcopy(chance.choice(SMALL))
    text = json.dumps(found)
    if kind:
        text = text.replace(json.dumps(marker), filled(kind, max(0, most - len(text))), 1)
    return text.encode(errors="replace")


def _places(value: Any) -> Any:
    """Every container with each of its keys. Not deeper than real objects are."""
    keys = list(value) if isinstance(value, dict) else list(range(len(value))) if isinstance(value, list) else []
    for key in keys:
        yield value, key
        yield from _places(value[key])


def filled(kind: str, room: int) -> str:
    """JSON of one of these kinds, as large as there is room for."""
    match kind:
        case "deep objects":
            return '{"a":' * DEEPEST + "1" + "}" * DEEPEST
        case "deep lists":
            return "[" * DEEPEST + "]" * DEEPEST
        case "objects":
            return "[" + "{}," * (room // 3 - 1) + "{}]"
        case "lists":
            return "[" + "[]," * (room // 3 - 1) + "[]]"
        case "text":
            return '"' + "x" * (room - 2) + '"'
        case "names":
            return "{" + ",".join(f'"{number:x}":1' for number in range(room // 10)) + "}"
        case "numbers":
            return "[" + "1.5," * (room // 4 - 1) + "1]"
        case _:
            return "[" + '{"name":"a","value":"b"},' * (room // 25 - 1) + "{}]"


def real_objects() -> list[tuple[Any, dict[str, Any]]]:
    """Kind and body of every object of a job, and of the job: it says much, and one of two workers finds no node."""
    world = World(job=merged(JOB, {"spec": RICH}))
    world.settle()
    found = [(place[0], body) for place, body in world.cluster.objects.items()]
    last = [body for kind, body in found if kind is kinds.POD and body["metadata"]["labels"][names.ROLE] == "worker"][
        -1
    ]
    last["status"] = unplaced()
    return found


def unplaced() -> dict[str, Any]:
    """The status of a pod for which there is no node."""
    words = "0/3 nodes are available: 3 Insufficient nvidia.com/gpu."
    lacks = {"type": "PodScheduled", "status": "False", "reason": "Unschedulable", "message": words}
    return {"phase": "Pending", "conditions": [lacks]}


HEALTHY = ("others", "healthy")
"""A job that nobody has changed anything of. One of its two workers finds no node, so looks at it read what others hold
of what it lacks."""
WORKERS = {"replicas": 2, "minReplicas": 2, "resources": {"limits": {"nvidia.com/gpu": 1}}}


def worker(of: Key, owner: str, index: int, status: dict[str, Any]) -> dict[str, Any]:
    """A worker of a job, as the API server has it.

    Args:
        owner: the UID of the job.
    """
    labels = {names.JOB: of[1], names.ROLE: names.WORKER, names.INDEX: str(index)}
    owners = [{"kind": kinds.JOB.name, "name": of[1], "uid": owner, "controller": True}]
    metadata = {"name": f"{of[1]}-worker-{index}-aaaaa", "namespace": of[0], "uid": f"{owner}-{index}"}
    metadata |= {"resourceVersion": "1", "creationTimestamp": rfc3339(time.time())}
    return {
        "metadata": {**metadata, "labels": labels, "ownerReferences": owners},
        "spec": {"restartPolicy": "Never", "containers": [{"name": names.WORKER}]},
        "status": status,
    }


class Swallowing:
    """An API server that does all it is told and keeps nothing, and coordinators that all say the same."""

    def __init__(self) -> None:
        self.snapshot: Snapshot | None = None
        self.statuses: dict[Key, list[dict[str, Any]]] = {}

    def acts(self, _: str) -> bool:
        return True

    async def get(self, *_: Any) -> None:
        return None

    async def create(self, kind: Kind, manifest: dict[str, Any]) -> dict[str, Any]:
        made = deepcopy(manifest)
        made["metadata"] |= {"uid": "made", "resourceVersion": "1"}
        return made

    apply = create

    async def patch_status(self, kind: Kind, namespace: str, name: str, changes: Any, version: str = "") -> None:
        # The API server gets it as JSON.
        json.dumps(changes, allow_nan=False)
        self.statuses.setdefault((namespace, name), []).append(changes)

    async def delete(self, *_: Any) -> None:
        pass

    terminate = delete

    async def poll(self, *_: Any) -> Snapshot | None:
        return self.snapshot

    async def set_target(self, *_: Any) -> bool:
        return True


class Operator:
    """The part of an operator that takes in and decides. Make it inside a running event loop."""

    def __init__(self) -> None:
        self.api, self.cache, self.metrics = Swallowing(), Cache(), OperatorMetrics()
        api: Any = self.api
        self.controller = Controller(api, api, self.cache, IMAGES, self.metrics, b"key", patience=0.0)
        self.metrics.unreadable = lambda: self.cache.unreadable.counts
        self.watching = Informer(api, self.cache, lambda key: None, ())
        healthy = manifests.manifest(HEALTHY[1], HEALTHY[0], trainer=TASK, workers=WORKERS)
        healthy["metadata"] |= {"uid": "healthy", "resourceVersion": "1", "generation": 1}
        self.cache.upsert(kinds.JOB, healthy)
        for index, status in enumerate(({"phase": "Running"}, unplaced())):
            self.cache.upsert(kinds.POD, worker(HEALTHY, "healthy", index, status))

    def take(self, kind: Kind, what: str, body: Any) -> None:
        """As a watch tells it."""
        self.watching.handle(kind, what, body)

    async def process(self, kind: Kind, body: Any) -> None:
        """Look at the job that an object says it belongs to, if it says one. What a look raises is raised: where the
        operator goes on after it, the job's status says InternalError."""
        metadata = body.get("metadata") if isinstance(body, dict) else None
        if not isinstance(metadata, dict):
            return
        labels = metadata.get("labels")
        job = metadata.get("name") if kind is kinds.JOB else labels.get(names.JOB) if isinstance(labels, dict) else None
        key = metadata.get("namespace"), job
        if all(isinstance(one, str) for one in key):
            await self.controller.sync((str(key[0]), str(key[1])))

    async def goes_on(self) -> None:
        """The healthy job is looked after, and metrics are told, whatever was taken in."""
        before = len(self.api.statuses.get(HEALTHY, ()))
        # What it found of the others a moment ago is not enough here.
        self.controller._claimants._due = 0.0
        await self.controller.sync(HEALTHY)
        statuses = self.api.statuses.pop(HEALTHY)
        assert len(statuses) > before
        assert statuses[-1]["phase"] == "Pending"
        assert b"tandem_operator_unreadable_objects_total" in self.metrics.text()
        await asyncio.sleep(0)
