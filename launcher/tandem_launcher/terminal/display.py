"""Displays of a run: a screen that is redrawn, or plain lines. Losing the terminal must not end the run."""

import re
import threading
import time
from collections.abc import Iterable
from contextlib import suppress
from typing import Protocol

from rich.console import Console

from tandem.wire.coordinator_client import CoordinatorClient, CoordinatorRefused, Unreachable
from tandem.wire.status import Snapshot
from tandem_launcher.terminal.canvas import Canvas, can_draw
from tandem_launcher.terminal.screen import Scene, event_line, screen, state_line

FRAME_SECONDS = 0.5
"""Interval between frames, in seconds. A frame takes some 5 ms of a core that a rank may need."""
LINE_SECONDS = 5.0
"""Interval between lines while nothing changes, in seconds."""


class Display(Protocol):
    """Interface of a display."""

    draws: bool
    """Whether it takes over the terminal with the first scene, so that the terminal must be restored."""

    def show(self, scene: Scene) -> None:
        """Show a scene, unless the last one is recent enough."""

    def end(self, scene: Scene) -> None:
        """Show the final scene, once the run is over."""

    def close(self) -> None:
        """Restore the terminal."""


def display_for(console: Console) -> Display:
    """Create the display for a console: a screen where the terminal can draw it, else lines."""
    return FullScreen(console) if can_draw(console) else Written(console)


class FullScreen:
    """A full-screen display, removed when it is closed."""

    def __init__(self, console: Console) -> None:
        self._canvas = Canvas(console)
        self._next = 0.0
        self._last_urgent: tuple[object, ...] = ()
        self._is_lost = False

    draws = True

    def show(self, scene: Scene) -> None:
        """Draw a scene; immediately if its notice or the size of the terminal has changed."""
        urgent = (scene.notice, scene.waiting)
        if self._is_lost:
            return
        if time.monotonic() < self._next and urgent == self._last_urgent and not self._canvas.is_resized:
            return
        self._next, self._last_urgent = time.monotonic() + FRAME_SECONDS, urgent
        try:
            self._canvas.draw(screen(scene))
        except OSError:
            self._is_lost = True

    def end(self, scene: Scene) -> None:
        """Do nothing: the screen is removed, and the lines after it tell how the run ended."""

    def close(self) -> None:
        """Remove the screen."""
        with suppress(OSError):
            self._canvas.close()


class Written:
    """A display of lines: one for each event, and one for the state every few seconds."""

    def __init__(self, console: Console) -> None:
        self._file = console.file
        self._next = 0.0
        self._written: set[tuple[float, str]] = set()
        self._last_urgent = ""
        self._is_lost = False

    draws = False

    def show(self, scene: Scene) -> None:
        """Write the new events, and the state if it is due or urgent."""
        self._write_events(scene)
        # A changed number, such as the seconds until the next start, is not urgent.
        urgent = re.sub(r"\d+", "", scene.notice or scene.waiting)
        if time.monotonic() >= self._next or (urgent and urgent != self._last_urgent):
            self._next, self._last_urgent = time.monotonic() + LINE_SECONDS, urgent
            self._write([state_line(scene, time.time())])

    def _write_events(self, scene: Scene) -> None:
        fresh = [event for event in scene.events if (event.at, event.text) not in self._written]
        self._written |= {(event.at, event.text) for event in fresh}
        self._write(event_line(event) for event in fresh)

    def end(self, scene: Scene) -> None:
        """Write the last line."""
        self._write_events(scene)
        self._write([state_line(scene, time.time())])

    def close(self) -> None:
        """Do nothing: lines leave the terminal as it is."""

    def _write(self, lines: Iterable[str]) -> None:
        if self._is_lost:
            return
        try:
            for line in lines:
                print(line, file=self._file, flush=True)
        except OSError:
            self._is_lost = True


POLL_SECONDS = 0.5
"""Poll interval of the coordinator, in seconds."""
CALM_POLL_SECONDS = 2.0
"""Poll interval while nothing is urgent: a request takes the coordinator and this process 2 ms of a core."""
TIMEOUT = 2.0
"""Timeout of one request, in seconds."""


class Watch:
    """Polls the coordinator at `endpoint` in a thread; `newest` is the last snapshot, None until the first."""

    def __init__(self, endpoint: str, token: str) -> None:
        self.newest: Snapshot | None = None
        self._client = CoordinatorClient(endpoint, token, timeout=TIMEOUT)
        self._is_calm = False
        self._is_closed = False
        self._wake = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="watch", daemon=True)
        self._thread.start()

    def calm(self, is_calm: bool) -> None:
        """Set the poll interval. When it becomes short again, the next request is sent immediately."""
        before, self._is_calm = self._is_calm, is_calm
        if before and not is_calm:
            self._wake.set()

    def close(self) -> None:
        """Stop polling."""
        self._is_closed = True
        self._wake.set()
        self._thread.join(2 * TIMEOUT)

    def _watch(self) -> None:
        while not self._is_closed:
            # A restarting coordinator does not answer for a second; the last snapshot stays.
            with suppress(Unreachable, CoordinatorRefused):
                self.newest = self._client.status()
            if self._wake.wait(CALM_POLL_SECONDS if self._is_calm else POLL_SECONDS):
                self._wake.clear()
        self._client.close()
