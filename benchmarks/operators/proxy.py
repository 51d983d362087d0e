"""A counting proxy between operator and API server: `python -m benchmarks.operators.proxy`.

It prints its port, and answers GET /counts with the number of forwarded requests of each kind. The caller's identity is
forwarded as well (the service account's token), so that rights are checked as usual. Go's client only sends its token
over TLS; for such a client, PUT /token sets the token of requests without one. It is a process of its own, so that it
delays no requests when the benchmark is busy.
"""

import asyncio
import sys
from collections import Counter

import aiohttp
from aiohttp import web

from benchmarks.operators.cluster import Access

PASSED = ("Authorization", "Content-Type", "Accept")
COUNTS, TOKEN = "/counts", "/token"
WRITES = {"POST": "create", "PUT": "update", "PATCH": "patch", "DELETE": "delete"}


def name_of(method: str, path: str, watch: bool) -> str:
    """Name a request in the words of RBAC, as `verb resource`; `patch jobs/status` for a subresource."""
    parts = path.strip("/").split("/")
    parts = parts[2:] if parts[0] == "api" else parts[3:]
    if parts[:1] == ["namespaces"] and len(parts) > 2:
        parts = parts[2:]
    if not parts:
        return f"{method} {path}"
    resource = "/".join([parts[0], *parts[2:3]])
    reading = "watch" if watch else "get" if len(parts) > 1 else "list"
    return f"{WRITES.get(method, reading)} {resource}"


async def serve() -> None:
    """Serve until cancelled."""
    access = await Access.of_kubeconfig()
    counts: Counter[str] = Counter()
    anybody: dict[str, str] = {}
    # Without the administrator's certificate, which would allow everything.
    connector = aiohttp.TCPConnector(ssl=access.tls(anonymous=True), limit=0)

    async def count(_: web.Request) -> web.Response:
        return web.json_response(counts)

    async def take_token(request: web.Request) -> web.Response:
        anybody["Authorization"] = f"Bearer {(await request.text()).strip()}"
        return web.Response(status=204)

    async def pass_on(request: web.Request) -> web.StreamResponse:
        counts[name_of(request.method, request.path, "watch" in request.query)] += 1
        headers = anybody | {name: request.headers[name] for name in PASSED if name in request.headers}
        # An empty body would still be sent with a content type.
        body = await request.read() or None
        async with session.request(
            request.method, access.host + request.raw_path, data=body, headers=headers
        ) as answer:
            response = web.StreamResponse(status=answer.status)
            response.headers["Content-Type"] = answer.headers.get("Content-Type", "application/json")
            await response.prepare(request)
            async for chunk in answer.content.iter_any():
                await response.write(chunk)
            await response.write_eof()
            return response

    timeout = aiohttp.ClientTimeout(total=None)
    async with aiohttp.ClientSession(connector=connector, timeout=timeout, auto_decompress=True) as session:
        app = web.Application(client_max_size=1 << 24)
        app.router.add_get(COUNTS, count)
        app.router.add_put(TOKEN, take_token)
        app.router.add_route("*", "/{path:.*}", pass_on)
        runner = web.AppRunner(app, access_log=None)
        await runner.setup()
        try:
            site = web.TCPSite(runner, "127.0.0.1", 0)
            await site.start()
            print(runner.addresses[0][1], flush=True)
            await asyncio.Event().wait()
        finally:
            await runner.cleanup()


if __name__ == "__main__":
    sys.exit(asyncio.run(serve()))
