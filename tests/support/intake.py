"""An operator that takes in whatever it is given, beside an API server that swallows everything: what a fuzz feeds."""

import asyncio
import copy
import json
import time
from typing import Any

from tandem.formatting import rfc3339
from tandem.status import Snapshot
from tandem_operator import kinds, names
from tandem_operator.controller import Controller
from tandem_operator.informer import Cache, Key, Watching
from tandem_operator.kinds import Kind
from tandem_operator.operator_metrics import OperatorMetrics
from tests.support import manifests
from tests.support.hostile import unplaced
from tests.support.worlds.operator_job import IMAGES, TASK

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
        self.heard: Snapshot | None = None
        self.statuses: dict[Key, list[dict[str, Any]]] = {}

    def acts(self, _: str) -> bool:
        return True

    async def get(self, *_: Any) -> None:
        return None

    async def create(self, kind: Kind, manifest: dict[str, Any]) -> dict[str, Any]:
        made = copy.deepcopy(manifest)
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

    async def ask(self, *_: Any) -> Snapshot | None:
        return self.heard

    async def tell(self, *_: Any) -> bool:
        return True


class Operator:
    """The part of an operator that takes in and decides. Make it inside a running event loop."""

    def __init__(self) -> None:
        self.api, self.cache, self.metrics = Swallowing(), Cache(), OperatorMetrics()
        api: Any = self.api
        self.controller = Controller(api, api, self.cache, IMAGES, self.metrics, b"key", patience=0.0)
        self.metrics.unreadable = lambda: self.cache.unreadable.counts
        self.watching = Watching(api, self.cache, lambda key: None, ())
        healthy = manifests.manifest(HEALTHY[1], HEALTHY[0], trainer=TASK, workers=WORKERS)
        healthy["metadata"] |= {"uid": "healthy", "resourceVersion": "1", "generation": 1}
        self.cache.see(kinds.JOB, healthy)
        for index, status in enumerate(({"phase": "Running"}, unplaced())):
            self.cache.see(kinds.POD, worker(HEALTHY, "healthy", index, status))

    def take(self, kind: Kind, what: str, body: Any) -> None:
        """As a watch tells it."""
        self.watching.take(kind, what, body)

    async def attend(self, kind: Kind, body: Any) -> None:
        """Look at the job that an object says it belongs to, if it says one. What a look raises is raised: where the
        operator goes on after it, the job's status says InternalError."""
        metadata = body.get("metadata") if isinstance(body, dict) else None
        if not isinstance(metadata, dict):
            return
        labels = metadata.get("labels")
        job = metadata.get("name") if kind is kinds.JOB else labels.get(names.JOB) if isinstance(labels, dict) else None
        key = metadata.get("namespace"), job
        if all(isinstance(one, str) for one in key):
            await self.controller.look((str(key[0]), str(key[1])))

    async def goes_on(self) -> None:
        """The healthy job is looked after, and metrics are told, whatever was taken in."""
        before = len(self.api.statuses.get(HEALTHY, ()))
        # What it found of the others a moment ago is not enough here.
        self.controller._claimants._due = 0.0
        await self.controller.look(HEALTHY)
        statuses = self.api.statuses.pop(HEALTHY)
        assert len(statuses) > before
        assert statuses[-1]["phase"] == "Pending"
        assert b"tandem_operator_unreadable_objects_total" in self.metrics.text()
        await asyncio.sleep(0)
