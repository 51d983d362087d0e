"""Runs that are compared share the same minutes: they take turns of SECONDS, and the others are stopped (SIGSTOP).

The speed of a shared machine drifts and jumps, by 20 % from one minute to the next. Runs one after the other are each
measured in other minutes, and nine pairs left the ratio of two equal sides uncertain by 10 %. Here the processes of all
sides exist at the same time and only one side's run, so that each jump affects all sides alike. The time of a side is
its own running time, without its stops (`Pauses`).

A side's first process is stopped first, and then its descendants repeatedly until none of them runs: a stopped process
starts nothing. Stopped processes keep their memory and their connections. Tandem's own timeouts (a lost heartbeat, a
step that hangs) are far above a turn.

Rejected: a file in which the training loops read whose turn it is (the scripts would no longer be unchanged, and
processes beside the ranks would continue in the others' turns); the freezer of cgroups (needs root, and v1 and v2
differ); many short runs (a start takes longer than the measurement).
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
    """Turns of threads that each watch one side; all but one wait."""

    def __init__(self, sides: list[str]) -> None:
        self._queue = deque(sides)
        self._changed = threading.Condition()

    def wait(self, side: str) -> None:
        """Wait until it is this side's turn."""
        with self._changed:
            self._changed.wait_for(lambda: self._queue[0] == side)

    def pass_on(self, side: str) -> None:
        """End this side's turn, and wait for its next."""
        with self._changed:
            self._queue.rotate(-1)
            self._changed.notify_all()
        self.wait(side)

    def leave(self, side: str) -> None:
        """End this side's turns."""
        with self._changed:
            self._queue.remove(side)
            self._changed.notify_all()

    @property
    def alone(self) -> bool:
        """Whether the other sides have left."""
        return len(self._queue) == 1


@dataclass
class Pauses:
    """Periods in which a run was stopped, in order of time; seconds since the epoch."""

    spans: list[tuple[float, float]] = field(default_factory=list)

    def running(self, time: float) -> float:
        """Convert a time to the run's own time: minus all stops before it."""
        return time - sum(min(end, time) - begin for begin, end in self.spans if begin < time)


_PRESENT: ContextVar[tuple[Turns, str] | None] = ContextVar("turns", default=None)


def in_turns(measures: Mapping[str, Callable[[], T]], number: int = 0) -> dict[str, T]:
    """Measure all sides at the same time, in turns.

    Args:
        measures: must not raise: an exception of one side would leave the others waiting.
        number: number of the round; in odd rounds the order of sides is reversed.
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
    """Turn of the run that this thread watches, if it shares its time with others."""

    def __init__(self, root: psutil.Process) -> None:
        self.pauses = Pauses()
        self._root = root
        self._present = _PRESENT.get()
        self._started = time.monotonic()

    @property
    def is_over(self) -> bool:
        """Whether another side's turn is due."""
        if self._present is None or self._present[0].alone:
            return False
        return time.monotonic() - self._started >= SECONDS

    def pass_on(self) -> None:
        """Stop the run until its next turn."""
        assert self._present is not None
        turns, side = self._present
        with stopped(self._root):
            begin = time.time()
            turns.pass_on(side)
            self.pauses.spans.append((begin, time.time()))
        self._started = time.monotonic()


@contextmanager
def stopped(root: psutil.Process) -> Iterator[None]:
    """Stop a process and all its descendants meanwhile."""
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
