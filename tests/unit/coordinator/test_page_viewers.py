"""Viewers are sent what changed, once; and nobody is drawn for who is not there."""

import asyncio
from pathlib import Path
from types import SimpleNamespace

import pytest

from tandem.rundir import RunDir
from tandem.snapshot import Snapshot
from tandem.status import Status
from tandem_coordinator.observer import Observed
from tandem_coordinator.page import live
from tandem_coordinator.page.live import Live
from tandem_coordinator.page.viewers import MOST_VIEWERS, Full, Viewers
from tests.support import manifests


class TestAViewer:
    async def test_is_sent_all_parts_first_and_then_those_that_changed(self) -> None:
        viewers = Viewers()
        first = viewers.enter("wide")
        viewers.show({"wide": {"head": "1", "tiles": "a"}})
        assert await first.wait(1.0) == {"head": "1", "tiles": "a"}
        viewers.show({"wide": {"head": "2", "tiles": "a"}})
        assert await first.wait(1.0) == {"head": "2"}
        assert await viewers.enter("wide").wait(1.0) == {"head": "2", "tiles": "a"}

    async def test_that_is_slow_has_the_newest_of_each_part_waiting_and_no_more(self) -> None:
        viewers = Viewers()
        slow = viewers.enter("wide")
        for number in range(10_000):
            viewers.show({"wide": {"head": str(number)}})
        assert await slow.wait(1.0) == {"head": "9999"}
        assert await slow.wait(0.0) == {}

    async def test_is_sent_what_is_drawn_for_its_screen_and_nothing_old(self) -> None:
        viewers = Viewers()
        wide = viewers.enter("wide")
        viewers.show({"wide": {"head": "wide"}})
        narrow = viewers.enter("narrow")
        assert await narrow.wait(0.0) == {}
        viewers.leave(wide)
        assert await viewers.enter("wide").wait(0.0) == {}

    async def test_finds_no_room_where_there_is_none(self) -> None:
        viewers = Viewers()
        seated = [viewers.enter("wide") for _ in range(MOST_VIEWERS)]
        with pytest.raises(Full):
            viewers.enter("wide")
        viewers.leave(seated[3])
        viewers.enter("narrow")
        viewers.close(over=False)
        viewers.leave(seated[4])
        with pytest.raises(Full):
            viewers.enter("wide")


class Job:
    """A coordinator that counts how often it is looked at."""

    def __init__(self, trouble: bool = False) -> None:
        self.glances = 0
        self.trouble = trouble
        self.job = manifests.job()

    def glance(self, most: int, observed: Observed | None = None) -> tuple[Snapshot, int]:
        self.glances += 1
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
        monkeypatch.setattr(live, "SECONDS", 0.01)
        job = Job()
        page = Live(job, RunDir(tmp_path))  # type: ignore[arg-type]
        assert page._drawing is None
        viewer = page.viewers.enter("wide")
        page.wake()
        assert "digits" in await seen(viewer, "head")
        page.viewers.leave(viewer)
        assert page._drawing is not None
        async with asyncio.timeout(20):
            await page._drawing
        before = job.glances
        again = page.viewers.enter("wide")
        assert job.glances == before
        page.wake()
        assert "digits" in await seen(again, "head")
        await page.close()

    async def test_that_cannot_be_drawn_does_not_keep_the_coordinator_from_its_end(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(live, "SECONDS", 0.01)
        job = Job(trouble=True)
        page = Live(job, RunDir(tmp_path))  # type: ignore[arg-type]
        viewer = page.viewers.enter("wide")
        page.wake()
        async with asyncio.timeout(20):
            while job.glances < 3:  # noqa: ASYNC110 - it has no event to wait for
                await asyncio.sleep(0.01)
            await page.close()
        assert viewer.closing
        assert not viewer.over

    async def test_leaves_more_time_to_heartbeats_where_a_glance_takes_long(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(live, "SECONDS", 0.0)
        moments = iter(n * 0.1 for n in range(1000))
        monkeypatch.setattr(live, "time", SimpleNamespace(monotonic=lambda: next(moments)))
        pauses: list[float] = []

        async def pause(seconds: float) -> None:
            pauses.append(seconds)
            page.viewers.leave(viewer)

        page = Live(Job(), RunDir(tmp_path))  # type: ignore[arg-type]
        viewer = page.viewers.enter("wide")
        monkeypatch.setattr(page, "_on_the_thread", lambda _: _nothing())
        monkeypatch.setattr(live, "asyncio", SimpleNamespace(sleep=pause))
        await page._draw()
        assert pauses == [pytest.approx(0.1 * live.LEAST_SHARE)]


async def _nothing() -> dict[str, dict[str, str]]:
    return {}
