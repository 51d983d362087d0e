"""Viewers are sent what changed, once; and nobody is drawn for who is not there."""

import asyncio
import socket
import tracemalloc
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Self, cast

import pytest
from aiohttp import ClientSession, StreamReader, web

from tandem.rundir.layout import RunDir
from tandem.wire.status import Snapshot, Status
from tandem_coordinator.__main__ import GRACE_SECONDS
from tandem_coordinator.page import routes, viewers
from tandem_coordinator.page.routes import LivePage
from tandem_coordinator.page.viewers import MAX_VIEWERS, Full, Live, Viewers
from tandem_coordinator.run_watcher import Observed
from tests.support import manifests
from tests.support.clock import Jumping, jumping

MIB = 2**20
PICTURES = 64
"""Each of a mebibyte: what waits for a reader shows."""


class TestAViewer:
    async def test_is_sent_all_parts_first_and_then_those_that_changed(self) -> None:
        viewers = Viewers()
        first = viewers.enter("wide")
        viewers.publish({"wide": {"head": "1", "tiles": "a"}})
        assert await first.wait(1.0) == {"head": "1", "tiles": "a"}
        viewers.publish({"wide": {"head": "2", "tiles": "a"}})
        assert await first.wait(1.0) == {"head": "2"}
        assert await viewers.enter("wide").wait(1.0) == {"head": "2", "tiles": "a"}

    async def test_that_is_slow_has_the_newest_of_each_part_waiting_and_no_more(self) -> None:
        viewers = Viewers()
        slow = viewers.enter("wide")
        for number in range(10_000):
            viewers.publish({"wide": {"head": str(number)}})
        assert await slow.wait(1.0) == {"head": "9999"}
        assert await slow.wait(0.0) == {}

    async def test_is_sent_what_is_drawn_for_its_screen_and_nothing_old(self) -> None:
        viewers = Viewers()
        wide = viewers.enter("wide")
        viewers.publish({"wide": {"head": "wide"}})
        assert await viewers.enter("narrow").wait(0.0) == {}
        viewers.leave(wide)
        assert await viewers.enter("wide").wait(0.0) == {}

    async def test_finds_no_room_where_there_is_none(self) -> None:
        viewers = Viewers()
        seated = [viewers.enter("wide") for _ in range(MAX_VIEWERS)]
        with pytest.raises(Full):
            viewers.enter("wide")
        viewers.leave(seated[3])
        viewers.enter("narrow")
        viewers.close(is_over=False)
        viewers.leave(seated[4])
        with pytest.raises(Full):
            viewers.enter("wide")


class Job:
    """A coordinator that counts how often it is looked at."""

    def __init__(self, trouble: bool = False, takes: Callable[[], None] = lambda: None) -> None:
        self.glances = 0
        self.trouble, self.takes = trouble, takes
        self.job = manifests.job()

    def glance(self, most: int, observed: Observed | None = None) -> tuple[Snapshot, int]:
        self.glances += 1
        self.takes()
        if self.trouble and self.glances == 2:
            raise RuntimeError("no glance either")
        name = "digits" if not self.trouble else 5
        return Snapshot.model_construct(
            job=name, time=0.0, status=None if self.trouble else Status(), members=[], generations=[], events=[]
        ), 0


async def seen(viewer: object, part: str) -> str:
    found: dict[str, str] = {}
    async with asyncio.timeout(20):
        while part not in found:
            found |= await viewer.wait(1.0)  # type: ignore[attr-defined]
    return found[part]


class TestThePage:
    async def test_is_drawn_while_somebody_looks_and_not_otherwise(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(viewers, "RENDER_SECONDS", 0.01)
        job = Job()
        page = Live(job, RunDir(tmp_path))  # type: ignore[arg-type]
        assert page._rendering is None
        viewer = page.viewers.enter("wide")
        page.wake()
        assert "digits" in await seen(viewer, "head")
        page.viewers.leave(viewer)
        assert page._rendering is not None
        async with asyncio.timeout(20):
            await page._rendering
        before = job.glances
        again = page.viewers.enter("wide")
        assert job.glances == before
        page.wake()
        assert "digits" in await seen(again, "head")
        await page.close()

    async def test_that_cannot_be_drawn_does_not_keep_the_coordinator_from_its_end(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(viewers, "RENDER_SECONDS", 0.01)
        job = Job(trouble=True)
        page = Live(job, RunDir(tmp_path))  # type: ignore[arg-type]
        viewer = page.viewers.enter("wide")
        page.wake()
        async with asyncio.timeout(20):
            while job.glances < 3:  # noqa: ASYNC110 - it has no event to wait for
                await asyncio.sleep(0.01)
            await page.close()
        assert viewer.is_closing
        assert not viewer.is_over

    @pytest.mark.parametrize(("seconds", "pictures"), [(0.001, 1000), (0.5, 40)], ids=["a small job", "a large job"])
    def test_leaves_all_but_a_fiftieth_of_the_loop_s_time_to_heartbeats(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, seconds: float, pictures: int
    ) -> None:
        """A glance takes the loop's time, and what is drawn of it that of a thread."""

        async def glances_in(period: float) -> int:
            loop = cast("Jumping", asyncio.get_running_loop())
            job = Job(takes=lambda: loop.pass_over(seconds))
            page = Live(job, RunDir(tmp_path))  # type: ignore[arg-type]
            monkeypatch.setattr(viewers, "time", SimpleNamespace(monotonic=loop.time))
            monkeypatch.setattr(page, "_on_thread", lambda _: asyncio.sleep(0.2, {}))
            viewer = page.viewers.enter("wide")
            page.wake()
            await asyncio.sleep(period)
            page.viewers.leave(viewer)
            await page.close()
            return job.glances

        glances = jumping(glances_in(1000.0))
        assert (glances - 1) * seconds <= 1000.0 / 50.0
        assert glances == pytest.approx(pictures, rel=0.05), "and no more time than that"


class TestAStream:
    async def test_that_nobody_reads_holds_the_newest_picture_alone_and_disturbs_nobody(self, served: "Served") -> None:
        with served.deaf() as stream:
            async with asyncio.timeout(120), served.reader() as reader:
                await served.has_viewers(2)
                tracemalloc.start()
                for number in range(PICTURES):
                    served.show(number)
                    await read_until(reader.readany, f"picture {number}.")
                held, _ = tracemalloc.get_traced_memory()
                tracemalloc.stop()
                assert held < 16 * MIB
                assert len(served.viewers) == 2, "it was not simply given up"
            loop = asyncio.get_running_loop()
            async with asyncio.timeout(120):
                waited = await read_until(lambda: loop.sock_recv(stream, MIB), f"picture {PICTURES - 1}.")
            assert waited < 16 * MIB, "what the kernel holds included"

    async def test_that_nobody_reads_does_not_keep_the_coordinator_from_its_end(self, served: "Served") -> None:
        with served.deaf():
            await served.has_viewers(1)
            served.show(0, size=16 * MIB)
            (viewer,) = served.viewers._open
            async with asyncio.timeout(120):
                while "large" in viewer._pending:  # noqa: ASYNC110 - nothing tells that it is being sent
                    await asyncio.sleep(0.01)
                await served.runner.cleanup()


class Served:
    """A page that somebody looks at through real connections, who are given an hour to take what they are sent."""

    def __init__(self, folder: Path) -> None:
        page, application = LivePage(Job(), "token", RunDir(folder)), web.Application()  # type: ignore[arg-type]
        page.add_to(application)
        self.viewers = page._live.viewers
        self.runner = web.AppRunner(application, shutdown_timeout=GRACE_SECONDS)
        self._cookie = self._page = ""

    async def __aenter__(self) -> Self:
        await self.runner.setup()
        await web.TCPSite(self.runner, "127.0.0.1", 0).start()
        host, port = self.runner.addresses[0][:2]
        self._host, self._port, self._url = host, port, f"http://{host}:{port}"
        async with ClientSession() as client, client.post(f"{self._url}/v1/invitation") as invited:
            word = (await invited.json())["word"]
            async with client.post(f"{self._url}/open", json={"word": word}) as opened:
                self._cookie = opened.headers["Set-Cookie"].partition(";")[0]
                self._page = (await opened.json())["page"]
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.runner.cleanup()

    def show(self, number: int, size: int = MIB) -> None:
        """Show all viewers a picture of that size, unlike the one before."""
        self.viewers.publish({"wide": {"number": f"picture {number}.", "large": str(number % 10) * size}})

    async def has_viewers(self, count: int) -> None:
        """Wait for them."""
        async with asyncio.timeout(120):
            while len(self.viewers) < count:  # noqa: ASYNC110 - nothing tells
                await asyncio.sleep(0.01)

    @asynccontextmanager
    async def reader(self) -> AsyncIterator[StreamReader]:
        """Somebody who reads."""
        headers = {"Cookie": self._cookie}
        async with ClientSession() as client, client.get(f"{self._url}{self._page}stream", headers=headers) as answer:
            yield answer.content

    @contextmanager
    def deaf(self) -> Iterator[socket.socket]:
        """A connection that asks for the stream and reads nothing."""
        asks = f"GET {self._page}stream HTTP/1.1\r\nHost: {self._host}\r\nCookie: {self._cookie}\r\n\r\n"
        with socket.socket() as connection:
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            connection.connect((self._host, self._port))
            connection.setblocking(False)
            connection.send(asks.encode())
            yield connection


@pytest.fixture
async def served(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Served]:
    monkeypatch.setattr(routes, "WRITE_TIMEOUT_SECONDS", 3600.0)
    async with Served(tmp_path) as made:
        yield made


async def read_until(read: Callable[[], Awaitable[bytes]], words: str) -> int:
    """Read until these words come; how many bytes that were."""
    size, end = 0, b""
    while words.encode() not in end:
        piece = await read()
        assert piece, "the stream ended"
        size, end = size + len(piece), end[-len(words) :] + piece
    return size
