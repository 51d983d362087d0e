"""The routes of the page: the requests, their authentication, and the response headers.

POST /v1/invitation    with the token, as all of /v1: a word that opens the page once
GET  /open             a page that takes the word out of the address bar and trades it
POST /open             the trade: the word for a cookie
GET  /page/KEY/        the page, with the cookie
GET  /page/KEY/stream  its parts, as server-sent events, with the cookie
GET  /page/KEY/ready   whether the stream would be answered, and if not, why: a browser does not tell its scripts
GET  /page/…           style, scripts and icon, which say nothing of the job

The token itself never comes near a browser. `tandem open` shows it to the coordinator and gets an *invitation*, a word
that is good for once and for minutes. The browser trades it for a cookie, whose value is signed with a key that is
made of the token: a coordinator that has restarted knows it again, nothing has to be kept, and nobody can work back to
the token. The cookie opens the page and nothing else.

Browsers send the cookies of 127.0.0.1 to all of its ports, and on another one may be the page of another tenant's job.
So the cookie is for a path that nobody can guess (KEY, made of the token as well), and is sent with no other request.

Rejected: a name for each job (`HASH.localhost`, which Safari does not resolve), and a word in the page's own storage
(an EventSource sends no headers).
"""

import asyncio
import hashlib
import hmac
import ipaddress
import json
import secrets
import time
from collections.abc import Callable, Mapping
from importlib import resources
from typing import Any
from urllib.parse import urlsplit

from aiohttp import web

from tandem.rundir.layout import RunDir
from tandem_coordinator import charts
from tandem_coordinator.charts import chart
from tandem_coordinator.coordinator import Coordinator
from tandem_coordinator.page.viewers import LOOKS, Full, Live, Viewer

INVITATION_SECONDS = 600.0
"""How long an invitation is good for; time enough to carry it to another machine."""
SESSION_SECONDS = 86_400
"""How long a cookie is good for."""
MAX_INVITATIONS = 64
"""That are open at the same time; the oldest is forgotten for one more."""
MAX_COOKIE = 200


class Sessions:
    """The invitations and cookies of one job.

    Args:
        token: the job's secret.
        clock: seconds since the epoch.
    """

    def __init__(self, token: str, clock: Callable[[], float] = time.time) -> None:
        self._key = hmac.digest(token.encode(), b"tandem live page", "sha256")
        self._clock = clock
        self._open: dict[str, float] = {}
        self.cookie = f"tandem-{hmac.new(self._key, b'name', hashlib.sha256).hexdigest()[:12]}"
        """Name of this job's cookie."""
        self.path = f"/page/{hmac.new(self._key, b'path', hashlib.sha256).hexdigest()[:32]}/"
        """Where the page is, and the only path with which browsers send the cookie."""

    def invite(self) -> str:
        """A new invitation."""
        while len(self._open) >= MAX_INVITATIONS:
            del self._open[next(iter(self._open))]
        word = secrets.token_urlsafe(24)
        self._open[_hashed(word)] = self._clock() + INVITATION_SECONDS
        return word

    def accept(self, word: str) -> str | None:
        """The value of a cookie for an invitation, None if it is unknown, used or too old."""
        # Looked up by its hash: how long that takes says nothing about the words there are.
        until = self._open.pop(_hashed(word), None)
        if until is None or until < self._clock():
            return None
        claim = f"{int(self._clock()) + SESSION_SECONDS}.{secrets.token_urlsafe(12)}"
        return f"{claim}.{self._signature(claim)}"

    def knows(self, value: str | None) -> bool:
        """Whether a cookie is one of ours, and still good."""
        if not value or len(value) > MAX_COOKIE:
            return False
        claim, _, signature = value.rpartition(".")
        if not hmac.compare_digest(signature.encode(errors="replace"), self._signature(claim).encode()):
            return False
        return int(claim.partition(".")[0]) > self._clock()

    def _signature(self, claim: str) -> str:
        return hmac.new(self._key, claim.encode(errors="replace"), hashlib.sha256).hexdigest()


def is_direct(host: str) -> bool:
    """Whether a Host header names this machine, or an address, and not a name that somebody else may have pointed here.

    A page elsewhere can have its own name lead to 127.0.0.1 (DNS rebinding), and its scripts would then be of the same
    origin as this page. They cannot do that with an address.
    """
    name = host.rpartition(":")[0] if host.rpartition(":")[2].isdecimal() else host
    name = name.removeprefix("[").removesuffix("]").lower()
    if name == "localhost" or name.endswith(".localhost"):
        return True
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True


def _hashed(word: str) -> str:
    return hashlib.sha256(word.encode(errors="replace")).hexdigest()


INVITATION = "/v1/invitation"
BEAT_SECONDS = 3.0
"""A stream says at least so often that it is there: a browser would not notice a connection that is cut off."""
WRITE_SECONDS = 20.0
"""A viewer that takes nothing for so long is gone."""
MAX_WORD = 1024
"""Bytes of what is traded."""

HEADERS = {
    "Content-Security-Policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; "
        "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    ),
    "X-Frame-Options": "DENY",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cache-Control": "no-store",
}
"""The page runs its own script and nothing else, is framed by nobody, and stays in no cache."""

FILES = {
    "page.js": "text/javascript",
    "open.js": "text/javascript",
    "icon.svg": "image/svg+xml",
}


class LivePage:
    """The page of one job. Make it inside a running event loop.

    Args:
        token: the job's secret, from which its sessions follow.
    """

    def __init__(self, coordinator: Coordinator, token: str, rundir: RunDir) -> None:
        self._sessions = Sessions(token)
        self._live = Live(coordinator, rundir)
        self._files = {name: (_file(name), kind) for name, kind in FILES.items()}
        # The report's page and this one look alike, and follow the reader's device in the same way.
        self._files["page.css"] = (chart.variables() + charts.style() + _file("page.css"), "text/css")
        self._files["charts.js"] = (charts.script(), "text/javascript")
        self._page, self._door = _file("page.html"), _file("open.html")

    def guards(self, path: str) -> bool:
        """Whether a path is the page's, which looks after it itself: a browser has no token."""
        return path in ("/", "/open") or path.startswith("/page/")

    def add_to(self, app: web.Application) -> None:
        """Give an application the page's routes."""
        app.add_routes(
            [
                web.post(INVITATION, self._invite),
                web.get("/open", self._show_door),
                web.post("/open", self._trade),
                web.get("/", self._send_to_door),
                web.get(self._sessions.path, self._show),
                web.get(f"{self._sessions.path}stream", self._stream),
                web.get(f"{self._sessions.path}ready", self._ready),
                web.get("/page/{name}", self._send_file),
            ]
        )
        app.on_response_prepare.append(self._protect)
        app.on_shutdown.append(self._close)

    async def _protect(self, request: web.Request, response: web.StreamResponse) -> None:
        if self.guards(request.path):
            response.headers.update(HEADERS)

    async def _close(self, _: web.Application) -> None:
        await self._live.close()

    async def _invite(self, _: web.Request) -> web.Response:
        return web.json_response(
            {"word": self._sessions.invite(), "seconds": INVITATION_SECONDS}, headers={"Cache-Control": "no-store"}
        )

    async def _show_door(self, request: web.Request) -> web.Response:
        _refuse_other_hosts(request)
        return _html(self._door)

    async def _trade(self, request: web.Request) -> web.Response:
        _refuse_other_hosts(request)
        origin = request.headers.get("Origin")
        if origin is not None and urlsplit(origin).netloc != request.host:
            raise web.HTTPForbidden(text="an invitation is traded by the page that it opens")
        value = self._sessions.accept(await _word(request))
        if value is None:
            raise web.HTTPForbidden(text="this invitation was used, is too old, or is of another coordinator")
        where = self._sessions.path
        answer = web.json_response({"page": where})
        answer.set_cookie(
            self._sessions.cookie, value, max_age=SESSION_SECONDS, httponly=True, samesite="Strict", path=where
        )
        return answer

    async def _send_to_door(self, request: web.Request) -> web.Response:
        _refuse_other_hosts(request)
        return web.Response(status=303, headers={"Location": "/open"})

    async def _show(self, request: web.Request) -> web.Response:
        _refuse_other_hosts(request)
        return _html(self._page) if self.knows(request) else await self._send_to_door(request)

    async def _ready(self, request: web.Request) -> web.Response:
        self._admit(request)
        return web.Response(status=204)

    async def _send_file(self, request: web.Request) -> web.Response:
        _refuse_other_hosts(request)
        found = self._files.get(request.match_info["name"])
        if found is None:
            raise web.HTTPNotFound(text="the page has no such file")
        text, kind = found
        return web.Response(text=text, content_type=kind)

    async def _stream(self, request: web.Request) -> web.StreamResponse:
        self._admit(request)
        look = request.query.get("look", "wide")
        if look not in LOOKS:
            raise web.HTTPBadRequest(text=f"look is {' or '.join(LOOKS)}")
        try:
            viewer = self._live.viewers.enter(look)
        except Full:
            raise _full() from None
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream", "X-Accel-Buffering": "no"})
        try:
            await response.prepare(request)
            self._live.wake()
            await _send(response, "retry: 2000\n\n")
            await _follow(viewer, response)
        except (TimeoutError, ConnectionError):
            # It is gone, and has told nobody.
            if request.transport is not None:
                request.transport.abort()
        finally:
            self._live.viewers.leave(viewer)
        return response

    def _admit(self, request: web.Request) -> None:
        """Let somebody look.

        Raises:
            HTTPForbidden, HTTPUnauthorized, HTTPTooManyRequests: who may not, or not now.
        """
        _refuse_other_hosts(request)
        if not self.knows(request):
            raise web.HTTPUnauthorized(text="this page was opened too long ago, or for another job; open it again")
        if self._live.viewers.full:
            raise _full()

    def knows(self, request: web.Request) -> bool:
        """Whether a request has a cookie of this page that is good."""
        return self._sessions.knows(request.cookies.get(self._sessions.cookie))


async def _follow(viewer: Viewer, response: web.StreamResponse) -> None:
    while True:
        closing = viewer.closing
        parts = await viewer.wait(0.0 if closing else BEAT_SECONDS)
        await _send(response, _event("parts", {"parts": parts}) if parts else _event("beat", {}))
        if closing and not parts:
            await _send(response, _event("end", {"over": viewer.over}))
            return


async def _send(response: web.StreamResponse, text: str) -> None:
    async with asyncio.timeout(WRITE_SECONDS):
        await response.write(text.encode())


def _event(kind: str, data: Mapping[str, Any]) -> str:
    return f"event: {kind}\ndata: {json.dumps(data)}\n\n"


def _html(text: str) -> web.Response:
    return web.Response(text=text, content_type="text/html", charset="utf-8")


def _refuse_other_hosts(request: web.Request) -> None:
    if not is_direct(request.host):
        raise web.HTTPMisdirectedRequest(
            text="the page answers under an address or localhost, not under a name; tandem open opens it"
        )


async def _word(request: web.Request) -> str:
    body = await request.content.read(MAX_WORD + 1)
    try:
        word = json.loads(body)["word"] if len(body) <= MAX_WORD else None
    except (ValueError, KeyError, TypeError):
        word = None
    if not isinstance(word, str):
        raise web.HTTPBadRequest(text='send {"word": …}')
    return word


def _full() -> web.HTTPTooManyRequests:
    return web.HTTPTooManyRequests(text="as many others are looking as may; this page tries again")


def _file(name: str) -> str:
    return resources.files(__package__).joinpath(name).read_text("utf-8")
