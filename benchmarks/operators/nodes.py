"""The loss of a node: time until the remaining group trains, and until the group is complete again.

Only on the cluster of this machine, whose nodes can be switched off. A worker is on the lost node, and in every second
round the coordinator, too: then the group waits until another one is started elsewhere.
"""

import asyncio
import time
from collections.abc import Callable
from pathlib import Path

from benchmarks.operators.cluster import Access, Cluster
from benchmarks.operators.pods import Record, Scene, Trouble, described, job
from benchmarks.operators.verdict import first_step, two_groups
from tandem_operator import kinds, names
from tests.support.cluster.images import provide
from tests.support.cluster.machine.binaries import build
from tests.support.cluster.machine.kubectl import Kubectl
from tests.support.cluster.machine.node import Node
from tests.support.cluster.operated import APART, operated
from tests.support.cluster.pods import restricted

NAME = "spread"
ALONE, WITH_COORDINATOR = "node", "node and coordinator"


async def measure(rounds: int, folder: Path, keep: Callable[[Record], None]) -> None:
    """Play all rounds, and pass on each record."""
    images = await asyncio.to_thread(provide)
    access = await Access.of_kubeconfig()
    with restricted() as namespace:
        async with Cluster(access) as cluster:
            with operated(namespace, images, folder) as operator:
                scene = Scene(cluster, namespace, operator, images.trainer)
                manifest = job(NAME, workers={"replicas": 2, "minReplicas": 1, "template": APART})
                await cluster.request("POST", kinds.JOB.path(namespace.name), manifest)
                for number in range(rounds):
                    for fault in (ALONE, WITH_COORDINATOR):
                        keep(await _round(scene, fault, number))


async def _round(scene: Scene, fault: str, number: int) -> Record:
    record: Record = {"kind": "pods", "fault": fault, "round": number, "problem": ""}
    try:
        home, workers = await _spread(scene)
        await scene.rests(NAME)
        lost = next(node for node in workers if (node == home) == (fault == WITH_COORDINATOR))
        (remaining,) = workers.keys() - {lost}
        node = Node(lost)
        started = time.time()
        await asyncio.to_thread(node.kill)
        try:
            record |= await _recovery(scene, workers[remaining], started)
        finally:
            await asyncio.to_thread(node.start, build())
        await asyncio.to_thread(node.wait_until_ready, Kubectl(build()))
        state = await scene.inside(NAME)
        record |= {"twoGroups": two_groups(state["generations"]), "damaged": state["damaged"]}
    except (Trouble, AssertionError) as problem:
        record["problem"] = str(problem) or "it did not come back"
    print(f"  {fault} {number}: {described(record)}", flush=True)
    return record


async def _spread(scene: Scene) -> tuple[str, dict[str, str]]:
    """Wait until the job trains with a worker on each node. Returns the coordinator's node, and the worker of each
    node."""

    async def spread_nodes() -> tuple[str, dict[str, str]] | None:
        places = {pod["metadata"]["name"]: pod["spec"].get("nodeName") for pod in await scene.pods(NAME, names.WORKER)}
        homes = {pod["spec"].get("nodeName") for pod in await scene.pods(NAME, names.COORDINATOR)}
        if len(set(places.values())) == 2 and len(homes) == 1:
            return homes.pop(), {node: worker for worker, node in places.items()}
        if len(places) == 2 and all(places.values()):
            await scene.delete(min(places))
            await asyncio.sleep(5.0)
        return None

    await scene.trains(NAME)
    placement: tuple[str, dict[str, str]] = await scene.until(spread_nodes, "a worker on each node", pause=1.0)
    await scene.trains(NAME, beyond=(await scene.status(NAME))["progress"]["step"])
    return placement


async def _recovery(scene: Scene, worker: str, started: float) -> Record:
    async def steps_again() -> float | None:
        return first_step((await scene.inside(NAME, worker))["generations"], started)

    async def steps_at_full_size() -> float | None:
        return first_step((await scene.inside(NAME, worker))["generations"], started, 2)

    first: float = await scene.until(steps_again, "a step of the rest", pause=0.5)
    full: float = await scene.until(steps_at_full_size, "a step at full size", pause=0.5)
    return {"any": first - started, "full": full - started, "began": started}
