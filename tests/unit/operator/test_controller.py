"""The operator's shell: when a job is looked at again, and what it takes from coordinators."""

import asyncio
import gzip
import json
import socket
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer

from tandem.formatting import parse_rfc3339, rfc3339
from tandem.wire.protocol import BRIEF_PATH, MAX_BRIEF_BYTES, QUEUE_PATH
from tandem.wire.queue_view import QueueView
from tandem.wire.status import GenerationView, Snapshot, Status
from tandem_operator import coordinators, pods
from tandem_operator.controller import MIN_INTERVAL_SECONDS, soonest
from tandem_operator.coordinators import (
    Coordinators,
    JobCoordinators,
    NodeUnreachable,
    UnreadableAnswer,
    clock_difference,
    in_own_clock,
)
from tests.support.hostile import filled
from tests.support.worlds.operator_job import NOW, UID, job
from tests.support.worlds.operator_job import coordinator as of_coordinator

VIEW = GenerationView(generation=1, world_size=1, members=["a"], opened_at=1.0, reason="Started")
SNAPSHOT = Snapshot(job="digits", time=1.0, status=Status(phase="Running"), finished=0, generations=[VIEW])


@pytest.mark.parametrize(
    ("again_in", "written_in", "expected"),
    [
        (5.0, 7.5, 5.0),
        (5.0, 2.5, 2.5),
        (None, 2.5, 2.5),
        # A look that came a moment too early to write is not followed by one that is five seconds late.
        (5.0, 0.01, MIN_INTERVAL_SECONDS),
        (5.0, -3.0, MIN_INTERVAL_SECONDS),
    ],
)
def test_a_status_that_is_due_is_written_then_and_not_at_the_next_steady_look(
    again_in: float | None, written_in: float, expected: float
) -> None:
    assert soonest(again_in, written_in) == expected


Page = Callable[[web.Request], Awaitable[web.StreamResponse]]


@asynccontextmanager
async def coordinator(**pages: Page) -> AsyncIterator[str]:
    """A coordinator that answers so at `brief`, `status`, `target` and `queue`; where it is."""
    application = web.Application()
    paths = {"brief": BRIEF_PATH, "status": "/status", "target": "/v1/target", "queue": QUEUE_PATH}
    for name, page in pages.items():
        application.router.add_route("*", paths[name], page)
    async with TestServer(application) as server:
        yield f"{server.host}:{server.port}"


def says(body: bytes, status: int = 200, **headers: str) -> Page:
    async def page(_: web.Request) -> web.StreamResponse:
        return web.Response(
            body=body, status=status, headers={name.replace("_", "-"): v for name, v in headers.items()}
        )

    return page


async def asked(**pages: Page) -> Snapshot | None:
    """What the operator makes of these answers."""
    async with coordinator(**pages) as endpoint, Coordinators() as pool:
        return await pool.poll(endpoint, "token")


WHOLE = SNAPSHOT.model_dump_json(by_alias=True).encode()


async def test_a_coordinator_says_how_its_job_is() -> None:
    found = await asked(brief=says(WHOLE))
    assert found == SNAPSHOT


async def test_what_a_newer_coordinator_adds_is_passed_over() -> None:
    body = json.dumps({**SNAPSHOT.dump(), "novelty": 1, "status": {"phase": "Running", "novelty": {}}}).encode()
    assert await asked(brief=says(body)) is not None


@pytest.mark.parametrize("body", [b"{}", b"not json", b"\xff" * 100, b"[" * 50_000, b"9" * 50_000])
async def test_an_answer_that_is_none_is_not_read(body: bytes) -> None:
    with pytest.raises(UnreadableAnswer):
        await asked(brief=says(body))


async def test_an_answer_without_end_is_not_read_to_it() -> None:
    assert await asked(brief=says(WHOLE.ljust(MAX_BRIEF_BYTES))) is not None
    with pytest.raises(UnreadableAnswer, match="more than"):
        await asked(brief=says(WHOLE.ljust(MAX_BRIEF_BYTES + 1)))


@pytest.mark.parametrize("kind", ["lists", "objects"])
async def test_an_answer_that_takes_long_to_parse_is_told_from_its_bytes(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(coordinators._Brief, "read_json", None)
    body = WHOLE[:-1] + b',"x":' + filled(kind, MAX_BRIEF_BYTES - len(WHOLE) - 10).encode() + b"}"
    with pytest.raises(UnreadableAnswer, match="takes more to parse"):
        await asked(brief=says(body))


async def test_nothing_but_the_brief_answer_is_asked_for() -> None:
    with pytest.raises(UnreadableAnswer, match="404"):
        await asked(status=says(WHOLE))


@pytest.mark.parametrize(
    ("page", "doubtful"),
    [(says(b"not json"), False), (says(WHOLE, status=404), False), (None, True)],
    ids=["no JSON", "404", "silence"],
)
async def test_one_that_falls_silent_is_asked_again_at_once_and_one_that_says_what_nobody_can_read_is_not(
    page: Page | None, doubtful: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    answers, key = [says(WHOLE)], ("n", "digits")

    async def brief(request: web.Request) -> web.StreamResponse:
        if not answers:
            assert request.transport is not None
            request.transport.abort()
            return web.Response()
        return await answers.pop()(request)

    async with coordinator(brief=brief) as endpoint, Coordinators() as pool:
        questions = JobCoordinators(pool, b"key")
        address, _, port = endpoint.partition(":")
        monkeypatch.setattr(pods, "PORT", int(port))
        pod = of_coordinator(address=address)
        for nth in range(2):
            await questions.poll(key, job(), UID, [pod])
            assert questions.in_doubt(key) == (doubtful and nth == 1)
            answers += [page] if page is not None else []


@pytest.mark.parametrize("ahead", [0.0, 3.0, 3600.0, -3600.0])
async def test_times_of_a_coordinator_whose_clock_is_wrong_are_taken_in_the_operators_own(
    monkeypatch: pytest.MonkeyPatch, ahead: float
) -> None:
    """Ahead, it lengthened a drain by as much; behind, it ended it at once."""
    pages: list[Page] = []

    async def brief(request: web.Request) -> web.StreamResponse:
        return await pages.pop()(request)

    async with coordinator(brief=brief) as endpoint, Coordinators() as pool:
        questions = JobCoordinators(pool, b"key")
        address, _, port = endpoint.partition(":")
        monkeypatch.setattr(pods, "PORT", int(port))
        began = time.time()
        stamps = {"started": began - 500, "evaluated": began - 20}
        seen = set()
        for jitter in (0.0, -1.4, 1.4):
            status = Status(
                phase="Draining",
                start_time=rfc3339(stamps["started"] + ahead),
                evaluated_at=rfc3339(stamps["evaluated"] + ahead),
            )
            answer = Snapshot(job="digits", time=time.time() + ahead + jitter, status=status)
            pages.append(says(answer.model_dump_json(by_alias=True).encode()))
            found = await questions.poll(("n", "digits"), job(), UID, [of_coordinator(address=address)])
            assert found is not None
            seen.add((found.status.start_time, found.status.evaluated_at))
    ((start, evaluated),) = seen
    assert parse_rfc3339(start) == pytest.approx(stamps["started"], abs=6.0)
    assert parse_rfc3339(evaluated) == pytest.approx(stamps["evaluated"], abs=6.0)


@pytest.mark.parametrize("measured", [float("nan"), float("inf"), -1e308])
def test_a_clock_that_cannot_be_is_no_reason_for_a_time_that_cannot_be(measured: float) -> None:
    status = Status(phase="Draining", evaluated_at=rfc3339(NOW))
    answer = Snapshot(job="digits", time=0.0, status=status)
    found = in_own_clock(answer, clock_difference(0.0, measured), NOW).status.evaluated_at
    assert 0.0 <= (parse_rfc3339(found) or -1.0) <= NOW


async def test_an_error_without_end_is_not_read_to_it() -> None:
    ended = []

    async def endless(request: web.Request) -> web.StreamResponse:
        await request.read()
        answer = web.StreamResponse(status=500)
        await answer.prepare(request)
        try:
            while True:
                await answer.write(b"x" * 65_536)
        finally:
            ended.append(request.path)

    async with asyncio.timeout(30):
        async with coordinator(brief=endless, target=endless) as endpoint, Coordinators() as pool:
            with pytest.raises(UnreadableAnswer):
                await pool.poll(endpoint, "token")
            assert not await pool.set_target(endpoint, "token", 2)


@pytest.mark.parametrize(("status", "knows"), [(200, True), (404, False), (500, True)])
async def test_a_coordinator_of_the_version_before_does_not_know_reports_of_the_queue(status: int, knows: bool) -> None:
    view = QueueView(name="gpus", integration="Workload", admitted=0, position=2)
    bodies = []

    async def report(request: web.Request) -> web.StreamResponse:
        bodies.append(await request.json())
        return web.json_response({}, status=status)

    async with coordinator(queue=report) as endpoint, Coordinators() as pool:
        assert await pool.report_queue(endpoint, "token", view) == knows
    assert bodies == [view.dump()]


async def test_a_redirection_is_not_followed() -> None:
    visited = []

    async def elsewhere(request: web.Request) -> web.StreamResponse:
        visited.append(request.headers.get("Authorization"))
        return web.json_response(SNAPSHOT.dump())

    async with coordinator(brief=elsewhere, target=elsewhere) as target:
        to = {"status": 307, "Location": f"http://{target}{BRIEF_PATH}"}
        async with coordinator(brief=says(b"", **to), target=says(b"", **to)) as endpoint, Coordinators() as pool:  # type: ignore[arg-type]
            with pytest.raises(UnreadableAnswer):
                await pool.poll(endpoint, "token")
            assert not await pool.set_target(endpoint, "token", 2)
    assert visited == []


async def test_an_answer_is_not_unpacked() -> None:
    asked_for = []

    async def packed(request: web.Request) -> web.StreamResponse:
        asked_for.append(request.headers["Accept-Encoding"])
        return web.Response(body=gzip.compress(WHOLE), headers={"Content-Encoding": "gzip"})

    with pytest.raises(UnreadableAnswer, match="packed"):
        await asked(brief=packed)
    assert asked_for == ["identity"]


@pytest.mark.parametrize(
    "status",
    [
        {"restarts": 10**30},
        {"workers": {"desired": 1, "ready": -1}},
        {"workers": {"desired": 1, "ready": 10**400}},
        {"latestCheckpoint": {"name": "../../etc", "step": 1, "generation": 1}},
        {"loss": 1e400},
    ],
)
async def test_numbers_and_names_that_no_coordinator_says_are_none(status: dict[str, Any]) -> None:
    body = json.dumps({**SNAPSHOT.dump(), "status": status}).encode()
    with pytest.raises(UnreadableAnswer):
        await asked(brief=says(body))


async def test_words_are_cut() -> None:
    body = json.dumps({**SNAPSHOT.dump(), "status": {"message": "x" * 100_000}}).encode()
    found = await asked(brief=says(body))
    assert found is not None
    assert found.status.message == "x" * 2_000


async def test_a_connection_that_is_refused_is_silence_and_one_that_nobody_takes_is_more(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(coordinators, "CONNECT_SECONDS", 0.2)
    with socket.socket() as server, socket.socket() as one, socket.socket() as other:
        server.bind(("127.0.0.1", 0))
        where = "{}:{}".format(*server.getsockname())
        async with Coordinators() as pool:
            assert await pool.poll(where, "token") is None
            # Where nobody accepts and the queue is full, the kernel drops what else comes, as it comes to nothing on a
            # node that is not there.
            server.listen(0)
            for client in (one, other):
                client.setblocking(False)
                client.connect_ex(server.getsockname())
            with pytest.raises(NodeUnreachable):
                await pool.poll(where, "token")
