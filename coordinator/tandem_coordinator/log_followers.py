"""Followers of the run directory's logs: the time that training took, the outcome of saves, and the work of evaluators.

First ranks and evaluators write these for people and reports anyway, so counting from them costs a step nothing, and
ranks, agents and heartbeats need not know. Rejected: sums in each heartbeat (they begin anew with each process, so they
would have to be joined over generations, and what a rank did after its last heartbeat would be missing).

The two newest training logs are followed, because a generation may write its last lines after the next one has begun.
Lines from before this process started are not counted: Prometheus' `rate` and `increase` would see them twice.
"""

import os
from bisect import bisect_left
from collections import Counter
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from math import inf, isfinite
from pathlib import Path
from typing import NamedTuple

from tandem.ledger import Purpose
from tandem.metrics import STEP_BUCKETS
from tandem.rundir.durable import listed
from tandem.rundir.layout import evaluator_of_log, generation_of_log
from tandem.rundir.log import LogReader
from tandem.rundir.records import (
    EVALUATOR,
    TRAINING,
    Evaluated,
    EvaluatorEnd,
    Lost,
    NotSaved,
    Rate,
    Saved,
    Start,
    Step,
    TrainingRecord,
    Unusable,
    Usage,
    Values,
)
from tandem.script import MAX_VALUES
from tandem.status import EvaluatorView

_TAIL_BYTES = 256 * 2**10
"""Of a log that was there before, so much of the end is searched for the last save."""
_FIRST_BYTES = 2**16
_FOLLOWED = 2
WORK = ("data", "compute", "checkpoint")
"""What a rate line divides time into."""


LEDGERS = 4
"""Number of the newest generations for which the time is broken down by purpose."""


@dataclass(frozen=True)
class Counted:
    """What an earlier coordinator has counted for the ledger (tandem_coordinator.ledger)."""

    reached: int = 0
    """The highest step that was taken."""
    offsets: Mapping[int, int] | None = None
    """Bytes of training logs by generation; None where there was no ledger, so that logs that are there do not
    count."""
    evaluators_until: float = -inf
    """Up to then, in seconds since the epoch, evaluators' logs."""

    def offset(self, generation: int) -> int | None:
        """How far a log that is there is counted; None: it does not count."""
        if self.offsets is None:
            return None
        return self.offsets.get(generation, 0 if generation > max(self.offsets, default=0) else None)


@dataclass(frozen=True)
class Training:
    """What was counted since this process began."""

    seconds: dict[str, float] = field(default_factory=dict)
    """Of the first rank, by what it did (WORK)."""
    steps: int = 0
    samples: int = 0
    steps_lost: int = 0
    """Steps that were taken and are taken again."""
    buckets: tuple[int, ...] = (0,) * (len(STEP_BUCKETS) + 1)
    """Steps by their time: as long as each of STEP_BUCKETS at most, and longer than the last."""
    step_seconds_sum: float = 0.0
    step_seconds: float | None = None
    """Of a step, lately."""
    samples_per_step: float | None = None
    """Over all ranks, lately."""
    saves: dict[str, int] = field(default_factory=dict)
    """By what became of them: committed, skipped, failed."""
    stall_seconds: float | None = None
    """Of the last save."""
    commit_seconds: float | None = None
    flops_per_sample: float | None = None
    peak_flops: float | None = None
    """Of one rank's GPU; None where one of the two is not well defined."""
    tokens_per_sample: float | None = None
    """Without padding; None where samples are no text."""
    learned_per_sample: float | None = None
    """Tokens of these that the loss is over."""
    learning_rate: float | None = None
    """Of the last step that a rate was told of."""
    loss: float | None = None
    """Of the same."""
    gradient_norm: float | None = None
    """The last that was measured."""
    values: dict[str, float] = field(default_factory=dict)
    """By the names that the script has logged them by, the newest ones that are finite: MAX_VALUES at most."""
    by_generation: Mapping[int, Mapping[Purpose, float]] = field(default_factory=dict)
    """Seconds of the first rank by what they were for, since the last record of a ledger."""
    reached: int = 0
    """The highest step that was ever taken."""
    offsets: Mapping[int, int] = field(default_factory=dict)
    """Bytes of the newest logs that are in all this, by generation."""


class _Each(NamedTuple):
    """What a generation says at its beginning of each sample, and of each GPU."""

    flops: float | None = None
    peak_flops: float | None = None
    tokens: float | None = None
    learned: float | None = None

    @classmethod
    def of(cls, record: Start) -> "_Each":
        """From its record."""
        return cls(record.flops_per_sample, record.peak_flops, record.tokens_per_sample, record.learned_per_sample)


class TrainingLogs:
    """Follows the newest training logs. Used by one thread."""

    def __init__(self, folder: Path, counted: Counted | None = None) -> None:
        self._logs: dict[int, LogReader[TrainingRecord]] = {}
        self._seconds = dict.fromkeys(WORK, 0.0)
        self._saves: Counter[str] = Counter()
        self._buckets = [0] * (len(STEP_BUCKETS) + 1)
        self._steps = self._samples = self._lost = 0
        self._sum = 0.0
        self._step: int | None = None
        self._step_seconds: float | None = None
        self._samples_per_step: float | None = None
        self._stall: float | None = None
        self._commit: float | None = None
        self._each = _Each()
        self._learning_rate: float | None = None
        self._loss: float | None = None
        self._gradient_norm: float | None = None
        self._values: dict[str, float] = {}
        self._counted = counted or Counted()
        self._reached = self._counted.reached
        self._purposes: dict[int, dict[Purpose, float]] = {}
        for generation, path in _logs(listed(folder))[-_FOLLOWED:]:
            self._skip(generation, path)

    def follow(self, paths: list[Path]) -> Training:
        """Read what was appended since the last time.

        Args:
            paths: what is in the folder of logs, by name.
        """
        for generation, path in _logs(paths)[-_FOLLOWED:]:
            if generation not in self._logs:
                self._logs[generation] = _reader(path)
            for record in self._logs[generation].read() or ():
                self._take(record)
                self._account(generation, record)
        return Training(
            seconds=dict(self._seconds),
            steps=self._steps,
            samples=self._samples,
            steps_lost=self._lost,
            buckets=tuple(self._buckets),
            step_seconds_sum=self._sum,
            step_seconds=self._step_seconds,
            samples_per_step=self._samples_per_step,
            saves=dict(self._saves),
            stall_seconds=self._stall,
            commit_seconds=self._commit,
            flops_per_sample=self._each.flops,
            peak_flops=self._each.peak_flops,
            tokens_per_sample=self._each.tokens,
            learned_per_sample=self._each.learned,
            learning_rate=self._learning_rate,
            loss=self._loss,
            gradient_norm=self._gradient_norm,
            values={name: value for name, value in self._values.items() if isfinite(value)},
            by_generation={number: dict(self._purposes[number]) for number in sorted(self._purposes)[-LEDGERS:]},
            reached=self._reached,
            offsets={number: self._logs[number].offset for number in sorted(self._logs)[-_FOLLOWED:]},
        )

    def _skip(self, generation: int, path: Path) -> None:
        """Remember the state that a log leaves, and count nothing of it."""
        try:
            size = path.stat().st_size
        except OSError:
            return
        self._each = _each(path)
        log = self._logs[generation] = _reader(path, max(0, size - _TAIL_BYTES))
        for record in log:
            match record:
                case Rate():
                    self._step, self._loss = record.step or self._step, record.loss
                case Saved():
                    self._saved(record)
                case Values():
                    self._logged(record)
        if (counted := self._counted.offset(generation)) is None:
            self._reached = max(self._reached, self._step or 0)
            return
        # The ledger goes on where an earlier coordinator's ended.
        self._logs[generation] = _reader(path, counted)
        for record in self._logs[generation]:
            self._account(generation, record)

    def _account(self, generation: int, record: TrainingRecord) -> None:
        """Take into the ledger what a log says."""
        if not isinstance(record, Rate) or record.phases is None:
            return
        spent = {name: seconds or 0.0 for name, seconds in record.phases.items()}
        again = 0.0
        if record.step is not None and record.steps:
            again = min(max(0, self._reached - (record.step - record.steps)), record.steps) / record.steps
            self._reached = max(self._reached, record.step)
        compute = spent.get("compute", 0.0)
        purposes = self._purposes.setdefault(generation, {"compute": 0.0, "recomputed": 0.0, "waiting": 0.0})
        purposes["recomputed"] += again * compute
        # In a pause a script does what is no step, such as a validation of its own.
        purposes["compute"] += (1 - again) * compute + spent.get("pause", 0.0)
        purposes["waiting"] += spent.get("data", 0.0) + spent.get("checkpoint", 0.0)

    def _take(self, record: TrainingRecord) -> None:
        match record:
            case Rate():
                self._rate(record)
            case Values():
                self._logged(record)
            case Start():
                if self._step is not None:
                    self._lost += max(0, self._step - record.step)
                self._step = record.step
                self._each = _Each.of(record)
            case Saved():
                self._saves["committed"] += 1
                self._saved(record)
            case NotSaved():
                # One that was begun has a name.
                self._saves["skipped" if record.name is None else "failed"] += 1

    def _rate(self, record: Rate) -> None:
        self._step, self._loss = record.step or self._step, record.loss
        if "lr" in record.model_fields_set:
            self._learning_rate = record.lr
        if "gradient_norm" in record.model_fields_set:
            self._gradient_norm = record.gradient_norm
        phases, seconds, steps, samples = record.phases, record.step_seconds, record.steps, record.samples
        if phases is None or seconds is None or steps is None:
            return
        for name in WORK:
            self._seconds[name] += phases.get(name) or 0.0
        self._steps += steps
        # A script may leave them out.
        self._samples += samples or 0
        self._buckets[bisect_left(STEP_BUCKETS, seconds)] += steps
        self._sum += seconds * steps
        self._step_seconds = seconds
        if samples is not None and steps:
            self._samples_per_step = samples / steps

    def _logged(self, record: Values) -> None:
        for name, value in record.known.items():
            if name in self._values or len(self._values) < MAX_VALUES:
                self._values[name] = value

    def _saved(self, record: Saved) -> None:
        self._stall, self._commit = record.stall_seconds, record.commit_seconds


def _reader(path: Path, offset: int = 0) -> LogReader[TrainingRecord]:
    """Without steps: there is nothing in their lines that a rate does not sum up."""
    return LogReader(path, TRAINING, offset, skip=Step)


def _each(path: Path) -> _Each:
    """What a log that was there before says of samples and GPUs at its beginning."""
    with suppress(OSError):
        for record in LogReader(path, TRAINING, skip=Step, bite=_FIRST_BYTES).read() or ():
            if isinstance(record, Start):
                return _Each.of(record)
    return _Each()


def _logs(paths: Iterable[Path]) -> list[tuple[int, Path]]:
    return sorted((number, path) for path in paths if (number := generation_of_log(path)) is not None)


MAX_FAILED, MAX_WORDS = 10_000, 200
SILENT_SECONDS = 3_600.0
"""After so long without a line the evaluator is hardly there any more."""
REPLACED_SECONDS = 10.0
"""Two signs of life of an idle evaluator. A process that begins within so much of another's last one has replaced it
at once."""
_LAST_BYTES = 64 * 2**10
"""A coordinator that finds a long log begins so far before its end."""


class EvaluatorFollower:
    """Follows one evaluator's log."""

    def __init__(self, path: Path, counted_until: float = -inf) -> None:
        """
        Args:
            counted_until: seconds since the epoch: what was before is in the ledger already.
        """
        self._path = path
        status = os.stat(path)  # noqa: PTH116 - one system call
        # Beginning inside a line is harmless: what is left of it is no record and is passed over.
        self._log = LogReader(path, EVALUATOR, max(0, status.st_size - _LAST_BYTES))
        self._grown_at = status.st_mtime
        self._is_read = False
        self._before: Usage | None = None
        self._newest: Usage | None = None
        self._ended = False
        self.failed: dict[str, str] = {}
        """Checkpoints that it could not evaluate, since it is followed, and why."""
        self.lines_lost = 0
        """Lines that it could not write, since it is followed."""
        self._counted_until = counted_until
        self._shards = 0.0
        self.seconds: dict[Purpose, float] = {"waiting": 0.0, "idle": 0.0, "evaluation": 0.0}
        """For which its processes existed, up to the last sign of life, since it is followed, by what they did."""

    def is_quiet(self, now: float) -> bool:
        """Whether its evaluator has ended, or is silent for long. Another process may write on under the same name."""
        return self._ended or now - self._grown_at > SILENT_SECONDS

    def follow(self, now: float) -> None:
        """Read what was appended since the last time."""
        before = self._log.offset
        records = self._log.read() or ()
        if self._is_read and self._log.offset != before:
            self._grown_at = now
        self._is_read = True
        for record in records:
            match record:
                case Usage():
                    self._account(record)
                    self._before, self._newest = self._newest, record
                case Evaluated():
                    self._shards += record.seconds or 0.0
                case Unusable() if len(self.failed) < MAX_FAILED:
                    self.failed[record.checkpoint[:MAX_WORDS]] = (record.why or "")[:MAX_WORDS]
                case Lost():
                    self.lines_lost += record.lines or 0
            self._ended = isinstance(record, EvaluatorEnd)

    def _account(self, sign: Usage) -> None:
        """Take into the ledger what was since the sign of life before."""
        before, shards, self._shards = self._newest, self._shards, 0.0
        if sign.age is None or sign.time <= self._counted_until:
            return
        seconds, state = sign.age, "starting"
        if before is None or before.age is None:
            seconds = min(seconds, sign.time - self._counted_until)
        elif _is_one_process(before, sign):
            seconds, state = sign.age - before.age, before.state or "idle"
        else:
            # The process before it has lived on after its last sign of life, and was replaced when it had died.
            gap = sign.time - sign.age - before.time
            self.seconds["idle"] += gap if 0.0 < gap <= REPLACED_SECONDS else 0.0
        evaluated = seconds if state == "evaluating" else min(seconds, shards)
        self.seconds["evaluation"] += evaluated
        self.seconds["waiting" if state == "starting" else "idle"] += seconds - evaluated

    def view(self, now: float) -> EvaluatorView | None:
        """The evaluator as it is at `now`, seconds since the epoch; None before its first sign of life and after its
        end."""
        newest = self._newest
        if newest is None or self._ended:
            return None
        name = evaluator_of_log(self._path)
        assert name is not None
        state = (newest.checkpoint or newest.state or "idle")[:MAX_WORDS]
        return EvaluatorView(name=name, state=state, cpu=self._cpu(), silent_seconds=max(0.0, now - newest.time))

    def _cpu(self) -> float | None:
        if self._before is None or self._newest is None:
            return None
        used, previously = self._newest.cpu_seconds, self._before.cpu_seconds
        seconds = self._newest.time - self._before.time
        if used is None or previously is None or seconds <= 0 or not _is_one_process(self._before, self._newest):
            return None
        return max(0.0, used - previously) / seconds


def _is_one_process(before: Usage, sign: Usage) -> bool:
    """Whether two signs of life under one name are one process'. Versions that do not say which tell their age alone.

    On a busy machine a process may be older at its first sign of life than the one before was at its last.
    """
    return before.process == sign.process and (before.age or 0.0) <= (sign.age or 0.0)
