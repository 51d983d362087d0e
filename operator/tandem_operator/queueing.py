"""Reads what a cluster says about queues: Kueue's ResourceFlavors, and PriorityClasses.

They belong to no namespace, and there are few of them, so they are listed when a queued job needs them, and again after
a while.
"""

import asyncio
import logging
from typing import Any

from tandem_operator import kinds
from tandem_operator.api import ApiServer, RequestRefused
from tandem_operator.kinds import Kind
from tandem_operator.workloads import NodePlacement, Queueing, placement_of

FRESH_SECONDS = 15.0
"""Time for which a list is used."""
MAX_OBJECTS = 1000
"""Maximum number of objects of each kind that are read."""
ABSENT = (403, 404)
"""Status codes of a cluster without Kueue, or one that does not let the operator use it."""

log = logging.getLogger("tandem.operator")


class QueueingReader:
    """Reads flavors and priority classes."""

    def __init__(self, api: ApiServer) -> None:
        self._api = api
        self._queueing: Queueing | None = None
        self._due = 0.0
        self._turn = asyncio.Lock()

    async def current(self) -> Queueing | None:
        """The flavors and priority classes, read now if they are old; None if the operator may not list them.

        Raises:
            tandem_operator.api.Unavailable: the API server did not answer.
        """
        async with self._turn:
            if asyncio.get_running_loop().time() >= self._due:
                self._queueing = await self._read()
                self._due = asyncio.get_running_loop().time() + FRESH_SECONDS
        return self._queueing

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
