"""The output of a local run's processes, as one stream of lines in time order.

Agents, coordinator and evaluators say when they print a line. What a script prints counts as of the line before it.
"""

import heapq
import re
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path

from tandem.errors import UserError
from tandem_cli.log_lines import MAX_COUNT, MAX_LENGTH, Line, shown

POLL_SECONDS = 0.2
_START = re.compile(r"^--- (\d{4}-\d\d-\d\d \d\d:\d\d:\d\d) ")
_STAMP = re.compile(r"^(\d{4}-\d\d-\d\d \d\d:\d\d:\d\d)(?:[,.](\d{1,6}))?\b")
_SECOND = 10**9
CUT = f" … (this line is longer than {MAX_LENGTH // 2**20} MiB; its rest is not shown)"
HIDDEN = ("guardian", "run")
"""Processes whose logs are left out: the guardian, and a background `tandem run`, which repeats what others print."""


def log_names(path: Path) -> list[str]:
    """The processes of a run that have a log."""
    with suppress(OSError):
        return [file.stem for file in sorted((path / "log").glob("*.txt")) if file.stem not in HIDDEN]
    return []


def chosen(path: Path, names: Sequence[str], role: str) -> list[Path]:
    """The logs of a run that are meant, all unless some are named.

    Raises:
        UserError: one is not there.
    """
    with suppress(OSError):
        there = {file.stem: file for file in sorted((path / "log").glob("*.txt")) if file.stem not in HIDDEN}
        for name in names:
            if name not in there:
                known = ", ".join(there) or "none yet"
                raise UserError(f"{path} has no log of {name}; there are: {known}")
        return [file for name, file in there.items() if (not names or name in names) and name.startswith(role)]
    return []


class Logs:
    """The logs of a run, read once and then followed."""

    def __init__(self, path: Path, names: Sequence[str], role: str, tail: int | None) -> None:
        self._path, self._names, self._role, self._tail = path, names, role, tail
        self._read: dict[Path, int] = {}
        self._at: dict[Path, int] = {}
        self._cut: set[Path] = set()
        """Those of which the rest of a line is passed over."""

    def lines(self) -> Iterator[Line]:
        """What has been printed since the last call, or so far."""
        found = []
        for file in chosen(self._path, self._names if not self._read else (), self._role):
            if self._names and file.stem not in self._names:
                continue
            first = file not in self._read
            lines = self._of(file)
            found.append(deque(lines, self._tail) if first and self._tail is not None else list(lines))
        # Not a sort: a file's own order stays, whatever the clocks say.
        yield from heapq.merge(*found, key=lambda line: line.at)

    def follow(self, is_over: Callable[[], bool]) -> Iterator[Line]:
        """What is printed from now on, until the run is over and all is read."""
        while True:
            over = is_over()
            yield from self.lines()
            if over:
                return
            time.sleep(POLL_SECONDS)

    def _of(self, file: Path) -> Iterator[Line]:
        with suppress(OSError), file.open("rb") as content:
            content.seek(self._read.get(file, 0))
            while raw := content.readline(MAX_LENGTH):
                is_whole, was_cut = raw.endswith(b"\n"), file in self._cut
                if not is_whole and len(raw) < MAX_LENGTH:
                    # Its rest is not written yet.
                    break
                self._read[file] = self._read.get(file, 0) + len(raw)
                if is_whole:
                    self._cut.discard(file)
                else:
                    self._cut.add(file)
                if was_cut:
                    continue
                text = raw[:MAX_COUNT].decode(errors="replace")
                at = self._at[file] = max(_time(text) or 0, self._at.get(file, 0))
                yield Line(at, file.stem, shown(text) + ("" if is_whole else CUT))


def _time(text: str) -> int | None:
    """Nanoseconds since the epoch."""
    found = _START.match(text) or _STAMP.match(text)
    if found is None:
        return None
    try:
        whole = time.mktime(time.strptime(found[1], "%Y-%m-%d %H:%M:%S"))
    except (ValueError, OverflowError):
        return None
    fraction = (found[2] or "0").ljust(9, "0") if found.re is _STAMP else "0"
    return int(whole) * _SECOND + int(fraction)
