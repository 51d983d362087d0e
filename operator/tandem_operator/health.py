"""What probes and Prometheus ask the operator: /healthz, /readyz, /metrics."""

import asyncio
from collections.abc import Callable

from aiohttp import web

from tandem_operator.metrics import OperatorMetrics
from tandem_operator.watching import Watching

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"


async def serve_health(
    port: int, watching: Watching, numbers: OperatorMetrics, waits: Callable[[], str] = lambda: ""
) -> None:
    """Answer until cancelled.

    Args:
        port: 0 takes a free one.
        waits: why this operator does not act yet, which is no fault of its own; empty if it does.

    Raises:
        OSError: the port is in use.
    """

    async def healthz(_: web.Request) -> web.Response:
        complaint = watching.complaint
        return web.Response(status=503 if complaint else 200, text=complaint or "ok")

    async def readyz(_: web.Request) -> web.Response:
        complaint = (watching.complaint or waits()) if watching.listed.is_set() else "not everything is listed yet"
        return web.Response(status=503 if complaint else 200, text=complaint or "ok")

    async def metrics(_: web.Request) -> web.Response:
        return web.Response(body=numbers.text(), headers={"Content-Type": CONTENT_TYPE})

    app = web.Application()
    app.add_routes([web.get("/healthz", healthz), web.get("/readyz", readyz), web.get("/metrics", metrics)])
    runner = web.AppRunner(app, access_log=None)
    await runner.setup()
    try:
        await web.TCPSite(runner, port=port).start()
        await asyncio.Event().wait()
    finally:
        await runner.cleanup()
