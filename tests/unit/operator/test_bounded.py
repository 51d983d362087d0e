"""What costs too much to parse is told before it is parsed, and nothing else is."""

import asyncio
import json
import sys
import tracemalloc
from collections.abc import AsyncIterator, Iterator
from typing import Any

import kopf
import pytest

from tandem_operator import bounded, kinds
from tandem_operator.bounded import MAX_COST, MAX_DEPTH, SMALL, UNREAD, BoundedLines, Login, cost, without_items
from tandem_operator.informer import Cache
from tandem_operator.job_objects import REFUSED
from tests.support.hostile import HEALTHY, LARGE, MAX_BYTES, filled, real_objects
from tests.support.worlds.operator_world import JOB

MAX_PARSED = 10_000_000


@pytest.fixture
def nesting() -> Iterator[None]:
    """What the operator sets at its start."""
    before = sys.getrecursionlimit()
    sys.setrecursionlimit(MAX_DEPTH)
    yield
    sys.setrecursionlimit(before)


@pytest.mark.parametrize("kind", LARGE)
@pytest.mark.parametrize("room", [MAX_BYTES, MAX_BYTES // 4, 70_000, SMALL])
@pytest.mark.usefixtures("nesting")
def test_whatever_is_let_through_takes_ten_megabytes_at_most(kind: str, room: int) -> None:
    text = filled(kind, room).encode()
    if cost(text) > MAX_COST:
        assert kind not in ("text", "deep objects", "deep lists")
        return
    tracemalloc.start()
    found = json.loads(text)
    used = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert found is not None
    assert used < MAX_PARSED


def test_what_real_objects_cost_is_far_from_too_much() -> None:
    real = [json.dumps(body).encode() for _, body in real_objects()]
    assert cost(b"".join(5 * real)) < MAX_COST
    assert cost(json.dumps({"text": "x" * MAX_BYTES}).encode()) == bounded.BRACKET


@pytest.mark.parametrize(
    "text",
    [
        b'{"kind":"PodList","metadata":{"resourceVersion":"7","continue":"c"},"items":[{"a":[1,2]},{"b":"]"}]}\n',
        b'{"items":[{"a":[1]}],"kind":"PodList","metadata":{"resourceVersion":"7","continue":"c"}}',
        b'{"metadata": {"resourceVersion": "7", "continue": "c"}, "kind": "PodList", "items": [[], {}]}',
    ],
    ids=["metadata first", "metadata last", "with spaces"],
)
def test_a_list_without_its_items(text: bytes) -> None:
    metadata = {"resourceVersion": "7", "continue": "c"}
    assert json.loads(without_items(text)) == {"kind": "PodList", "metadata": metadata, "items": []}


@pytest.mark.parametrize("text", [b"", b"{}", b'{"items":[', b'{"items":[}', b'[]"items":[]'])
def test_what_is_no_list_is_told(text: bytes) -> None:
    with pytest.raises(ValueError):
        without_items(text)


@pytest.mark.parametrize("size", [1, 7, 100_000, 10_000_000])
async def test_lines_of_a_watch_come_whole_but_for_those_that_cost_too_much(size: int) -> None:
    wide = b'{"a":[' + b"[]," * (40_000 if size > 7 else 1) + b"1]}\n"
    lines = [b'{"first":1}\n', wide, b'{"second":"\\n"}\n', b"\n", wide, b'{"last":2}\n']

    class Content:
        async def iter_chunked(self, _: int) -> AsyncIterator[bytes]:
            text = b"".join(lines)
            for begin in range(0, len(text), size):
                yield text[begin : begin + size]

    nobody: Any = Content()
    found = b"".join([piece async for piece in BoundedLines(nobody).iter_chunked(size)])
    assert found == b"".join(line for line in lines if size <= 7 or line is not wide)


async def test_the_same_credentials_are_not_tried_in_a_row_without_a_pause(monkeypatch: pytest.MonkeyPatch) -> None:
    pauses: list[float] = []

    async def sleep(seconds: float) -> None:
        pauses.append(seconds)

    tokens = iter(["one", "one", "two"])
    monkeypatch.setattr(asyncio, "sleep", sleep)
    monkeypatch.setattr(
        kopf, "login_via_client", lambda **_: kopf.ConnectionInfo(server="http://here", token=next(tokens))
    )
    login, given = Login(), []
    for _ in range(3):
        session = await login.session()
        assert session is not None
        given.append((session.aiohttp_session.headers["Authorization"], len(pauses)))
        await session.aiohttp_session.close()
    assert given == [("Bearer one", 0), ("Bearer one", 1), ("Bearer two", 1)]


def test_a_job_that_is_too_much_is_refused_in_words_and_its_status_is_kept() -> None:
    cache = Cache()
    metadata = {"namespace": HEALTHY[0], "name": HEALTHY[1], "uid": "u", "resourceVersion": "1", "generation": 1}
    whole = {**JOB, "metadata": metadata, "status": {"phase": "Running"}}
    assert cache.upsert(kinds.JOB, whole) == [HEALTHY]
    newer = {"metadata": {**metadata, "resourceVersion": "2", "generation": 2}, UNREAD: "it has too much"}
    assert cache.upsert(kinds.JOB, newer) == [HEALTHY]
    found = cache.job(HEALTHY)
    assert found is not None
    assert (found[REFUSED], found["spec"], found["status"]) == ("it has too much", None, {"phase": "Running"})

    # One that nobody has seen before may have a status; that of a new one is written.
    other = Cache()
    assert other.upsert(kinds.JOB, newer) == []
    assert other.unreadable.counts[kinds.JOB.name] == 1
    assert other.upsert(kinds.JOB, {"metadata": metadata, UNREAD: "it has too much"}) == [HEALTHY]


def test_another_object_that_is_too_much_stays_what_it_was() -> None:
    cache = Cache()
    kind, body = next(one for one in real_objects() if one[0] is kinds.POD)
    (key,) = cache.upsert(kind, body)
    before = cache.children(key)
    assert cache.upsert(kind, {"metadata": {**body["metadata"], "resourceVersion": "99"}, UNREAD: "too much"}) == []
    assert cache.children(key) == before
    assert cache.unreadable.counts[kinds.POD.name] == 1
