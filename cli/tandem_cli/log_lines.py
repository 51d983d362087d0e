"""Data of log streams: lines, the selection of logs, and the printable form of a line."""

import re
from collections.abc import Callable
from dataclasses import dataclass

from tandem.formatting import one_line

MAX_LINE_BYTES = 2**16
"""Bytes after which a line is truncated."""
MAX_READ_BYTES = 2**20
"""Bytes that are read of a line at once. A program that prints no line breaks may print gigabytes."""
_COLOURS = re.compile(r"\x1b\[[0-9;:?]*[ -/]*[@-~]|\x1b\][^\x07\x1b]*(?:\x07|\x1b\\)")
"""Escape sequences that colour text or set the title of the window."""

Notify = Callable[[str], None]
"""Reports a message about the logs that is not a line of them."""


@dataclass(frozen=True, order=True)
class Line:
    """One line of one process."""

    timestamp: int
    """Nanoseconds since the epoch, by the clock of its node."""
    process: str
    """Name of the process, for example `worker-0`, `evaluator-1`, `coordinator`."""
    text: str
    """The text, without control characters."""

    def __str__(self) -> str:
        return f"{self.process} │ {self.text}"


@dataclass(frozen=True)
class LogSelection:
    """Selects logs."""

    role: str = ""
    """Role of the processes; empty: all roles."""
    names: tuple[str, ...] = ()
    """Names of the processes, for example `worker-0`; empty: all."""
    tail: int | None = None
    """Number of last lines of each log to start with; None: all."""


def printable_line(text: str) -> str:
    """Return the text that a terminal would finally show: no colours, only the last state of a progress bar.

    The result contains no control characters.
    """
    plain = _COLOURS.sub("", text).rstrip("\r\n")
    last_state = next((part for part in reversed(plain.split("\r")) if part), "")
    return one_line(last_state.expandtabs())
