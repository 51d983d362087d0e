"""The logs of a run as one stream: a line of it, whose logs are wanted, and what a terminal shows of a line."""

import re
from collections.abc import Callable
from dataclasses import dataclass

from tandem.formatting import one_line

MAX_COUNT = 2**16
"""Bytes of a line that are kept: what is longer is no line for people."""
MAX_LENGTH = 2**20
"""Bytes of a line that are read at once. A program that never ends its line may print gigabytes of it."""
_COLOURS = re.compile(r"\x1b\[[0-9;:?]*[ -/]*[@-~]|\x1b\][^\x07\x1b]*(?:\x07|\x1b\\)")
"""What programs write to colour their text, or to name the window."""

Tell = Callable[[str], None]
"""Says something about the logs that is none of their lines."""


@dataclass(frozen=True, order=True)
class Line:
    """One line of one container."""

    at: int
    """Nanoseconds since the epoch, by the clock of its node."""
    who: str
    """worker-0, evaluator-1, coordinator."""
    text: str
    """Without control characters."""


@dataclass(frozen=True)
class Choice:
    """Whose logs are wanted."""

    role: str = ""
    """Pods of one role; empty: of all."""
    names: tuple[str, ...] = ()
    """These alone: worker-0, evaluator-1, coordinator; empty: all."""
    tail: int | None = None
    """Lines of each to begin with; None: all."""


def shown(text: str) -> str:
    """What a terminal would show of a line in the end: without colours, of a progress bar only its last state; and
    nothing that could steer the terminal."""
    plain = _COLOURS.sub("", text).rstrip("\r\n")
    last = next((part for part in reversed(plain.split("\r")) if part), "")
    return one_line(last.expandtabs())
