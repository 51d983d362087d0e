"""What a client that has not authenticated gets of a server: little, and not for long."""

import asyncio
import gzip
from collections.abc import AsyncIterator
from typing import Self

import pytest
from aiohttp import web

from tandem.processes.launch import listen
from tandem.wire import http_server
from tandem.wire.http_server import MAX_UNAUTHENTICATED_BYTES, HttpServer, authenticate, drain

TOKEN = "Authorization: Bearer token"


class Served:
    """A server whose paths tell what it has read, and connections to it."""

    def __init__(self) -> None:
        self.bodies: list[bytes] = []
        application = web.Application(middlewares=[self._guard])
        application.add_routes(
            [web.post("/read", self._read), web.get("/", self._hello), web.post("/no", self._refuse)]
        )
        self._server = HttpServer(application)
        self._writers: list[asyncio.StreamWriter] = []

    async def __aenter__(self) -> Self:
        socket = listen("127.0.0.1", 0, 16)
        self._port = socket.getsockname()[1]
        await self._server.start(socket)
        return self

    async def __aexit__(self, *_: object) -> None:
        for writer in self._writers:
            writer.close()
        await self._server.close()

    async def connect(self, sends: bytes = b"") -> "Connection":
        reader, writer = await asyncio.open_connection("127.0.0.1", self._port)
        self._writers.append(writer)
        writer.write(sends)
        return Connection(reader, writer)

    @web.middleware
    async def _guard(self, request: web.Request, handler: http_server.Handler) -> web.StreamResponse:
        if request.headers.get("Authorization") != "Bearer token":
            return await handler(request)
        authenticate(request)
        try:
            return await handler(request)
        finally:
            await drain(request)

    async def _read(self, request: web.Request) -> web.Response:
        length = 0
        while piece := await request.content.readany():
            self.bodies.append(piece)
            length += len(piece)
        return web.Response(text=str(length))

    async def _hello(self, _: web.Request) -> web.Response:
        return web.Response(text="hello")

    async def _refuse(self, _: web.Request) -> web.Response:
        raise web.HTTPConflict(text="no")


class Connection:
    """A connection of a client."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader, self.writer = reader, writer

    async def ask(self, *lines: str, body: bytes = b"") -> str:
        """The head of the answer to a request, and its body."""
        self.writer.write("\r\n".join([*lines, "Host: x", "", ""]).encode() + body)
        head = (await self.reader.readuntil(b"\r\n\r\n")).decode()
        length = int(head.lower().partition("content-length: ")[2].partition("\r\n")[0])
        return head + (await self.reader.readexactly(length)).decode()

    async def ends(self) -> bytes:
        """What comes until the server closes it."""
        try:
            return await self.reader.read()
        except ConnectionError:
            return b""


@pytest.fixture
async def served() -> AsyncIterator[Served]:
    async with Served() as made:
        yield made


@pytest.fixture
def soon(monkeypatch: pytest.MonkeyPatch) -> None:
    """The time before authentication is short."""
    monkeypatch.setattr(http_server, "UNAUTHENTICATED_SECONDS", 0.2)


@pytest.mark.usefixtures("soon")
@pytest.mark.parametrize(
    "sends", [b"", b"G", b"GET / HTTP/1.1\r\nX: " + b"x" * 6_000, b"GET / HTTP/1.1\r\n" + b"A: b\r\n" * 90]
)
async def test_a_connection_that_sends_no_request_is_closed(served: Served, sends: bytes) -> None:
    assert await (await served.connect(sends)).ends() == b""


@pytest.mark.usefixtures("soon")
async def test_of_a_body_no_more_is_read_before_authentication(served: Served) -> None:
    connection = await served.connect(b"POST /read HTTP/1.1\r\nHost: x\r\nContent-Length: 10000000\r\n\r\n")
    connection.writer.write(b"x" * 10_000_000)
    assert await connection.ends() == b""
    assert 0 < sum(map(len, served.bodies)) <= MAX_UNAUTHENTICATED_BYTES


async def test_a_connection_is_closed_with_its_first_answer_before_authentication(served: Served) -> None:
    connection = await served.connect()
    assert "connection: close" in (await connection.ask("GET / HTTP/1.1")).lower()
    assert await connection.ends() == b""
    several = await served.connect(b"GET / HTTP/1.1\r\nHost: x\r\n\r\n" * 100)
    assert (await several.ends()).count(b"hello") == 1


async def test_an_encoded_body_is_refused_and_not_unpacked(served: Served) -> None:
    body = gzip.compress(b"\0" * 2**20)
    lines = ("POST /read HTTP/1.1", "Content-Encoding: gzip", f"Content-Length: {len(body)}")
    for more in ((), (TOKEN,)):
        assert (await (await served.connect()).ask(*lines, *more, body=body)).startswith("HTTP/1.1 415 ")
    assert served.bodies == []


async def test_one_connection_too_many_closes_the_oldest_that_sends_nothing(
    served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(http_server, "MAX_UNAUTHENTICATED", 3)
    sends, silent = await served.connect(b"GET / "), await served.connect()
    others = [await served.connect() for _ in range(2)]
    assert await silent.ends() == b""
    assert "hello" in await others[0].ask("GET / HTTP/1.1")
    sends.writer.write(b"HTTP/1.1\r\nHost: x\r\n\r\n")
    assert b"hello" in await sends.ends()


@pytest.mark.usefixtures("soon")
async def test_after_authentication_a_connection_has_no_limits(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http_server, "MAX_UNAUTHENTICATED", 1)
    connections = [await served.connect() for _ in range(1)]
    for _ in range(3):
        assert "hello" in await connections[-1].ask("GET / HTTP/1.1", TOKEN)
        connections.append(await served.connect())
    # The last one has not authenticated: once it is closed, the others' time would be over as well.
    assert await connections.pop().ends() == b""
    for connection in connections:
        body = b"x" * 3_000_000
        lines = ("POST /read HTTP/1.1", TOKEN, f"Content-Length: {len(body)}")
        assert (await connection.ask(*lines, body=body)).endswith("3000000")
        assert "hello" in await connection.ask("GET / HTTP/1.1", TOKEN)


async def test_a_refusal_reaches_an_authenticated_client_that_still_sends(served: Served) -> None:
    connection = await served.connect()
    body = b"x" * 10_000_000
    answer = await connection.ask("POST /no HTTP/1.1", TOKEN, f"Content-Length: {len(body)}", body=body)
    assert answer.startswith("HTTP/1.1 409 ")
    assert "hello" in await connection.ask("GET / HTTP/1.1", TOKEN)
