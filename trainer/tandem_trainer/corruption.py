"""Wrong numbers of a run: what the comparisons find is recorded in the training log, with ranks and machines.

The coordinator reads it there and makes an Event, a metric and a trouble of it. Ranks that differ end their group as
before; what rank 0 alone compares (samples with their order, an optimizer with its checkpoint) does not stop training,
unless the job says `elasticity.onCorruption: Stop`. Then rank 0 ends here, and the coordinator, which reads the same
record, fails the job.
"""

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor

from tandem.formatting import number
from tandem.rundir.checkpoint import COUNTER, COUNTERS, Manifest
from tandem.rundir.log import LogWriter
from tandem.rundir.records import CorruptionRecord
from tandem.wire.status import SAMPLES_DIFFER, CorruptionKind
from tandem_trainer.agreement import MAX_RANKS_NAMED
from tandem_trainer.checkpoint.train_state import TrainState
from tandem_trainer.data.order import Batches, Passes
from tandem_trainer.failure import Disagreement
from tandem_trainer.rank_context import RankContext

CLOSE_SECONDS = 2.0
"""Time limit of a record where the generation has no log yet, in seconds."""


class NumbersWrong(Exception):  # noqa: N818 - it is what is the case
    """Numbers of the run are wrong, and the job stops at that; the message is what was recorded."""


class CorruptionLog:
    """Records wrong numbers.

    Args:
        context: identity of this process.
        writer: returns the training log; None on other ranks than 0, and before the generation has begun.
        stops: whether a difference ends the job.
    """

    def __init__(self, context: RankContext, writer: Callable[[], LogWriter | None], stops: bool = False) -> None:
        self._context, self._writer, self._stops = context, writer, stops

    @contextmanager
    def recording(self) -> Iterator[None]:
        """Record a disagreement of ranks that is raised inside. Every rank raises the same."""
        try:
            yield
        except Disagreement as error:
            self._write(error.corruption, str(error), error.ranks)
            raise

    def record(self, reason: CorruptionKind, message: str, ranks: Sequence[int] = (0,), count: int = 1) -> None:
        """Write a record, on rank 0, and wait until it is on the disk.

        Args:
            reason: kind of the comparison.
            message: a sentence.
            ranks: ranks that are named with their machines.
            count: number of differences.

        Raises:
            NumbersWrong: the job stops at that.
        """
        text = self._write(reason, message, ranks, count)
        if text and self._stops:
            raise NumbersWrong(text)

    def _write(self, reason: CorruptionKind, message: str, ranks: Sequence[int], count: int = 1) -> str:
        """Write a record, and return its message; empty on other ranks than 0."""
        if self._context.group.rank != 0:
            return ""
        # In front: long messages are cut at their end.
        machines = "; ".join(f"rank {rank} ({self._context.machine(rank)})" for rank in ranks[:MAX_RANKS_NAMED])
        text = f"{machines}: {message}" if machines else message
        record = CorruptionRecord(time=time.time(), reason=reason, message=text, count=count)
        if (writer := self._writer()) is not None:
            writer.append(record)
            writer.settle()
            return text
        writer = LogWriter(self._context.rundir.training_log(self._context.generation))
        writer.append(record)
        writer.close(CLOSE_SECONDS)
        return text


class SamplePlan:
    """Compares the samples of each step with those that the order gives it.

    Ranks compare their samples with each other, so they do not see what all of them skip or repeat. Streams, and orders
    of the script's own, have no order to compare with. Where the order of an epoch is not in memory, its computation
    takes a millisecond, so only the last step before each report is compared.

    Args:
        data: data steps of the run.
    """

    def __init__(self, data: object) -> None:
        order = data.order if isinstance(data, Passes) else None
        self._batches = None if order is None else Batches(order)
        self._is_cheap = order is not None and order.is_in_memory
        self._last: tuple[int, int, Tensor] | None = None
        self._differing: list[int] = []

    def add(self, step: int, data_step: int, ids: Tensor) -> None:
        """Add the samples of a step.

        Args:
            step: the step's number, from 1.
            data_step: its data step, from 0.
            ids: [global batch], int64, its sample ids.
        """
        self._last = step, data_step, ids
        if self._is_cheap:
            self._compare()

    def report(self, corruptions: CorruptionLog) -> None:
        """Record the steps that differed since the last report."""
        self._compare()
        if self._differing:
            first, count = self._differing[0], len(self._differing)
            corruptions.record(
                SAMPLES_DIFFER,
                f"step {number(first)} took other samples than seed and order give it, so samples are repeated or left "
                "out",
                count=count,
            )
            self._differing.clear()

    def _compare(self) -> None:
        if self._batches is not None and self._last is not None:
            step, data_step, ids = self._last
            if not torch.equal(ids, self._batches.ids(data_step)):
                self._differing.append(step)
        self._last = None


def optimizer_problem(manifest: Manifest, train_state: TrainState) -> str:
    """Describe how the updates that a restored optimizer counts differ from those at the save; empty if they do not.

    Weights and moments are files of their own. Where the moments of another step are restored, or none, training goes
    on, and only the loss tells.

    Args:
        manifest: the checkpoint.
        train_state: state into which it was loaded.
    """
    saved: dict[str, float] = manifest.loop.get(COUNTERS, {})
    for name, count in train_state.counters(saved).items():
        if count != saved[name]:
            return (
                f"the optimizer was restored from {manifest.name} with {count:,g} updates of "
                f"{name.removesuffix(COUNTER)}, and had made {saved[name]:,g} when that was saved"
            )
    return ""
