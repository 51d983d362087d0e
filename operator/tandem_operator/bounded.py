"""Answers of the API server that cost too much to parse: they are told from their bytes, before anybody parses them.

An object has a megabyte and a half at most. As text that costs twice as much; as `[],[],…` or `{"a":1},…` twenty-five
times, and a list of such objects is the end of whoever has 300 MB. So commas and brackets are counted first, which
takes a millisecond. What has too many is passed over by the watch; the next list asks for fewer objects at once, and of
one that is too much by itself for the metadata alone (tandem_operator.api).

kopf parses for itself, so its session bounds what it is given (`kopf.AiohttpSession`).
"""

import asyncio
import json
import re
from collections.abc import AsyncIterator
from typing import Any

import aiohttp
import kopf

MOST_COST = 7_000_000
"""Bytes that an answer, and a line of a watch, may take once it is parsed, by estimate and beside its text. A pod takes
some 100,000."""
COMMA, BRACKET = 120, 100
"""Bytes for each: what stands between two commas is a number of 32, or a key of 60 in a table that has 60 for it; an
object that has entries takes 184. Those in texts count as well."""
UNREAD = "tandemUnread"
"""A field that no object has: why of this one the metadata alone were read."""
SMALL = 2**16
"""Bytes that cannot be too much, whatever they are."""
AGAIN_SECONDS = 1.0
"""Before the same credentials are given out again."""


def cost(text: bytes | bytearray) -> int:
    """An estimate of the bytes that this JSON takes once it is parsed, beside its text."""
    if len(text) <= SMALL:
        return 0
    return COMMA * text.count(b",") + BRACKET * (text.count(b"{") + text.count(b"["))


def without_items(text: bytes) -> bytes:
    """A list as the API server sends it, but for what it lists.

    Raises:
        ValueError: it is no list.
    """
    begin = re.search(rb'"items":\s*\[', text)
    if begin is None:
        raise ValueError("no list")
    # Of custom resources the metadata come last, of others the items do.
    head = text[: begin.start()].rstrip().removesuffix(b",") + b"}"
    tail = b"{" + text[text.rindex(b"]") + 1 :].lstrip().removeprefix(b",")
    return json.dumps({**json.loads(head), **json.loads(tail), "items": []}).encode()


class BoundedLines:
    """The content of a watch, without the lines that cost too much."""

    def __init__(self, content: aiohttp.StreamReader) -> None:
        self._content = content

    def __getattr__(self, name: str) -> Any:
        return getattr(self._content, name)

    async def iter_chunked(self, size: int) -> AsyncIterator[bytes]:
        """Whole lines, as many as have come."""
        rest = bytearray()
        async for piece in self._content.iter_chunked(size):
            rest += piece
            end = rest.rfind(b"\n") + 1
            if not end:
                continue
            lines = bytes(rest[:end])
            del rest[:end]
            if cost(lines) > MOST_COST:
                lines = b"".join(line for line in lines.splitlines(keepends=True) if cost(line) <= MOST_COST)
            if lines:
                yield lines


class Response(aiohttp.ClientResponse):
    """An answer to kopf."""

    async def start(self, connection: Any) -> "Response":
        """Its headers have come."""
        await super().start(connection)
        if self.url.query.get("watch") == "true":
            self.content: Any = BoundedLines(self.content)
        return self

    async def read(self) -> bytes:
        """The whole body. A list that costs too much has no items: what there is, our own lists tell."""
        body = await super().read()
        if cost(body) > MOST_COST:
            try:
                self._body = body = without_items(body)
            except ValueError as error:
                raise aiohttp.ClientPayloadError(f"more than is read: {error}") from error
        return body


class Login:
    """Logs kopf in as the client would, with a session that has bounds."""

    def __init__(self) -> None:
        self._last: kopf.ConnectionInfo | None = None

    async def session(self, **options: Any) -> kopf.AiohttpSession | None:
        """Called by kopf at its start, and when its credentials are refused."""
        found = kopf.login_via_client(**options)
        if found is None:
            return None
        if found == self._last:
            await asyncio.sleep(AGAIN_SECONDS)
        self._last = found
        session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0, ssl=found.as_ssl_context()),
            headers=found.as_http_headers(),
            proxy=found.proxy_url,
            trust_env=found.trust_env,
            response_class=Response,
        )
        return kopf.AiohttpSession(server=found.server, aiohttp_session=session)
