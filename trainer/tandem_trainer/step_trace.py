"""A trace of a few steps of rank 0, on request (`tandem bench --profile`): the operations of CPU and GPU on a time
line, as JSON that Chrome's viewer (chrome://tracing) and Perfetto open.

torch's profiler needs a moment to start, and the step in which it starts is left out (https://pytorch.org/docs/stable/profiler).
"""

import os
from typing import Any

import torch

from tandem.processes.launch import TRACE

WAIT, WARM_UP, TRACED = 3, 1, 4
"""Steps that are skipped, steps of warm-up, and steps that are traced."""


class StepTrace:
    """Trace of one rank. Does nothing unless a trace was requested."""

    def __init__(self, rank: int, device: torch.device) -> None:
        self._path = os.environ.get(TRACE, "") if rank == 0 else ""
        self._profiler: torch.profiler.profile | None = None
        if self._path:
            activities = [torch.profiler.ProfilerActivity.CPU]
            activities += [torch.profiler.ProfilerActivity.CUDA] if device.type == "cuda" else []
            schedule = torch.profiler.schedule(wait=WAIT, warmup=WARM_UP, active=TRACED, repeat=1)
            self._profiler = torch.profiler.profile(
                activities=activities, schedule=schedule, on_trace_ready=self._write, record_shapes=True
            )
            self._profiler.start()

    def step(self) -> None:
        """Record that a step is complete."""
        if self._profiler is not None:
            self._profiler.step()

    def close(self) -> None:
        """Stop the profiler: no step follows."""
        if self._profiler is not None:
            self._profiler.stop()

    def _write(self, profiler: Any) -> None:
        profiler.export_chrome_trace(self._path)
