"""Flavors and priority classes: read now and then, and not at all where that is not allowed."""

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest

from tandem_operator import kinds
from tandem_operator.api import ListPart, RequestRefused, Unavailable
from tandem_operator.kinds import Kind
from tandem_operator.queueing import FRESH_SECONDS, QueueingReader
from tests.support.clock import jumping

FLAVORS = [{"metadata": {"name": "a100"}, "spec": {"nodeLabels": {"pool": "a100"}}}, {"metadata": {"name": "any"}}]
CLASSES: list[dict[str, Any]] = [
    {"metadata": {"name": "urgent"}, "value": 1000},
    {"metadata": {"name": "usual"}, "value": 10, "globalDefault": True},
]


class Api:
    """An API server with these objects."""

    def __init__(self) -> None:
        self.lists: list[Kind] = []
        self.error: Exception | None = None

    async def pages(self, kind: Kind, namespace: str = "", selector: str = "") -> AsyncIterator[ListPart]:
        self.lists.append(kind)
        if self.error is not None:
            raise self.error
        yield ListPart({kinds.RESOURCE_FLAVOR: FLAVORS, kinds.PRIORITY_CLASS: CLASSES}[kind], 1)


def reader(api: Api) -> QueueingReader:
    return QueueingReader(api)  # type: ignore[arg-type]


def test_flavors_and_classes_are_read_and_read_again_after_a_while() -> None:
    api = Api()

    async def story() -> None:
        queues = reader(api)
        first, second = await asyncio.gather(queues.current(), queues.current())
        assert first is second is not None
        assert {name: dict(place.node_selector) for name, place in first.flavors.items()} == {
            "a100": {"pool": "a100"},
            "any": {},
        }
        assert first.priorities == {"urgent": 1000, "usual": 10, "": 10}
        assert len(api.lists) == 2
        await asyncio.sleep(FRESH_SECONDS + 1)
        await queues.current()
        assert len(api.lists) == 4

    jumping(story())


@pytest.mark.parametrize("code", [403, 404])
def test_a_cluster_that_does_not_allow_it_has_none(code: int) -> None:
    api = Api()
    api.error = RequestRefused(code, "No", "no")
    assert jumping(reader(api).current()) is None


@pytest.mark.parametrize("error", [Unavailable("away"), RequestRefused(400, "BadRequest", "what?")])
def test_an_answer_that_says_nothing_of_that_is_passed_on(error: Exception) -> None:
    api = Api()
    api.error = error
    with pytest.raises(type(error)):
        jumping(reader(api).current())
