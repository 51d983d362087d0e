"""The interval between two saves: that of the job, or with `checkpoint.every: Auto` the one that costs least.

Only rank 0's interval counts, because its "a save is due" travels in the vote (tandem_trainer.process_group), so all
ranks save after the same step. It needs the cost of a save, which each rank measures and the manifest carries on, and
the failures so far, which rank 0 reads from the run directory once a generation. A generation that survivors continue
loses no step, so it is no failure here; nor is one after a group that saved and left, or that went back on purpose. The
formula is in tandem.wire.save_interval, the design in docs/decisions/0059-ettr.md.
"""

import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import pairwise
from statistics import median
from typing import Any, NamedTuple, Protocol

from tandem.job.resource import CheckpointSpec
from tandem.model import amount
from tandem.rundir.layout import RunDir
from tandem.rundir.lineage import GenerationRecord
from tandem.rundir.log import LogReader
from tandem.rundir.records import TRAINING, IntervalChosen, Step, TrainingEnd
from tandem.wire.save_interval import best_interval

MEMORY = "saveInterval"
"""Name of the memory in the `loop` of a manifest."""
MAX_COSTS = 5
"""Number of the newest saves whose median cost counts."""
MAX_GENERATIONS = 200
"""Number of the newest generations that are searched for failures."""
MAX_FAILURES = 10
"""Number of the newest failures that count, so that a change of their rate is followed. Chosen with
`python -m benchmarks.save_interval`."""
TAIL_BYTES = 2**14
"""Size of the end of a training log in which its last record is searched, in bytes."""
INTERVAL_BYTES = 2**23
"""Size of the end of the newest one in which its last interval is searched, in bytes: some 60,000 steps."""
MIN_CHANGE = 0.1
"""Relative change of the interval that is logged."""


@dataclass(frozen=True)
class FailureCount:
    """The newest failures of a run that lost steps, and the time of training in which they occurred."""

    failures: int = 0
    seconds: float = 0.0
    newest: IntervalChosen | None = None
    """The last interval of the generation before. A checkpoint cannot hold the cost of its own save."""


class IntervalLog(Protocol):
    """A log of chosen intervals."""

    def append(self, *records: IntervalChosen) -> None:
        """Add records."""


class SaveInterval:
    """The interval of one run, over the generations that this rank is in.

    Args:
        checkpoints: the job's settings.
        clock: seconds of any steady clock.
    """

    def __init__(self, checkpoints: CheckpointSpec, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._is_auto, self._seconds = checkpoints.every == "Auto", checkpoints.interval_seconds
        self._costs: deque[float] = deque(maxlen=MAX_COSTS)
        self._write_seconds = 0.0
        self._count, self._started_at = FailureCount(), clock()
        self._log: IntervalLog | None = None
        self._logged: float | None = None

    def restore(self, loop: Mapping[str, Any]) -> None:
        """Take over what `memory` returned for a checkpoint that is restored."""
        memory = loop.get(MEMORY)
        if isinstance(memory, Mapping) and isinstance(costs := memory.get("costs"), list):
            amounts = [amount(cost) for cost in costs]
            self._costs.extend(cost for cost in amounts if cost is not None)
            self._write_seconds = amount(memory.get("write")) or 0.0

    def begin(self, log: IntervalLog | None, count: Callable[[], FailureCount]) -> None:
        """Begin a generation.

        Args:
            log: the training log; None on ranks that write none, whose interval does not count.
            count: returns the failures before it.
        """
        self._log, self._logged, self._started_at = log, None, self._clock()
        if self._is_auto and log is not None:
            self._count = count()
            newest = self._count.newest
            if not self._costs and newest is not None and newest.save_seconds is not None:
                self._costs.append(newest.save_seconds)
                self._write_seconds = newest.write_seconds or 0.0
        self._choose()

    def saved(self, cost: float, outcome: Mapping[str, Any]) -> None:
        """Note a save.

        Args:
            cost: time for which it has blocked training, in seconds.
            outcome: outcome of the save before it (tandem_trainer.checkpoint.saving).
        """
        self._costs.append(cost)
        self._write_seconds = outcome.get("seconds") or self._write_seconds
        self._choose()

    def memory(self) -> dict[str, Any]:
        """Collect what the next generation needs to know, as JSON; empty with a fixed interval."""
        if not self._is_auto:
            return {}
        costs = [round(cost, 6) for cost in self._costs]
        return {MEMORY: {"costs": costs, "write": round(self._write_seconds, 6)}}

    @property
    def seconds(self) -> float | None:
        """The present interval; None where only steps count."""
        return self._seconds

    def is_over(self, saved_at: float) -> bool:
        """Whether a save is due by time.

        Args:
            saved_at: time of the last save, by the same clock.
        """
        return self._seconds is not None and self._clock() - saved_at >= self._seconds

    def _choose(self) -> None:
        # Before the first save its cost is not known, and the job's default counts.
        if not self._is_auto or not self._costs:
            return
        seconds = self._count.seconds + self._clock() - self._started_at
        cost = median(self._costs)
        self._seconds = best_interval(cost, self._write_seconds, self._count.failures, seconds)
        if self._logged is not None and abs(self._seconds - self._logged) < MIN_CHANGE * self._logged:
            return
        self._logged = self._seconds
        if self._log is not None:
            self._log.append(
                IntervalChosen(
                    time=time.time(),
                    seconds=round(self._seconds, 3),
                    save_seconds=round(cost, 6),
                    write_seconds=round(self._write_seconds, 6),
                    failures=self._count.failures,
                    training_seconds=round(seconds, 3),
                )
            )


def recent_failures(generations: Iterable[tuple[float, bool]]) -> FailureCount:
    """Count the newest failures.

    Args:
        generations: seconds of each generation, newest first, and whether its last steps were lost.
    """
    failures, total = 0, 0.0
    for seconds, is_lost in generations:
        if failures == MAX_FAILURES:
            break
        failures += is_lost
        total += seconds
    return FailureCount(failures, total)


def count_failures(rundir: RunDir, generation: int) -> FailureCount:
    """Count the generations before this one whose last steps were lost.

    A run directory that lacks a log, as on another node, counts its generation as lost: to save too often costs less.
    """
    try:
        records = [record for record in rundir.generation_records() if record.generation <= generation]
    except (OSError, ValueError):
        return FailureCount()
    pairs = list(pairwise(records[-MAX_GENERATIONS:]))
    count = recent_failures(_fate(rundir, record, successor) for record, successor in reversed(pairs))
    end = _end_of_log(rundir, pairs[-1][0].generation, INTERVAL_BYTES) if pairs else None
    return replace(count, newest=None if end is None else end.interval)


def _fate(rundir: RunDir, record: GenerationRecord, successor: GenerationRecord) -> tuple[float, bool]:
    """Seconds of a generation, and whether its last steps were lost: it has not ended in order, and no survivor
    continued it."""
    end = _end_of_log(rundir, record.generation)
    seconds = 0.0 if end.time is None else max(0.0, end.time - record.started_at)
    return seconds, not end.is_orderly and successor.continues is None


class _LogEnd(NamedTuple):
    time: float | None
    """Time of the last record; None if the log is missing."""
    is_orderly: bool
    """Whether the group ended in order."""
    interval: IntervalChosen | None
    """The last interval near the end."""


def _end_of_log(rundir: RunDir, generation: int, size: int = TAIL_BYTES) -> _LogEnd:
    path = rundir.training_log(generation)
    last_at, has_ended, interval = None, False, None
    with suppress(OSError, ValueError):
        last_at = path.stat().st_mtime
        for record in LogReader(path, TRAINING, max(0, path.stat().st_size - size), skip=Step):
            has_ended = has_ended or isinstance(record, TrainingEnd)
            interval = record if isinstance(record, IntervalChosen) else interval
            last_at = record.time
    return _LogEnd(last_at, has_ended, interval)
