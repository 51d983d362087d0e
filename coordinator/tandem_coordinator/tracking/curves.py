"""The curves of a run that are final, read from its run directory: points that no restart will give another value.

A group that fails goes on from its newest checkpoint and takes the steps after that again. A tracking server keeps
every point that it was ever sent, so a step is given only once nothing can take it again:

- its generation has saved a checkpoint at that step or later,
- or a later generation has gone on from a later step (the lineage of the checkpoints says which steps count),
- or the job has ended.

A script without a session says nothing of its checkpoints. Its steps are given after SETTLE_SECONDS, and when a later
generation of it takes them again, what was given first stays.

Training may also go back behind a checkpoint, where the loss became useless or a checkpoint is damaged. Whoever sends
the points keeps the first of each step then (tandem_coordinator.tracking.mlflow_run).
"""

import re
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from math import inf

from tandem.job import DistributedTrainingJob
from tandem.ledger import HOUR, Spent, parts
from tandem.rundir.catalog import Lineage, Result, Results, base
from tandem.rundir.evaluations import Rank
from tandem.rundir.layout import RunDir
from tandem.rundir.lineage import FOREIGN, GenerationRecord, chain
from tandem.rundir.log import LogReader
from tandem.rundir.records import TRAINING, Accounted, Rate, Saved, Start, Step, TrainingRecord, Values
from tandem.status import CheckpointRef

SETTLE_SECONDS = 60.0
"""Age at which a step of a script without a session is final."""
EVALUATION, VALIDATION = "eval/", "validation/"
"""What names of evaluators' metrics begin with: those on the test data and those on the validation data."""
BASE_MODEL = "base/"
"""What names of the base model's scores begin with. A point of the curve of checkpoints would set that one's scale."""
LEDGER = "ledger/"
"""What names of amounts begin with. Their step is the CPU-seconds that the run has taken so far."""
LOSS = "train/loss"
MAX_KEY = 250
"""Characters of a metric's name."""
_NO_KEY = re.compile(r"[^/\w.\- :]")
"""What MLflow does not take in the name of a metric."""


@dataclass(frozen=True, slots=True)
class Point:
    """A value of one curve."""

    key: str
    step: int
    value: float
    """May be NaN or infinite."""
    at: float
    """When it was measured, seconds since the epoch."""


@dataclass
class _Log:
    """What was read of one generation's training log and is not given yet."""

    reader: LogReader[TrainingRecord]
    pending: deque[Point] = field(default_factory=deque)
    """In the order of the log."""
    begins: int | None = None
    """The step that the generation went on after; None while that is not known."""
    saved: int = -1
    """The step of its newest checkpoint."""


class Curves:
    """Follows one run directory. For one thread.

    Args:
        has_base: the model that training begins with is evaluated, too.
    """

    def __init__(self, rundir: RunDir, job: DistributedTrainingJob, has_base: bool = False) -> None:
        self._rundir, self._evaluation = rundir, job.spec.evaluation
        self._awaits_base = has_base
        self._logs: dict[int, _Log] = {}
        self._lineage, self._results = Lineage(rundir), Results(rundir)
        self._records: list[GenerationRecord] = []
        """Of generations, oldest first."""
        self._ranks: dict[CheckpointRef, tuple[Rank, Result]] = {}
        self._settled: set[CheckpointRef] = set()

    def training(self, now: float, is_over: bool = False) -> Iterator[Point]:
        """The points of training that have become final since the last call, by generation and then as logged.

        Args:
            now: seconds since the epoch.
            is_over: no step will be taken again, so all are final.

        Raises:
            OSError, ValueError: the run directory cannot be read, or is damaged.
        """
        self._look()
        for generation, path in self._rundir.training_logs().items():
            if generation not in self._logs:
                self._logs[generation] = _Log(LogReader(path, TRAINING))
        # Later generations decide how far earlier ones count, so how each begins is read first.
        for log in self._logs.values():
            if log.begins is None:
                self._read(log)
        limits = self._limits()
        for generation, log in sorted(self._logs.items()):
            limit = limits.get(generation, -1)
            while True:
                is_final = self._final(log, limit, now, is_over)
                while log.pending and is_final(log.pending[0]):
                    yield log.pending.popleft()
                if not self._read(log):
                    break
            if limit < inf:
                # What is left was taken again.
                log.pending.clear()

    def evaluations(self, now: float) -> Iterator[Point]:
        """The scores of checkpoints that count and that were evaluated since the last call, and once those of the base
        model.

        Raises:
            OSError, ValueError: the run directory cannot be read, or is damaged.
        """
        self._look()
        if self._awaits_base and (found := base(self._rundir)) is not None:
            # A result, or the note that there will be none, is never replaced.
            self._awaits_base = False
            for name, value in found[0].metrics.items():
                yield Point(key(BASE_MODEL + name), found[0].checkpoint.step, value, found[0].finished_at or now)
        for result, at in self._results.new(now):
            reference = result.checkpoint
            if not self._lineage.counts(reference):
                continue
            if result.skipped:
                if result.is_failure:
                    self._settled.add(reference)
                continue
            self._settled.add(reference)
            if (place := result.rank(self._evaluation.metric, self._evaluation.direction)) is not None:
                self._ranks[reference] = place, result
            for beginning, scores in ((EVALUATION, result.metrics), (VALIDATION, result.validation)):
                for name, value in scores.items():
                    yield Point(key(beginning + name), reference.step, value, result.finished_at or at)

    def best(self) -> Result | None:
        """The best checkpoint of those that were evaluated, as far as `evaluations` has read; of those that a script
        has written in its own way, none."""
        found = [one for reference, one in self._ranks.items() if self._is_ours(reference)]
        return min(found, key=lambda one: one[0], default=(None, None))[1]

    def is_evaluated(self, reference: CheckpointRef) -> bool:
        """Whether evaluators are through with a checkpoint, as far as `evaluations` has read."""
        return reference in self._settled

    def taken_again(self) -> tuple[int, int, float] | None:
        """The newest generation, the step that it went on after, and when it began, seconds since the epoch; None
        while no checkpoint was resumed from."""
        self._look()
        if not self._records or (parent := self._records[-1].resumed_from) is None:
            return None
        return self._records[-1].generation, parent.step, self._records[-1].started_at

    def _is_ours(self, reference: CheckpointRef) -> bool:
        return reference.generation != FOREIGN and self._lineage.counts(reference)

    def _look(self) -> None:
        """Read the lineage, if there is a new generation."""
        self._lineage.look()
        if self._rundir.newest_generation() != (self._records[-1].generation if self._records else 0):
            self._records = self._rundir.generation_records()

    def _limits(self) -> Mapping[int, float]:
        """The last step that counts, by generation; of the newest, infinite."""
        if self._records:
            return {one: inf if limit is None else limit for one, limit in chain(self._records).items()}
        limits: dict[int, float] = {}
        limit = inf
        for generation, log in sorted(self._logs.items(), reverse=True):
            limits[generation] = limit
            limit = limit if log.begins is None else min(limit, log.begins)
        return limits

    def _final(self, log: _Log, limit: float, now: float, is_over: bool) -> Callable[[Point], bool]:
        if limit < inf or is_over:
            return lambda point: point.step <= limit
        if self._records:
            return lambda point: point.step <= log.saved
        return lambda point: point.at <= now - SETTLE_SECONDS

    def _read(self, log: _Log) -> bool:
        """Read one bite; whether there was any."""
        if (records := log.reader.read()) is None:
            return False
        for record in records:
            match record:
                case Start():
                    log.begins = record.step
                case Saved():
                    log.saved = max(log.saved, record.step)
                case _:
                    log.pending.extend(_points(record))
        return True


def key(name: str) -> str:
    """A name as MLflow takes it."""
    return _NO_KEY.sub("_", name)[:MAX_KEY]


def ledger_points(record: Accounted) -> Iterator[Point]:
    """What a run has taken so far, in hours and in money, by what it was for."""
    step = int(record.cpu_seconds.total)
    for name, spent, unit in (
        ("gpuHours", record.gpu_seconds, HOUR),
        ("cpuHours", record.cpu_seconds, HOUR),
        ("cost", record.cost or Spent(), 1.0),
    ):
        if spent.total > 0:
            for purpose, amount in (*parts(spent), ("total", spent.total)):
                yield Point(f"{LEDGER}{name}.{purpose}", step, amount / unit, record.time)


def _points(record: TrainingRecord) -> Iterator[Point]:
    match record:
        case Step():
            yield from _named(
                record.step, record.time, loss=record.loss, lr=record.lr, gradientNorm=record.gradient_norm
            )
        case Rate(step=int(step)):
            yield from _named(
                step,
                record.time,
                epoch=record.epoch,
                throughput=record.throughput,
                stepSeconds=record.step_seconds,
                worldSize=record.world_size,
            )
        case Values():
            for name, value in record.known.items():
                yield Point(name, record.step, value, record.time)


def _named(step: int, at: float, **values: float | None) -> Iterator[Point]:
    for name, value in values.items():
        if value is not None:
            yield Point(f"train/{name}", step, value, at)
