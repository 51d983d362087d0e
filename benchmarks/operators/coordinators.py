"""One HTTP server that simulates the coordinators of all jobs."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from aiohttp import web

from benchmarks.operators.cast import Cast
from tandem.wire.protocol import BRIEF_PATH
from tandem_operator.pods import PORT


@asynccontextmanager
async def coordinators(cast: Cast, address: str) -> AsyncIterator[None]:
    """Serve at the port that operators ask.

    Raises:
        OSError: the port is in use on this machine.
    """

    async def status(request: web.Request) -> web.Response:
        snapshot = cast.snapshot(request.headers.get("Authorization", "").removeprefix("Bearer "))
        return web.json_response(snapshot.dump()) if snapshot is not None else web.Response(status=401)

    async def target(request: web.Request) -> web.Response:
        return web.json_response(await request.json())

    app = web.Application()
    app.add_routes([web.get(BRIEF_PATH, status), web.get("/status", status), web.post("/v1/target", target)])
    runner = web.AppRunner(app, access_log=None)
    await runner.setup()
    try:
        await web.TCPSite(runner, address, PORT).start()
        yield
    finally:
        await runner.cleanup()
