"""A terminal of 80 columns and 24 lines, for commands that draw: the kernel's pseudo-terminal, and what it shows."""

import fcntl
import os
import struct
import subprocess
import termios
from collections.abc import Mapping, Sequence
from pathlib import Path

import pyte

from tests.support.processes import environment

COLUMNS, LINES = 80, 24
CTRL_C = b"\x03"


class Terminal:
    """What a person sees of one command, and the keyboard. Nothing is read but by `look`: call it now and then, or the
    command waits for the terminal."""

    def __init__(self) -> None:
        self._master, self._slave = os.openpty()
        fcntl.ioctl(self._slave, termios.TIOCSWINSZ, struct.pack("4H", LINES, COLUMNS, 0, 0))
        os.set_blocking(self._master, False)
        self._screen = pyte.HistoryScreen(COLUMNS, LINES, history=1_000)
        self._stream = pyte.ByteStream(self._screen)
        self._fresh = self.settings
        self.written = ""
        """All that was written to it, also what is not seen any more."""

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
        past = ["".join(line[column].data for column in range(COLUMNS)).rstrip() for line in self._screen.history.top]
        return "\n".join([*past, *shown]).rstrip().split("\n")

    def press(self, keys: bytes) -> None:
        """Type something."""
        os.write(self._master, keys)

    @property
    def settings(self) -> list[object]:
        """What `stty` shows."""
        return termios.tcgetattr(self._slave)

    @property
    def is_as_before(self) -> bool:
        """Whether a shell could go on: the cursor is seen, at the beginning of a line, and keys do what they did."""
        cursor = self._screen.cursor
        return not cursor.hidden and cursor.x == 0 and self.settings == self._fresh

    def close(self) -> None:
        """Switch it off."""
        os.close(self._master)
        os.close(self._slave)
