"""A browser as the coordinator sees it: requests with cookies, a store of cookies by the rules of RFC 6265 (which know
hosts and paths, and no ports), and a stream of server-sent events."""

import http.client
import http.cookiejar
import json
import time
import urllib.error
import urllib.request
from collections.abc import Mapping
from http.server import ThreadingHTTPServer
from typing import Any, Self

from tandem_coordinator.page.routes import Sessions
from tests.support.coordinator_process import TOKEN, Coordinator
from tests.support.http_server import QuietHandler
from tests.support.waiting import SECONDS

PAGE = Sessions(TOKEN).path


def invited(coordinator: Coordinator) -> str:
    """The cookie of somebody who was invited."""
    with coordinator.client() as client:
        traded = coordinator.ask("POST", "/open", {"word": client.invitation()})
    assert traded.status == 200, traded.body
    return traded.cookie


class Browser:
    """Sends to each address of 127.0.0.1 the cookies that a browser would."""

    def __init__(self) -> None:
        self.cookies = http.cookiejar.CookieJar()
        self._opener = urllib.request.build_opener(
            urllib.request.ProxyHandler({}), urllib.request.HTTPCookieProcessor(self.cookies)
        )

    def ask(self, port: int, path: str, body: Any = None) -> tuple[int, str]:
        """Status and content of the answer to a request; with a body, which is sent as JSON, it is a POST."""
        content = None if body is None else json.dumps(body).encode()
        try:
            with self._opener.open(f"http://127.0.0.1:{port}{path}", content, SECONDS) as answer:
                return answer.status, answer.read().decode()
        except urllib.error.HTTPError as error:
            return error.code, error.read().decode()


class OtherServer(ThreadingHTTPServer):
    """A server on another port, as another tenant's forwarded one is, with the path and the cookies of each request."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Listener)
        self.requests: list[tuple[str, str | None]] = []


class _Listener(QuietHandler):
    server: OtherServer

    def do_GET(self) -> None:
        self.server.requests.append((self.path, self.headers["Cookie"]))
        self.send_response(200)
        self.send_header("Set-Cookie", "tandem-own=1; Path=/")
        self.end_headers()


class Stream:
    """The parts of the page, as they come. Use it in `with`."""

    def __init__(self, coordinator: Coordinator, cookie: str, look: str = "wide", page: str = PAGE) -> None:
        self._connection = http.client.HTTPConnection("127.0.0.1", coordinator.port, timeout=SECONDS)
        self._connection.request("GET", f"{page}stream?look={look}", headers={"Cookie": cookie})
        self._response = self._connection.getresponse()
        self.status, self.headers = self._response.status, self._response.headers
        self.parts: dict[str, str] = {}
        self.kinds: list[str] = []
        self.over: bool | None = None

    def until(self, true: Any, what: str, seconds: float = SECONDS) -> None:
        """Take what comes until something is true of the parts so far."""
        deadline = time.monotonic() + seconds
        while not true(self.parts):
            assert time.monotonic() < deadline, f"not within {seconds:g} s: {what}; {self.kinds[-5:]}"
            assert self._take(), f"the stream ended before: {what}"

    def until_its_end(self) -> None:
        while self._take():
            pass

    def _take(self) -> bool:
        kind, data = "", ""
        while line := self._response.readline().decode():
            if line == "\n" and kind:
                self._hear(kind, json.loads(data))
                return True
            name, _, value = line.rstrip("\n").partition(": ")
            kind = value if name == "event" else kind
            data = value if name == "data" else data
        return False

    def _hear(self, kind: str, data: Mapping[str, Any]) -> None:
        self.kinds.append(kind)
        if kind == "parts":
            self.parts.update(data["parts"])
        if kind == "end":
            self.over = bool(data["over"])

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._connection.close()
