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
    """A stopwatch for forward passes: `with busy: loss = forward(…)`. A pass that does not end counts for nothing."""

    def __init__(self, device: torch.device) -> None:
        self._on_gpu = device.type == "cuda"
        self._began: float | torch.cuda.Event | None = None
        self._seconds = 0.0
        self._events: list[tuple[torch.cuda.Event, torch.cuda.Event]] = []
        self._pauses = False

    def __enter__(self) -> None:
        if not self._pauses:
            self._began = self._now()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, frames: TracebackType | None
    ) -> None:
        began, self._began = self._began, None
        if self._pauses or began is None:
            return
        if isinstance(began, float):
            self._seconds += time.perf_counter() - began
        else:
            self._events.append((began, self._event()))

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
        milliseconds: float = sum(begin.elapsed_time(end) for begin, end in self._events)
        seconds = self._seconds + milliseconds / 1000
        self._began, self._seconds = None, 0.0
        self._events.clear()
        return seconds

    def _now(self) -> "float | torch.cuda.Event":
        return self._event() if self._on_gpu else time.perf_counter()

    def _event(self) -> torch.cuda.Event:
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record()
        return event
