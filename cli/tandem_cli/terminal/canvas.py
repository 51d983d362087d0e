"""A full-screen display that is redrawn until it is closed, and then restores the terminal.

It is drawn on the terminal's second screen, as `less` and `top` do. On the first one a picture has to be found again
before it can be replaced, and only the terminal knows where it is: the keys that a user presses are echoed into it, and
most terminals break and join its lines when their size changes. What was counted before is wrong then, and parts of the
old picture stay. Rejected for that reason: rich's Live, which counts lines. Meanwhile the terminal echoes no keys: it
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
"""The second screen, empty, without a cursor."""
LEAVE = "\x1b[?25h\x1b[?1049l"
"""The first screen as it was, with the cursor."""
_HOME, _REST_OF_LINE, _REST_OF_SCREEN = "\x1b[H", "\x1b[K", "\x1b[J"


def can_draw(console: Console) -> bool:
    """Whether its output is a terminal that knows pictures."""
    return console.is_terminal and not console.is_dumb_terminal and console.encoding.startswith("utf")


def give_back(terminal: int) -> None:
    """The first screen again, and keys that are echoed, where somebody else has died with a picture on it.

    Raises:
        OSError: the terminal is gone.
    """
    os.write(terminal, LEAVE.encode())
    with suppress(termios.error):
        settings = termios.tcgetattr(terminal)
        termios.tcsetattr(terminal, termios.TCSANOW, [*settings[:3], settings[3] | termios.ECHO, *settings[4:]])


class Canvas:
    """Draws on the terminal of a console. Ctrl-Z gives the terminal back until the command goes on."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._open = False
        self._drawn_at: os.terminal_size | None = None
        self._echoes: list[Any] | None = None
        """Settings of the terminal, where it has ceased to echo."""

    @property
    def size(self) -> os.terminal_size:
        """Columns and lines of the terminal as it is at this moment, whatever COLUMNS says."""
        with suppress(OSError, ValueError):
            size = os.get_terminal_size(self._console.file.fileno())
            # Of one that does not know its size, both are 0.
            if size.columns and size.lines:
                return size
        return os.terminal_size(self._console.size)

    @property
    def is_resized(self) -> bool:
        """Whether the terminal has another size than the last picture."""
        return self._drawn_at is not None and self._drawn_at != self.size

    def draw(self, picture: RenderableType) -> None:
        """Replace the picture. Of one that is too long the last line stays, and what is above it is cut.

        Raises:
            OSError: the terminal is gone.
        """
        size = self.size
        self._drawn_at = size
        lines = self._lines(picture, size)
        # At its end the cursor stands at the beginning: a key that is echoed on the last line would scroll the picture.
        text = _HOME + "\r\n".join(line + _REST_OF_LINE for line in lines) + _REST_OF_SCREEN + _HOME
        if not self._open:
            self._open = True
            self._before = signal.signal(signal.SIGTSTP, self._suspend)
            self._silence()
            text = ENTER + text
        self._write(text)

    def close(self) -> None:
        """Give the terminal back."""
        if self._open:
            self._open = False
            signal.signal(signal.SIGTSTP, self._before)
            self._write(LEAVE)
            self._echo()

    def _silence(self) -> None:
        """Echo no keys."""
        with suppress(OSError, ValueError, termios.error):
            terminal = self._console.file.fileno()
            # In the background, the kernel would stop this process for it.
            if os.tcgetpgrp(terminal) == os.getpgrp():
                settings = termios.tcgetattr(terminal)
                silent = [*settings[:3], settings[3] & ~termios.ECHO, *settings[4:]]
                termios.tcsetattr(terminal, termios.TCSANOW, silent)
                self._echoes = settings

    def _echo(self) -> None:
        """As it was."""
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
        """Ctrl-Z. Direct to the descriptor: what was interrupted may be writing to the buffer."""
        with suppress(OSError, ValueError):
            terminal = self._console.file.fileno()
            os.write(terminal, LEAVE.encode())
            self._echo()
            mine = signal.signal(signal.SIGTSTP, signal.SIG_DFL)
            os.kill(os.getpid(), signal.SIGTSTP)
            # From here on it goes on again, after `fg`.
            signal.signal(signal.SIGTSTP, mine)
            self._silence()
            os.write(terminal, ENTER.encode())


class PrintableConsole(Console):
    """A rich console. Texts are made printable where they become segments, so that no caller can forget it."""

    def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterable[Segment]:
        """The segments of something that rich can draw."""
        for segment in super().render(renderable, options):
            yield segment if segment.control else Segment(printable(segment.text), segment.style)
