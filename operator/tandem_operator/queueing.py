"""Reads what a cluster says about queues.

- Kueue's ResourceFlavors, and PriorityClasses. They belong to no namespace, and there are few of them, so they are
  listed now and then, where there is Kueue.
- The use of queues (tandem_operator.queue_usage), while jobs wait in them: once for all of these jobs, and at most a
  twentieth of the time.
"""

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable
from typing import Any

from tandem_operator import kinds
from tandem_operator.api import ApiServer, RequestRefused, Unavailable
from tandem_operator.informer import Key
from tandem_operator.kinds import Kind
from tandem_operator.queue_usage import QueuePlace, QueueUsage, QuotaUse, place_of, quota_use
from tandem_operator.workloads import NodePlacement, Queueing, placement_of

INTERVAL_SECONDS, RETRY_SECONDS = 15.0, 1.0
"""Interval between two lists, and between two looks whether they are needed before the first."""
MAX_OBJECTS = 1000
"""Maximum number of objects of each kind that are read."""
ABSENT = (403, 404)
"""Status codes of a cluster without Kueue, or one that does not let the operator use it."""
MAX_WORKLOADS, MAX_LOCAL_QUEUES = 5000, 1000
"""Maximum number of Workloads, and of LocalQueues in which jobs wait, that are read at a time."""
MIN_INTERVAL_RATIO = 20.0
"""Minimum interval between two reads of the use of queues, in multiples of the duration of a read."""
WRITES_PER_SECOND = 20.0
"""A place that changes is a write for each job that waits: with many of them it is read more rarely."""

log = logging.getLogger("tandem.operator")


class QueueingReader:
    """Reads flavors and priority classes.

    Args:
        is_needed: whether there are queues at all.
    """

    def __init__(self, api: ApiServer, is_needed: Callable[[], bool]) -> None:
        self._api, self._is_needed = api, is_needed
        self.latest: Queueing | None = None
        """Newest value; None if nothing was read, or if that is not allowed."""
        self.is_allowed: bool | None = None
        """Whether the operator may read them; None if that is not known yet."""

    async def run(self) -> None:
        """Read them again and again, until cancelled. What was read stays while the API server is away."""
        while True:
            if self._is_needed():
                await self.refresh()
            await asyncio.sleep(INTERVAL_SECONDS if self.is_allowed is not None else RETRY_SECONDS)

    async def refresh(self) -> None:
        """Read them now."""
        try:
            self.latest = await self._read()
            self.is_allowed = self.latest is not None
        except (RequestRefused, Unavailable) as error:
            log.warning("event=queues-not-read error=%r", str(error))

    async def _read(self) -> Queueing | None:
        try:
            flavors, classes = (
                await list_objects(self._api, kinds.RESOURCE_FLAVOR),
                await list_objects(self._api, kinds.PRIORITY_CLASS),
            )
        except RequestRefused as error:
            if error.code not in ABSENT:
                raise
            log.info("event=queues-not-read error=%r", str(error))
            return None
        priorities = {_name(body): value for body in classes if isinstance(value := body.get("value"), int)}
        default = next((_name(body) for body in classes if body.get("globalDefault") is True), "")
        priorities[""] = priorities.get(default, 0)
        return Queueing({_name(body): _placement(body) for body in flavors}, priorities)


class QueueUsageReader:
    """Reads the use of the queues in which jobs wait."""

    def __init__(self, api: ApiServer) -> None:
        self._api = api
        self._waiting: dict[Key, str] = {}
        self._problems: dict[str, str] = {}
        self.latest: QueueUsage | None = None
        """Newest value; None if no job waits, or nothing was read yet."""

    def note(self, job: Key, queue: str) -> None:
        """Note the LocalQueue in which a job waits; empty if it waits in none."""
        if queue:
            self._waiting[job] = queue
        else:
            self._waiting.pop(job, None)

    async def run(self) -> None:
        """Read it again and again while jobs wait, until cancelled."""
        while True:
            pause = RETRY_SECONDS
            if self._waiting:
                started = time.monotonic()
                await self.refresh()
                duration = time.monotonic() - started
                pause = max(INTERVAL_SECONDS, MIN_INTERVAL_RATIO * duration, len(self._waiting) / WRITES_PER_SECOND)
            else:
                self.latest = None
            await asyncio.sleep(pause)

    async def refresh(self) -> None:
        """Read it now. What cannot be read is left out, and logged once."""
        queues = sorted({(namespace, queue) for (namespace, _), queue in self._waiting.items()})[:MAX_LOCAL_QUEUES]
        places: dict[tuple[str, str], QueuePlace] = {}
        cluster_queues: dict[tuple[str, str], str] = {}

        async def read_places() -> None:
            places.update(filter(None, map(place_of, await self._api.pending_workloads(cluster_queues))))

        async def read_cluster_queues() -> None:
            for namespace, queue in queues:
                body = await self._api.get(kinds.LOCAL_QUEUE, namespace, queue)
                name = ((body or {}).get("spec") or {}).get("clusterQueue")
                if isinstance(name, str):
                    cluster_queues[namespace, queue] = name

        cohorts: dict[str, str] = {}
        uses: list[QuotaUse] = []
        # Of a queue that does not exist, nothing else is asked.
        await self._try("local queues", read_cluster_queues())
        if cluster_queues:
            await self._try("places", read_places())
            await self._try("cohorts", self._read_cohorts(cohorts))
            if not await self._try("uses", self._read_uses(uses)):
                # A part of them would name the wrong holders.
                uses.clear()
        self.latest = QueueUsage(places, cluster_queues, cohorts, uses)

    async def _read_cohorts(self, cohorts: dict[str, str]) -> None:
        for body in await list_objects(self._api, kinds.CLUSTER_QUEUE):
            spec = body.get("spec") or {}
            # The name of the field in v1beta2, and in v1beta1.
            cohort = spec.get("cohortName") or spec.get("cohort")
            if isinstance(cohort, str):
                cohorts[_name(body)] = cohort

    async def _read_uses(self, uses: list[QuotaUse]) -> None:
        count = 0
        async for page in self._api.pages(kinds.WORKLOAD):
            uses += filter(None, map(quota_use, page.items))
            count += len(page.items)
            if count >= MAX_WORKLOADS:
                break

    async def _try(self, part: str, reading: Awaitable[None]) -> bool:
        """Await a part; returns whether it could be read."""
        try:
            await reading
        except (RequestRefused, Unavailable) as error:
            if self._problems.get(part) != str(error):
                self._problems[part] = str(error)
                log.info("event=queue-usage-not-read part=%r error=%r", part, str(error))
            return False
        self._problems.pop(part, None)
        return True


async def list_objects(api: ApiServer, kind: Kind) -> list[dict[str, Any]]:
    """List all objects of a kind of which there are few."""
    result: list[dict[str, Any]] = []
    async for page in api.pages(kind):
        result += page.items
        if len(result) >= MAX_OBJECTS:
            break
    return result


def _name(body: dict[str, Any]) -> str:
    return str(body["metadata"]["name"])


def _placement(body: dict[str, Any]) -> NodePlacement:
    return placement_of(body.get("spec") or {}, labels="nodeLabels")
