"""The display of a run: a screen that is redrawn, or plain lines. Losing the terminal must not end the run."""

import re
import threading
import time
from collections.abc import Iterable
from contextlib import suppress
from typing import Protocol

from rich.console import Console

from tandem.coordinator_client import CoordinatorClient, Refused, Unreachable
from tandem.status import Snapshot
from tandem_cli.terminal.canvas import Canvas, can_draw
from tandem_cli.terminal.screen import Scene, event_line, screen, state_line

FRAME_SECONDS = 0.5
"""Between two pictures. One takes some 5 ms of a core that a rank may want."""
LINE_SECONDS = 5.0
"""Between two lines where nothing happens."""


class Display(Protocol):
    """Shows scenes."""

    draws: bool
    """Whether there is a picture on the terminal from the first scene on, which somebody has to take away."""

    def show(self, scene: Scene) -> None:
        """Show this one, if it is time to."""

    def end(self, scene: Scene) -> None:
        """Show how it stands when the run is over."""

    def close(self) -> None:
        """Leave the terminal as it was."""


def display_for(console: Console) -> Display:
    """A screen on a terminal that can draw it, else lines."""
    return FullScreen(console) if can_draw(console) else Written(console)


class FullScreen:
    """A picture that fills the terminal, gone when it is closed."""

    def __init__(self, console: Console) -> None:
        self._canvas = Canvas(console)
        self._next = 0.0
        self._shown: tuple[object, ...] = ()
        self._lost = False

    draws = True

    def show(self, scene: Scene) -> None:
        """Draw it, at once if what the user must know or the size of the terminal has changed."""
        urgent = (scene.notice, scene.waiting)
        if self._lost:
            return
        if time.monotonic() < self._next and urgent == self._shown and not self._canvas.is_resized:
            return
        self._next, self._shown = time.monotonic() + FRAME_SECONDS, urgent
        try:
            self._canvas.draw(screen(scene))
        except OSError:
            self._lost = True

    def end(self, scene: Scene) -> None:
        """Nothing: the picture goes, and what follows it says how the run ended."""

    def close(self) -> None:
        """Take the picture away."""
        with suppress(OSError):
            self._canvas.close()


class Written:
    """One line for each event, and one for the state every few seconds."""

    def __init__(self, console: Console) -> None:
        self._file = console.file
        self._next = 0.0
        self._seen: set[tuple[float, str]] = set()
        self._shown = ""
        self._lost = False

    draws = False

    def show(self, scene: Scene) -> None:
        """Write what is new."""
        self._tell(scene)
        # A number that changes in it, such as that of the seconds until the next start, is no news.
        urgent = re.sub(r"\d+", "", scene.notice or scene.waiting)
        if time.monotonic() >= self._next or (urgent and urgent != self._shown):
            self._next, self._shown = time.monotonic() + LINE_SECONDS, urgent
            self._write([state_line(scene, time.time())])

    def _tell(self, scene: Scene) -> None:
        fresh = [event for event in scene.events if (event.at, event.text) not in self._seen]
        self._seen |= {(event.at, event.text) for event in fresh}
        self._write(event_line(event) for event in fresh)

    def end(self, scene: Scene) -> None:
        """Write the last line."""
        self._tell(scene)
        self._write([state_line(scene, time.time())])

    def close(self) -> None:
        """Nothing is left open."""

    def _write(self, lines: Iterable[str]) -> None:
        if self._lost:
            return
        try:
            for line in lines:
                print(line, file=self._file, flush=True)
        except OSError:
            self._lost = True


SECONDS = 0.5
"""Between two questions."""
CALM_SECONDS = 2.0
"""The same while nobody waits for what is new: an answer takes the coordinator and us 2 ms of a core."""
TIMEOUT = 2.0
"""For one answer."""


class Watch:
    """The newest snapshot of the coordinator at `endpoint`, None until there is one."""

    def __init__(self, endpoint: str, token: str) -> None:
        self.newest: Snapshot | None = None
        self._client = CoordinatorClient(endpoint, token, timeout=TIMEOUT)
        self._is_calm = False
        self._closed = False
        self._hurry = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="watch", daemon=True)
        self._thread.start()

    def calm(self, is_calm: bool) -> None:
        """Ask less often, or often again, which begins at once."""
        before, self._is_calm = self._is_calm, is_calm
        if before and not is_calm:
            self._hurry.set()

    def close(self) -> None:
        """Stop asking."""
        self._closed = True
        self._hurry.set()
        self._thread.join(2 * TIMEOUT)

    def _watch(self) -> None:
        while not self._closed:
            # A coordinator that is being started again does not answer for a second; the last snapshot stays.
            with suppress(Unreachable, Refused):
                self.newest = self._client.status()
            if self._hurry.wait(CALM_SECONDS if self._is_calm else SECONDS):
                self._hurry.clear()
        self._client.close()
