"""Jobs of the whole cluster that are starved, or have backed off (tandem_operator.gang_deadlock).

Every job that has been starved for long needs this list, and everybody's jobs are scanned for it, so their authors must
be able neither to stop the scan nor to make it long. Jobs are selected by their pods and their conditions alone; only
of those few is the spec read, once for each version of it. The scan yields to other tasks after every few jobs, and its
result serves all callers for a while. A job that cannot be parsed is skipped.
"""

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Callable
from typing import Any

from tandem.formatting import parse_rfc3339
from tandem.wire.reasons import Reason
from tandem_operator import names
from tandem_operator.gang_deadlock import Claimant, backoff_ends, claimant, is_partly_placed, starved_for
from tandem_operator.informer import Cache, Key
from tandem_operator.job_memory import JobMemory
from tandem_operator.job_objects import InvalidSpec

FRESH_SECONDS = 2.0
"""Time for which the result of a scan is reused."""
CHUNK_SIZE = 50
"""Jobs between two yields to other tasks. Each takes some ten microseconds."""

log = logging.getLogger("tandem.operator")


class Claimants:
    """Finds the jobs that are starved, or have backed off.

    Args:
        memory: returns the memory of a job, with its parsed spec, for its key and its UID.
    """

    def __init__(self, cache: Cache, memory: Callable[[Key, str], JobMemory]) -> None:
        self._cache, self._memory = cache, memory
        self._claimants: list[tuple[Key, Claimant]] = []
        self._due = 0.0
        self._turn = asyncio.Lock()

    async def excluding(self, key: Key) -> list[Claimant]:
        """All claimants but this job, without jobs that were deleted since the scan."""
        async with self._turn:
            if time.monotonic() >= self._due:
                self._claimants = [entry async for entry in self._scan()]
                self._due = time.monotonic() + FRESH_SECONDS
        return [
            other for other_key, other in self._claimants if other_key != key and self._exists(other_key, other.uid)
        ]

    async def _scan(self) -> AsyncIterator[tuple[Key, Claimant]]:
        for number, key in enumerate(self._cache.job_keys()):
            if number % CHUNK_SIZE == CHUNK_SIZE - 1:
                await asyncio.sleep(0)
            if (body := self._cache.job(key)) is None:
                continue
            try:
                uid = body["metadata"]["uid"]
                workers = self._cache.children(key).pods(names.WORKER, uid)
                if not (is_partly_placed(workers) or _reports_backoff(body.get("status"))):
                    continue
                job = self._memory(key, uid).parsed(body)
                starved = starved_for(job, workers, time.time()) is not None
                if starved or backoff_ends(job.status) is not None:
                    created = parse_rfc3339(body["metadata"].get("creationTimestamp")) or 0.0
                    yield key, claimant(job, created, uid, workers, starved)
            except InvalidSpec:
                pass
            except Exception as error:
                # The reconcile of that job reports it, too, and at a pace of its own.
                log.debug("event=passed-over job=%s/%s error=%r", *key, str(error))
            await asyncio.sleep(0)

    def _exists(self, key: Key, uid: str) -> bool:
        body = self._cache.job(key)
        return body is not None and body["metadata"]["uid"] == uid


def _reports_backoff(status: Any) -> bool:
    conditions = status.get("conditions") if isinstance(status, dict) else None
    entries = [entry for entry in conditions if isinstance(entry, dict)] if isinstance(conditions, list) else []
    return any((entry.get("type"), entry.get("reason")) == ("Running", Reason.GAVE_WAY) for entry in entries)
