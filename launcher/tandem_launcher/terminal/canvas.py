"""A full-screen display that is redrawn until it is closed, and then restores the terminal.

It is drawn on the terminal's alternate screen, like `less` and `top`. On the main screen a picture must be found again
before it can be replaced, and only the terminal knows where it is: keys that a user presses are echoed into it, and
most terminals break and join its lines when their size changes. A count of lines is wrong then, and parts of the old
picture stay. Rejected for that reason: rich's Live, which counts lines. Meanwhile the terminal echoes no keys, as it
would show them in the picture.
"""

import os
import signal
import termios
from collections.abc import Iterable
from contextlib import suppress
from types import FrameType
from typing import Any

from rich.console import Console, ConsoleOptions, RenderableType
from rich.segment import Segment

from tandem.formatting import printable

ENTER = "\x1b[?1049h\x1b[?25l\x1b[2J\x1b[H"
"""Switches to the alternate screen, clears it, and hides the cursor."""
LEAVE = "\x1b[?25h\x1b[?1049l"
"""Switches back to the main screen, and shows the cursor."""
_HOME, _REST_OF_LINE, _REST_OF_SCREEN = "\x1b[H", "\x1b[K", "\x1b[J"


def can_draw(console: Console) -> bool:
    """Whether the output is a terminal that can show pictures."""
    return console.is_terminal and not console.is_dumb_terminal and console.encoding.startswith("utf")


def give_back(terminal: int) -> None:
    """Restore the main screen and the echo of keys after a process has died with a picture on the terminal.

    Raises:
        OSError: the terminal is gone.
    """
    os.write(terminal, LEAVE.encode())
    with suppress(termios.error):
        settings = termios.tcgetattr(terminal)
        termios.tcsetattr(terminal, termios.TCSANOW, [*settings[:3], settings[3] | termios.ECHO, *settings[4:]])


class Canvas:
    """Draws on the terminal of a console. Ctrl-Z restores the terminal until the command continues."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._open = False
        self._drawn_at: os.terminal_size | None = None
        self._echoes: list[Any] | None = None
        """Settings of the terminal before the echo was turned off; None while it is on."""

    @property
    def size(self) -> os.terminal_size:
        """Columns and lines of the terminal at this moment, whatever COLUMNS says."""
        with suppress(OSError, ValueError):
            size = os.get_terminal_size(self._console.file.fileno())
            # A terminal that does not know its size reports 0 for both.
            if size.columns and size.lines:
                return size
        return os.terminal_size(self._console.size)

    @property
    def is_resized(self) -> bool:
        """Whether the terminal's size has changed since the last picture."""
        return self._drawn_at is not None and self._drawn_at != self.size

    def draw(self, picture: RenderableType) -> None:
        """Replace the picture. If it is too long, its last line stays and the lines above it are cut.

        Raises:
            OSError: the terminal is gone.
        """
        size = self.size
        self._drawn_at = size
        lines = self._lines(picture, size)
        # The cursor ends at the top: a key that is echoed on the last line would scroll the picture.
        text = _HOME + "\r\n".join(line + _REST_OF_LINE for line in lines) + _REST_OF_SCREEN + _HOME
        if not self._open:
            self._open = True
            self._before = signal.signal(signal.SIGTSTP, self._suspend)
            self._silence()
            text = ENTER + text
        self._write(text)

    def close(self) -> None:
        """Restore the terminal."""
        if self._open:
            self._open = False
            signal.signal(signal.SIGTSTP, self._before)
            self._write(LEAVE)
            self._echo()

    def _silence(self) -> None:
        """Turn off the echo of keys."""
        with suppress(OSError, ValueError, termios.error):
            terminal = self._console.file.fileno()
            # The kernel would stop a process in the background that changes the settings.
            if os.tcgetpgrp(terminal) == os.getpgrp():
                settings = termios.tcgetattr(terminal)
                silent = [*settings[:3], settings[3] & ~termios.ECHO, *settings[4:]]
                termios.tcsetattr(terminal, termios.TCSANOW, silent)
                self._echoes = settings

    def _echo(self) -> None:
        """Restore the echo of keys."""
        settings, self._echoes = self._echoes, None
        with suppress(OSError, ValueError, termios.error):
            if settings is not None:
                termios.tcsetattr(self._console.file.fileno(), termios.TCSANOW, settings)

    def _lines(self, picture: RenderableType, size: os.terminal_size) -> list[str]:
        with self._console.capture() as captured:
            self._console.print(picture, width=max(1, size.columns), crop=False)
        lines = captured.get().rstrip("\n").split("\n")
        return lines if len(lines) <= size.lines else [*lines[: max(0, size.lines - 1)], lines[-1]]

    def _write(self, text: str) -> None:
        self._console.file.write(text)
        self._console.file.flush()

    def _suspend(self, number: int, frame: FrameType | None) -> None:
        """Handle Ctrl-Z. Writes directly to the descriptor: the interrupted code may be writing to the buffer."""
        with suppress(OSError, ValueError):
            terminal = self._console.file.fileno()
            os.write(terminal, LEAVE.encode())
            self._echo()
            handler = signal.signal(signal.SIGTSTP, signal.SIG_DFL)
            os.kill(os.getpid(), signal.SIGTSTP)
            # Continues here after `fg`.
            signal.signal(signal.SIGTSTP, handler)
            self._silence()
            os.write(terminal, ENTER.encode())


class PrintableConsole(Console):
    """A rich console that makes texts printable where they become segments, so that no caller can forget it."""

    def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterable[Segment]:
        """Render something that rich can draw into segments."""
        for segment in super().render(renderable, options):
            yield segment if segment.control else Segment(printable(segment.text), segment.style)
