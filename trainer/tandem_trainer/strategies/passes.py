"""Records when each rank of a pipeline computes what, in a few steps (`tandem bench --profile`).

Times are those of the clock that all processes of a machine share, so a pipeline whose ranks are on several machines
has no such picture. On a GPU the recorder waits for each pass, to know its end; passes that would overlap then do not.
"""

import json
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from torch.distributed.pipelining import PipelineStage

from tandem.processes.launch import TRACE, schedule_path
from tandem_trainer.process_group import Group

SKIPPED_STEPS, RECORDED_STEPS = 10, 8
"""Number of steps that are skipped, in which the first rank is traced (tandem_trainer.step_trace), and number of steps
that are recorded."""


class PassRecorder:
    """Records the forward and backward passes of the pipeline that rank 0 is part of.

    Args:
        about: further content of the file: the schedule, and the numbers of ranks, stages and micro-batches.
        rank_stride: difference between the ranks of neighbouring stages.
    """

    def __init__(self, group: Group, about: dict[str, Any], rank_stride: int = 1) -> None:
        self._group, self._about, self._rank_stride = group, about, rank_stride
        self._recorded: list[list[dict[str, Any]]] = []
        self._step_count = 0

    @staticmethod
    def is_enabled() -> bool:
        """Return whether this process is to record passes."""
        return bool(os.environ.get(TRACE))

    @contextmanager
    def step(self) -> Iterator[None]:
        """Record all passes of a step. Collective after the last step that is recorded, when rank 0 writes the file."""
        self._step_count += 1
        if self._is_recording:
            self._recorded.append([])
        yield
        # All ranks reach this step together, so the gather matches. Rank 0 picks the ranks of its own pipeline.
        if self._step_count == SKIPPED_STEPS + RECORDED_STEPS:
            views = self._group.gather({"steps": self._recorded})
            pipeline_views = views[: self._about["ranks"] * self._rank_stride : self._rank_stride]
            if self._group.rank == 0:
                steps = [
                    [*chain(*of_ranks)]
                    for of_ranks in zip(*(record["steps"] for record in pipeline_views), strict=True)
                ]
                schedule_path(Path(os.environ[TRACE])).write_text(json.dumps(self._about | {"steps": steps}))

    @contextmanager
    def record(self, kind: str, stage: int, micro_batch: int) -> Iterator[None]:
        """Record a pass of one micro-batch through a stage."""
        begin = self._now()
        yield
        if self._is_recording:
            end = self._now()
            about = {"rank": self._group.rank, "stage": stage, "microBatch": micro_batch, "pass": kind}
            self._recorded[-1].append(about | {"begin": begin, "end": end})

    @property
    def _is_recording(self) -> bool:
        return SKIPPED_STEPS < self._step_count <= SKIPPED_STEPS + RECORDED_STEPS

    def _now(self) -> float:
        if self._is_recording and self._group.device.type == "cuda":
            # Kernels run asynchronously: without this a pass would seem to end when it is launched.
            torch.cuda.synchronize(self._group.device)
        return time.monotonic()


class RecordedStage(PipelineStage):
    """A stage that records its passes, without the time in which it waits for other ranks."""

    def __init__(self, passes: PassRecorder, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._passes = passes

    def forward_one_chunk(self, fwd_chunk_id: int, *args: Any, **kwargs: Any) -> Any:
        """Run and record a forward pass."""
        with self._passes.record("forward", self.stage_index, fwd_chunk_id):
            return super().forward_one_chunk(fwd_chunk_id, *args, **kwargs)

    def backward_one_chunk(
        self, bwd_chunk_id: int, loss: Any = None, full_backward: bool = True, last_backward: bool = False
    ) -> Any:
        """Run and record a backward pass."""
        with self._passes.record("backward" if full_backward else "input", self.stage_index, bwd_chunk_id):
            return super().backward_one_chunk(bwd_chunk_id, loss, full_backward, last_backward)

    def backward_weight_one_chunk(self, bwd_chunk_id: int, last_backward: bool = False) -> Any:
        """Run and record the part of a backward pass that computes the gradients of weights."""
        with self._passes.record("weight", self.stage_index, bwd_chunk_id):
            return super().backward_weight_one_chunk(bwd_chunk_id, last_backward)
