"""Flavors and priority classes: read now and then, and kept while the API server is away. The use of queues: read while
jobs wait."""

import asyncio
from collections.abc import AsyncIterator, Iterable
from contextlib import suppress
from typing import Any

import pytest

from tandem_operator import kinds
from tandem_operator.api import ListPart, RequestRefused, Unavailable
from tandem_operator.kinds import Kind
from tandem_operator.queue_usage import QueuePlace
from tandem_operator.queueing import INTERVAL_SECONDS, RETRY_SECONDS, QueueingReader, QueueUsageReader
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


LOCAL_QUEUE = {"spec": {"clusterQueue": "all"}}
CLUSTER_QUEUES = [
    {"metadata": {"name": "all"}, "spec": {"cohortName": "team"}},
    {"metadata": {"name": "old"}, "spec": {"cohort": "team"}},
    {"metadata": {"name": "alone"}, "spec": {}},
]
RESERVED = {
    "metadata": {"name": "first", "namespace": "lab"},
    "status": {"admission": {"clusterQueue": "all", "podSetAssignments": []}},
}
PLACES = [{"metadata": {"name": "digits-queue-0", "namespace": "lab"}, "positionInLocalQueue": 1}]


class QueuesApi:
    """An API server with one queue, which counts the requests."""

    def __init__(self) -> None:
        self.requests: list[str] = []
        self.refused: dict[str, Exception] = {}

    def _answers(self, request: str) -> None:
        self.requests.append(request)
        if request in self.refused:
            raise self.refused[request]

    async def get(self, kind: Kind, namespace: str, name: str) -> dict[str, Any]:
        self._answers(f"{kind.name} {namespace}/{name}")
        return LOCAL_QUEUE

    async def pending_workloads(self, queues: Iterable[tuple[str, str]]) -> list[dict[str, Any]]:
        for namespace, queue in queues:
            self._answers(f"places {namespace}/{queue}")
        return PLACES

    async def pages(self, kind: Kind, namespace: str = "", selector: str = "") -> AsyncIterator[ListPart]:
        self._answers(kind.name)
        bodies = {kinds.CLUSTER_QUEUE: CLUSTER_QUEUES, kinds.WORKLOAD: [RESERVED, {"metadata": {}}]}
        yield ListPart(bodies[kind], 1)  # type: ignore[arg-type]


READ_ONCE = ["LocalQueue lab/gpus", "places lab/gpus", "ClusterQueue", "Workload"]


def test_the_use_of_queues_is_read_only_while_jobs_wait_and_once_for_all_of_them() -> None:
    api = QueuesApi()

    async def story() -> None:
        usage = QueueUsageReader(api)  # type: ignore[arg-type]
        task = asyncio.create_task(usage.run())
        await asyncio.sleep(10 * INTERVAL_SECONDS)
        assert (usage.latest, api.requests) == (None, [])
        for name in ("digits", "second", "third"):
            usage.note(("lab", name), "gpus")
        await asyncio.sleep(2 * RETRY_SECONDS)
        assert api.requests == READ_ONCE
        assert usage.latest is not None
        assert usage.latest.places == {("lab", "digits-queue-0"): QueuePlace(2, 1)}
        assert usage.latest.cluster_queues == {("lab", "gpus"): "all"}
        assert usage.latest.cohorts == {"all": "team", "old": "team"}
        assert [use.owner for use in usage.latest.uses] == [("Workload", "first")]
        await asyncio.sleep(INTERVAL_SECONDS)
        assert api.requests == 2 * READ_ONCE
        for name in ("digits", "second", "third"):
            usage.note(("lab", name), "")
        await asyncio.sleep(10 * INTERVAL_SECONDS)
        assert (usage.latest, api.requests) == (None, 2 * READ_ONCE)
        task.cancel()
        with suppress(asyncio.CancelledError):
            await task

    jumping(story())


@pytest.mark.parametrize(
    ("request_", "parts"),
    [
        ("places lab/gpus", (0, 1, 2, 1)),
        ("LocalQueue lab/gpus", (0, 0, 0, 0)),
        ("ClusterQueue", (1, 1, 0, 1)),
        ("Workload", (1, 1, 2, 0)),
    ],
)
@pytest.mark.parametrize("error", [RequestRefused(403, "Forbidden", "no"), Unavailable("away")])
def test_a_part_that_cannot_be_read_is_left_out_and_logged_once(
    request_: str, parts: tuple[int, ...], error: Exception, caplog: pytest.LogCaptureFixture
) -> None:
    api = QueuesApi()
    api.refused[request_] = error
    usage = QueueUsageReader(api)  # type: ignore[arg-type]
    usage.note(("lab", "digits"), "gpus")
    with caplog.at_level("INFO"):
        for _ in range(3):
            jumping(usage.refresh())
    latest = usage.latest
    assert latest is not None
    assert (len(latest.places), len(latest.cluster_queues), len(latest.cohorts), len(latest.uses)) == parts
    assert caplog.text.count("queue-usage-not-read") == 1
