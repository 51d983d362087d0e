"""A trace of a few steps of rank 0, where somebody asks for one (`tandem bench --profile`): the operations of CPU and
GPU on a time line, as JSON that Chrome's viewer (chrome://tracing) and Perfetto open.

torch's profiler needs a moment to begin, and what it begins in is left out (https://pytorch.org/docs/stable/profiler).
"""

import os
from typing import Any

import torch

from tandem.launch import TRACE

WAIT, WARM_UP, TRACED = 3, 1, 4
"""Steps that are passed over, in which the profiler begins, and that are traced."""


class StepTrace:
    """The trace of one rank. Costs nothing where none was asked for."""

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
        """A step is complete."""
        if self._profiler is not None:
            self._profiler.step()

    def close(self) -> None:
        """No step follows."""
        if self._profiler is not None:
            self._profiler.stop()

    def _write(self, profiler: Any) -> None:
        profiler.export_chrome_trace(self._path)
