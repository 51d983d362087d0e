"""Many jobs at the same time, on a real API server with its real controllers, and without kubelets.

The operator is the real process, with the rights of its service account. The controller manager is real, too; kubelets
and coordinators are simulated by this process. The operator's requests to the API server go through a counting proxy. A
Subject describes the operator.
"""

import asyncio
import json
import os
import subprocess
import sys
import time
import urllib.request
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any

from benchmarks.operators.cast import Cast
from benchmarks.operators.cluster import Access, Cluster
from benchmarks.operators.coordinators import coordinators
from benchmarks.operators.kubelets import Kubelets
from benchmarks.operators.ours import WORKERS
from benchmarks.operators.subject import Running, Subject
from benchmarks.scale import Process
from tests.support.cluster.pods import Namespace, restricted

MAX_REQUESTS = 32
LOOK_SECONDS = 0.1
Record = dict[str, Any]


class Statuses:
    """Statuses as a watcher of the jobs sees them, and their age."""

    def __init__(self, cluster: Cluster, namespace: str, subject: Subject, cast: Cast) -> None:
        self._cluster, self._subject, self._cast = cluster, subject, cast
        self._path = subject.kind.path(namespace)
        self.phases: dict[str, str] = {}
        self.right: set[str] = set()
        """Jobs whose status reports correctly that all their pods run."""
        self._steps: dict[str, int] = {}
        self.ages: list[float] | None = None
        """Age of each status just before the next one, in seconds; None while it is not recorded."""

    def now(self) -> list[float]:
        """Current age of every status, in seconds."""
        now = time.time()
        return [self._cast.age(step, now) for step in self._steps.values()]

    async def run(self) -> None:
        """Run until cancelled."""
        async for change, job in self._cluster.watch(self._path):
            name, status = job["metadata"]["name"], job.get("status") or {}
            if change == "DELETED":
                self.phases.pop(name, None)
                self.right.discard(name)
                continue
            self.phases[name] = self._subject.phase(status)
            (self.right.add if self._subject.right(status) else self.right.discard)(name)
            step = self._subject.step(status)
            if step is not None and step != self._steps.get(name):
                if self.ages is not None and name in self._steps:
                    self.ages.append(self._cast.age(self._steps[name], time.time()))
                self._steps[name] = step


async def measure(subject: Subject, jobs: int, seconds: float, start: float, limit: float, folder: Path) -> Record:
    """Measure one run.

    Args:
        subject: the operator.
        seconds: duration of the measurement while all train.
        start: seconds between a pod's creation and its start.
        limit: seconds for each stage.
        folder: folder for logs of this run alone.

    Raises:
        TimeoutError: a stage took longer.
        RuntimeError: the API server refuses a request, or the operator has ended.
    """
    access = await Access.of_kubeconfig()
    cast = Cast(WORKERS)
    with restricted() as namespace, counting(folder) as port, subject.running(namespace, folder, port) as operator:
        async with Cluster(access) as cluster, coordinators(cast, access.own_address):
            stage = Stage(cluster, namespace, subject, cast, access.own_address, start, operator)
            async with stage.played():
                return await _figures(stage, Watched(operator, port, subject), jobs, seconds, limit)


class Watched:
    """The operator's process, and its requests."""

    def __init__(self, operator: Running, proxy: int, subject: Subject) -> None:
        self._operator, self._proxy, self._failed_look = operator, proxy, subject.failed_look
        self._process = Process(operator.pid)

    @property
    def cpu(self) -> float:
        """Processor seconds."""
        return self._process.cpu_seconds()

    @property
    def memory(self) -> float:
        """Peak memory, MiB."""
        return self._process.memory("VmHWM")

    @property
    def resident(self) -> float:
        """Current memory, MiB."""
        return self._process.memory("VmRSS")

    def counts(self) -> Counter[str]:
        """Requests by kind."""
        with urllib.request.urlopen(f"http://127.0.0.1:{self._proxy}/counts", timeout=30) as answer:
            return Counter(json.load(answer))

    def complaints(self) -> int:
        """Reconciliations that failed, from its log."""
        return sum(self._failed_look in line for line in self._operator.log().splitlines())


class Stage:
    """Simulation of the jobs."""

    def __init__(
        self,
        cluster: Cluster,
        namespace: Namespace,
        subject: Subject,
        cast: Cast,
        address: str,
        start: float,
        operator: Running,
    ) -> None:
        self.cluster, self.namespace, self.subject, self._operator = cluster, namespace.name, subject, operator
        self.path = subject.kind.path(namespace.name)
        self.kubelets = Kubelets(cluster, namespace.name, subject, cast, address, start)
        self.statuses = Statuses(cluster, namespace.name, subject, cast)
        self._tasks: list[asyncio.Task[None]] = []

    @asynccontextmanager
    async def played(self) -> AsyncIterator[None]:
        """Run the kubelets and the watch."""
        self._tasks = [asyncio.create_task(actor.run()) for actor in (self.kubelets, self.statuses)]
        # The watches must be open before the first job.
        await asyncio.sleep(1.0)
        try:
            yield
        finally:
            for task in self._tasks:
                task.cancel()
            await asyncio.gather(*self._tasks, return_exceptions=True)

    async def until(self, holds: Callable[[], bool], title: str, limit: float) -> float:
        """Wait until a condition holds; returns the seconds."""
        started = time.monotonic()
        while not holds():
            for task in self._tasks:
                if task.done():
                    task.result()
            if self._operator.has_ended:
                raise RuntimeError(f"the operator has ended:\n{self._operator.log()[-2000:]}")
            if time.monotonic() - started > limit:
                raise TimeoutError(
                    f"{title}: not within {limit:g} s; phases {dict(Counter(self.statuses.phases.values()))}"
                )
            await asyncio.sleep(LOOK_SECONDS)
        return time.monotonic() - started

    async def apply(self, count: int) -> None:
        """Create all jobs, as fast as they are accepted."""
        gate = asyncio.Semaphore(MAX_REQUESTS)

        async def create(index: int) -> None:
            async with gate:
                await self.cluster.request("POST", self.path, self.subject.manifest(index))

        await asyncio.gather(*(create(index) for index in range(count)))

    async def remaining(self) -> dict[str, int]:
        """Count the remaining objects of all jobs, by kind."""
        counts = {}
        for kind in (self.subject.kind, *self.subject.belongings):
            selector = "" if kind is self.subject.kind else self.subject.job
            page = await self.cluster.request("GET", kind.path(self.namespace), limit="1", labelSelector=selector)
            if page["items"]:
                counts[kind.name] = len(page["items"]) + int(page["metadata"].get("remainingItemCount") or 0)
        return counts


async def _figures(stage: Stage, watched: Watched, jobs: int, seconds: float, limit: float) -> Record:
    kubelets, statuses, pods = stage.kubelets, stage.statuses, stage.subject.pods * jobs
    idle = watched.counts()
    started, cpu = time.monotonic(), watched.cpu
    await stage.apply(jobs)
    applied = time.monotonic() - started
    await stage.until(lambda: len(kubelets.pods) >= pods, "all pods exist", limit)
    created = time.monotonic() - started
    by_role = {role: created_at - started for role, created_at in kubelets.newest.items()}
    await stage.until(lambda: len(kubelets.ready) >= pods, "all pods run", limit)
    running = time.monotonic() - started
    await stage.until(lambda: len(statuses.right) >= jobs, "all statuses are right", limit)
    right = time.monotonic() - started
    start_cpu, start_counts = watched.cpu - cpu, watched.counts() - idle
    print(f"  {stage.subject.title}, {jobs} jobs: pods after {created:.1f} s, statuses after {right:.1f} s", flush=True)

    cpu, since, before = watched.cpu, time.monotonic(), watched.counts()
    statuses.ages = []
    await asyncio.sleep(seconds)
    ages, statuses.ages = sorted(statuses.ages + statuses.now()), None
    elapsed = time.monotonic() - since
    steady = watched.counts() - before
    cores, resident = (watched.cpu - cpu) / elapsed, watched.resident
    oldest = f"the oldest status while all train: {ages[-1]:.1f} s; " if ages else ""
    print(f"  {oldest}{watched.memory:.0f} MiB at most", flush=True)

    since = time.monotonic()
    await kubelets.end_all()
    await stage.until(
        lambda: sum(phase == "Succeeded" for phase in statuses.phases.values()) >= jobs, "all ended", limit
    )
    ended = time.monotonic() - since
    since = time.monotonic()
    life = watched.counts() - idle
    await stage.cluster.request("DELETE", stage.path)
    remaining = await _emptied(stage, limit)
    return {
        "kind": "scale",
        "operator": stage.subject.title,
        "jobs": jobs,
        "pods": pods,
        "appliedSeconds": applied,
        "madeSeconds": created,
        "madeSecondsByRole": by_role,
        "runningSeconds": running,
        "rightSeconds": right,
        "endedSeconds": ended,
        "deletedSeconds": time.monotonic() - since,
        "left": remaining,
        "ages": _ages(ages),
        "startCpuSeconds": start_cpu,
        "steadyCores": cores,
        "cpuSeconds": watched.cpu,
        "peakMiB": watched.memory,
        "steadyMiB": resident,
        "complaints": watched.complaints(),
        "counts": dict((watched.counts() - idle).most_common()),
        "startCounts": dict(start_counts.most_common()),
        "steadyCounts": dict(steady.most_common()),
        "steadySeconds": elapsed,
        "lifeCounts": dict(life.most_common()),
    }


def _ages(ages: list[float]) -> Record | None:
    """Summarize the sorted ages of statuses; None if statuses have no step."""
    if not ages:
        return None
    return {"median": ages[len(ages) // 2], "p99": ages[int(len(ages) * 0.99)], "oldest": ages[-1]}


async def _emptied(stage: Stage, limit: float) -> dict[str, int]:
    """Wait until nothing remains of the jobs; returns what remains after the limit."""
    until = time.monotonic() + limit
    while (remaining := await stage.remaining()) and time.monotonic() < until:  # noqa: ASYNC110 - there is no event for it
        await asyncio.sleep(0.5)
    return remaining


@contextmanager
def counting(folder: Path) -> Iterator[int]:
    """Run a counting proxy; yields its port."""
    with (folder / "proxy.log").open("ab") as log:
        proxy = subprocess.Popen(
            [sys.executable, "-m", "benchmarks.operators.proxy"],
            stdout=subprocess.PIPE,
            stderr=log,
            text=True,
            env=os.environ,
        )
    try:
        assert proxy.stdout is not None
        line = proxy.stdout.readline()
        if not line.strip():
            raise RuntimeError(f"the proxy has not started; see {folder / 'proxy.log'}")
        yield int(line)
    finally:
        proxy.kill()
        proxy.wait(10)
