"""What each rank of a pipeline computes when, in a few steps, for those who want to see it (`tandem bench --profile`).

Times are of the clock that all processes of a machine share, so a pipeline whose ranks are on several machines has no
such picture. On a GPU each pass is waited for, so that its end is known; what would overlap with it then does not.
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

from tandem.launch import TRACE, schedule_beside
from tandem_trainer.process_group import Group

WAIT, RECORDED = 10, 8
"""Steps that are passed over, in which the first rank is traced (tandem_trainer.step_trace), and that are recorded."""


class Passes:
    """The forward and backward passes of the pipeline that rank 0 is part of.

    Args:
        about: what the file says besides: the schedule, and numbers of ranks, stages and micro-batches.
        apart: by how much the numbers of ranks with neighbouring stages differ.
    """

    def __init__(self, group: Group, about: dict[str, Any], apart: int = 1) -> None:
        self._group, self._about, self._apart = group, about, apart
        self._steps: list[list[dict[str, Any]]] = []
        self._seen = 0

    @staticmethod
    def are_wanted() -> bool:
        """Whether this process was asked for them."""
        return bool(os.environ.get(TRACE))

    @contextmanager
    def step(self) -> Iterator[None]:
        """All passes of a step. Collective after the last step that is recorded, when rank 0 writes the file."""
        self._seen += 1
        if self._is_on:
            self._steps.append([])
        yield
        if self._seen == WAIT + RECORDED:
            told = self._group.gather({"steps": self._steps})
            found = told[: self._about["ranks"] * self._apart : self._apart]
            if self._group.rank == 0:
                steps = [[*chain(*of_ranks)] for of_ranks in zip(*(one["steps"] for one in found), strict=True)]
                schedule_beside(Path(os.environ[TRACE])).write_text(json.dumps(self._about | {"steps": steps}))

    @contextmanager
    def one(self, kind: str, stage: int, micro_batch: int) -> Iterator[None]:
        """A pass of one micro-batch through a stage."""
        begin = self._now()
        yield
        if self._is_on:
            end = self._now()
            about = {"rank": self._group.rank, "stage": stage, "microBatch": micro_batch, "pass": kind}
            self._steps[-1].append(about | {"begin": begin, "end": end})

    @property
    def _is_on(self) -> bool:
        return WAIT < self._seen <= WAIT + RECORDED

    def _now(self) -> float:
        if self._is_on and self._group.device.type == "cuda":
            torch.cuda.synchronize(self._group.device)
        return time.monotonic()


class RecordedStage(PipelineStage):
    """A stage that tells of its passes, without the time in which it waits for others."""

    def __init__(self, passes: Passes, *given: Any, **named: Any) -> None:
        super().__init__(*given, **named)
        self._passes = passes

    def forward_one_chunk(self, fwd_chunk_id: int, *given: Any, **named: Any) -> Any:
        """As torch's."""
        with self._passes.one("forward", self.stage_index, fwd_chunk_id):
            return super().forward_one_chunk(fwd_chunk_id, *given, **named)

    def backward_one_chunk(
        self, bwd_chunk_id: int, loss: Any = None, full_backward: bool = True, last_backward: bool = False
    ) -> Any:
        """As torch's."""
        with self._passes.one("backward" if full_backward else "input", self.stage_index, bwd_chunk_id):
            return super().backward_one_chunk(bwd_chunk_id, loss, full_backward, last_backward)

    def backward_weight_one_chunk(self, bwd_chunk_id: int, last_backward: bool = False) -> Any:
        """As torch's."""
        with self._passes.one("weight", self.stage_index, bwd_chunk_id):
            return super().backward_weight_one_chunk(bwd_chunk_id, last_backward)
