"""A browser as the coordinator sees it: requests with cookies, and a stream of server-sent events."""

import http.client
import json
import time
from collections.abc import Mapping
from typing import Any, Self

from tandem_coordinator.page.routes import Sessions
from tests.support.coordinator_process import TOKEN, Coordinator
from tests.support.waiting import SECONDS

PAGE = Sessions(TOKEN).path


def invited(coordinator: Coordinator) -> str:
    """The cookie of somebody who was invited."""
    with coordinator.client() as client:
        traded = coordinator.ask("POST", "/open", {"word": client.invitation()})
    assert traded.status == 200, traded.body
    return traded.cookie


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
        """Take all that comes."""
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
