"""How long this rank's own work takes, to tell a straggler from those who wait for it.

All ranks of a group take a step in the same time, because they wait for each other when they average gradients. The
forward pass is what each does alone, so its time is compared. On a GPU it is timed there, between two events, which
costs the training thread nothing; the times are read at a vote, when the losses have been waited for anyway.
"""

import contextlib
import time
from collections.abc import Iterator
from types import TracebackType

import torch


class Busy:
    """A stopwatch for forward passes: `with busy: loss = forward(…)`."""

    def __init__(self, device: torch.device) -> None:
        self._on_gpu = device.type == "cuda"
        self._seconds = 0.0
        self._began = 0.0
        self._events: list[torch.cuda.Event] = []
        self._pauses = False

    def __enter__(self) -> None:
        if self._pauses:
            return
        if self._on_gpu:
            self._mark()
        else:
            self._began = time.perf_counter()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, frames: TracebackType | None
    ) -> None:
        if self._pauses:
            return
        if self._on_gpu:
            self._mark()
        else:
            self._seconds += time.perf_counter() - self._began

    @contextlib.contextmanager
    def pausing(self) -> Iterator[None]:
        """What is done in the block is no part of a step."""
        before, self._pauses = self._pauses, True
        try:
            yield
        finally:
            self._pauses = before

    def take(self) -> float:
        """Seconds since the last call. On a GPU the work must be complete."""
        begins, ends = self._events[::2], self._events[1::2]
        milliseconds: float = sum(begin.elapsed_time(end) for begin, end in zip(begins, ends, strict=True))
        seconds = self._seconds + milliseconds / 1000
        self._seconds = 0.0
        self._events.clear()
        return seconds

    def _mark(self) -> None:
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record()
        self._events.append(event)
