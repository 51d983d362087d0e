"""Runs that are compared share the same minutes: they take turns of SECONDS, and who has no turn is stopped (SIGSTOP).

The speed of a shared machine drifts and jumps, by 20 % from one minute to the next. Runs one after the other are each
measured in other minutes, and nine pairs left the ratio of two equal sides uncertain by 10 %. Here the processes of
all sides live at once and one side's alone run, so that each jump meets all sides alike. What a side takes is told in
its own running time, in which its stops do not occur (`Pauses`).

A side's first process is stopped first, and its descendants again and again until there is none that runs: what is
stopped starts nothing. Stopped processes keep their memory and their connections. Tandem's own limits of time (a lost
heartbeat, a step that hangs) are far above a turn.

Rejected: a file in which the training loops read whose turn it is (the scripts would no longer be unchanged, and what
is beside the ranks would go on in the others' turns); the freezer of cgroups (needs root, and v1 and v2 differ); many
short runs (a start takes longer than what is measured).
"""

import os
import signal
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import TypeVar

import psutil

SECONDS = 2.0
T = TypeVar("T")


class Turns:
    """Of threads that each watch one side; all but one wait."""

    def __init__(self, sides: list[str]) -> None:
        self._queue = deque(sides)
        self._changed = threading.Condition()

    def wait(self, side: str) -> None:
        """Until it is this side's turn."""
        with self._changed:
            self._changed.wait_for(lambda: self._queue[0] == side)

    def pass_on(self, side: str) -> None:
        """End this side's turn, and wait for its next."""
        with self._changed:
            self._queue.rotate(-1)
            self._changed.notify_all()
        self.wait(side)

    def leave(self, side: str) -> None:
        """End this side's turn for good."""
        with self._changed:
            self._queue.remove(side)
            self._changed.notify_all()

    @property
    def alone(self) -> bool:
        """Whether the others have left."""
        return len(self._queue) == 1


@dataclass
class Pauses:
    """When a run was stopped, in the order of time; seconds since the epoch."""

    spans: list[tuple[float, float]] = field(default_factory=list)

    def running(self, at: float) -> float:
        """A moment in the run's own time: less all the time that it was stopped before."""
        return at - sum(min(end, at) - begin for begin, end in self.spans if begin < at)


_PRESENT: ContextVar[tuple[Turns, str] | None] = ContextVar("turns", default=None)


def in_turns(measures: Mapping[str, Callable[[], T]], number: int = 0) -> dict[str, T]:
    """Measure all sides at once, in turns.

    Args:
        measures: let no error out: one side's would leave the others without an end.
        number: of the round; in those that are odd the last side is the first.
    """
    turns = Turns(list(measures) if number % 2 == 0 else list(measures)[::-1])

    def measured(side: str) -> T:
        _PRESENT.set((turns, side))
        turns.wait(side)
        try:
            return measures[side]()
        finally:
            turns.leave(side)

    with ThreadPoolExecutor(len(measures)) as pool:
        return dict(zip(measures, pool.map(measured, measures), strict=True))


class Turn:
    """That of the run which this thread watches, if it shares its time with others."""

    def __init__(self, root: psutil.Process) -> None:
        self.pauses = Pauses()
        self._root = root
        self._present = _PRESENT.get()
        self._began = time.monotonic()

    @property
    def is_over(self) -> bool:
        """Whether another's is due."""
        if self._present is None or self._present[0].alone:
            return False
        return time.monotonic() - self._began >= SECONDS

    def pass_on(self) -> None:
        """Stop the run, and let it go on at its next turn."""
        assert self._present is not None
        turns, side = self._present
        with stopped(self._root):
            begin = time.time()
            turns.pass_on(side)
            self.pauses.spans.append((begin, time.time()))
        self._began = time.monotonic()


@contextmanager
def stopped(root: psutil.Process) -> Iterator[None]:
    """A process and all its descendants stand still meanwhile."""
    still: list[int] = []
    try:
        while fresh := [pid for pid in _family(root) if pid not in still]:
            for pid in fresh:
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGSTOP)
                still.append(pid)
        yield
    finally:
        for pid in reversed(still):
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGCONT)


def _family(root: psutil.Process) -> list[int]:
    with suppress(psutil.NoSuchProcess):
        return [root.pid, *(child.pid for child in root.children(recursive=True))]
    return []
