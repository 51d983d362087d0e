"""The three kinds of log of a run directory, each parsed in one pass (docs/architecture.md lists their lines)."""

import re
from array import array
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np

from tandem.model import MAX_TIMESTAMP
from tandem.rundir import records
from tandem.rundir.log import LogReader
from tandem.rundir.records import COORDINATOR, EVALUATOR, TRAINING, AnyRecord, Kinds
from tandem.rundir.timeline import damaged_lines
from tandem.script import MAX_VALUES
from tandem.wire.measures import SAME_SECONDS
from tandem.wire.status import Corruption, Troubles
from tandem_cli.report.run import (
    EvaluationWork,
    Floats,
    Ints,
    Kind,
    OfRank,
    Rates,
    RunEvent,
    Steps,
    Use,
    World,
    number,
    within,
)
from tandem_coordinator.charts.stories import GRADIENT_NORM, LEARNING_RATE

MAX_CORES = 10_000.0
MAX_THROUGHPUT = 1e15
MAX_BYTES = 1e15
"""Limits of plausible values: larger numbers of busy cores, of samples a second and of bytes are damage."""

LOST_SECONDS = 12.0
"""Silence after which a process counts as absent: an evaluator logs at least every 5 s, the coordinator every
second."""


@dataclass(frozen=True)
class TrainLog:
    """Log of rank 0 of one generation."""

    generation: int
    steps: Steps
    rates: Rates
    saves: tuple[records.Saved, ...]
    unsaved: tuple[tuple[int, str], ...]
    failed: tuple[str, ...]
    """Reasons why saves that were started have failed."""
    passed: tuple[tuple[float, str, str], ...]
    """Checkpoints that it could not resume from: time, name, reason."""
    start: records.Start | None
    ended: str
    corruptions: tuple[Corruption, ...]
    first_at: float | None
    last_at: float | None
    marks: Floats


@dataclass(frozen=True)
class CoordinatorLog:
    """Log of the coordinator."""

    world: World
    trainer_cpu: tuple[Use, ...] = ()
    gpu: tuple[Use, ...] = ()
    evaluator_cpu: tuple[Use, ...] = ()
    busy: tuple[OfRank, ...] = ()
    memory: tuple[OfRank, ...] = ()
    formed: tuple[records.Formed, ...] = ()
    closed: tuple[records.Closed, ...] = ()
    events: tuple[RunEvent, ...] = ()
    uploads: tuple[records.Uploaded, ...] = ()
    troubles: tuple[Troubles, ...] = ()
    """Counts of the coordinator, at each change."""
    ledger: records.LedgerRecord | None = None
    """The last one logged."""
    ended_at: float | None = None
    """Time at which the coordinator ended in good order, if it logged nothing afterwards."""
    marks: Floats = field(default_factory=lambda: np.empty(0))


@dataclass(frozen=True)
class ReadEvaluatorLog:
    """Log of one evaluator."""

    name: str
    use: Use
    works: tuple[EvaluationWork, ...]
    skipped: tuple[tuple[float, str], ...]
    bad: tuple[tuple[float, str, str], ...]
    marks: Floats
    corruptions: tuple[Corruption, ...] = ()


class _Marks:
    """Times at which something was logged, at most two a second: a million steps need no more on the axis."""

    def __init__(self) -> None:
        self._times = array("d")
        self._last = -1.0

    def add(self, time: float) -> None:
        if abs(time - self._last) >= 0.5:
            self._times.append(time)
            self._last = time

    def all(self) -> Floats:
        return _floats(self._times)


def read_train_log(path: Path, generation: int, faults: list[str]) -> TrainLog:
    """Parse `log/train-g….jsonl` in one pass."""
    step, when, loss = array("q"), array("d"), array("d")
    measures = {name: array("d") for name in (LEARNING_RATE, GRADIENT_NORM)}
    lossless = array("b")
    script_values: dict[str, tuple[array[int], array[float]]] = {}
    rates: list[tuple[float, records.Rate]] = []
    saves: list[records.Saved] = []
    unsaved: list[tuple[int, str]] = []
    corruptions: list[Corruption] = []
    failed: list[str] = []
    passed: list[tuple[float, str, str]] = []
    start: records.Start | None = None
    ended, marks = "", _Marks()
    first = last = None
    # A rate covers the time since the rate before, or since the first line.
    previous_rate: float | None = None
    for record in _all(path, TRAINING, faults):
        time = record.time
        marks.add(time)
        first, last = time if first is None else first, time
        match record:
            case records.Step():
                step.append(record.step)
                when.append(time)
                loss.append(number(record.loss))
                # A step without a loss, as scripts may log it, differs from a loss of null, which was not finite.
                lossless.append("loss" not in record.model_fields_set)
                for values, value in zip(measures.values(), (record.lr, record.gradient_norm), strict=True):
                    values.append(number(value))
            case records.Values():
                for name, value in record.known.items():
                    # A script that makes up names without end must not fill the memory.
                    if name in script_values or len(script_values) < MAX_VALUES:
                        steps_of, column = script_values.setdefault(name, (array("q"), array("d")))
                        steps_of.append(record.step)
                        column.append(number(value))
            case records.Rate():
                rates.append((time - (first if previous_rate is None else previous_rate), record))
                previous_rate = time
            case records.Saved():
                saves.append(record)
            case records.NotSaved():
                unsaved.append((record.step or 0, record.why or ""))
                if record.name is not None:  # the save was started
                    failed.append(record.why or "")
            case records.CheckpointPassedOver():
                passed.append((time, record.checkpoint or "", record.why or ""))
            case records.Start():
                # One for each generation's log; should there be several, the first.
                start = start or record
            case records.TrainingEnd():
                ended = record.why or ""
            case records.CorruptionRecord():
                corruptions.append(record.corruption)
    # Arrays are built once at the end: appending to numpy arrays would copy them for each line.
    steps = Steps(
        np.array(step, np.int64),
        _floats(when),
        _floats(loss),
        _logged(measures),
        np.array(lossless, np.bool_) if any(lossless) else None,
    )
    return TrainLog(
        generation=generation,
        steps=replace(steps, measures=steps.measures | _aligned(steps.step, script_values)),
        rates=_rates(rates),
        saves=tuple(saves),
        unsaved=tuple(unsaved),
        failed=tuple(failed),
        passed=tuple(passed),
        start=start,
        ended=ended,
        corruptions=tuple(corruptions),
        first_at=first,
        last_at=last,
        marks=marks.all(),
    )


def read_coordinator_log(path: Path, faults: list[str]) -> CoordinatorLog:
    """Parse `log/coordinator.jsonl` in one pass."""
    when, size, throughput = array("d"), array("q"), array("d")
    trainers, gpus, evaluators = _Samples(), _Samples(), _Samples()
    busy, memory = _Samples(MAX_TIMESTAMP), _Samples(MAX_BYTES)
    formed: list[records.Formed] = []
    closed: list[records.Closed] = []
    events: list[RunEvent] = []
    uploads: list[records.Uploaded] = []
    troubles: list[Troubles] = []
    ledger: records.LedgerRecord | None = None
    marks, ended_at = _Marks(), None
    for record in _all(path, COORDINATOR, faults):
        time = record.time
        marks.add(time)
        # Only the last line counts: a coordinator that was restarted has not ended.
        ended_at = time if isinstance(record, records.CoordinatorEnd) else None
        match record:
            case records.Sample():
                when.append(time)
                size.append(record.world_size or 0)
                throughput.append(within(record.throughput, 0, MAX_THROUGHPUT))
                # Values may have been measured some time before the sample that reports them.
                before = record.used_before or {}
                trainers.add(len(when) - 1, record.trainer_cpu, before)
                gpus.add(len(when) - 1, record.gpu, before)
                evaluators.add(len(when) - 1, record.evaluator_cpu, before)
                # Work and memory of ranks have no age: they belong to the sample.
                busy.add(len(when) - 1, record.busy_seconds, {})
                memory.add(len(when) - 1, record.gpu_memory, {})
            case records.Formed():
                formed.append(record)
            case records.Closed():
                closed.append(record)
            case records.Uploaded():
                uploads.append(record)
            case records.TroublesRecord():
                troubles.append(record)
            case records.LedgerRecord():
                ledger = record
            case records.EventRecord():
                events.append(RunEvent(time, record.level or "info", record.text or ""))
    times = _floats(when)
    return CoordinatorLog(
        world=World(times, np.array(size, np.int64), _floats(throughput)),
        trainer_cpu=trainers.uses("trainer", times),
        gpu=gpus.uses("gpu", times),
        evaluator_cpu=evaluators.uses("evaluator", times),
        busy=tuple(OfRank(name, times, values) for name, values in busy.columns(times)),
        memory=tuple(OfRank(name, times, values) for name, values in memory.columns(times)),
        formed=tuple(formed),
        closed=tuple(closed),
        events=tuple(events),
        uploads=tuple(uploads),
        troubles=tuple(troubles),
        ledger=ledger,
        ended_at=ended_at,
        marks=marks.all(),
    )


def read_evaluator_log(path: Path, name: str, faults: list[str]) -> ReadEvaluatorLog:
    """Parse `log/evaluator-NAME.jsonl` in one pass."""
    when, cpu_seconds = array("d"), array("d")
    works: list[EvaluationWork] = []
    skipped: list[tuple[float, str]] = []
    bad: list[tuple[float, str, str]] = []
    corruptions: list[Corruption] = []
    marks = _Marks()
    for record in _all(path, EVALUATOR, faults):
        time = record.time
        marks.add(time)
        match record:
            case records.Usage():
                when.append(time)
                cpu_seconds.append(number(record.cpu_seconds))
            case records.Evaluated():
                # The line is written at the end of the work.
                started_at = time - (record.seconds or 0.0)
                works.append(
                    EvaluationWork(name, record.checkpoint, record.generation, record.step or 0, started_at, time)
                )
            case records.NotEvaluated():
                skipped.append((time, record.checkpoint))
            case records.CheckpointUnusable():
                bad.append((time, record.checkpoint, record.why or ""))
            case records.CorruptionRecord():
                corruptions.append(record.corruption)
    times = _floats(when)
    use = Use(name, "evaluator", times, busy_cores(times, _floats(cpu_seconds)))
    return ReadEvaluatorLog(name, use, tuple(works), tuple(skipped), tuple(bad), marks.all(), tuple(corruptions))


def busy_cores(time: Floats, cpu_seconds: Floats) -> Floats:
    """Compute the busy cores between samples of a process's CPU clock.

    The clock restarts at 0 when another process takes over the name; its value was used since then. The first sample,
    and one after a silence longer than `LOST_SECONDS`, have no start: NaN.
    """
    if len(time) == 0:
        return np.empty(0)
    length = np.diff(time, prepend=np.nan)
    used = np.diff(cpu_seconds, prepend=np.nan)
    # A smaller value is the clock of a new process: all of it was used since the last sample.
    used = np.where(used < 0, cpu_seconds, used)
    with np.errstate(divide="ignore", invalid="ignore"):
        busy = used / length
    # After a silence, the new process's CPU time was not used over the whole of it.
    return np.where((length > 0) & (length <= LOST_SECONDS) & (busy <= MAX_CORES), busy, np.nan)


class _Samples:
    """Samples of values by name; a name may be missing in some samples."""

    def __init__(self, limit: float = MAX_CORES) -> None:
        self._limit = limit
        self._columns: dict[str, tuple[array[int], array[float], array[float]]] = {}

    def add(self, sample: int, values: Mapping[str, float | None] | None, before: Mapping[str, float | None]) -> None:
        """Add the values of a sample.

        Args:
            before: seconds from the measurement of a value to the sample, by name.
        """
        for name, value in (values or {}).items():
            if name not in self._columns:
                self._columns[name] = (array("q"), array("d"), array("d"))
            indices, column, ages = self._columns[name]
            indices.append(sample)
            column.append(within(value, 0, self._limit))
            ages.append(min(before.get(name) or 0.0, MAX_TIMESTAMP))

    def uses(self, kind: Kind, time: Floats) -> tuple[Use, ...]:
        """Make one `Use` for each name, each value at the time of its measurement; a value in two samples is one."""
        uses = []
        for name, values in self.columns(time):
            indices, _, ages = self._columns[name]
            # From the time of the sample back to that of the measurement.
            measured_at = time.copy()
            measured_at[np.array(indices, np.int64)] -= _floats(ages)
            is_repeated = np.diff(measured_at, prepend=-np.inf) < SAME_SECONDS
            uses.append(Use(name, kind, measured_at[~is_repeated], values[~is_repeated]))
        return tuple(uses)

    def columns(self, time: Floats) -> Iterator[tuple[str, Floats]]:
        """Generate each name with its values over all samples: NaN in samples without the name."""
        # By rank number, which is the order of rows in the figures.
        for name in sorted(self._columns, key=natural):
            values = np.full(len(time), np.nan)
            values[np.array(self._columns[name][0], np.int64)] = _floats(self._columns[name][1])
            yield name, values


def natural(name: str) -> list[tuple[bool, int, str]]:
    """Sort key that puts rank 10 after rank 9."""
    parts = re.findall(r"[0-9]+|[^0-9]+", name)
    return [(False, int(part), "") if part[0] in "0123456789" else (True, 0, part) for part in parts]


def _all(path: Path, kinds: Kinds[AnyRecord], faults: list[str]) -> Iterator[AnyRecord]:
    """Generate the records of a log, in order. Unreadable lines are counted, and reported in `faults`: a page that
    silently omits something is worse than none."""
    log = LogReader(path, kinds)
    try:
        yield from log
    except OSError as error:
        faults.append(f"log/{path.name} could not be read to its end: {error.strerror}")
    if log.damaged:
        faults.append(damaged_lines(path.name, log.damaged))


def _rates(rows: list[tuple[float, records.Rate]]) -> Rates:
    names = list(dict.fromkeys(name for _, rate in rows for name in rate.phases or ()))

    def phase_seconds(rate: records.Rate, name: str) -> float:
        value = (rate.phases or {}).get(name)
        return value if value is not None and value <= MAX_TIMESTAMP else 0.0

    return Rates(
        time=np.array([rate.time for _, rate in rows], np.float64),
        throughput=np.array([within(rate.throughput, 0, MAX_THROUGHPUT) for _, rate in rows], np.float64),
        seconds=np.array([length for length, _ in rows], np.float64),
        phases={name: np.array([phase_seconds(rate, name) for _, rate in rows], np.float64) for name in names},
    )


def _logged(measures: "dict[str, array[float]]") -> dict[str, Floats]:
    """Select the measures that were logged at all."""
    arrays = {name: _floats(values) for name, values in measures.items()}
    return {name: values for name, values in arrays.items() if np.isfinite(values).any()}


def _aligned(step: Ints, script_values: "dict[str, tuple[array[int], array[float]]]") -> dict[str, Floats]:
    """Align values that were logged by themselves with the steps: each in the row of its step, or of the last step
    before."""
    aligned: dict[str, Floats] = {}
    # The search needs ascending steps; `order` leads back to the rows of the log.
    order = np.argsort(step, kind="stable")
    for name, (logged_steps, values) in script_values.items() if len(step) else ():
        places = np.searchsorted(step[order], np.array(logged_steps, np.int64), side="right") - 1
        aligned[name] = np.full(len(step), np.nan)
        aligned[name][order[np.maximum(0, places)]] = _floats(values)
    return aligned


def _floats(values: "array[float]") -> Floats:
    return np.array(values, np.float64)
