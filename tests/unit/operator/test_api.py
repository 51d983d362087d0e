"""Lists of objects of any size, a piece at a time."""

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer
from kubernetes.aio import client
from kubernetes.aio.config import kube_config

from tandem_operator import api, kinds
from tandem_operator.api import ApiServer, ListPart, RequestRefused, Unavailable
from tandem_operator.bounded import UNREAD

Answer = Callable[[web.Request], web.Response]


@asynccontextmanager
async def served(method: str, path: str, answer: Any) -> AsyncIterator[ApiServer]:
    """A connection to a server that answers so at one path."""
    application = web.Application()
    application.router.add_route(method, path, answer)
    settings = client.Configuration()
    async with TestServer(application) as server:
        settings.host = str(server.make_url("")).rstrip("/")
        async with ApiServer(client.ApiClient(settings)) as connection:
            yield connection


async def listed(answer: Answer) -> list[Any]:
    """Names of all objects that a server lists which answers so."""
    return [one["name"] for page in await pages(answer) for one in page.items]


async def pages(answer: Answer) -> list[ListPart]:
    """All pages of it."""

    async def pods(request: web.Request) -> web.Response:
        return answer(request)

    async with served("GET", "/api/v1/pods", pods) as connection:
        return [page async for page in connection.pages(kinds.POD)]


@pytest.mark.parametrize(
    "content", ["x" * 50_000, [{} for _ in range(5_000)]], ids=["of many bytes", "of many small parts"]
)
async def test_of_large_objects_fewer_are_asked_for_at_once(content: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(api, "MAX_BYTES", 200_000)
    monkeypatch.setattr(api, "MAX_COST", 1_200_000)
    objects = [{"name": str(number), "content": content if 10 <= number < 20 else ""} for number in range(100)]
    limits = []

    def answer(request: web.Request) -> web.Response:
        limit, begin = int(request.query["limit"]), int(request.query.get("continue", 0))
        limits.append(limit)
        more = {"continue": str(begin + limit)} if begin + limit < len(objects) else {}
        body = {"metadata": {"resourceVersion": "7", **more}, "items": objects[begin : begin + limit]}
        return web.json_response(body)

    assert await listed(answer) == [str(number) for number in range(100)]
    assert limits[0] == api.PAGE
    assert min(limits) <= 2
    assert len(limits) < 40


async def test_of_what_only_the_metadata_are_needed_nothing_else_is_listed_and_in_few_pages() -> None:
    """A tenant may have hundreds of thousands of ConfigMaps with the label of a job, of a megabyte each."""
    asked = []

    async def answer(request: web.Request) -> web.Response:
        asked.append(request.headers["Accept"])
        limit, begin = int(request.query["limit"]), int(request.query.get("continue", 0))
        names = [str(number) for number in range(begin, min(1000, begin + limit))]
        more = {"continue": str(begin + limit)} if begin + limit < 1000 else {}
        items = [{"kind": "PartialObjectMetadata", "metadata": {"name": name}} for name in names]
        return web.json_response({"metadata": {"resourceVersion": "7", **more}, "items": items})

    async with served("GET", "/api/v1/configmaps", answer) as connection:
        found = [item async for page in connection.pages(kinds.CONFIG_MAP) for item in page.items]
    assert [item["metadata"]["name"] for item in found] == [str(number) for number in range(1000)]
    assert {item["kind"] for item in found} == {"ConfigMap"}
    assert asked == [api.METADATA] * (1000 // api.PAGE_OF_METADATA)


@pytest.mark.parametrize("in_metadata", [False, True], ids=["", "and so are its metadata"])
async def test_of_an_object_that_is_too_much_the_metadata_are_read(in_metadata: bool) -> None:
    names = ["a", "hostile", "b"]
    wide: list[list[None]] = [[] for _ in range(200_000)]

    def answer(request: web.Request) -> web.Response:
        begin, limit = int(request.query.get("continue", 0)), int(request.query["limit"])
        end = begin + limit
        more = {"continue": str(end)} if end < len(names) else {}
        alone = "PartialObjectMetadataList" in request.headers["Accept"]
        items = [
            {
                "metadata": {"name": name, "managedFields": wide if in_metadata and name == "hostile" else []},
                "name": name,
                **({} if alone else {"content": wide if name == "hostile" else []}),
            }
            for name in names[begin:end]
        ]
        return web.json_response({"metadata": {"resourceVersion": "7", **more}, "items": items})

    found = await pages(answer)
    assert [page.version for page in found] == [7] * len(found)
    items = [one for page in found for one in page.items]
    unread = [one["metadata"]["name"] for one in items if UNREAD in one]
    assert unread == ([] if in_metadata else ["hostile"])
    assert [one["metadata"]["name"] for one in items if UNREAD not in one] == ["a", "b"]
    assert all(page.is_complete for page in found) == (not in_metadata)


async def test_the_way_to_it_is_the_environments_and_a_netrc_is_not_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[tuple[str, str | None]] = []

    async def pods(request: web.Request) -> web.Response:
        asked.append((request.headers["Host"], request.headers.get("Authorization")))
        return web.json_response({"items": []})

    application = web.Application()
    application.router.add_get("/api/v1/pods", pods)
    (tmp_path / "netrc").write_text("default login me password mine")
    monkeypatch.setenv("NETRC", str(tmp_path / "netrc"))
    # KUBECONFIG is read as the client is imported.
    monkeypatch.setattr(kube_config, "KUBE_CONFIG_DEFAULT_LOCATION", str(tmp_path / "config"))
    cluster = {"clusters": [{"name": "c", "cluster": {"server": "http://192.0.2.1:6443"}}], "users": []}
    context = {"contexts": [{"name": "c", "context": {"cluster": "c", "user": ""}}], "current-context": "c"}
    (tmp_path / "config").write_text(json.dumps({"apiVersion": "v1", "kind": "Config", **cluster, **context}))
    async with TestServer(application) as server:
        monkeypatch.setenv("http_proxy", str(server.make_url("")))
        async with await ApiServer.connect() as connection:
            assert [page.items async for page in connection.pages(kinds.POD)] == [[]]
    assert asked == [("192.0.2.1:6443", None)]

    monkeypatch.setenv("no_proxy", "192.0.2.1")
    async with await ApiServer.connect() as connection:
        assert connection.proxy is None


async def made(status: int, message: str) -> None:
    """A pod is made on a server that answers so."""

    async def pods(request: web.Request) -> web.Response:
        return web.json_response({"message": message, "reason": "InternalError"}, status=status)

    async with served("POST", "/api/v1/namespaces/n/pods", pods) as connection:
        await connection.create(kinds.POD, {"metadata": {"name": "p", "namespace": "n"}})


async def test_a_webhook_that_does_not_answer_speaks_against_one_object_and_not_against_all() -> None:
    with pytest.raises(Unavailable):
        await made(500, "etcdserver: leader changed")
    with pytest.raises(RequestRefused):
        await made(500, 'Internal error occurred: failed calling webhook "pods.example.org": context deadline exceeded')


async def test_an_answer_that_cannot_be_parsed_is_no_answer() -> None:
    deep = '{"items": [' + "[" * 30_000 + "]" * 30_000 + "]}"
    for text in (deep, "what is this"):
        with pytest.raises(Unavailable):
            await listed(lambda request, text=text: web.Response(text=text, content_type="application/json"))  # type: ignore[misc]


Told = list[tuple[str, dict[str, Any]]]


async def heard(lines: list[str], status: int = 200, asked: list[Any] | None = None) -> Told:
    """All that a watch tells whose answer has these lines."""

    async def pods(request: web.Request) -> web.StreamResponse:
        if asked is not None:
            asked.append(dict(request.query))
        answer = web.StreamResponse(status=status)
        await answer.prepare(request)
        for line in lines:
            # In two pieces, as a network may.
            for piece in (line[:7], line[7:]):
                await answer.write(piece.encode())
                await asyncio.sleep(0)
        return answer

    async with served("GET", "/api/v1/namespaces/n/pods", pods) as connection:
        return [one async for one in connection.changes(kinds.POD, 5, "n", "mine")]


def line(what: str, name: str, **more: Any) -> str:
    return json.dumps({"type": what, "object": {"name": name, **more}}) + "\n"


async def test_a_watch_tells_what_happens_and_passes_over_what_costs_too_much() -> None:
    wide: list[list[None]] = [[] for _ in range(200_000)]
    told = [line("ADDED", "a"), line("MODIFIED", "hostile", content=wide), line("DELETED", "b", content="x" * 10**6)]
    asked: list[Any] = []
    found = await heard(told, asked=asked)
    assert [(what, one["name"]) for what, one in found] == [("ADDED", "a"), ("DELETED", "b")]
    assert [(one["resourceVersion"], one["labelSelector"], one["watch"]) for one in asked] == [("5", "mine", "true")]
    assert asked[0]["allowWatchBookmarks"] == "true"


@pytest.mark.parametrize("as_an_event", [True, False])
async def test_a_watch_that_begins_too_long_ago_is_refused(as_an_event: bool) -> None:
    said = {"kind": "Status", "code": api.EXPIRED, "reason": "Expired", "message": "too old resource version"}
    told = json.dumps({"type": "ERROR", "object": said} if as_an_event else said) + "\n"
    with pytest.raises(RequestRefused, match="too old") as refused:
        await heard([told], 200 if as_an_event else api.EXPIRED)
    assert refused.value.code == api.EXPIRED


@pytest.mark.parametrize(
    "told", ["<html>\n", "[]\n", "{}\n", '{"type":"ADDED","object":[]}\n', '{"type":"ERROR","object":{"code":"x"}}\n']
)
async def test_a_watch_that_is_answered_by_something_else_can_be_tried_again(told: str) -> None:
    with pytest.raises(Unavailable):
        await heard([told])


async def test_a_watch_that_breaks_off_can_be_tried_again() -> None:
    async def pods(request: web.Request) -> web.StreamResponse:
        answer = web.StreamResponse()
        await answer.prepare(request)
        await answer.write(line("ADDED", "a").encode())
        assert request.transport is not None
        request.transport.abort()
        return answer

    found = []
    async with served("GET", "/api/v1/pods", pods) as connection:
        with pytest.raises(Unavailable):
            async for _, one in connection.changes(kinds.POD, 5):
                found.append(one["name"])
    assert found == ["a"]


async def test_a_field_that_pods_do_not_have_is_an_error_and_not_passed_over() -> None:
    asked: list[str] = []

    async def pods(request: web.Request) -> web.Response:
        asked.append(request.query.get("fieldValidation", ""))
        return web.json_response({}, status=201)

    async with served("POST", "/api/v1/namespaces/n/pods", pods) as connection:
        await connection.create(kinds.POD, {"metadata": {"name": "p", "namespace": "n"}})
    assert asked == ["Strict"]


async def test_events_of_one_object_are_asked_for() -> None:
    asked: list[str] = []

    async def events(request: web.Request) -> web.Response:
        asked.append(request.query["fieldSelector"])
        return web.json_response({"items": [{"reason": "Pulling"}, "nonsense"]})

    async with served("GET", "/api/v1/namespaces/n/events", events) as connection:
        assert await connection.events("n", "u") == [{"reason": "Pulling"}]
    assert asked == ["involvedObject.uid=u"]


SERVED_VERSIONS = pytest.mark.parametrize(
    ("versions", "expected"),
    [
        (["v1beta2", "v1beta1"], "v1beta2"),
        (["v1beta1"], "v1beta1"),
        (["v1", "v1beta2"], "v1beta2"),
        (["v1"], None),
        ([], None),
    ],
)
"""Versions of a group that a server has, and the one that is used."""


@SERVED_VERSIONS
async def test_places_in_a_queue_are_read_where_the_cluster_has_that_api_and_kueue_the_queue(
    versions: list[str], expected: str | None
) -> None:
    requests: list[str] = []
    item = {"metadata": {"name": "digits-queue-0"}}

    async def server(request: web.Request) -> web.Response:
        if request.path == "/apis":
            group = {"name": "visibility.kueue.x-k8s.io", "versions": [{"version": version} for version in versions]}
            return web.json_response({"groups": [group] if versions else []})
        requests.append(request.path)
        is_known = "/localqueues/gpus/" in request.path
        return web.json_response({"items": [item, 3]} if is_known else {"code": 404}, status=200 if is_known else 404)

    async with served("*", "/{path:.*}", server) as connection:
        if expected is None:
            with pytest.raises(RequestRefused):
                await connection.pending_workloads([("lab", "gpus")])
            return
        assert await connection.pending_workloads([("lab", "nowhere"), ("lab", "gpus")]) == [item]
    group = f"visibility.kueue.x-k8s.io/{expected}"
    assert requests == [
        f"/apis/{group}/namespaces/lab/localqueues/{name}/pendingworkloads" for name in ("nowhere", "gpus")
    ]


@SERVED_VERSIONS
async def test_kueue_is_spoken_to_in_a_version_that_it_has(versions: list[str], expected: str | None) -> None:
    requests: list[tuple[str, str]] = []

    async def server(request: web.Request) -> web.Response:
        if request.path == "/apis":
            group = {"name": "kueue.x-k8s.io", "versions": [{"version": version} for version in versions]}
            return web.json_response({"groups": [{"name": "apps"}, *([group] if versions else [])]})
        body = await request.json() if request.can_read_body else {}
        requests.append((request.path, body.get("apiVersion", "")))
        return web.json_response({"metadata": {"resourceVersion": "3"}, "items": []})

    async with served("*", "/{path:.*}", server) as connection:
        if expected is None:
            with pytest.raises(RequestRefused) as refused:
                _ = [page async for page in connection.pages(kinds.WORKLOAD)]
            assert refused.value.code == 404, "it is absent, which is no trouble"
            return
        _ = [page async for page in connection.pages(kinds.WORKLOAD)]
        await connection.create(kinds.WORKLOAD, {"apiVersion": kinds.WORKLOAD.api, "metadata": {"namespace": "n"}})
        await connection.patch_status(kinds.WORKLOAD, "n", "w", {})
    group = f"kueue.x-k8s.io/{expected}"
    assert requests == [
        (f"/apis/{group}/workloads", ""),
        (f"/apis/{group}/namespaces/n/workloads", group),
        (f"/apis/{group}/namespaces/n/workloads/w/status", ""),
    ]
