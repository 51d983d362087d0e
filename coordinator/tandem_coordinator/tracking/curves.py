"""The curves of a run that are final, read from its run directory: points that no restart will give another value.

A group that fails resumes from its newest checkpoint and takes the steps after that again. A tracking server keeps
every point that it was ever sent, so a step is sent only once nothing can repeat it:

- its generation has saved a checkpoint at that step or later,
- or a later generation has resumed from a later step (the lineage of the checkpoints says which steps count),
- or the job has ended.

A script without a session reports no checkpoints. Its steps are sent after SETTLE_SECONDS, and when a later generation
of it repeats them, what was sent first stays.

Training may also go back behind a checkpoint, where the loss became useless or a checkpoint is damaged. The sender then
keeps the first point of each step (tandem_coordinator.tracking.mlflow_run).
"""

import re
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from math import inf

from tandem.job.resource import DistributedTrainingJob
from tandem.rundir.catalog import EvaluationResult, Lineage, Results, read_base_result
from tandem.rundir.evaluations import Rank
from tandem.rundir.layout import RunDir
from tandem.rundir.lineage import FOREIGN_GENERATION, GenerationRecord, chain
from tandem.rundir.log import LogReader
from tandem.rundir.records import TRAINING, LedgerRecord, Rate, Saved, Start, Step, TrainingRecord, Values
from tandem.rundir.training_log import counted_until
from tandem.wire.ledger import HOUR, UsageByPurpose, nonzero_purposes
from tandem.wire.status import CheckpointRef

SETTLE_SECONDS = 60.0
"""Age at which a step of a script without a session is final."""
EVALUATION, VALIDATION = "eval/", "validation/"
"""Prefixes of evaluators' metrics: those on the test data and those on the validation data."""
BASE_MODEL = "base/"
"""Prefix of the base model's scores. A point on the curve of checkpoints would set that one's scale."""
LEDGER = "ledger/"
"""Prefix of the ledger's amounts. Their step is the CPU-seconds that the run has taken so far."""
LOSS = "train/loss"
MAX_KEY_LENGTH = 250
"""Maximum length of a metric's name, in characters."""
_FORBIDDEN_IN_KEYS = re.compile(r"[^/\w.\- :]")
"""Characters that MLflow does not accept in the name of a metric."""


@dataclass(frozen=True, slots=True)
class Point:
    """A value of one curve."""

    key: str
    step: int
    value: float
    """Value; may be NaN or infinite."""
    measured_at: float
    """Time of the measurement, in seconds since the epoch."""


@dataclass
class _Log:
    """The points of one generation's training log that were read and not sent yet."""

    reader: LogReader[TrainingRecord]
    pending: deque[Point] = field(default_factory=deque)
    """Points, in the order of the log."""
    begins: int | None = None
    """The step that the generation resumed from; None while that is unknown."""
    saved: int = -1
    """The step of its newest checkpoint."""


class Curves:
    """A follower of one run directory. For one thread.

    Args:
        has_base: the model that training begins with is evaluated, too.
    """

    def __init__(self, rundir: RunDir, job: DistributedTrainingJob, has_base: bool = False) -> None:
        self._rundir, self._evaluation = rundir, job.spec.evaluation
        self._awaits_base = has_base
        self._logs: dict[int, _Log] = {}
        self._lineage, self._results = Lineage(rundir), Results(rundir)
        self._records: list[GenerationRecord] = []
        """Records of generations, oldest first."""
        self._ranks: dict[CheckpointRef, tuple[Rank, EvaluationResult]] = {}
        self._evaluated: set[CheckpointRef] = set()

    def training(self, now: float, is_over: bool = False) -> Iterator[Point]:
        """The points of training that have become final since the last call, by generation and then as logged.

        Args:
            now: seconds since the epoch.
            is_over: no step will be taken again, so all are final.

        Raises:
            OSError, ValueError: the run directory cannot be read, or is damaged.
        """
        self._update_lineage()
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
        self._update_lineage()
        if self._awaits_base and (base_result := read_base_result(self._rundir)) is not None:
            # A result, or the note that there will be none, is never replaced.
            self._awaits_base = False
            for name, value in base_result[0].metrics.items():
                yield Point(
                    key(BASE_MODEL + name), base_result[0].checkpoint.step, value, base_result[0].finished_at or now
                )
        for result, published_at in self._results.new(now):
            reference = result.checkpoint
            if not self._lineage.counts(reference):
                continue
            if result.skipped:
                if result.is_failure:
                    self._evaluated.add(reference)
                continue
            self._evaluated.add(reference)
            if (rank := result.rank(self._evaluation.metric, self._evaluation.direction)) is not None:
                self._ranks[reference] = rank, result
            for prefix, scores in ((EVALUATION, result.metrics), (VALIDATION, result.validation)):
                for name, value in scores.items():
                    yield Point(key(prefix + name), reference.step, value, result.finished_at or published_at)

    def best(self) -> EvaluationResult | None:
        """The best evaluated checkpoint, as far as `evaluations` has read; a checkpoint in a script's own format is
        none."""
        candidates = [
            candidate
            for reference, candidate in self._ranks.items()
            if reference.generation != FOREIGN_GENERATION and self._lineage.counts(reference)
        ]
        return min(candidates, key=lambda candidate: candidate[0], default=(None, None))[1]

    def is_evaluated(self, reference: CheckpointRef) -> bool:
        """Whether evaluators are done with a checkpoint, as far as `evaluations` has read."""
        return reference in self._evaluated

    def repeated_from(self) -> tuple[int, int, float] | None:
        """The newest generation, the step after which it started, and its start in seconds since the epoch; None if it
        started from the beginning."""
        self._update_lineage()
        if not self._records or (parent := self._records[-1].parent) is None:
            return None
        return self._records[-1].generation, parent.step, self._records[-1].started_at

    def _update_lineage(self) -> None:
        """Read the lineage, if there is a new generation."""
        self._lineage.look()
        if self._rundir.newest_generation() != (self._records[-1].generation if self._records else 0):
            self._records = self._rundir.generation_records()

    def _limits(self) -> Mapping[int, float]:
        """The last step that counts, by generation; infinite for the newest."""
        if self._records:
            return {generation: inf if limit is None else limit for generation, limit in chain(self._records).items()}
        return counted_until({number: inf if log.begins is None else log.begins for number, log in self._logs.items()})

    def _final(self, log: _Log, limit: float, now: float, is_over: bool) -> Callable[[Point], bool]:
        if limit < inf or is_over:
            return lambda point: point.step <= limit
        if self._records:
            return lambda point: point.step <= log.saved
        return lambda point: point.measured_at <= now - SETTLE_SECONDS

    def _read(self, log: _Log) -> bool:
        """Read the next part of a log; returns whether there was any."""
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
    """Convert a name to one that MLflow accepts."""
    return _FORBIDDEN_IN_KEYS.sub("_", name)[:MAX_KEY_LENGTH]


def ledger_points(record: LedgerRecord) -> Iterator[Point]:
    """The ledger of a run, in hours and in money, by purpose."""
    step = int(record.cpu_seconds.total)
    for name, amounts, unit in (
        ("gpuHours", record.gpu_seconds, HOUR),
        ("cpuHours", record.cpu_seconds, HOUR),
        ("cost", record.cost or UsageByPurpose(), 1.0),
    ):
        if amounts.total > 0:
            for purpose, amount in (*nonzero_purposes(amounts), ("total", amounts.total)):
                yield Point(f"{LEDGER}{name}.{purpose}", step, amount / unit, record.time)


def _points(record: TrainingRecord) -> Iterator[Point]:
    match record:
        case Step():
            yield from _metric_points(
                record.step, record.time, loss=record.loss, lr=record.lr, gradientNorm=record.gradient_norm
            )
        case Rate(step=int(step)):
            yield from _metric_points(
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


def _metric_points(step: int, time: float, **values: float | None) -> Iterator[Point]:
    for name, value in values.items():
        if value is not None:
            yield Point(f"train/{name}", step, value, time)
