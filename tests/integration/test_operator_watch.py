"""kopf itself watches an API server that tells of hostile objects, and what comes after them is told all the same."""

import asyncio
import sys
from collections.abc import AsyncIterator, Iterator
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from typing import Any

import kopf
import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer

from tandem_operator import handlers, job_objects, kinds
from tandem_operator.bounded import MAX_DEPTH
from tandem_operator.informer import Cache, Informer, Key

SOUND = '{"trainer":{"task":"image-classification"}}'
TEMPLATE = '{"trainer":{"task":"image-classification"},"workers":{"template":%s}}'
DEEP = TEMPLATE % ('{"a":' * 9_900 + "1" + "}" * 9_900)
WIDE = TEMPLATE % ('{"a":[' + "[]," * 450_000 + "1]}")


@pytest.fixture(autouse=True)
def _nesting() -> Iterator[None]:
    """What the operator sets at its start."""
    before = sys.getrecursionlimit()
    sys.setrecursionlimit(MAX_DEPTH)
    yield
    sys.setrecursionlimit(before)


def job(name: str, spec: str) -> str:
    metadata = f'{{"name":"{name}","namespace":"n","uid":"uid-{name}","resourceVersion":"5","generation":1}}'
    return f'{{"apiVersion":"{kinds.JOB.api}","kind":"{kinds.JOB.name}","metadata":{metadata},"spec":{spec}}}'


def resources(*those: tuple[str, str]) -> dict[str, Any]:
    common = {"namespaced": True, "verbs": ["list", "watch"], "singularName": "", "shortNames": [], "categories": []}
    return {"resources": [{"name": plural, "kind": kind, **common} for plural, kind in those]}


def group(kind: kinds.Kind) -> dict[str, Any]:
    version = {"version": kind.version}
    return {"name": kind.group, "preferredVersion": version, "versions": [version]}


async def api_server(request: web.Request) -> web.StreamResponse:
    """Lists one hostile job, and tells of two more and then of a sound one."""
    groups = [group(kinds.JOB), group(kinds.NETWORK_POLICY)]
    core = [(kind.plural, kind.name) for kind in kinds.WATCHED if not kind.group]
    known = {
        "/api": {"versions": ["v1"]},
        "/apis": {"groups": groups},
        "/api/v1": resources(("namespaces", "Namespace"), *core),
        **{f"/apis/{kind.api}": resources((kind.plural, kind.name)) for kind in (kinds.JOB, kinds.NETWORK_POLICY)},
    }
    if request.path in known:
        return web.json_response(known[request.path])
    is_ours = kinds.JOB.plural in request.path
    if "watch" not in request.query:
        items = job("listed", DEEP) if is_ours else ""
        text = f'{{"metadata":{{"resourceVersion":"4"}},"items":[{items}]}}'
        return web.Response(text=text, content_type="application/json")
    answer = web.StreamResponse()
    await answer.prepare(request)
    for name, spec in {"deep": DEEP, "wide": WIDE, "sound": SOUND}.items():
        if is_ours:
            await answer.write(f'{{"type":"ADDED","object":{job(name, spec)}}}\n'.encode())
    with suppress(asyncio.CancelledError):
        await asyncio.Event().wait()
    return answer


@asynccontextmanager
async def served(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[None]:
    """The API server, into which kopf logs in."""
    application = web.Application()
    application.router.add_get("/{path:.*}", api_server)
    async with TestServer(application) as server:
        connection = kopf.ConnectionInfo(server=str(server.make_url("")).rstrip("/"))
        monkeypatch.setattr(kopf, "login_via_client", lambda **_: connection)
        yield


def handled() -> kopf.OperatorRegistry:
    """The operator's handlers of settings and login."""
    registry = kopf.OperatorRegistry()
    kopf.on.startup(registry=registry)(handlers.configure)
    kopf.on.login(registry=registry)(handlers.login)
    return registry


async def test_hostile_objects_end_no_watch(monkeypatch: pytest.MonkeyPatch) -> None:
    store, sound = Cache(), asyncio.Event()
    told: list[Key] = []

    def news(key: Key) -> None:
        told.append(key)
        if key == ("n", "sound"):
            sound.set()

    nobody: Any = None
    registry = handled()
    kopf.on.event(kinds.JOB.group, kinds.JOB.version, kinds.JOB.plural, registry=registry)(handlers.on_job_event)
    async with served(monkeypatch):
        memo = kopf.Memo(informer=Informer(nobody, store, news, ()))
        watch = asyncio.create_task(kopf.operator(registry=registry, memo=memo, standalone=True, clusterwide=True))
        ended = asyncio.create_task(sound.wait())
        done, _ = await asyncio.wait({watch, ended}, timeout=60, return_when=asyncio.FIRST_COMPLETED)
        assert ended in done
        watch.cancel()
        with suppress(asyncio.CancelledError):
            await watch
    assert set(told) == {("n", "listed"), ("n", "deep"), ("n", "sound")}, "what costs too much is left to the lists"
    for name in ("listed", "deep"):
        assert job_objects.REFUSED in store.job(("n", name))


async def test_a_background_task_that_ends_stops_the_operator(monkeypatch: pytest.MonkeyPatch) -> None:
    """The other tasks end first, then the Lease is released, then the connections are closed."""
    events: list[str] = []

    class Lease:
        async def release(self) -> None:
            events.append("released")

    async def endless() -> None:
        try:
            await asyncio.Event().wait()
        finally:
            events.append("cancelled")

    async def broken() -> None:
        raise ValueError("the watch is gone")

    registry = handled()

    @kopf.on.startup(registry=registry)
    async def start(memo: kopf.Memo, **_: Any) -> None:
        memo.leases, memo.connections = Lease(), AsyncExitStack()
        memo.connections.callback(events.append, "closed")
        handlers.run_task(memo, "control", endless())
        handlers.run_task(memo, "follow", broken())

    kopf.on.cleanup(registry=registry)(handlers.stop)
    with pytest.raises(RuntimeError, match="follow has ended") as raised:
        async with served(monkeypatch), asyncio.timeout(60):
            await handlers.run(kopf.Memo(), registry, clusterwide=True)
    assert repr(raised.value.__cause__) == "ValueError('the watch is gone')"
    assert events == ["cancelled", "released", "closed"]
