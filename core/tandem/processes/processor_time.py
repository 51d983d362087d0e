"""Processor time of this process and of all its descendants.

The kernel adds the time of a process to its parent's once the parent has waited for it. Until then the process itself
has it. Both are read here, so that the sum grows evenly while programs start and end: an evaluator's, the loader
workers of a rank, the processes that a script spawns.
"""

import os
import resource
import time
from contextlib import suppress
from pathlib import Path

_TICKS = os.sysconf("SC_CLK_TCK")
_PROCESSES = Path("/proc")


class ProcessorTime:
    """Processor time of this process and of its descendants. Not thread-safe."""

    def __init__(self) -> None:
        self._newest = 0.0
        self._orphaned = 0.0
        """Processor time of processes whose parents ended without waiting for them: the kernel does not report it any
        more."""
        self._fell = False
        self._last_orphaned = 0.0
        """The part of `_orphaned` that the previous reading has added."""

    def seconds(self) -> float:
        """Processor time in seconds since this process started; never less than before. Without /proc it excludes
        descendants that nobody has waited for."""
        total = _used() + self._orphaned
        last_orphaned, self._last_orphaned = self._last_orphaned, 0.0
        if total >= self._newest:
            if total - self._newest >= last_orphaned:
                # All of it came back: it was not orphaned, both readings have missed it while it ended.
                self._orphaned -= last_orphaned
                total -= last_orphaned
            self._newest, self._fell = total, False
        elif self._fell:
            self._last_orphaned = self._newest - total
            self._orphaned += self._last_orphaned
            self._fell = False
        else:
            # A process may end between two readings: then its time appears in its parent's in the next one.
            self._fell = True
        return self._newest


def _used() -> float:
    ended = resource.getrusage(resource.RUSAGE_CHILDREN)
    return time.process_time() + ended.ru_utime + ended.ru_stime + sum(map(_tree_seconds, _children("self")))


def _tree_seconds(pid: str) -> float:
    """Processor time of a process and its descendants; 0 if it has ended."""
    with suppress(OSError, ValueError, IndexError):
        # User and system time, of itself and of those that it has waited for.
        fields = (_PROCESSES / pid / "stat").read_text().rpartition(")")[2].split()[11:15]
        return sum(map(int, fields)) / _TICKS + sum(map(_tree_seconds, _children(pid)))
    return 0.0


def _children(pid: str) -> list[str]:
    children: list[str] = []
    with suppress(OSError):
        for task in (_PROCESSES / pid / "task").iterdir():
            with suppress(OSError):
                children += (task / "children").read_text().split()
    return children
