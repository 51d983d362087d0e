"""Processor time of this process and of all processes that it has started, directly or through others.

The kernel adds the time of a process to its parent's once the parent has waited for it. Until then the process itself
has it. Both are read here, so that the sum grows evenly while programs come and go: an evaluator's, the loader workers
of a rank, the processes that a script spawns.
"""

import os
import resource
import time
from contextlib import suppress
from pathlib import Path

_TICKS = os.sysconf("SC_CLK_TCK")
_PROCESSES = Path("/proc")


class ProcessorTime:
    """Processor time of this process and of its descendants. Used by one thread."""

    def __init__(self) -> None:
        self._newest = 0.0
        self._left = 0.0
        """Of processes that were left alone by their parents: nobody is told how much they used any more."""
        self._fell = False
        self._given_up = 0.0
        """Of `_left`, what the reading before this one has added."""

    def seconds(self) -> float:
        """Seconds since this process began; never less than before. Where there is no /proc, without descendants that
        nobody has waited for."""
        found = _used() + self._left
        given_up, self._given_up = self._given_up, 0.0
        if found >= self._newest:
            if found - self._newest >= given_up:
                # All of it at once: it was not left alone, both readings have missed it while it ended.
                self._left -= given_up
                found -= given_up
            self._newest, self._fell = found, False
        elif self._fell:
            self._given_up = self._newest - found
            self._left += self._given_up
            self._fell = False
        else:
            # A process may end between two readings, and is found again in the time of its parent.
            self._fell = True
        return self._newest


def _used() -> float:
    ended = resource.getrusage(resource.RUSAGE_CHILDREN)
    return time.process_time() + ended.ru_utime + ended.ru_stime + sum(map(_of_tree, _children("self")))


def _of_tree(pid: str) -> float:
    """What a process has used, with its descendants; 0 if it is not there any more."""
    with suppress(OSError, ValueError, IndexError):
        # User and system time, of itself and of those that it has waited for.
        fields = (_PROCESSES / pid / "stat").read_text().rpartition(")")[2].split()[11:15]
        return sum(map(int, fields)) / _TICKS + sum(map(_of_tree, _children(pid)))
    return 0.0


def _children(pid: str) -> list[str]:
    found: list[str] = []
    with suppress(OSError):
        for task in (_PROCESSES / pid / "task").iterdir():
            with suppress(OSError):
                found += (task / "children").read_text().split()
    return found
