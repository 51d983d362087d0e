"""The operator's shell: when a job is looked at again, and what it takes from coordinators."""

import socket

import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer

from tandem.snapshot import Snapshot
from tandem.status import Status
from tandem_operator import coordinators
from tandem_operator.controller import LEAST_SECONDS, soonest
from tandem_operator.coordinators import Coordinators, Unreached

SNAPSHOT = Snapshot(job="digits", time=1.0, status=Status(phase="Running"))


@pytest.mark.parametrize(
    ("again_in", "written_in", "expected"),
    [
        (5.0, 7.5, 5.0),
        (5.0, 2.5, 2.5),
        (None, 2.5, 2.5),
        # A look that came a moment too early to write is not followed by one that is five seconds late.
        (5.0, 0.01, LEAST_SECONDS),
        (5.0, -3.0, LEAST_SECONDS),
    ],
)
def test_a_status_that_is_due_is_written_then_and_not_at_the_next_steady_look(
    again_in: float | None, written_in: float, expected: float
) -> None:
    assert soonest(again_in, written_in) == expected


async def asked(body: bytes) -> Snapshot | None:
    """What the operator makes of this answer."""

    async def status(request: web.Request) -> web.Response:
        return web.Response(body=body, content_type="application/json")

    application = web.Application()
    application.router.add_get("/status", status)
    async with TestServer(application) as server, Coordinators() as pool:
        return await pool.ask(f"{server.host}:{server.port}", "token")


async def test_a_coordinator_says_how_its_job_is() -> None:
    found = await asked(SNAPSHOT.model_dump_json(by_alias=True).encode())
    assert found is not None
    assert found.status.phase == "Running"


@pytest.mark.parametrize("body", [b"{}", b"not json", b"\xff" * 100])
async def test_an_answer_that_is_none_is_as_good_as_silence(body: bytes) -> None:
    assert await asked(body) is None


async def test_a_connection_that_is_refused_is_silence_and_one_that_nobody_takes_is_more(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(coordinators, "CONNECT_SECONDS", 0.2)
    with socket.socket() as server, socket.socket() as one, socket.socket() as other:
        server.bind(("127.0.0.1", 0))
        where = "{}:{}".format(*server.getsockname())
        async with Coordinators() as pool:
            assert await pool.ask(where, "token") is None
            # Where nobody accepts and the queue is full, the kernel drops what else comes, as it comes to nothing on a
            # node that is not there.
            server.listen(0)
            for client in (one, other):
                client.setblocking(False)
                client.connect_ex(server.getsockname())
            with pytest.raises(Unreached):
                await pool.ask(where, "token")


async def test_an_answer_without_end_is_not_read_to_it(monkeypatch: pytest.MonkeyPatch) -> None:
    body = SNAPSHOT.model_dump_json(by_alias=True).encode()
    monkeypatch.setattr(coordinators, "MOST_BYTES", len(body))
    assert await asked(body) is not None
    assert await asked(body + b" ") is None
