"""A terminal for commands that draw: the kernel's pseudo-terminal, and what it shows."""

import fcntl
import os
import struct
import subprocess
import termios
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, TextIO

import pyte

from tests.support.processes import environment

COLUMNS, LINES = 80, 24
CTRL_C = b"\x03"


class _Screen(pyte.HistoryScreen):
    """pyte's screen with a second one, which terminals have and pyte has not."""

    first: Any = None

    def set_mode(self, *modes: int, **options: Any) -> None:
        super().set_mode(*modes, **options)
        if options.get("private") and 1049 in modes and self.first is None:
            cursor = self.cursor
            self.first = {line: dict(row) for line, row in self.buffer.items()}, cursor.x, cursor.y, self.history
            self.erase_in_display(2)
            self.cursor_position()

    def reset_mode(self, *modes: int, **options: Any) -> None:
        super().reset_mode(*modes, **options)
        if options.get("private") and 1049 in modes and self.first is not None:
            lines, x, y, self.history = self.first
            self.first = None
            self.erase_in_display(2)
            for line, row in lines.items():
                self.buffer[line].update(row)
            self.cursor.y, self.cursor.x = min(y, self.lines - 1), min(x, self.columns - 1)


class Terminal:
    """What a person sees of one command, and the keyboard. Nothing is read but by `look`: call it now and then, or the
    command waits for the terminal."""

    def __init__(self, columns: int = COLUMNS, lines: int = LINES) -> None:
        self._master, self._slave = os.openpty()
        self._screen = _Screen(columns, lines, history=1_000)
        self.resize(columns, lines)
        os.set_blocking(self._master, False)
        self._stream = pyte.ByteStream(self._screen)
        self._fresh = self.settings
        self.written = ""
        """All that was written to it, also what is not seen any more."""

    def resize(self, columns: int, lines: int) -> None:
        """Another size, as when a window is dragged: the kernel sends SIGWINCH."""
        fcntl.ioctl(self._slave, termios.TIOCSWINSZ, struct.pack("4H", lines, columns, 0, 0))
        self._screen.resize(lines, columns)

    def start(self, command: Sequence[str], cwd: Path) -> subprocess.Popen[bytes]:
        """Start a command as a shell in this terminal would: the keys' signals are for it."""
        variables: Mapping[str, str] = {"TERM": "xterm-256color", "LC_ALL": "C.UTF-8"}
        return subprocess.Popen(
            command,
            cwd=cwd,
            env={name: value for name, value in environment(variables).items() if name not in ("LINES", "NO_COLOR")},
            stdin=self._slave,
            stdout=self._slave,
            stderr=self._slave,
            start_new_session=True,
            preexec_fn=lambda: fcntl.ioctl(0, termios.TIOCSCTTY, 0),
        )

    def open(self) -> TextIO:
        """The side that commands write to."""
        return os.fdopen(os.dup(self._slave), "w", encoding="utf-8")

    def look(self) -> list[str]:
        """The lines on the screen, without what is blank at their ends."""
        while True:
            try:
                data = os.read(self._master, 65_536)
            except BlockingIOError:
                return [line.rstrip() for line in self._screen.display]
            self._stream.feed(data)
            self.written += data.decode(errors="replace")

    def all_lines(self) -> list[str]:
        """Those that have left the screen at its top, and those on it, but for blank ones at the end."""
        shown = self.look()
        columns = range(self._screen.columns)
        past = ["".join(line[column].data for column in columns).rstrip() for line in self._screen.history.top]
        return "\n".join([*past, *shown]).rstrip().split("\n")

    def press(self, keys: bytes) -> None:
        os.write(self._master, keys)

    @property
    def settings(self) -> list[object]:
        """What `stty` shows."""
        return termios.tcgetattr(self._slave)

    @property
    def is_as_before(self) -> bool:
        """Whether a shell could go on: the first screen, the cursor seen at the beginning of a line, and keys do what
        they did."""
        cursor = self._screen.cursor
        return self._screen.first is None and not cursor.hidden and cursor.x == 0 and self.settings == self._fresh

    def close(self) -> None:
        os.close(self._master)
        os.close(self._slave)
