"""The jobs of the whole cluster that are starved, or have given way (tandem_operator.gang_deadlock).

It is asked for each job that has been starved for long, and everybody's jobs are looked through for that: those who
write them must neither stop that nor make it long. So jobs are chosen by their pods and their conditions alone; of the
few that are left the spec is read, once for each version of it; after every few the others have their turn; and what
was found serves all who ask for a while. A job that nobody can make sense of is passed over.
"""

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Callable
from typing import Any

from tandem.formatting import seconds
from tandem.reasons import Reason
from tandem_operator import names
from tandem_operator.gang_deadlock import Claimant, claimant, is_partly_placed, starved_for, way_ends
from tandem_operator.informer import Cache, Key
from tandem_operator.job_memory import JobMemory
from tandem_operator.observed import InvalidSpec

FRESH_SECONDS = 2.0
"""So long what was found serves all who ask."""
AT_A_TIME = 50
"""Jobs. Each takes some ten microseconds."""

log = logging.getLogger("tandem.operator")


class Claimants:
    """Finds them.

    Args:
        memory: what is kept of a job, by its key and its UID; what was read of its spec among it.
    """

    def __init__(self, cache: Cache, memory: Callable[[Key, str], JobMemory]) -> None:
        self._cache, self._memory = cache, memory
        self._found: list[tuple[Key, Claimant]] = []
        self._due = 0.0
        self._turn = asyncio.Lock()

    async def besides(self, key: Key) -> list[Claimant]:
        """All but this job. One that has gone since is none."""
        async with self._turn:
            if time.monotonic() >= self._due:
                self._found = [one async for one in self._look()]
                self._due = time.monotonic() + FRESH_SECONDS
        return [one for of, one in self._found if of != key and self._is_there(of, one.uid)]

    async def _look(self) -> AsyncIterator[tuple[Key, Claimant]]:
        for number, key in enumerate(self._cache.everyone()):
            if number % AT_A_TIME == AT_A_TIME - 1:
                await asyncio.sleep(0)
            if (body := self._cache.job(key)) is None:
                continue
            try:
                uid = body["metadata"]["uid"]
                workers = self._cache.children(key).pods(names.WORKER, uid)
                if not (is_partly_placed(workers) or _says_that_it_gave_way(body.get("status"))):
                    continue
                job = self._memory(key, uid).parsed(body)
                starved = starved_for(job, workers, time.time()) is not None
                if starved or way_ends(job.status) is not None:
                    created = seconds(body["metadata"].get("creationTimestamp")) or 0.0
                    yield key, claimant(job, created, uid, workers, starved)
            except InvalidSpec:
                pass
            except Exception as error:
                # A look at that job tells it, too, and at a pace of its own.
                log.debug("event=passed-over job=%s/%s error=%r", *key, str(error))
            await asyncio.sleep(0)

    def _is_there(self, key: Key, uid: str) -> bool:
        body = self._cache.job(key)
        return body is not None and body["metadata"]["uid"] == uid


def _says_that_it_gave_way(status: Any) -> bool:
    conditions = status.get("conditions") if isinstance(status, dict) else None
    found = [one for one in conditions if isinstance(one, dict)] if isinstance(conditions, list) else []
    return any((one.get("type"), one.get("reason")) == ("Running", Reason.GAVE_WAY) for one in found)
