"""The HTTP server of the operator and of coordinators: it spends next to no memory on an unauthenticated client.

Any pod of a cluster may connect. So a connection starts with tight limits, and `authenticate` removes them:

    before      16 KiB are read, headers and body together; one request is answered, then the connection is closed,
                after ten seconds in any case; at most 1,024 such connections are open, and one more closes the oldest
    after       as any connection of aiohttp

Bodies are never decompressed: a request with a Content-Encoding is refused. The rest of a body is not read once a
request was answered (aiohttp reads on for up to ten seconds), unless the client has authenticated: `drain`.

Rejected: a limit for each address (all agents of a job may come through one proxy), a pause in which no connection is
accepted (strangers could delay agents for any time), and a time limit around aiohttp's handler (it starts after the
headers were read, and does not end a connection that sends none).
"""

import asyncio
import socket
from collections.abc import Awaitable, Callable
from contextlib import suppress
from typing import Any, cast

from aiohttp import web

MAX_UNAUTHENTICATED = 1_024
"""Maximum number of unauthenticated connections. Agents send their token in their first packet, so few of their
connections count at a time."""
MAX_UNAUTHENTICATED_BYTES = 16 * 1_024
"""Maximum bytes read from an unauthenticated client. The headers of a browser take one or two KiB."""
UNAUTHENTICATED_SECONDS = 10.0
ACCEPTED_AT_ONCE = 128
"""Number of connections to accept before data of the others is read. asyncio accepts as many as the backlog has, and
those would be more than may be unauthenticated."""
BACKLOG = 4_096
"""Connections that the kernel holds until they are accepted: agents of large jobs all connect at once after a restart.
With fewer, the kernel makes them retry after seconds."""
DRAIN_SECONDS = 10.0

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


class HttpServer:
    """Serves an application on a socket.

    Args:
        options: options of `web.AppRunner`.
    """

    def __init__(self, application: web.Application, **options: Any) -> None:
        application.middlewares.append(_refuse_encoded_bodies)
        application.on_response_prepare.append(_close_unauthenticated)
        self._runner = web.AppRunner(application, access_log=None, auto_decompress=False, lingering_time=0.0, **options)
        self._server: asyncio.Server | None = None

    async def start(self, sock: socket.socket) -> None:
        """Serve on a listening socket."""
        await self._runner.setup()
        assert self._runner.server is not None
        connections = _Connections(self._runner.server)
        self._server = await asyncio.get_running_loop().create_server(
            connections.accept, sock=sock, backlog=ACCEPTED_AT_ONCE
        )
        # Only the kernel's backlog: create_server has set it to the number of connections that asyncio accepts.
        sock.listen(BACKLOG)

    async def close(self) -> None:
        """Stop accepting connections, finish pending responses, and close all connections."""
        if self._server is not None:
            self._server.close()
        await self._runner.cleanup()


def authenticate(request: web.Request) -> None:
    """Remove the limits of a connection whose client has authenticated."""
    connection = _unauthenticated(request)
    if connection is not None:
        connection.authenticate()


async def drain(request: web.Request) -> None:
    """Read and discard the rest of an authenticated client's body. If the connection were closed while the client still
    sends, it would not receive the response."""
    if request.content.at_eof():
        return
    # A client that has disconnected, or stalls, does not wait for the response.
    with suppress(TimeoutError, ConnectionError, web.RequestPayloadError):
        async with asyncio.timeout(DRAIN_SECONDS):
            while await request.content.readany():
                pass


class _Connections:
    """The unauthenticated connections of a server."""

    def __init__(self, handler: Callable[[], asyncio.Protocol]) -> None:
        self._handler = handler
        self.buffer = memoryview(bytearray(MAX_UNAUTHENTICATED_BYTES))
        """Read buffer that the connections share: the event loop reads one of them at a time."""
        self._open: dict[_Unauthenticated, None] = {}

    def accept(self) -> "_Unauthenticated":
        return _Unauthenticated(self._handler(), self)

    def add(self, connection: "_Unauthenticated") -> None:
        if len(self._open) >= MAX_UNAUTHENTICATED:
            # Those that have sent nothing yet are closed first.
            silent = (candidate for candidate in self._open if candidate.is_silent)
            oldest = next(silent, next(iter(self._open)))
            oldest.abort()
        self._open[connection] = None

    def remove(self, connection: "_Unauthenticated") -> None:
        self._open.pop(connection, None)


class _Unauthenticated(asyncio.BufferedProtocol):
    """A connection, between its transport and aiohttp's handler, until its client has authenticated."""

    def __init__(self, handler: asyncio.Protocol, connections: _Connections) -> None:
        self._handler, self._connections = handler, connections
        self._room = MAX_UNAUTHENTICATED_BYTES
        self._transport: asyncio.Transport | None = None
        self._deadline: asyncio.TimerHandle | None = None

    @property
    def is_silent(self) -> bool:
        return self._room == MAX_UNAUTHENTICATED_BYTES

    def authenticate(self) -> None:
        self._leave()
        if self._transport is None or self._transport.is_closing():
            return
        self._transport.set_protocol(self._handler)
        if self._room <= 0:
            self._transport.resume_reading()

    def abort(self) -> None:
        self._leave()
        if self._transport is not None:
            self._transport.abort()

    def _leave(self) -> None:
        self._connections.remove(self)
        if self._deadline is not None:
            self._deadline.cancel()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        self._deadline = asyncio.get_running_loop().call_later(UNAUTHENTICATED_SECONDS, self.abort)
        self._connections.add(self)
        self._handler.connection_made(transport)

    def connection_lost(self, error: Exception | None) -> None:
        self._leave()
        self._handler.connection_lost(error)

    def get_buffer(self, sizehint: int) -> memoryview:
        return self._connections.buffer[: max(1, self._room)]

    def buffer_updated(self, nbytes: int) -> None:
        assert self._transport is not None
        self._room -= nbytes
        if self._room < 0:
            self.abort()
            return
        if self._room == 0:
            # The request may be complete, and about to be authenticated.
            self._transport.pause_reading()
        self._handler.data_received(bytes(self._connections.buffer[:nbytes]))

    def eof_received(self) -> bool | None:
        return self._handler.eof_received()

    def pause_writing(self) -> None:
        self._handler.pause_writing()

    def resume_writing(self) -> None:
        self._handler.resume_writing()


def _unauthenticated(request: web.BaseRequest) -> _Unauthenticated | None:
    protocol = None if request.transport is None else request.transport.get_protocol()
    return protocol if isinstance(protocol, _Unauthenticated) else None


async def _close_unauthenticated(request: web.Request, response: web.StreamResponse) -> None:
    if _unauthenticated(request) is not None:
        response.force_close()
        response.headers["Connection"] = "close"


@web.middleware
async def _refuse_encoded_bodies(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Answer 415 to a body with a Content-Encoding. Innermost, so that a client without a token gets 401 first."""
    if request.headers.get("Content-Encoding", "identity") != "identity":
        raise web.HTTPUnsupportedMediaType(text="send the body as it is, without Content-Encoding")
    return await handler(request)
