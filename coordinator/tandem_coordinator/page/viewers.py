"""Who is looking, and what each of them has to be sent.

A viewer is sent the newest state of a part and never the ones between: what waits for one that reads slowly is at most
one of each part, however slowly it reads.
"""

import asyncio
from collections.abc import Mapping

MOST_VIEWERS = 16
"""Streams at the same time; one more is asked to come back later."""
LOOKS = ("wide", "narrow")
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
        return len(self._open) >= MOST_VIEWERS

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
