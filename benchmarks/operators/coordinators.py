"""One HTTP server that plays the coordinators of all jobs."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from aiohttp import web

from benchmarks.operators.cast import Cast
from tandem.protocol import BRIEF
from tandem_operator.pods import PORT


@asynccontextmanager
async def coordinators(cast: Cast, address: str) -> AsyncIterator[None]:
    """Answer for a while, at the port at which operators ask.

    Raises:
        OSError: something else has the port on this machine.
    """

    async def status(request: web.Request) -> web.Response:
        found = cast.snapshot(request.headers.get("Authorization", "").removeprefix("Bearer "))
        return web.json_response(found.dump()) if found is not None else web.Response(status=401)

    async def target(request: web.Request) -> web.Response:
        return web.json_response(await request.json())

    app = web.Application()
    app.add_routes([web.get(BRIEF, status), web.get("/status", status), web.post("/v1/target", target)])
    runner = web.AppRunner(app, access_log=None)
    await runner.setup()
    try:
        await web.TCPSite(runner, address, PORT).start()
        yield
    finally:
        await runner.cleanup()
