"""Followers of the run directory's logs: the time that training took, the outcome of saves, and the work of evaluators.

First ranks and evaluators write these for people and reports anyway, so counting from them costs a step nothing, and
ranks, agents and heartbeats need not know. Rejected: sums in each heartbeat (they start over with each process, so they
would have to be joined over generations, and what a rank did after its last heartbeat would be missing).

The two newest training logs are followed, because a generation may write its last lines after the next one has begun.
Lines from before this process started are not counted: Prometheus' `rate` and `increase` would see them twice.
"""

import os
from bisect import bisect_left
from collections import Counter
from collections.abc import Iterable, Mapping
from copy import deepcopy
from dataclasses import dataclass, field
from math import inf, isfinite
from pathlib import Path

from tandem.rundir.durable import list_folder
from tandem.rundir.layout import evaluator_of_log, generation_of_log
from tandem.rundir.log import LogReader
from tandem.rundir.records import (
    EVALUATOR,
    TRAINING,
    CheckpointUnusable,
    CorruptionRecord,
    Evaluated,
    EvaluatorEnd,
    IntervalChosen,
    LostLines,
    Mirrored,
    NotSaved,
    Rate,
    Saved,
    Start,
    Step,
    TrainingRecord,
    Usage,
    Values,
)
from tandem.rundir.training_log import first_start
from tandem.script import MAX_VALUES
from tandem.wire.ledger import Purpose
from tandem.wire.metrics import STEP_BUCKETS
from tandem.wire.status import Corruption, EvaluatorView, joined
from tandem.wire.wall_time import Cause

_MAX_TAIL_BYTES = 256 * 2**10
"""Size of the end of an earlier log that is searched for the last save, in bytes."""
_MAX_FOLLOWED = 2
PURPOSE_OF_CAUSE: dict[Cause, Purpose] = {
    "training": "compute",
    "recomputed": "recomputed",
    "data": "waiting",
    "checkpoint": "waiting",
    "script": "compute",
}
"""The ledger's purposes of the causes that a rate line divides time into."""
MAX_LEDGER_GENERATIONS = 4
"""Number of the newest generations for which the time is broken down by purpose."""


@dataclass(frozen=True)
class LedgerPosition:
    """The position up to which an earlier coordinator has counted logs for the ledger (tandem_coordinator.ledger)."""

    reached: int = 0
    """The highest step taken."""
    offsets: Mapping[int, int] | None = None
    """Bytes of training logs by generation; None if there was no ledger, so that existing logs do not count."""
    evaluators_until: float = -inf
    """Time up to which evaluators' logs are counted, in seconds since the epoch."""

    def offset(self, generation: int) -> int | None:
        """Offset up to which an existing log is counted; None if it does not count."""
        if self.offsets is None:
            return None
        return self.offsets.get(generation, 0 if generation > max(self.offsets, default=0) else None)


@dataclass
class Training:
    """Counts of training logs since this process started."""

    work: dict[Cause, float] = field(default_factory=dict)
    """Seconds of the first rank by cause, since the last record of a ledger."""
    ledger_saves: int = 0
    """Saves that blocked training, since the last record of a ledger."""
    setbacks: int = 0
    """Times that steps had to be repeated, since the last record of a ledger."""
    steps: int = 0
    samples: int = 0
    steps_lost: int = 0
    """Steps that were taken and then repeated."""
    buckets: list[int] = field(default_factory=lambda: [0] * (len(STEP_BUCKETS) + 1))
    """Histogram of steps by duration: at most each of STEP_BUCKETS, and longer than the last."""
    step_seconds_sum: float = 0.0
    step_seconds: float | None = None
    """Recent duration of a step."""
    samples_per_step: float | None = None
    """Recent samples per step, over all ranks."""
    saves: Counter[str] = field(default_factory=Counter)
    """Saves by outcome: committed, skipped, failed."""
    corruptions: list[Corruption] = field(default_factory=list)
    """Numbers that are wrong, one entry for each kind."""
    stall_seconds: float | None = None
    """Time for which the last save stopped training."""
    commit_seconds: float | None = None
    interval_seconds: float | None = None
    """Interval between saves that `checkpoint.every: Auto` has chosen last."""
    mirror_seconds: float | None = None
    """Interval between mirrors that was chosen last."""
    mirror_step: int | None = None
    """Step after which the newest mirror was taken."""
    flops_per_sample: float | None = None
    peak_flops: float | None = None
    """Peak of one rank's GPU; None if one of the two is not well defined."""
    tokens_per_sample: float | None = None
    """Tokens without padding; None if samples are no text."""
    learned_per_sample: float | None = None
    """Tokens that the loss is computed over."""
    filtered_samples: str = ""
    """Description of the samples that nothing is learned from; empty if there are none."""
    learning_rate: float | None = None
    """Learning rate of the last step that logged one."""
    loss: float | None = None
    """Loss of the same step."""
    gradient_norm: float | None = None
    """The last measured gradient norm."""
    values: dict[str, float] = field(default_factory=dict)
    """The newest finite values that a script has logged, by name; at most MAX_VALUES."""
    by_generation: dict[int, dict[Purpose, float]] = field(default_factory=dict)
    """Seconds of the first rank by purpose, since the last record of a ledger."""
    reached: int = 0
    """The highest step ever taken."""
    offsets: Mapping[int, int] = field(default_factory=dict)
    """Bytes of the newest logs that are counted, by generation."""


class TrainingLogs:
    """A follower of the newest training logs. For one thread."""

    def __init__(self, folder: Path, ledger_position: LedgerPosition | None = None) -> None:
        self._logs: dict[int, LogReader[TrainingRecord]] = {}
        self._ledger_position = ledger_position or LedgerPosition()
        self._training = Training(reached=self._ledger_position.reached)
        self._step: int | None = None
        for generation, path in _logs(list_folder(folder))[-_MAX_FOLLOWED:]:
            self._skip(generation, path)

    def follow(self, paths: list[Path]) -> Training:
        """Read what was appended since the last call.

        Args:
            paths: what is in the folder of logs, by name.
        """
        for generation, path in _logs(paths)[-_MAX_FOLLOWED:]:
            if generation not in self._logs:
                self._logs[generation] = _reader(path)
            for record in self._logs[generation].read() or ():
                self._take(record)
                self._account(generation, record)
        training = self._training
        for generation in sorted(training.by_generation)[:-MAX_LEDGER_GENERATIONS]:
            del training.by_generation[generation]
        training.offsets = {number: self._logs[number].offset for number in sorted(self._logs)[-_MAX_FOLLOWED:]}
        # The caller keeps what it got while this goes on counting.
        counts = deepcopy(training)
        counts.values = {name: value for name, value in counts.values.items() if isfinite(value)}
        return counts

    def _skip(self, generation: int, path: Path) -> None:
        """Take over the state that a log leaves, and count nothing of it."""
        try:
            size = path.stat().st_size
            self._started(first_start(path))
        except OSError:
            return
        log = self._logs[generation] = _reader(path, max(0, size - _MAX_TAIL_BYTES))
        for record in log:
            match record:
                case Rate():
                    self._step, self._training.loss = record.step or self._step, record.loss
                case Saved():
                    self._saved(record)
                case IntervalChosen():
                    self._training.interval_seconds = record.seconds
                case Mirrored():
                    self._mirrored(record)
                case Values():
                    self._logged(record)
        if (position := self._ledger_position.offset(generation)) is None:
            self._training.reached = max(self._training.reached, self._step or 0)
            return
        # The ledger continues where that of an earlier coordinator ended.
        self._logs[generation] = _reader(path, position)
        for record in self._logs[generation]:
            self._account(generation, record)

    def _account(self, generation: int, record: TrainingRecord) -> None:
        """Account a record of the log in the ledger."""
        training = self._training
        if isinstance(record, Saved) or (isinstance(record, NotSaved) and record.name is not None):
            training.ledger_saves += 1
        if isinstance(record, Start):
            training.setbacks += record.step < training.reached
        if not isinstance(record, Rate) or record.phases is None:
            return
        phases = {name: seconds or 0.0 for name, seconds in record.phases.items()}
        repeated = 0.0
        if record.step is not None and record.steps:
            repeated = min(max(0, training.reached - (record.step - record.steps)), record.steps) / record.steps
            training.reached = max(training.reached, record.step)
        compute = phases.get("compute", 0.0)
        work: dict[Cause, float] = {
            "training": (1 - repeated) * compute,
            "recomputed": repeated * compute,
            "data": phases.get("data", 0.0),
            "checkpoint": phases.get("checkpoint", 0.0),
            # In a pause a script does what is no step, such as a validation of its own.
            "script": phases.get("pause", 0.0),
        }
        purposes = training.by_generation.setdefault(generation, {"compute": 0.0, "recomputed": 0.0, "waiting": 0.0})
        for cause, seconds in work.items():
            training.work[cause] = training.work.get(cause, 0.0) + seconds
            purposes[PURPOSE_OF_CAUSE[cause]] += seconds

    def _take(self, record: TrainingRecord) -> None:
        match record:
            case Rate():
                self._rate(record)
            case Values():
                self._logged(record)
            case Start():
                if self._step is not None:
                    self._training.steps_lost += max(0, self._step - record.step)
                self._step = record.step
                self._started(record)
            case IntervalChosen():
                self._training.interval_seconds = record.seconds
            case Mirrored():
                self._mirrored(record)
            case Saved():
                self._training.saves["committed"] += 1
                self._saved(record)
            case NotSaved():
                # A save that was started has a name.
                self._training.saves["skipped" if record.name is None else "failed"] += 1
            case CorruptionRecord():
                self._training.corruptions = joined([*self._training.corruptions, record.corruption])

    def _started(self, record: Start | None) -> None:
        """Take over the cost of a sample, and the peak of a GPU, as a generation logs them at its start."""
        training = self._training
        training.flops_per_sample = record.flops_per_sample if record else None
        training.peak_flops = record.peak_flops if record else None
        training.tokens_per_sample = record.tokens_per_sample if record else None
        training.learned_per_sample = record.learned_per_sample if record else None
        training.filtered_samples = (record.filtered_samples if record else None) or ""

    def _mirrored(self, record: Mirrored) -> None:
        self._training.mirror_seconds, self._training.mirror_step = record.interval_seconds, record.step

    def _rate(self, record: Rate) -> None:
        training = self._training
        self._step, training.loss = record.step or self._step, record.loss
        if "lr" in record.model_fields_set:
            training.learning_rate = record.lr
        if "gradient_norm" in record.model_fields_set:
            training.gradient_norm = record.gradient_norm
        phases, seconds, steps, samples = record.phases, record.step_seconds, record.steps, record.samples
        if phases is None or seconds is None or steps is None:
            return
        training.steps += steps
        # A script may leave them out.
        training.samples += samples or 0
        training.buckets[bisect_left(STEP_BUCKETS, seconds)] += steps
        training.step_seconds_sum += seconds * steps
        training.step_seconds = seconds
        if samples is not None and steps:
            training.samples_per_step = samples / steps

    def _logged(self, record: Values) -> None:
        values = self._training.values
        for name, value in record.known.items():
            if name in values or len(values) < MAX_VALUES:
                values[name] = value

    def _saved(self, record: Saved) -> None:
        self._training.stall_seconds, self._training.commit_seconds = record.stall_seconds, record.commit_seconds


def _reader(path: Path, offset: int = 0) -> LogReader[TrainingRecord]:
    """A reader that skips steps: their lines hold nothing that a rate does not sum up."""
    return LogReader(path, TRAINING, offset, skip=Step)


def _logs(paths: Iterable[Path]) -> list[tuple[int, Path]]:
    return sorted((number, path) for path in paths if (number := generation_of_log(path)) is not None)


MAX_FAILED, MAX_TEXT_LENGTH = 10_000, 200
SILENT_SECONDS = 3_600.0
"""Time without a line after which the evaluator is assumed to be gone, in seconds."""
REPLACED_SECONDS = 10.0
"""Maximum gap between a process's last line and the start of another that replaced it at once, in seconds: two lines of
an idle evaluator."""
_MAX_EVALUATOR_TAIL_BYTES = 64 * 2**10
"""Size of the end of a long log at which a new follower begins, in bytes."""


class EvaluatorFollower:
    """A follower of one evaluator's log."""

    def __init__(self, path: Path, counted_until: float = -inf) -> None:
        """
        Args:
            counted_until: seconds since the epoch: what was before is in the ledger already.
        """
        self._path = path
        status = os.stat(path)  # noqa: PTH116 - one system call
        # Beginning inside a line is harmless: what is left of it is no record and is passed over.
        self._log = LogReader(path, EVALUATOR, max(0, status.st_size - _MAX_EVALUATOR_TAIL_BYTES))
        self._grown_at = status.st_mtime
        self._is_read = False
        self._previous: Usage | None = None
        self._newest: Usage | None = None
        self._ended = False
        self.failed: dict[str, str] = {}
        """Checkpoints that it could not evaluate since it is followed, and the reasons."""
        self.lines_lost = 0
        """Lines that it could not write since it is followed."""
        self.corruptions: list[Corruption] = []
        """Wrong numbers that it has found since it is followed, one entry for each kind."""
        self._counted_until = counted_until
        self._shards = 0.0
        self.seconds: dict[Purpose, float] = {"waiting": 0.0, "idle": 0.0, "evaluation": 0.0}
        """Seconds for which its processes existed, up to the last sign of life, since it is followed, by purpose."""
        self.gpu_seconds = dict(self.seconds)
        """Seconds of the same processes, times the GPUs of each."""

    def is_quiet(self, now: float) -> bool:
        """Whether its evaluator has ended, or has been silent for long. Another process may write on under the same
        name."""
        return self._ended or now - self._grown_at > SILENT_SECONDS

    def follow(self, now: float) -> None:
        """Read what was appended since the last call."""
        offset = self._log.offset
        records = self._log.read() or ()
        if self._is_read and self._log.offset != offset:
            self._grown_at = now
        self._is_read = True
        for record in records:
            match record:
                case Usage():
                    self._account(record)
                    self._previous, self._newest = self._newest, record
                case Evaluated():
                    self._shards += record.seconds or 0.0
                case CheckpointUnusable() if len(self.failed) < MAX_FAILED:
                    self.failed[record.checkpoint[:MAX_TEXT_LENGTH]] = (record.why or "")[:MAX_TEXT_LENGTH]
                case LostLines():
                    self.lines_lost += record.lines or 0
                case CorruptionRecord():
                    self.corruptions = joined([*self.corruptions, record.corruption])
            self._ended = isinstance(record, EvaluatorEnd)

    def _account(self, sign: Usage) -> None:
        """Account the time since the last sign of life in the ledger."""
        earlier, shards, self._shards = self._newest, self._shards, 0.0
        if sign.age is None or sign.time <= self._counted_until:
            return
        seconds, state = sign.age, "starting"
        if earlier is None or earlier.age is None:
            seconds = min(seconds, sign.time - self._counted_until)
        elif _is_one_process(earlier, sign):
            seconds, state = sign.age - earlier.age, earlier.state or "idle"
        else:
            # The process before it has lived on after its last sign of life, and was replaced when it had died.
            gap = sign.time - sign.age - earlier.time
            self._add("idle", gap if 0.0 < gap <= REPLACED_SECONDS else 0.0, earlier)
        evaluation_seconds = seconds if state == "evaluating" else min(seconds, shards)
        self._add("evaluation", evaluation_seconds, sign)
        self._add("waiting" if state == "starting" else "idle", seconds - evaluation_seconds, sign)

    def _add(self, purpose: Purpose, seconds: float, sign: Usage) -> None:
        self.seconds[purpose] += seconds
        self.gpu_seconds[purpose] += seconds * (sign.gpus or 0.0)

    def view(self, now: float) -> EvaluatorView | None:
        """The evaluator at `now`, in seconds since the epoch; None before its first sign of life and after its end."""
        newest = self._newest
        if newest is None or self._ended:
            return None
        name = evaluator_of_log(self._path)
        assert name is not None
        state = (newest.checkpoint or newest.state or "idle")[:MAX_TEXT_LENGTH]
        return EvaluatorView(name=name, state=state, cpu=self._cpu(), silent_seconds=max(0.0, now - newest.time))

    def _cpu(self) -> float | None:
        if self._previous is None or self._newest is None:
            return None
        cpu_seconds, previously = self._newest.cpu_seconds, self._previous.cpu_seconds
        seconds = self._newest.time - self._previous.time
        if (
            cpu_seconds is None
            or previously is None
            or seconds <= 0
            or not _is_one_process(self._previous, self._newest)
        ):
            return None
        return max(0.0, cpu_seconds - previously) / seconds


def _is_one_process(before: Usage, sign: Usage) -> bool:
    """Whether two signs of life under one name come from one process. Versions that do not report the process are told
    apart by their age alone.

    On a busy machine a process may be older at its first sign of life than the one before was at its last.
    """
    return before.process == sign.process and (before.age or 0.0) <= (sign.age or 0.0)
