"""A proxy in front of the API server that fails as an overloaded one does: `Storm`.

A part of the requests is answered 429 or 500 and not done, is done and answered 503, or is done late. Watches are
passed on, and cut after some seconds. What it answers is drawn by chance, from a seed. It serves plain HTTP on
loopback, and passes the client's token on.
"""

import asyncio
import base64
import ssl
import threading
from collections import Counter
from random import Random
from typing import Any, Self

import aiohttp
import yaml
from aiohttp import web

from tests.support.cluster.operated import kubectl
from tests.support.ports import reserved_port

SHARES = {"429": 0.25, "500": 0.15, "done, and 503": 0.15, "late": 0.15}
"""Shares of the requests that get these answers while there is a storm; the others are passed on."""
LATE_SECONDS = (0.5, 6.0)
CUT_SECONDS = (2.0, 10.0)
SKIPPED_HEADERS = {"host", "content-length", "transfer-encoding", "connection", "content-encoding"}


class Storm:
    """The proxy, in a thread of its own. As a context it is closed in the end.

    Attributes:
        address: for the kubeconfig of its clients.
        blows: whether it fails requests now.
        answers: numbers of answers by kind, while it blows.
        made: names of the pods that the API server has created.
    """

    def __init__(self, seed: int = 1) -> None:
        self.address = f"http://127.0.0.1:{reserved_port()}"
        self.blows = True
        self.answers = Counter[str]()
        self.made: list[str] = []
        self._random = Random(seed)
        cluster = yaml.safe_load(kubectl("config", "view", "--raw", "--minify", "--flatten", "-o", "yaml"))["clusters"][
            0
        ]["cluster"]
        self._server = cluster["server"]
        authority = base64.b64decode(cluster["certificate-authority-data"]).decode()
        self._tls = ssl.create_default_context(cadata=authority)
        self._loop = asyncio.new_event_loop()
        self._over = asyncio.Event()
        self._ready = threading.Event()
        self._thread = threading.Thread(target=self._loop.run_until_complete, args=(self._serve(),), daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        assert self._ready.wait(10.0)
        return self

    def __exit__(self, *_: object) -> None:
        self._loop.call_soon_threadsafe(self._over.set)
        self._thread.join(10.0)
        self._loop.close()

    async def _serve(self) -> None:
        application = web.Application(client_max_size=2**24)
        application.router.add_route("*", "/{path:.*}", self._answer)
        runner = web.AppRunner(application, access_log=None, shutdown_timeout=0.1)
        await runner.setup()
        async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(ssl=self._tls, limit=0)) as self._session:
            await web.TCPSite(runner, "127.0.0.1", int(self.address.rpartition(":")[2])).start()
            self._ready.set()
            await self._over.wait()
            await runner.cleanup()
            rest = asyncio.all_tasks() - {asyncio.current_task()}
            for task in rest:
                task.cancel()
            await asyncio.gather(*rest, return_exceptions=True)

    def _drawn(self) -> str:
        """What becomes of the next request."""
        if not self.blows:
            return "done"
        share = self._random.random()
        for answer, part in SHARES.items():
            if (share := share - part) < 0:
                self.answers[answer] += 1
                return answer
        self.answers["done"] += 1
        return "done"

    async def _answer(self, request: web.Request) -> web.StreamResponse:
        if request.query.get("watch") in ("true", "1"):
            return await self._watch(request)
        match self._drawn():
            case "429":
                return _refusal(429, "TooManyRequests", {"Retry-After": "1"})
            case "500":
                return _refusal(500, "InternalError")
            case "done, and 503":
                await self._pass_on(request)
                return _refusal(503, "ServiceUnavailable")
            case "late":
                await asyncio.sleep(self._random.uniform(*LATE_SECONDS))
        return await self._pass_on(request)

    def _upstream(self, request: web.Request, body: bytes | None, **options: Any) -> Any:
        headers = {name: value for name, value in request.headers.items() if name.lower() not in SKIPPED_HEADERS}
        return self._session.request(
            request.method,
            self._server + request.raw_path,
            headers=headers,
            data=body,
            allow_redirects=False,
            **options,
        )

    async def _pass_on(self, request: web.Request) -> web.Response:
        async with self._upstream(request, await request.read() or None) as answer:
            content = await answer.read()
            if request.method == "POST" and request.path.endswith("/pods") and answer.status == 201:
                self.made.append((await answer.json())["metadata"]["name"])
            return web.Response(
                status=answer.status, body=content, headers={"Content-Type": answer.headers.get("Content-Type", "")}
            )

    async def _watch(self, request: web.Request) -> web.StreamResponse:
        """Pass the lines of a watch on; in a storm, cut it after some seconds."""
        seconds = self._random.uniform(*CUT_SECONDS) if self.blows else None
        async with self._upstream(request, None, timeout=aiohttp.ClientTimeout(total=None)) as answer:
            response = web.StreamResponse(status=answer.status)
            response.content_type = "application/json"
            await response.prepare(request)
            try:
                async with asyncio.timeout(seconds):
                    async for piece in answer.content.iter_any():
                        await response.write(piece)
            except TimeoutError:
                self.answers["watch cut"] += 1
            return response


def _refusal(code: int, reason: str, headers: dict[str, str] | None = None) -> web.Response:
    body = {"kind": "Status", "apiVersion": "v1", "status": "Failure", "reason": reason, "code": code}
    return web.json_response(body | {"message": f"the storm says {reason}"}, status=code, headers=headers)
