"""The viewers of the page: renders it while somebody looks, and sends each viewer what changed.

A viewer is sent the newest state of a part and never the ones between: what waits for one that reads slowly is at most
one of each part, however slowly it reads.
"""

import asyncio
import logging
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from typing import TypeVar

from tandem.rundir.layout import RunDir
from tandem_coordinator.charts.chart import NARROW, WIDE, Look
from tandem_coordinator.coordinator import Coordinator
from tandem_coordinator.page import parts
from tandem_coordinator.page.parts import Glance
from tandem_coordinator.page.timeline import Timeline
from tandem_coordinator.run_watcher import RunDirectory

MAX_VIEWERS = 16
"""Streams at the same time; one more is asked to come back later."""
LOOKS: dict[str, Look] = {"wide": WIDE, "narrow": NARROW}
"""The kinds of screens that pictures are drawn for."""


class Full(Exception):  # noqa: N818 - reads as the sentence it is
    """There are as many viewers as there may be."""


class Viewer:
    """One open stream."""

    def __init__(self, look: str, parts: Mapping[str, str]) -> None:
        self.look = look
        self.over = False
        """Whether nothing will change any more, because the job is over."""
        self.closing = False
        """Whether the coordinator is about to end."""
        self._waiting = dict(parts)
        self._news = asyncio.Event()
        if parts:
            self._news.set()

    async def wait(self, seconds: float) -> dict[str, str]:
        """What is new, at once if there is something, else after a while nothing."""
        try:
            async with asyncio.timeout(seconds):
                await self._news.wait()
        except TimeoutError:
            return {}
        self._news.clear()
        waiting, self._waiting = self._waiting, {}
        return waiting

    def tell(self, parts: Mapping[str, str]) -> None:
        """Give it parts, of which the newest count."""
        self._waiting.update(parts)
        self._news.set()


class Viewers:
    """All open streams. For the event loop."""

    def __init__(self) -> None:
        self._open: list[Viewer] = []
        self._shown: dict[str, dict[str, str]] = {}
        self.closing = False

    def __len__(self) -> int:
        return len(self._open)

    @property
    def full(self) -> bool:
        """Whether there is room for no more."""
        return len(self._open) >= MAX_VIEWERS

    @property
    def looks(self) -> set[str]:
        """For which kinds of screens somebody is looking."""
        return {viewer.look for viewer in self._open}

    def enter(self, look: str) -> Viewer:
        """A new viewer, who is sent all parts first.

        Raises:
            Full: there is no room.
        """
        if self.full or self.closing:
            raise Full
        if look not in self.looks:
            # Drawn for nobody for a while: old pictures are worse than none.
            self._shown.pop(look, None)
        viewer = Viewer(look, self._shown.get(look, {}))
        self._open.append(viewer)
        return viewer

    def leave(self, viewer: Viewer) -> None:
        """It is gone."""
        self._open.remove(viewer)

    def show(self, parts: Mapping[str, Mapping[str, str]]) -> None:
        """Send what has changed, for each look, to those who look so."""
        for look, own in parts.items():
            before = self._shown.setdefault(look, {})
            changed = {name: html for name, html in own.items() if before.get(name) != html}
            before.update(changed)
            for viewer in self._open:
                if viewer.look == look and changed:
                    viewer.tell(changed)

    def close(self, over: bool) -> None:
        """Have all streams end once they have sent what waits.

        Args:
            over: the job is over, so nobody needs to wait for the next coordinator.
        """
        self.closing = True
        for viewer in self._open:
            viewer.over, viewer.closing = over, True
            viewer.tell({})


log = logging.getLogger("tandem.coordinator")

SECONDS = 1.0
"""Between two pictures, at least."""
MIN_SHARE = 50.0
"""So many times as long as a glance takes is left to everything else: looking costs the loop 2 % at most."""
CHARTS_EVERY = 2
"""Pictures have new charts; the numbers change with each."""
FOLLOW_SECONDS = 0.5
"""For reading the logs, of each picture."""
MAX_MEMBERS = 50
LAST_SECONDS = 2.0
"""For the last picture, when the coordinator ends; it takes 0.1 s, and more only where the disk hangs."""
T = TypeVar("T")


class Live:
    """The page of one job. Make it inside a running event loop."""

    def __init__(self, coordinator: Coordinator, rundir: RunDir) -> None:
        self.viewers = Viewers()
        self._coordinator, self._rundir = coordinator, rundir
        self._timeline: Timeline | None = None
        self._complaint = ""
        self._studio = ThreadPoolExecutor(1, thread_name_prefix="page")
        self._drawing: asyncio.Task[None] | None = None
        self._round = 0
        self._told = ""

    def wake(self) -> None:
        """Somebody looks: draw, unless that is being done."""
        if self._drawing is None or self._drawing.done():
            self._round = 0
            self._drawing = asyncio.get_running_loop().create_task(self._draw())

    async def close(self) -> None:
        """Show the end, or that this coordinator ends, and have all streams end."""
        if self._timeline is not None:
            self._timeline.hurry = True
        if self._drawing is not None:
            self._drawing.cancel()
            with suppress(asyncio.CancelledError):
                await self._drawing
        over = False
        if len(self.viewers):
            try:
                async with asyncio.timeout(LAST_SECONDS):
                    over = await self._last()
            except Exception:
                # Whatever is wrong with the page, or the disk: the coordinator ends as it should.
                log.exception("event=last-page-failed")
        self.viewers.close(over)
        self._studio.shutdown(wait=False, cancel_futures=True)

    async def _draw(self) -> None:
        while len(self.viewers):
            began = time.monotonic()
            glanced, with_charts = 0.0, self._round % CHARTS_EVERY == 0
            self._round += 1
            try:
                glance = Glance(*self._coordinator.glance(MAX_MEMBERS))
                glanced = time.monotonic() - began
                drawn = await self._on_the_thread(partial(self._drawn, glance, self.viewers.looks, with_charts))
            except Exception as error:
                # A page that cannot be drawn must not keep a job from being coordinated; the log says what to mend.
                drawn = self._failed(error)
            self.viewers.show(drawn)
            await asyncio.sleep(max(SECONDS - (time.monotonic() - began), MIN_SHARE * glanced))

    async def _last(self) -> bool:
        """One more look at the run directory: the end of a job is a file there, and the newest news."""
        await self._on_the_thread(self._take_time)
        spec = self._coordinator.job.spec
        directory = RunDirectory(self._rundir, spec.evaluation, has_base=spec.trainer.is_fine_tuning)
        observed = await self._on_the_thread(lambda: directory.look(time.time()))
        glance = Glance(*self._coordinator.glance(MAX_MEMBERS, observed))
        looks = self.viewers.looks
        self.viewers.show(await self._on_the_thread(lambda: self._drawn(glance, looks, True)))
        return observed.ending is not None

    def _failed(self, error: Exception) -> dict[str, dict[str, str]]:
        """What is shown instead, and said in the log once."""
        if repr(error) != self._told:
            self._told = repr(error)
            log.error("event=page-failed error=%r", error, exc_info=error)
        return {look: {"note": parts.FAILED} for look in self.viewers.looks}

    async def _on_the_thread(self, work: Callable[[], T]) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._studio, work)

    # On the thread

    def _take_time(self) -> None:
        """The picture that was being drawn is done, so the last one may take what it needs."""
        if self._timeline is not None:
            self._timeline.hurry = False

    def _drawn(self, glance: Glance, looks: set[str], with_charts: bool) -> dict[str, dict[str, str]]:
        timeline = self._follow()
        told = parts.words(glance, timeline, self._complaint)
        drawn: dict[str, dict[str, str]] = {}
        for look in sorted(looks):
            drawn[look] = dict(told)
            if timeline is not None and with_charts:
                time.sleep(0.001)  # the loop may want the interpreter
                drawn[look] |= parts.charts(glance, timeline, LOOKS[look])
        return drawn

    def _follow(self) -> Timeline | None:
        if self._timeline is None:
            self._timeline = Timeline(self._rundir)
        try:
            self._timeline.follow(FOLLOW_SECONDS)
            self._complaint = ""
        except (OSError, ValueError) as error:
            self._complaint = str(error)
        return self._timeline
