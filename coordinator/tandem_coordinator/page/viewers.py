"""The viewers of the page: renders it while somebody looks, and sends each viewer what changed.

A viewer is sent the newest state of a part and never the ones in between: a viewer that reads slowly has at most one
pending version of each part.
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
from tandem_coordinator.charts.chart import NARROW, WIDE, Viewport
from tandem_coordinator.coordinator import Coordinator
from tandem_coordinator.page import parts
from tandem_coordinator.page.parts import Glance
from tandem_coordinator.page.timeline import Timeline
from tandem_coordinator.run_watcher import RunDirectory

MAX_VIEWERS = 16
"""Maximum number of open streams; one more is asked to come back later."""
SCREENS: dict[str, Viewport] = {"wide": WIDE, "narrow": NARROW}
"""The kinds of screens that charts are drawn for."""


class Full(Exception):  # noqa: N818 - reads as the sentence it is
    """The maximum number of viewers is reached."""


class Viewer:
    """One open stream."""

    def __init__(self, screen: str, parts: Mapping[str, str]) -> None:
        self.screen = screen
        self.is_over = False
        """Whether nothing will change any more, because the job has ended."""
        self.is_closing = False
        """Whether the coordinator is about to end."""
        self._pending = dict(parts)
        self._news = asyncio.Event()
        if parts:
            self._news.set()

    async def wait(self, seconds: float) -> dict[str, str]:
        """Wait for new parts, for at most this many seconds; empty if there are none."""
        try:
            async with asyncio.timeout(seconds):
                await self._news.wait()
        except TimeoutError:
            return {}
        self._news.clear()
        pending, self._pending = self._pending, {}
        return pending

    def push(self, parts: Mapping[str, str]) -> None:
        """Add parts to send; newer versions replace older ones."""
        self._pending.update(parts)
        self._news.set()


class Viewers:
    """All open streams. For the event loop."""

    def __init__(self) -> None:
        self._open: list[Viewer] = []
        self._published: dict[str, dict[str, str]] = {}
        self.is_closing = False

    def __len__(self) -> int:
        return len(self._open)

    @property
    def full(self) -> bool:
        """Whether the maximum number of viewers is reached."""
        return len(self._open) >= MAX_VIEWERS

    @property
    def screens(self) -> set[str]:
        """The kinds of screens of all viewers."""
        return {viewer.screen for viewer in self._open}

    def enter(self, screen: str) -> Viewer:
        """Add a viewer, which is sent all parts first.

        Raises:
            Full: there is no room.
        """
        if self.full or self.is_closing:
            raise Full
        if screen not in self.screens:
            # Nothing was drawn for this screen for a while: old charts are worse than none.
            self._published.pop(screen, None)
        viewer = Viewer(screen, self._published.get(screen, {}))
        self._open.append(viewer)
        return viewer

    def leave(self, viewer: Viewer) -> None:
        """Remove a viewer that is gone."""
        self._open.remove(viewer)

    def publish(self, parts: Mapping[str, Mapping[str, str]]) -> None:
        """Send changed parts, for each kind of screen, to its viewers."""
        for screen, own in parts.items():
            before = self._published.setdefault(screen, {})
            changed = {name: html for name, html in own.items() if before.get(name) != html}
            before.update(changed)
            for viewer in self._open:
                if viewer.screen == screen and changed:
                    viewer.push(changed)

    def close(self, is_over: bool) -> None:
        """End all streams once they have sent their pending parts.

        Args:
            is_over: the job has ended, so that no viewer needs to wait for the next coordinator.
        """
        self.is_closing = True
        for viewer in self._open:
            viewer.is_over, viewer.is_closing = is_over, True
            viewer.push({})


log = logging.getLogger("tandem.coordinator")

RENDER_SECONDS = 1.0
"""Minimum time between two renderings, in seconds."""
LOOP_REST_FACTOR = 50.0
"""Multiple of a glance's duration that is left to everything else: viewers cost the event loop 2 % at most."""
CHARTS_INTERVAL = 2
"""Renderings from one with new charts to the next; the numbers are new in each."""
MAX_READ_SECONDS = 0.5
"""Maximum time for reading the logs in each rendering, in seconds."""
MAX_MEMBERS = 50
LAST_RENDER_SECONDS = 2.0
"""Maximum time of the last rendering, when the coordinator ends, in seconds; it takes 0.1 s, and more only if the disk
hangs."""
T = TypeVar("T")


class Live:
    """The page of one job. Create it inside a running event loop."""

    def __init__(self, coordinator: Coordinator, rundir: RunDir) -> None:
        self.viewers = Viewers()
        self._coordinator, self._rundir = coordinator, rundir
        self._timeline: Timeline | None = None
        self._complaint = ""
        self._executor = ThreadPoolExecutor(1, thread_name_prefix="page")
        self._rendering: asyncio.Task[None] | None = None
        self._round = 0
        self._last_error = ""

    def wake(self) -> None:
        """Start rendering, unless it is in progress."""
        if self._rendering is None or self._rendering.done():
            self._round = 0
            self._rendering = asyncio.get_running_loop().create_task(self._render_loop())

    async def close(self) -> None:
        """Show the end of the job, or of this coordinator, and end all streams."""
        if self._timeline is not None:
            self._timeline.hurry = True
        if self._rendering is not None:
            self._rendering.cancel()
            with suppress(asyncio.CancelledError):
                await self._rendering
        is_over = False
        if len(self.viewers):
            try:
                async with asyncio.timeout(LAST_RENDER_SECONDS):
                    is_over = await self._render_last()
            except Exception:
                # Whatever is wrong with the page, or the disk: the coordinator ends as it should.
                log.exception("event=last-page-failed")
        self.viewers.close(is_over)
        self._executor.shutdown(wait=False, cancel_futures=True)

    async def _render_loop(self) -> None:
        while len(self.viewers):
            started = time.monotonic()
            glance_seconds, with_charts = 0.0, self._round % CHARTS_INTERVAL == 0
            self._round += 1
            try:
                glance = Glance(*self._coordinator.glance(MAX_MEMBERS))
                glance_seconds = time.monotonic() - started
                rendered = await self._on_thread(partial(self._render, glance, self.viewers.screens, with_charts))
            except Exception as error:
                # A page that cannot be drawn must not disturb the job; the log has the error.
                rendered = self._failure_parts(error)
            self.viewers.publish(rendered)
            await asyncio.sleep(max(RENDER_SECONDS - (time.monotonic() - started), LOOP_REST_FACTOR * glance_seconds))

    async def _render_last(self) -> bool:
        """Render once more with the newest state of the run directory: the end of a job is a file there."""
        await self._on_thread(self._allow_time)
        job = self._coordinator.job
        directory = RunDirectory(self._rundir, job.spec.evaluation, has_base=job.spec.trainer.is_fine_tuning, job=job)
        observed = await self._on_thread(lambda: directory.poll(time.time()))
        glance = Glance(*self._coordinator.glance(MAX_MEMBERS, observed))
        screens = self.viewers.screens
        self.viewers.publish(await self._on_thread(lambda: self._render(glance, screens, True)))
        return observed.ending is not None

    def _failure_parts(self, error: Exception) -> dict[str, dict[str, str]]:
        """The parts that are shown after an error, which is logged once."""
        if repr(error) != self._last_error:
            self._last_error = repr(error)
            log.error("event=page-failed error=%r", error, exc_info=error)
        return {screen: {"note": parts.FAILED_NOTE} for screen in self.viewers.screens}

    async def _on_thread(self, work: Callable[[], T]) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._executor, work)

    # On the thread

    def _allow_time(self) -> None:
        """Let the last rendering take the time that it needs, now that the one before is done."""
        if self._timeline is not None:
            self._timeline.hurry = False

    def _render(self, glance: Glance, screens: set[str], with_charts: bool) -> dict[str, dict[str, str]]:
        timeline = self._follow()
        texts = parts.texts(glance, timeline, self._complaint)
        rendered: dict[str, dict[str, str]] = {}
        for screen in sorted(screens):
            rendered[screen] = dict(texts)
            if timeline is not None and with_charts:
                time.sleep(0.001)  # the loop may want the interpreter
                rendered[screen] |= parts.charts(glance, timeline, SCREENS[screen])
        return rendered

    def _follow(self) -> Timeline | None:
        if self._timeline is None:
            self._timeline = Timeline(self._rundir)
        try:
            self._timeline.follow(MAX_READ_SECONDS)
            self._complaint = ""
        except (OSError, ValueError) as error:
            self._complaint = str(error)
        return self._timeline
