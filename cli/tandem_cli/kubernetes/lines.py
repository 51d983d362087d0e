"""A line of a log: when it was written, by whom, and what of it may reach a terminal. Pure, but for reading a pipe."""

import os
import re
import select
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import datetime

from tandem.printable import one_line

MOST = 2**16
"""Bytes of a line that are kept: what is longer is no line for people."""
_CHUNK = 2**16
_COLOURS = re.compile(r"\x1b\[[0-9;:?]*[ -/]*[@-~]|\x1b\][^\x07\x1b]*(?:\x07|\x1b\\)")
"""What programs write to colour their text, or to name the window."""
_SECOND = 10**9


@dataclass(frozen=True, order=True)
class Line:
    """One line of one container."""

    at: int
    """Nanoseconds since the epoch, by the clock of its node."""
    who: str
    """worker-0, evaluator-1, coordinator."""
    text: str
    """Without control characters."""


def line(raw: bytes, who: str, before: int) -> Line:
    """A line as `kubectl logs --timestamps` writes it.

    Args:
        before: the time of the line before, which counts where this one has none.
    """
    text = raw.decode(errors="replace")
    first, _, rest = text.partition(" ")
    at = stamp(first)
    return Line(before, who, shown(text)) if at is None else Line(at, who, shown(rest))


def stamp(text: str) -> int | None:
    """Nanoseconds since the epoch of an RFC 3339 time, None for anything else."""
    found = re.fullmatch(r"(\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d)(?:\.(\d{1,9}))?(Z|[+-]\d\d:\d\d)", text)
    if found is None:
        return None
    whole, fraction, zone = found.groups()
    try:
        at = datetime.fromisoformat(whole + zone)
    except ValueError:
        return None
    return int(at.timestamp()) * _SECOND + int((fraction or "0").ljust(9, "0"))


def shown(text: str) -> str:
    """What a terminal would show of a line in the end: without colours, of a progress bar only its last state; and
    nothing that could steer the terminal."""
    plain = _COLOURS.sub("", text).rstrip("\r\n")
    last = next((part for part in reversed(plain.split("\r")) if part), "")
    return one_line(last.expandtabs())


def lines_of(child: subprocess.Popen[bytes], silence: float | None) -> Iterator[bytes]:
    """The lines that a process writes to its pipe, without their ends; long ones are cut.

    Args:
        silence: seconds without a byte after which it is given up; None: never.

    Raises:
        TimeoutError: it was silent for so long.
    """
    assert child.stdout is not None
    rest, is_cut = b"", False
    while True:
        ready, _, _ = select.select([child.stdout], [], [], silence)
        if not ready:
            raise TimeoutError
        piece = os.read(child.stdout.fileno(), _CHUNK)
        *whole, rest = (rest + piece).split(b"\n")
        for one in whole:
            if not is_cut:
                yield one[:MOST]
            is_cut = False
        if len(rest) > MOST and not is_cut:
            yield rest[:MOST] + " …".encode()
            is_cut = True
        if is_cut:
            rest = b""
        if not piece:
            if rest:
                yield rest
            return
