"""Reads what a cluster says about queues: Kueue's ResourceFlavors, and PriorityClasses.

They belong to no namespace, and there are few of them, so they are listed now and then, where there is Kueue.
"""

import asyncio
import logging
from collections.abc import Callable
from typing import Any

from tandem_operator import kinds
from tandem_operator.api import ApiServer, RequestRefused, Unavailable
from tandem_operator.kinds import Kind
from tandem_operator.workloads import NodePlacement, Queueing, placement_of

INTERVAL_SECONDS, RETRY_SECONDS = 15.0, 1.0
"""Interval between two lists, and between two looks whether they are needed before the first."""
MAX_OBJECTS = 1000
"""Maximum number of objects of each kind that are read."""
ABSENT = (403, 404)
"""Status codes of a cluster without Kueue, or one that does not let the operator use it."""

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
            flavors, classes = await self._list(kinds.RESOURCE_FLAVOR), await self._list(kinds.PRIORITY_CLASS)
        except RequestRefused as error:
            if error.code not in ABSENT:
                raise
            log.info("event=queues-not-read error=%r", str(error))
            return None
        priorities = {_name(body): value for body in classes if isinstance(value := body.get("value"), int)}
        default = next((_name(body) for body in classes if body.get("globalDefault") is True), "")
        priorities[""] = priorities.get(default, 0)
        return Queueing({_name(body): _placement(body) for body in flavors}, priorities)

    async def _list(self, kind: Kind) -> list[dict[str, Any]]:
        result: list[dict[str, Any]] = []
        async for page in self._api.pages(kind):
            result += page.items
            if len(result) >= MAX_OBJECTS:
                break
        return result


def _name(body: dict[str, Any]) -> str:
    return str(body["metadata"]["name"])


def _placement(body: dict[str, Any]) -> NodePlacement:
    return placement_of(body.get("spec") or {}, labels="nodeLabels")
