"""Flavors and priority classes: read now and then, and kept while the API server is away."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import suppress
from typing import Any

import pytest

from tandem_operator import kinds
from tandem_operator.api import ListPart, RequestRefused, Unavailable
from tandem_operator.kinds import Kind
from tandem_operator.queueing import INTERVAL_SECONDS, RETRY_SECONDS, QueueingReader
from tests.support.clock import jumping

FLAVORS = [{"metadata": {"name": "a100"}, "spec": {"nodeLabels": {"pool": "a100"}}}, {"metadata": {"name": "any"}}]
CLASSES: list[dict[str, Any]] = [
    {"metadata": {"name": "urgent"}, "value": 1000},
    {"metadata": {"name": "usual"}, "value": 10, "globalDefault": True},
]


class Api:
    """An API server with these objects."""

    def __init__(self, error: Exception | None = None) -> None:
        self.lists: list[Kind] = []
        self.error = error

    async def pages(self, kind: Kind, namespace: str = "", selector: str = "") -> AsyncIterator[ListPart]:
        self.lists.append(kind)
        if self.error is not None:
            raise self.error
        yield ListPart({kinds.RESOURCE_FLAVOR: FLAVORS, kinds.PRIORITY_CLASS: CLASSES}[kind], 1)


def reader(api: Api) -> QueueingReader:
    return QueueingReader(api, lambda: True)  # type: ignore[arg-type]


def test_flavors_and_classes_are_read_and_read_again_after_a_while_and_kept_meanwhile() -> None:
    api = Api()

    async def story() -> None:
        is_needed = False
        queues = QueueingReader(api, lambda: is_needed)  # type: ignore[arg-type]
        task = asyncio.create_task(queues.run())
        await asyncio.sleep(10)
        assert (queues.is_allowed, api.lists) == (None, []), "there is no Kueue"
        is_needed = True
        await asyncio.sleep(2 * RETRY_SECONDS)
        first = queues.latest
        assert first is not None
        assert queues.is_allowed
        assert {name: dict(place.node_selector) for name, place in first.flavors.items()} == {
            "a100": {"pool": "a100"},
            "any": {},
        }
        assert first.priorities == {"urgent": 1000, "usual": 10, "": 10}
        assert len(api.lists) == 2
        api.error = Unavailable("away")
        await asyncio.sleep(3 * INTERVAL_SECONDS)
        assert (queues.latest, queues.is_allowed) == (first, True)
        assert len(api.lists) == 5
        task.cancel()
        with suppress(asyncio.CancelledError):
            await task

    jumping(story())


@pytest.mark.parametrize("code", [403, 404])
def test_a_cluster_that_does_not_allow_it_has_none(code: int) -> None:
    queues = reader(Api(RequestRefused(code, "No", "no")))
    jumping(queues.refresh())
    assert (queues.latest, queues.is_allowed) == (None, False)


@pytest.mark.parametrize("error", [Unavailable("away"), RequestRefused(400, "BadRequest", "what?")])
def test_an_answer_that_says_nothing_of_that_leaves_it_open(error: Exception) -> None:
    queues = reader(Api(error))
    jumping(queues.refresh())
    assert (queues.latest, queues.is_allowed) == (None, None)
