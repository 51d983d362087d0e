"""Simulates the kubelets: reports that each pod runs, a moment after it was created, and later that it has succeeded.

The pods ask for a scheduler that does not exist, so no real node takes them. They get a status all the same, which the
API server allows, and no node: then a deleted pod disappears at once, without a kubelet's confirmation.
"""

import asyncio
import base64
import time
from datetime import UTC, datetime
from typing import Any

from benchmarks.operators.cast import Cast
from benchmarks.operators.cluster import MERGE, Cluster, Object
from benchmarks.operators.subject import Subject
from tandem_operator import names

MAX_REQUESTS = 32


class Kubelets:
    """All simulated kubelets.

    Args:
        address: address of every pod; the coordinators listen there.
        seconds: time between a pod's creation and its start.
    """

    def __init__(
        self, cluster: Cluster, namespace: str, subject: Subject, cast: Cast, address: str, seconds: float
    ) -> None:
        self._cluster, self._subject, self._cast = cluster, subject, cast
        self._path = f"/api/v1/namespaces/{namespace}"
        self._address, self._seconds = address, seconds
        self._gate = asyncio.Semaphore(MAX_REQUESTS)
        self.pods: dict[str, Object] = {}
        """Existing pods, by name."""
        self.ready: set[str] = set()
        """Names of running pods."""
        self.newest: dict[str, float] = {}
        """Creation time of the newest pod of each role, by the monotonic clock."""

    async def run(self) -> None:
        """Run until cancelled."""
        async with asyncio.TaskGroup() as starts:
            async for change, pod in self._cluster.watch(f"{self._path}/pods"):
                name = pod["metadata"]["name"]
                if change == "DELETED":
                    self.pods.pop(name, None)
                    self._ended(name, pod["metadata"])
                elif name not in self.pods:
                    self.pods[name] = pod["metadata"]
                    self.newest[self._role(pod["metadata"])] = time.monotonic()
                    starts.create_task(self._start(name, pod))

    async def end_all(self) -> None:
        """Complete the training: the pods that end with it succeed."""
        self._cast.is_complete = True
        ending = [name for name, metadata in self.pods.items() if self._role(metadata) in self._subject.ending]
        await asyncio.gather(*(self._end(name) for name in ending))

    async def _start(self, name: str, pod: Object) -> None:
        await asyncio.sleep(self._seconds)
        job, role = pod["metadata"]["labels"][self._subject.job], self._role(pod["metadata"])
        if role == names.COORDINATOR:
            async with self._gate:
                secret = await self._cluster.request("GET", f"{self._path}/secrets/{names.token(job)}")
            if "data" in secret:
                self._cast.tokens[base64.b64decode(secret["data"]["token"]).decode()] = job
        status = _running(self._subject.container(role), self._address)
        async with self._gate:
            answer = await self._tell(name, status)
        if answer["kind"] == "Pod":
            self.ready.add(name)
            if role == names.WORKER:
                self._cast.part(job).workers.add(name)

    async def _end(self, name: str) -> None:
        container = self._subject.container(self._role(self.pods[name]))
        async with self._gate:
            await self._tell(name, _ended_well(container))

    async def _tell(self, name: str, status: dict[str, Any]) -> Object:
        return await self._cluster.request("PATCH", f"{self._path}/pods/{name}/status", {"status": status}, MERGE)

    def _ended(self, name: str, metadata: Object) -> None:
        self.ready.discard(name)
        self._cast.part(metadata["labels"][self._subject.job]).workers.discard(name)

    def _role(self, metadata: Object) -> str:
        return str(metadata["labels"][self._subject.role])


def _running(container: str, address: str) -> dict[str, Any]:
    now = _now()
    kinds = ("PodScheduled", "Initialized", "ContainersReady", "Ready")
    return {
        "phase": "Running",
        "startTime": now,
        "podIP": address,
        "podIPs": [{"ip": address}],
        "conditions": [{"type": kind, "status": "True", "lastTransitionTime": now} for kind in kinds],
        "containerStatuses": [_container(container, True, {"running": {"startedAt": now}})],
    }


def _ended_well(container: str) -> dict[str, Any]:
    now = _now()
    ended = {"exitCode": 0, "reason": "Completed", "startedAt": now, "finishedAt": now}
    conditions = [
        {"type": kind, "status": "False", "reason": "PodCompleted", "lastTransitionTime": now}
        for kind in ("ContainersReady", "Ready")
    ]
    statuses = [_container(container, False, {"terminated": ended})]
    return {"phase": "Succeeded", "conditions": conditions, "containerStatuses": statuses}


def _container(name: str, runs: bool, state: dict[str, Any]) -> dict[str, Any]:
    image = {"image": "bench", "imageID": "bench", "restartCount": 0}
    return {"name": name, "ready": runs, "started": runs, "state": state, **image}


def _now() -> str:
    return datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
