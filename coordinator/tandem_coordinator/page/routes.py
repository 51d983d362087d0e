"""The routes of the page: the requests, their authentication, and the response headers.

POST /v1/invitation    with the token, as all of /v1: creates an invitation, which opens the page once
GET  /open             a page that takes the invitation out of the address bar and exchanges it
POST /open             the exchange of the invitation for a cookie
GET  /page/KEY/        the page, with the cookie
GET  /page/KEY/stream  its parts, as server-sent events, with the cookie
GET  /page/KEY/ready   whether the stream would be answered, and the reason if not: a browser hides it from scripts
GET  /page/…           style, scripts and icon, which contain nothing about the job

The token itself never reaches a browser. `tandem open` sends it to the coordinator and gets an *invitation*, a secret
that is valid once and for minutes. The browser exchanges it for a cookie, whose value is signed with a key that is
derived from the token: a coordinator that has restarted accepts it, no state has to be stored, and nobody can compute
the token from it. The cookie opens the page and nothing else.

Browsers send the cookies of 127.0.0.1 to all of its ports, and on another one may be the page of another tenant's job.
So the cookie is for a path that nobody can guess (KEY, also derived from the token), and is sent with no other request.

Rejected: a name for each job (`HASH.localhost`, which Safari does not resolve), and a secret in the page's own storage
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
from tandem_coordinator.page.viewers import SCREENS, Full, Live, Viewer

INVITATION_SECONDS = 600.0
"""Lifetime of an invitation, in seconds: enough to carry it to another machine."""
SESSION_SECONDS = 86_400
"""Lifetime of a cookie, in seconds."""
MAX_INVITATIONS = 64
"""Maximum number of open invitations; one more replaces the oldest."""
MAX_COOKIE_LENGTH = 200


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
        """Path of the page, and the only path with which browsers send the cookie."""

    def invite(self) -> str:
        """Create an invitation."""
        while len(self._open) >= MAX_INVITATIONS:
            del self._open[next(iter(self._open))]
        word = secrets.token_urlsafe(24)
        self._open[_hashed(word)] = self._clock() + INVITATION_SECONDS
        return word

    def accept(self, word: str) -> str | None:
        """Exchange an invitation for the value of a cookie; None if it is unknown, used or too old."""
        # Looked up by its hash, so that the time of the lookup reveals nothing about invitations.
        until = self._open.pop(_hashed(word), None)
        if until is None or until < self._clock():
            return None
        claim = f"{int(self._clock()) + SESSION_SECONDS}.{secrets.token_urlsafe(12)}"
        return f"{claim}.{self._signature(claim)}"

    def is_valid(self, value: str | None) -> bool:
        """Whether a cookie is one of ours, and has not expired."""
        if not value or len(value) > MAX_COOKIE_LENGTH:
            return False
        claim, _, signature = value.rpartition(".")
        if not hmac.compare_digest(signature.encode(errors="replace"), self._signature(claim).encode()):
            return False
        return int(claim.partition(".")[0]) > self._clock()

    def _signature(self, claim: str) -> str:
        return hmac.new(self._key, claim.encode(errors="replace"), hashlib.sha256).hexdigest()


def is_direct(host: str) -> bool:
    """Whether a Host header is an address or names this machine, and is no name that others may have pointed here.

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
KEEPALIVE_SECONDS = 3.0
"""Maximum time between two messages of a stream, in seconds: a browser would not notice a connection that is cut
off."""
WRITE_TIMEOUT_SECONDS = 20.0
"""Time without reading after which a viewer is taken to be gone, in seconds."""
MAX_BODY_BYTES = 1024
"""Maximum size of an exchange's body, in bytes."""

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
"""Headers of the page's responses: it runs only its own script, cannot be framed, and is not cached."""

FILES = {
    "page.js": "text/javascript",
    "open.js": "text/javascript",
    "icon.svg": "image/svg+xml",
}


class LivePage:
    """The page of one job. Create it inside a running event loop.

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
        self._page, self._entrance = _file("page.html"), _file("open.html")

    def is_page_path(self, path: str) -> bool:
        """Whether a path belongs to the page, which authenticates it itself: a browser has no token."""
        return path in ("/", "/open") or path.startswith("/page/")

    def add_to(self, app: web.Application) -> None:
        """Add the page's routes to an application."""
        app.add_routes(
            [
                web.post(INVITATION, self._invite),
                web.get("/open", self._show_entrance),
                web.post("/open", self._exchange),
                web.get("/", self._redirect_to_entrance),
                web.get(self._sessions.path, self._show),
                web.get(f"{self._sessions.path}stream", self._stream),
                web.get(f"{self._sessions.path}ready", self._ready),
                web.get("/page/{name}", self._send_file),
            ]
        )
        app.on_response_prepare.append(self._protect)
        app.on_shutdown.append(self._close)

    async def _protect(self, request: web.Request, response: web.StreamResponse) -> None:
        if self.is_page_path(request.path):
            response.headers.update(HEADERS)

    async def _close(self, _: web.Application) -> None:
        await self._live.close()

    async def _invite(self, _: web.Request) -> web.Response:
        return web.json_response(
            {"word": self._sessions.invite(), "seconds": INVITATION_SECONDS}, headers={"Cache-Control": "no-store"}
        )

    async def _show_entrance(self, request: web.Request) -> web.Response:
        _refuse_other_hosts(request)
        return _html(self._entrance)

    async def _exchange(self, request: web.Request) -> web.Response:
        _refuse_other_hosts(request)
        origin = request.headers.get("Origin")
        if origin is not None and urlsplit(origin).netloc != request.host:
            raise web.HTTPForbidden(text="an invitation is exchanged by the page that it opens")
        value = self._sessions.accept(await _word(request))
        if value is None:
            raise web.HTTPForbidden(text="this invitation was used, has expired, or belongs to another coordinator")
        path = self._sessions.path
        answer = web.json_response({"page": path})
        answer.set_cookie(
            self._sessions.cookie, value, max_age=SESSION_SECONDS, httponly=True, samesite="Strict", path=path
        )
        return answer

    async def _redirect_to_entrance(self, request: web.Request) -> web.Response:
        _refuse_other_hosts(request)
        return web.Response(status=303, headers={"Location": "/open"})

    async def _show(self, request: web.Request) -> web.Response:
        _refuse_other_hosts(request)
        return _html(self._page) if self.has_session(request) else await self._redirect_to_entrance(request)

    async def _ready(self, request: web.Request) -> web.Response:
        self._admit(request)
        return web.Response(status=204)

    async def _send_file(self, request: web.Request) -> web.Response:
        _refuse_other_hosts(request)
        entry = self._files.get(request.match_info["name"])
        if entry is None:
            raise web.HTTPNotFound(text="the page has no such file")
        text, kind = entry
        return web.Response(text=text, content_type=kind)

    async def _stream(self, request: web.Request) -> web.StreamResponse:
        self._admit(request)
        screen = request.query.get("look", "wide")
        if screen not in SCREENS:
            raise web.HTTPBadRequest(text=f"look is {' or '.join(SCREENS)}")
        try:
            viewer = self._live.viewers.enter(screen)
        except Full:
            raise _too_many_viewers() from None
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream", "X-Accel-Buffering": "no"})
        try:
            await response.prepare(request)
            self._live.wake()
            await _send(response, "retry: 2000\n\n")
            await _follow(viewer, response)
        except (TimeoutError, ConnectionError):
            # The viewer is gone without closing the connection.
            if request.transport is not None:
                request.transport.abort()
        finally:
            self._live.viewers.leave(viewer)
        return response

    def _admit(self, request: web.Request) -> None:
        """Admit a viewer.

        Raises:
            HTTPForbidden, HTTPUnauthorized, HTTPTooManyRequests: who may not, or not now.
        """
        _refuse_other_hosts(request)
        if not self.has_session(request):
            raise web.HTTPUnauthorized(
                text="the session of this page has expired, or is for another job; open it again"
            )
        if self._live.viewers.full:
            raise _too_many_viewers()

    def has_session(self, request: web.Request) -> bool:
        """Whether a request has a valid cookie of this page."""
        return self._sessions.is_valid(request.cookies.get(self._sessions.cookie))


async def _follow(viewer: Viewer, response: web.StreamResponse) -> None:
    while True:
        closing = viewer.is_closing
        parts = await viewer.wait(0.0 if closing else KEEPALIVE_SECONDS)
        await _send(response, _event("parts", {"parts": parts}) if parts else _event("beat", {}))
        if closing and not parts:
            await _send(response, _event("end", {"over": viewer.is_over}))
            return


async def _send(response: web.StreamResponse, text: str) -> None:
    async with asyncio.timeout(WRITE_TIMEOUT_SECONDS):
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
    body = await request.content.read(MAX_BODY_BYTES + 1)
    try:
        word = json.loads(body)["word"] if len(body) <= MAX_BODY_BYTES else None
    except (ValueError, KeyError, TypeError):
        word = None
    if not isinstance(word, str):
        raise web.HTTPBadRequest(text='send {"word": …}')
    return word


def _too_many_viewers() -> web.HTTPTooManyRequests:
    return web.HTTPTooManyRequests(text="the page has the maximum number of viewers; it tries again")


def _file(name: str) -> str:
    return resources.files(__package__).joinpath(name).read_text("utf-8")
