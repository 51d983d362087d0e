"""Bounds on API objects: hostile ones are detected before they are parsed, and unreadable ones skipped.

An object has a megabyte and a half at most. As text that costs twice as much memory; as `[],[],…` or `{"a":1},…`
twenty-five times, and a list of such objects would exhaust a process with 300 MB. So commas and brackets are counted
first, which takes a millisecond. The watch skips an object with too many of them; the next list asks for fewer objects
at once, and for an object that is too much by itself it asks for the metadata alone (tandem_operator.api).

kopf does its own parsing, so its session bounds the answers that it gets (`kopf.AiohttpSession`).

Whoever may create a pod in some namespace can write anything into it. The consequence must be one line in the log: an
exception here would end the list of all jobs, and again after each restart.
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
"""Limit for the memory that an answer, or a line of a watch, takes once it is parsed, in bytes, as `cost` estimates it
and besides its text. A pod takes some 100,000."""
COMMA, BRACKET = 120, 100
"""Bytes for each comma and bracket: between two commas there is a number of 32 bytes, or a key of 60 in a table that
has 60 for it; an object with entries takes 184. Those inside of texts count as well."""
UNREAD = "tandemUnread"
"""A field that no API object has: the reason why only the metadata of this one were read."""
SMALL = 2**16
"""Size in bytes below which no answer can cost too much."""
LOGIN_INTERVAL_SECONDS = 1.0
"""Delay before the same credentials are returned again."""


def cost(text: bytes | bytearray) -> int:
    """Estimate the memory in bytes that a JSON text takes once it is parsed, besides the text."""
    if len(text) <= SMALL:
        return 0
    return COMMA * text.count(b",") + BRACKET * (text.count(b"{") + text.count(b"["))


MAX_SPEC_BYTES = 192 * 2**20
"""Limit for the specs of all jobs together, as `size` estimates them. The operator's container has 512 MiB by
default, of which a thousand ordinary jobs take a fifth."""
MAX_PODS, MAX_STRAY_PODS = 24_000, 2_000
"""Limits for pods that jobs own, and for pods that carry the label of a job and have no owner. Each takes some 6 KiB,
so that all of them take a quarter of that container."""
ENTRY = 240
"""Bytes for each entry of an object or a list: in the spec as it came, and in the job that was parsed from it."""


def size(root: Any) -> int:
    """Estimate the memory in bytes that a parsed piece of JSON takes. Without recursion."""
    total = 0
    stack = [root]
    while stack:
        value = stack.pop()
        if isinstance(value, str):
            total += len(value)
        elif isinstance(value, dict | list):
            total += ENTRY * len(value)
            if isinstance(value, dict):
                total += sum(map(len, value))
            stack += value.values() if isinstance(value, dict) else value
    return total


class Shares:
    """The shares of namespaces in a bounded amount of the operator's memory.

    A namespace may take as much as is free: a single one half of the capacity, two a third each, and so on. So there is
    room for one more namespace whatever the others take. A share that was granted is never revoked.
    """

    def __init__(self, capacity: int) -> None:
        self._capacity = capacity
        self._sizes: dict[tuple[str, str], int] = {}
        self._namespaces: Counter[str] = Counter()

    def used(self, namespace: str) -> int:
        """The share of a namespace."""
        return self._namespaces[namespace]

    def take(self, key: tuple[str, str], size: int) -> bool:
        """Grant room to an object, in exchange for what that object has; False, and it has none, if there is no
        room."""
        before = self.give(key)
        free = self._capacity - self._namespaces.total()
        if size > before and self._namespaces[key[0]] + size > free:
            return False
        self._sizes[key] = size
        self._namespaces[key[0]] += size
        return True

    def give(self, key: tuple[str, str]) -> int:
        """Release an object's room; returns how much that was."""
        before = self._sizes.pop(key, 0)
        self._namespaces[key[0]] -= before
        if not self._namespaces[key[0]]:
            del self._namespaces[key[0]]
        return before


def without_items(text: bytes) -> bytes:
    """A list as the API server sends it, without its items.

    Raises:
        ValueError: it is not a list.
    """
    begin = re.search(rb'"items":\s*\[', text)
    if begin is None:
        raise ValueError("no list")
    # Custom resources have their metadata after the items, other kinds before them.
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
        """Yield whole lines, as many as have arrived."""
        buffer = bytearray()
        async for piece in self._content.iter_chunked(size):
            buffer += piece
            end = buffer.rfind(b"\n") + 1
            if not end:
                continue
            lines = bytes(buffer[:end])
            del buffer[:end]
            if cost(lines) > MAX_COST:
                lines = b"".join(line for line in lines.splitlines(keepends=True) if cost(line) <= MAX_COST)
            if lines:
                yield lines


class Response(aiohttp.ClientResponse):
    """An answer to kopf with bounds."""

    async def start(self, connection: Any) -> "Response":
        """Wait for the headers; bound the content if it is a watch."""
        await super().start(connection)
        if self.url.query.get("watch") == "true":
            self.content: Any = BoundedLines(self.content)
        return self

    async def read(self) -> bytes:
        """The whole body. A list that costs too much comes without items: the operator's own lists contain them."""
        body = await super().read()
        if cost(body) > MAX_COST:
            try:
                self._body = body = without_items(body)
            except ValueError as error:
                raise aiohttp.ClientPayloadError(f"more than is read: {error}") from error
        return body


class Login:
    """Logs kopf in like the official client, with a session that has bounds."""

    def __init__(self) -> None:
        self._last: kopf.ConnectionInfo | None = None

    async def session(self, **options: Any) -> kopf.AiohttpSession | None:
        """Return a session. kopf calls it at its start, and when its credentials are refused."""
        credentials = kopf.login_via_client(**options)
        if credentials is None:
            return None
        if credentials == self._last:
            await asyncio.sleep(LOGIN_INTERVAL_SECONDS)
        self._last = credentials
        session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0, ssl=credentials.as_ssl_context()),
            headers=credentials.as_http_headers(),
            proxy=credentials.proxy_url,
            trust_env=credentials.trust_env,
            response_class=Response,
        )
        return kopf.AiohttpSession(server=credentials.server, aiohttp_session=session)


MAX_DEPTH = 12_000
"""Maximum nesting depth of JSON that can be parsed. The API server accepts 10,000, and a template may have them;
Python's default of a thousand also applies to kopf's watch. This depth takes 1.3 MB of the stack, which has eight."""
GC_THRESHOLDS = (50_000, 20, 50)
"""Thresholds of the garbage collector. With the defaults, a megabyte and a half of empty lists took 60 to 670 ms to
parse, because all existing objects are examined again and again; with these it takes 45."""


def prepare() -> None:
    """Prepare this process. To be called after all imports: the garbage collector ignores everything that exists by
    then."""
    sys.setrecursionlimit(max(sys.getrecursionlimit(), MAX_DEPTH))
    gc.collect()
    gc.freeze()
    gc.set_threshold(*GC_THRESHOLDS)


MAX_REMEMBERED = 1_000
"""Number of reported versions that are remembered, so that they are not reported at each list."""
MAX_LINES, WINDOW_SECONDS = 20, 60.0
"""Maximum number of lines in the log in this many seconds; further ones are only counted."""
MAX_TEXT_LENGTH = 200

log = logging.getLogger("tandem.operator")


class UnreadableObjects:
    """Counts unreadable objects, and logs them.

    Args:
        clock: seconds of any steady clock.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self.counts: Counter[str] = Counter({kind.name: 0 for kind in (kinds.JOB, *kinds.WATCHED)})
        """Number of unreadable versions of objects, by kind."""
        self._clock = clock
        self._reported: OrderedDict[tuple[str, ...], None] = OrderedDict()
        self._window_start, self._lines, self._suppressed = float("-inf"), 0, 0

    def note(self, kind: Kind, body: Any, reason: object) -> None:
        """Record that an object could not be read.

        Args:
            body: the object, of which nothing is assumed.
            reason: a sentence, or the exception.
        """
        metadata = body.get("metadata") if isinstance(body, Mapping) else None
        fields = ("namespace", "name", "uid", "resourceVersion")
        values = [metadata.get(field) if isinstance(metadata, Mapping) else None for field in fields]
        identity = tuple(_cut(value) for value in values)
        key = (kind.name, *identity)
        if key in self._reported:
            self._reported.move_to_end(key)
            return
        self._reported[key] = None
        if len(self._reported) > MAX_REMEMBERED:
            self._reported.popitem(last=False)
        self.counts[kind.name] += 1
        now = self._clock()
        if now - self._window_start >= WINDOW_SECONDS:
            if self._suppressed:
                log.warning("event=unreadable-untold count=%d", self._suppressed)
            self._window_start, self._lines, self._suppressed = now, 0, 0
        if self._lines >= MAX_LINES:
            self._suppressed += 1
            return
        self._lines += 1
        text = _cut(reason) if isinstance(reason, str) else f"{type(reason).__name__}: {_cut(reason)}"
        log.warning("event=unreadable kind=%s object=%s/%s error=%r", kind.name, *identity[:2], text)


def _cut(value: object) -> str:
    """A short text for anything."""
    if isinstance(value, str):
        return value[:MAX_TEXT_LENGTH]
    if isinstance(value, BaseException):
        # Pydantic's messages quote the value, and may be long.
        return str(value)[:MAX_TEXT_LENGTH]
    return "" if value is None else type(value).__name__
