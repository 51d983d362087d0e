"""The operator on a cluster with kubelets: from `apply` to the first step, and the loss of pods.

Times are taken from the run directory if possible (`inside`). Beside each there is the start time of a plain pod of the
trainer's image on this cluster, measured in the same round: no operator can be faster.

All jobs have the default times. A worker is only taken from a group that has last changed longer ago than the default
of `growCooldownSeconds`: groups grow once in that time.
"""

import asyncio
import json
import time
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

from benchmarks.operators.cluster import Access, Cluster, Object
from benchmarks.operators.verdict import first_step, two_groups
from tandem.job.resource import Elasticity
from tandem_operator import kinds, names
from tests.support.cluster.images import provide
from tests.support.cluster.operated import Operator, manifest, operated
from tests.support.cluster.pods import Namespace, container, named, pod, restricted

WORKERS = 2
STARTING = """
import time
print(time.time())
import torch
print(time.time())
torch.distributed.init_process_group("gloo", init_method="tcp://127.0.0.1:29600", rank=0, world_size=1)
model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(8, 8))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
model(torch.ones(1, 8)).sum().backward()
optimizer.step()
print(time.time())
"""
CRASH = "import os; os.kill(-1, 9)"
"""Kills everything in the pod except its first process, which then ends as well."""
INSIDE, SCRIPT = ((Path(__file__).parent / f"{name}.py").read_text() for name in ("inside", "script"))
LOOK_SECONDS = 0.1
LIMIT_SECONDS = 120.0
COOLDOWN_SECONDS = Elasticity().grow_cooldown_seconds + 1.0
FAULTS = ("worker deleted", "script's worker deleted", "worker crashed", "coordinator", "evaluator", "operator")
SCRIPTS = FAULTS[1]
Record = dict[str, Any]


class Trouble(Exception):  # noqa: N818 - it is what the table counts
    """An expected state was not reached in time."""


class Scene:
    """A namespace with an operator in it."""

    def __init__(self, cluster: Cluster, namespace: Namespace, operator: Operator, image: str) -> None:
        self.cluster, self.namespace, self.operator, self.image = cluster, namespace, operator, image

    async def pods(self, job: str, role: str = "") -> list[Object]:
        """Pods of a job that are not being deleted."""
        selector = f"{names.JOB}={job}" + (f",{names.ROLE}={role}" if role else "")
        page = await self.cluster.request("GET", kinds.POD.path(self.namespace.name), labelSelector=selector)
        return [pod for pod in page["items"] if "deletionTimestamp" not in pod["metadata"]]

    async def live(self, job: str, role: str) -> set[str]:
        """Names of pods of a role that are ready."""
        return {pod["metadata"]["name"] for pod in await self.pods(job, role) if _is_ready(pod)}

    async def status(self, job: str) -> Object:
        """Status of a job."""
        response = await self.cluster.request("GET", kinds.JOB.path(self.namespace.name, job))
        return dict(response.get("status") or {})

    async def inside(self, job: str, pod: str = "") -> Object:
        """State of the run directory, read in the coordinator's pod, or in another one."""
        target = pod or f"svc/{names.coordinator(job)}"
        text = await asyncio.to_thread(self.namespace, "exec", "-i", target, "--", "python", "-", stdin=INSIDE)
        state: Object = json.loads(text)
        return state

    async def until(self, poll: Callable[[], Awaitable[Any]], title: str, pause: float = LOOK_SECONDS) -> Any:
        """Poll until the result is true; returns it.

        Raises:
            Trouble: that took too long.
        """
        deadline = time.monotonic() + LIMIT_SECONDS
        while not (result := await poll()):
            if time.monotonic() > deadline:
                raise Trouble(f"{title}: not within {LIMIT_SECONDS:g} s")
            await asyncio.sleep(pause)
        return result

    async def trains(self, job: str, beyond: int | None = 0) -> Object:
        """Wait until a job trains at full size, beyond a step; returns its status. None for a job that reports no
        steps."""

        async def full_size() -> Object | None:
            status = await self.status(job)
            step = (status.get("progress") or {}).get("step", 0)
            full = status.get("phase") == "Running" and status.get("worldSize") == WORKERS
            return status if full and (beyond is None or step > beyond) else None

        status: Object = await self.until(full_size, f"{job} at full size, beyond step {beyond}")
        return status

    async def rests(self, job: str) -> None:
        """Wait until a job's group may grow again at once."""

        async def generations() -> list[Object]:
            result: list[Object] = (await self.inside(job))["generations"]
            return result

        # A script's group counts as training from the moment it is formed; its record follows.
        newest = (await self.until(generations, f"a generation of {job}"))[-1]
        await asyncio.sleep(max(0.0, newest["startedAt"] + COOLDOWN_SECONDS - time.time()))

    async def plain_start(self, name: str) -> Record:
        """Measure the seconds from the creation of a plain pod to its first line of Python, until torch is imported,
        and until it has taken a step of DistributedDataParallel by itself."""
        spec = pod([container("plain", self.image, "python", "-c", STARTING)])
        started = time.time()
        path = kinds.POD.path(self.namespace.name)
        await self.cluster.request("POST", path, named("Pod", name, spec=spec))
        code, output = await asyncio.to_thread(self.namespace.result, name)
        if code != 0:
            raise Trouble(f"the plain pod has ended with {code}: {output[-300:]}")
        await self.delete(name)
        moments = [float(line) - started for line in output.splitlines() if line.replace(".", "").isdigit()]
        return dict(zip(("plain", "plainTorch", "plainStep"), moments, strict=True))

    async def delete(self, name: str) -> None:
        """Delete a pod by force."""
        path = kinds.POD.path(self.namespace.name, name)
        await self.cluster.request("DELETE", path, {"gracePeriodSeconds": 0})


async def measure(rounds: int, faults: tuple[str, ...], folder: Path, keep: Callable[[Record], None]) -> None:
    """Play all rounds, and pass on each record."""
    images = await asyncio.to_thread(provide)
    access = await Access.of_kubeconfig()
    with restricted() as namespace:
        async with Cluster(access) as cluster:
            with operated(namespace, images, folder) as operator:
                scene = Scene(cluster, namespace, operator, images.trainer)
                for number in range(rounds):
                    keep(await _creation(scene, f"made-{number}", number))
                await cluster.request("POST", kinds.JOB.path(namespace.name), job("long"))
                if SCRIPTS in faults:
                    await cluster.request("POST", kinds.JOB.path(namespace.name), script("script"))
                    await scene.trains("script", None)
                await scene.trains("long")
                for number in range(rounds):
                    for fault in faults:
                        keep(await _round(scene, fault, number))


async def _creation(scene: Scene, name: str, number: int) -> Record:
    record: Record = {"kind": "pods", "fault": "created", "round": number, "problem": ""}
    try:
        record |= await scene.plain_start(f"plain-{name}")
        started = time.time()
        await scene.cluster.request("POST", kinds.JOB.path(scene.namespace.name), job(name))

        async def all_exist() -> bool:
            return len(await scene.pods(name)) == WORKERS + 2

        await scene.until(all_exist, "all pods", pause=0.05)
        record["pods"] = time.time() - started
        await scene.trains(name)

        async def full_size() -> float | None:
            return first_step((await scene.inside(name))["generations"], started, WORKERS)

        # A heartbeat may report a step before the log has it.
        full: float = await scene.until(full_size, "a step in the run directory", pause=0.5)
        generations = (await scene.inside(name))["generations"]
        first = first_step(generations, started)
        assert first is not None
        record |= {"any": first - started, "full": full - started, "twoGroups": two_groups(generations)}
    except (Trouble, AssertionError) as problem:
        record["problem"] = str(problem) or "no step of any group"
    await scene.cluster.request("DELETE", kinds.JOB.path(scene.namespace.name, name))
    print(f"  created {number}: {described(record)}", flush=True)
    return record


async def _round(scene: Scene, fault: str, number: int) -> Record:
    record: Record = {"kind": "pods", "fault": fault, "round": number, "problem": ""}
    try:
        name = "script" if fault == SCRIPTS else "long"
        before = await scene.trains(name, None if fault == SCRIPTS else 0)
        if "worker" in fault:
            await scene.rests(name)
            record |= await scene.plain_start(f"plain-{FAULTS.index(fault)}-{number}")
            record |= await _kill_worker(scene, name, crash=fault == "worker crashed")
        else:
            workers = await scene.live("long", names.WORKER)
            record["full"] = await _kill_other(scene, fault)
            after = await scene.trains("long", beyond=before["progress"]["step"])
            unharmed = after["generation"] == before["generation"] and workers == await scene.live("long", names.WORKER)
            record["problem"] = "" if unharmed else "training was disturbed"
        state = await scene.inside(name)
        record |= {"twoGroups": two_groups(state["generations"]), "damaged": state["damaged"]}
    except (Trouble, AssertionError) as problem:
        record["problem"] = str(problem) or "it did not come back"
    print(f"  {fault} {number}: {described(record)}", flush=True)
    return record


async def _kill_worker(scene: Scene, name: str, crash: bool) -> Record:
    victim = min(await scene.live(name, names.WORKER))
    started = time.time()
    if crash:
        await asyncio.to_thread(scene.namespace, "exec", victim, "--", "python", "-c", CRASH, check=False)
    else:
        await scene.delete(victim)

    async def steps_again() -> float | None:
        status = await scene.status(name)
        if status.get("phase") != "Running" or status.get("worldSize") != WORKERS:
            return None
        return first_step((await scene.inside(name))["generations"], started, WORKERS)

    full: float = await scene.until(steps_again, "a step at full size", pause=0.5)
    generations = (await scene.inside(name))["generations"]
    first = first_step(generations, started)
    assert first is not None
    # The times of all later generations show where the time went.
    later_generations = [generation for generation in generations if generation["startedAt"] > started]
    return {"full": full - started, "any": first - started, "began": started, "generations": later_generations}


async def _kill_other(scene: Scene, fault: str) -> float:
    """Kill a pod other than a worker; returns the seconds until its replacement is ready."""
    started = time.time()
    if fault == "operator":
        scene.operator.kill()
        await asyncio.to_thread(scene.operator.start)
        return time.time() - started
    before = await scene.live("long", fault)
    for name in before:
        await scene.delete(name)

    async def another() -> bool:
        return bool(await scene.live("long", fault) - before)

    await scene.until(another, f"another {fault}")
    return time.time() - started


def job(name: str, **spec: Any) -> Object:
    """Manifest of a job that trains for longer than all rounds, and allows any number of failures."""
    parameters, loop = {"model": "cnn", "data": {"name": "digits"}}, {"epochs": 100_000, "globalBatchSize": 64}
    return manifest(
        name,
        trainer={"task": "image-classification", "parameters": parameters, "loop": loop},
        elasticity={"maxRestarts": 1000},
        checkpoint={"everySteps": 50, "storage": {"size": "1Gi", "retain": False}},
        **spec,
    )


def script(name: str) -> Object:
    """Manifest of a job of a plain script that runs for longer than all rounds."""
    return manifest(
        name,
        trainer={"command": ["python", "-c", SCRIPT]},
        elasticity={"maxRestarts": 1000},
        evaluators={"replicas": 0},
        checkpoint={"storage": {"size": "1Gi", "retain": False}},
    )


def _is_ready(pod_object: Object) -> bool:
    conditions: Iterator[Object] = iter(pod_object["status"].get("conditions") or [])
    return any(state["type"] == "Ready" and state["status"] == "True" for state in conditions)


def described(record: Record) -> str:
    """Describe a round in a line."""
    if record["problem"]:
        return f"FAILED {record['problem']}"
    labels = {"pods": "pods", "any": "a step", "full": "full size", "plain": "a plain pod's start"}
    return ", ".join(f"{label} {record[name]:.1f} s" for name, label in labels.items() if name in record)
