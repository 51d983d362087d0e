"""What probes are told over HTTP while the operator cannot know what goes on, and once it can again."""

import asyncio
import time
from collections import Counter
from collections.abc import AsyncIterator, Mapping
from typing import Any

import aiohttp
import psutil
import pytest

from tandem_operator import informer, kinds
from tandem_operator.api import ListPart, Unavailable
from tandem_operator.informer import Cache, Informer
from tandem_operator.kinds import Kind
from tandem_operator.operator_metrics import OperatorMetrics, serve_health

SECONDS = 60.0
GREEN = (200, "ok")


def job(version: int) -> dict[str, Any]:
    metadata = {"name": "digits", "namespace": "n", "uid": "u", "resourceVersion": str(version), "generation": version}
    return {"metadata": metadata}


class Api:
    """An API server that a test has fail, hang, or change."""

    def __init__(self) -> None:
        self.version = 1
        self.answers = asyncio.Event()
        self.refuses = False

    async def pages(self, kind: Kind, namespace: str = "", selector: str = "") -> AsyncIterator[ListPart]:
        await self.answers.wait()
        if self.refuses:
            raise Unavailable("the API server is away")
        yield ListPart([job(self.version)] if kind is kinds.JOB else [], self.version)


class Operator:
    """The part of an operator that lists, and the server that its probes ask."""

    def __init__(self) -> None:
        self.api = Api()
        api: Any = self.api
        self.watching = Informer(api, Cache(), lambda key: None, ())
        self._tasks: list[asyncio.Task[None]] = []

    async def __aenter__(self) -> "Operator":
        work = (self.watching.sweep(), serve_health(0, self.watching, OperatorMetrics()))
        before = listening()
        self._tasks = [asyncio.create_task(one) for one in work]
        self._session = aiohttp.ClientSession()
        self._port = await new_port(before)
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._session.close()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def says(self, path: str) -> tuple[int, str]:
        """What it answers."""
        async with self._session.get(f"http://127.0.0.1:{self._port}{path}") as answer:
            return answer.status, await answer.text()

    async def answer(self, path: str, **options: Any) -> tuple[int, Mapping[str, str]]:
        """The status and the headers of its answer."""
        async with self._session.get(f"http://127.0.0.1:{self._port}{path}", **options) as answer:
            return answer.status, answer.headers

    async def turns(self, path: str, status: int, words: str) -> None:
        """Ask until this is what it answers."""
        deadline = time.monotonic() + SECONDS
        while True:
            code, text = await self.says(path)
            if code == status and words in text:
                return
            assert time.monotonic() < deadline, f"{path} still answers {code} {text!r}, not {status} {words!r}"
            await asyncio.sleep(0.01)


def listening() -> set[int]:
    """Ports of this process at which anybody is heard."""
    found = psutil.Process().net_connections("tcp")
    return {one.laddr.port for one in found if one.status == psutil.CONN_LISTEN}


async def new_port(before: set[int]) -> int:
    """The port that is listened to since these were."""
    async with asyncio.timeout(SECONDS):
        while True:
            if new := listening() - before:
                return min(new)
            await asyncio.sleep(0.01)


@pytest.fixture(autouse=True)
def _soon(monkeypatch: pytest.MonkeyPatch) -> None:
    """Minutes are tenths of seconds."""
    monkeypatch.setattr(informer, "SWEEP_SECONDS", 0.1)
    monkeypatch.setattr(informer, "RETRY_SECONDS", 0.05)
    monkeypatch.setattr(informer, "STALE_SECONDS", 0.5)
    monkeypatch.setattr(informer, "PAGE_SECONDS", 0.5)


async def test_an_operator_is_alive_before_it_has_listed_everything_but_not_ready(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(informer, "STALE_SECONDS", SECONDS)
    monkeypatch.setattr(informer, "PAGE_SECONDS", SECONDS)
    async with Operator() as operator:
        assert await operator.says("/healthz") == GREEN
        assert await operator.says("/readyz") == (503, "not everything is listed yet")
        operator.api.answers.set()
        await operator.turns("/readyz", *GREEN)


@pytest.mark.parametrize("trouble", ["refuses", "hangs"])
async def test_both_probes_turn_red_while_nothing_can_be_listed_and_green_again(trouble: str) -> None:
    async with Operator() as operator:
        operator.api.answers.set()
        for path in ("/healthz", "/readyz"):
            await operator.turns(path, *GREEN)
        if trouble == "refuses":
            operator.api.refuses = True
        else:
            operator.api.answers.clear()
        for path in ("/healthz", "/readyz"):
            await operator.turns(path, 503, "nothing could be listed for ")
        operator.api.refuses = False
        operator.api.answers.set()
        for path in ("/healthz", "/readyz"):
            await operator.turns(path, *GREEN)


async def test_both_probes_turn_red_while_a_watch_has_stalled_and_green_when_it_speaks_again() -> None:
    async with Operator() as operator:
        operator.api.answers.set()
        await operator.turns("/readyz", *GREEN)
        operator.api.version = 5
        for path in ("/healthz", "/readyz"):
            await operator.turns(path, 503, "the watch of distributedtrainingjobs has stalled")
        operator.watching.handle(kinds.JOB, "MODIFIED", job(6))
        for path in ("/healthz", "/readyz"):
            await operator.turns(path, *GREEN)


async def test_prometheus_is_answered_also_while_the_probes_are_red() -> None:
    async with Operator() as operator:
        await operator.turns("/healthz", 503, "nothing could be listed")
        status, text = await operator.says("/metrics")
        assert status == 200
        assert "tandem_operator" in text


async def test_a_stranger_gets_one_answer_and_nothing_is_unpacked() -> None:
    """No client of these paths authenticates: a kubelet and Prometheus are strangers as well."""
    async with Operator() as operator:
        packed = {"data": b"x", "headers": {"Content-Encoding": "gzip"}}
        for path, options, status in (("/healthz", {}, 200), ("/metrics", {}, 200), ("/healthz", packed, 415)):
            code, headers = await operator.answer(path, **options)
            assert (code, headers["Connection"]) == (status, "close")


async def test_everything_is_listed_soon_where_every_second_request_fails() -> None:
    """Not all lists of a sweep begin anew with each failure: that would take dozens of sweeps."""
    async with Operator() as operator:
        pages, requests = operator.api.pages, Counter[str]()

        async def every_second(kind: Kind, namespace: str = "", selector: str = "") -> AsyncIterator[ListPart]:
            requests[kind.name] += 1
            if requests[kind.name] % 2:
                raise Unavailable("429 Too Many Requests")
            async for page in pages(kind, namespace, selector):
                yield page

        operator.api.pages = every_second  # type: ignore[method-assign]
        operator.api.answers.set()
        await operator.turns("/readyz", *GREEN)
        # What not every cluster has is listed again with the next sweep.
        assert requests == {kind.name: 1 + (kind not in kinds.OPTIONAL) for kind in kinds.WATCHED}
