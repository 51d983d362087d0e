"""Bounds on API objects: hostile ones are detected before they are parsed, and unreadable ones skipped.

An object has a megabyte and a half at most. As text that costs twice as much; as `[],[],…` or `{"a":1},…` twenty-five
times, and a list of such objects is the end of whoever has 300 MB. So commas and brackets are counted first, which
takes a millisecond. What has too many is passed over by the watch; the next list asks for fewer objects at once, and of
one that is too much by itself for the metadata alone (tandem_operator.api).

kopf parses for itself, so its session bounds what it is given (`kopf.AiohttpSession`).

Whoever may make a pod in some namespace may write into it what he likes. What comes of that must be a line in the log:
an exception here would end the sweep for all jobs, and again after each restart.
"""

import asyncio
import gc
import json
import logging
import re
import sys
import time
from collections import Counter, OrderedDict
from collections.abc import AsyncIterator, Callable, Mapping
from typing import Any

import aiohttp
import kopf

from tandem_operator import kinds
from tandem_operator.kinds import Kind

MAX_COST = 7_000_000
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


MAX_SPEC_BYTES = 192 * 2**20
"""Limit for the specs of all jobs together, as `size` estimates them. The operator's container has 512 MiB by
default, of which a thousand ordinary jobs take a fifth."""
MAX_PODS, MAX_STRAY_PODS = 24_000, 2_000
"""Limits for pods that jobs own, and for pods that carry the label of a job and are nobody's. Each takes some 6 KiB, so
that all of them take a quarter of that container."""
ENTRY = 240
"""Bytes for each entry of an object or a list: in the spec as it came, and in the job that was made of it."""


def size(value: Any) -> int:
    """An estimate of the bytes that a parsed piece of JSON takes. Without recursion."""
    found = 0
    left = [value]
    while left:
        one = left.pop()
        if isinstance(one, str):
            found += len(one)
        elif isinstance(one, dict | list):
            found += ENTRY * len(one)
            if isinstance(one, dict):
                found += sum(map(len, one))
            left += one.values() if isinstance(one, dict) else one
    return found


class Shares:
    """How much each namespace takes of what the operator's memory has room for.

    A namespace may take as much as is free: one alone half of it all, two a third each, and so on. So there is room for
    one more namespace whatever the others take. Who has some room keeps it.
    """

    def __init__(self, most: int) -> None:
        self._most = most
        self._sizes: dict[tuple[str, str], int] = {}
        self._namespaces: Counter[str] = Counter()

    def of(self, namespace: str) -> int:
        """How much a namespace takes."""
        return self._namespaces[namespace]

    def take(self, key: tuple[str, str], size: int) -> bool:
        """Take room for an object, instead of what that object has; False, and it has none, if there is none."""
        before = self.give(key)
        free = self._most - self._namespaces.total()
        if size > before and self._namespaces[key[0]] + size > free:
            return False
        self._sizes[key] = size
        self._namespaces[key[0]] += size
        return True

    def give(self, key: tuple[str, str]) -> int:
        """Give back what an object has; how much that was."""
        before = self._sizes.pop(key, 0)
        self._namespaces[key[0]] -= before
        if not self._namespaces[key[0]]:
            del self._namespaces[key[0]]
        return before


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
            if cost(lines) > MAX_COST:
                lines = b"".join(line for line in lines.splitlines(keepends=True) if cost(line) <= MAX_COST)
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
        if cost(body) > MAX_COST:
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


NESTING = 12_000
"""Levels of JSON that can be parsed. The API server takes 10,000, and a template may have them; by default Python stops
at a thousand, in kopf's watch as well. So many take 1.3 MB of the stack, which has eight."""
COLLECTION = (50_000, 20, 50)
"""Objects that are made between two collections of garbage, and after how many of those older ones are looked at. With
the defaults a megabyte and a half of empty lists took 60 to 670 ms to parse, because all that is there is looked at
again and again; so it takes 45."""


def prepare() -> None:
    """Prepare this process. To be called once everything is imported: that is not looked at any more."""
    sys.setrecursionlimit(max(sys.getrecursionlimit(), NESTING))
    gc.collect()
    gc.freeze()
    gc.set_threshold(*COLLECTION)


MAX_REMEMBERED = 1_000
"""Versions of objects that were told of, so as not to tell of them at each sweep."""
MAX_LINES, SECONDS = 20, 60.0
"""At most this many lines in the log in this many seconds; further ones are only counted."""
MAX_WORDS = 200

log = logging.getLogger("tandem.operator")


class UnreadableObjects:
    """Counts and tells of them.

    Args:
        clock: seconds of any steady clock.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self.counts: Counter[str] = Counter({kind.name: 0 for kind in (kinds.JOB, *kinds.WATCHED)})
        """By kind: versions of objects that could not be read."""
        self._clock = clock
        self._known: OrderedDict[tuple[str, ...], None] = OrderedDict()
        self._began, self._lines, self._untold = float("-inf"), 0, 0

    def note(self, kind: Kind, body: Any, why: object) -> None:
        """An object could not be read.

        Args:
            body: the object, of which nothing is taken for granted.
            why: a sentence, or what was raised.
        """
        metadata = body.get("metadata") if isinstance(body, Mapping) else None
        fields = ("namespace", "name", "uid", "resourceVersion")
        given = [metadata.get(field) if isinstance(metadata, Mapping) else None for field in fields]
        identity = tuple(_cut(one) for one in given)
        key = (kind.name, *identity)
        if key in self._known:
            self._known.move_to_end(key)
            return
        self._known[key] = None
        if len(self._known) > MAX_REMEMBERED:
            self._known.popitem(last=False)
        self.counts[kind.name] += 1
        now = self._clock()
        if now - self._began >= SECONDS:
            if self._untold:
                log.warning("event=unreadable-untold count=%d", self._untold)
            self._began, self._lines, self._untold = now, 0, 0
        if self._lines >= MAX_LINES:
            self._untold += 1
            return
        self._lines += 1
        words = _cut(why) if isinstance(why, str) else f"{type(why).__name__}: {_cut(why)}"
        log.warning("event=unreadable kind=%s object=%s/%s error=%r", kind.name, *identity[:2], words)


def _cut(value: object) -> str:
    """Some words of anything, whatever it is."""
    if isinstance(value, str):
        return value[:MAX_WORDS]
    if isinstance(value, BaseException):
        # Pydantic's own words quote what was given, and may be long.
        return str(value)[:MAX_WORDS]
    return "" if value is None else type(value).__name__
