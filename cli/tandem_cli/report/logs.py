"""The three kinds of log of a run directory, each parsed in one pass (docs/architecture.md lists their lines)."""

import re
from array import array
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from pydantic import ValidationError

from tandem.charts.stories import GRADIENT_NORM, LEARNING_RATE
from tandem.numbers import whole
from tandem.status import Troubles
from tandem_cli.report.lines import LATEST, Record, mapping, number, seconds, stream, text, within
from tandem_cli.report.run import Event, Floats, Kind, OfRank, Rates, Steps, Use, Work, World

MOST_CORES = 10_000.0
MOST_THROUGHPUT = 1e15
MOST_BYTES = 1e15
"""Larger numbers of busy cores, of samples a second and of bytes are damage."""

SAME_SECONDS = 0.1
"""Values that were measured so shortly after one another are one, told twice."""

LOST_SECONDS = 12.0
"""An evaluator speaks at least every 5 s and the coordinator every second: after this it was not there."""


@dataclass(frozen=True)
class Save:
    """A `checkpoint` line of a trainer."""

    name: str
    step: int
    at: float
    stall_seconds: float | None
    commit_seconds: float | None
    size: int | None


@dataclass(frozen=True)
class TrainLog:
    """What rank 0 of one generation wrote."""

    generation: int
    steps: Steps
    rates: Rates
    saves: tuple[Save, ...]
    unsaved: tuple[tuple[int, str], ...]
    failed: tuple[str, ...]
    """Why saves that were begun have failed."""
    passed: tuple[tuple[float, str, str], ...]
    """Checkpoints it could not resume from: when, name, why."""
    started_at: float | None
    start_step: int | None
    total_steps: int | None
    world_size: int | None
    ended: str
    first_at: float | None
    last_at: float | None
    marks: Floats


@dataclass(frozen=True)
class CoordinatorLog:
    """What the coordinator wrote."""

    world: World
    trainer_cpu: tuple[Use, ...] = ()
    gpu: tuple[Use, ...] = ()
    evaluator_cpu: tuple[Use, ...] = ()
    busy: tuple[OfRank, ...] = ()
    memory: tuple[OfRank, ...] = ()
    opened: tuple[Record, ...] = ()
    closed: tuple[Record, ...] = ()
    events: tuple[Event, ...] = ()
    troubles: tuple[Troubles, ...] = ()
    """As the coordinator counted them, each time something was new."""
    ended_at: float | None = None
    """When the coordinator left in good order, if nothing followed."""
    marks: Floats = field(default_factory=lambda: np.empty(0))


@dataclass(frozen=True)
class EvaluatorLog:
    """What one evaluator wrote."""

    name: str
    use: Use
    works: tuple[Work, ...]
    skipped: tuple[tuple[float, str], ...]
    bad: tuple[tuple[float, str, str], ...]
    marks: Floats


class _Marks:
    """Times at which something was logged, at most two a second."""

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
    """Parse `log/train-g….jsonl`."""
    step, when, loss = array("q"), array("d"), array("d")
    measures = {name: array("d") for name in (LEARNING_RATE, GRADIENT_NORM)}
    rates: list[tuple[float, float, float, Record]] = []
    saves: list[Save] = []
    unsaved: list[tuple[int, str]] = []
    failed: list[str] = []
    passed: list[tuple[float, str, str]] = []
    start: Record = {}
    ended, marks = "", _Marks()
    first = last = None
    previous_rate: float | None = None
    for record in stream(path, faults):
        time, kind = record["time"], record["kind"]
        marks.add(time)
        first, last = time if first is None else first, time
        if kind == "step":
            if (at := whole(record.get("step"))) is not None:
                step.append(at)
                when.append(time)
                loss.append(number(record.get("loss")))
                for name, values in measures.items():
                    values.append(number(record.get(name)))
        elif kind == "rate":
            since = first if previous_rate is None else previous_rate
            rates.append(
                (
                    time,
                    within(record.get("throughput"), 0, MOST_THROUGHPUT),
                    time - since,
                    mapping(record.get("phases")),
                )
            )
            previous_rate = time
        elif kind == "checkpoint":
            if (saved := _save(record)) is not None:
                saves.append(saved)
        elif kind == "skipped":
            unsaved.append((whole(record.get("step")) or 0, text(record.get("why"))))
            if "name" in record:  # it was begun
                failed.append(text(record.get("why")))
        elif kind == "passed":
            passed.append((time, text(record.get("checkpoint")), text(record.get("why"))))
        elif kind == "start":
            start = start or record
        elif kind == "end":
            ended = text(record.get("why"))
    return TrainLog(
        generation=generation,
        steps=Steps(np.array(step, np.int64), _floats(when), _floats(loss), _told(measures)),
        rates=_rates(rates),
        saves=tuple(saves),
        unsaved=tuple(unsaved),
        failed=tuple(failed),
        passed=tuple(passed),
        started_at=start.get("time"),
        start_step=whole(start.get("step")),
        total_steps=whole(start.get("totalSteps")),
        world_size=whole(start.get("worldSize")),
        ended=ended,
        first_at=first,
        last_at=last,
        marks=marks.all(),
    )


def read_coordinator_log(path: Path, faults: list[str]) -> CoordinatorLog:
    """Parse `log/coordinator.jsonl`."""
    when, size, throughput = array("d"), array("q"), array("d")
    trainers, gpus, evaluators = _Samples(), _Samples(), _Samples()
    busy, memory = _Samples(LATEST), _Samples(MOST_BYTES)
    opened: list[Record] = []
    closed: list[Record] = []
    events: list[Event] = []
    troubles: list[Troubles] = []
    marks, ended_at = _Marks(), None
    for record in stream(path, faults):
        time, kind = record["time"], record["kind"]
        marks.add(time)
        ended_at = time if kind == "end" else None
        if kind == "sample":
            when.append(time)
            size.append(whole(record.get("worldSize")) or 0)
            throughput.append(within(record.get("throughput"), 0, MOST_THROUGHPUT))
            before = mapping(record.get("usedBefore"))
            trainers.add(len(when) - 1, mapping(record.get("trainerCpu")), before)
            gpus.add(len(when) - 1, mapping(record.get("gpu")), before)
            evaluators.add(len(when) - 1, mapping(record.get("evaluatorCpu")), before)
            busy.add(len(when) - 1, mapping(record.get("busySeconds")), {})
            memory.add(len(when) - 1, mapping(record.get("gpuMemory")), {})
        elif kind == "generation":
            opened.append(record)
        elif kind == "closed":
            closed.append(record)
        elif kind == "troubles":
            with suppress(ValidationError):
                troubles.append(Troubles.read(record))
        elif kind == "event":
            events.append(Event(time, text(record.get("level")) or "info", text(record.get("text"))))
    times = _floats(when)
    return CoordinatorLog(
        world=World(times, np.array(size, np.int64), _floats(throughput)),
        trainer_cpu=trainers.uses("trainer", times),
        gpu=gpus.uses("gpu", times),
        evaluator_cpu=evaluators.uses("evaluator", times),
        busy=tuple(OfRank(name, times, values) for name, values in busy.columns(times)),
        memory=tuple(OfRank(name, times, values) for name, values in memory.columns(times)),
        opened=tuple(opened),
        closed=tuple(closed),
        events=tuple(events),
        troubles=tuple(troubles),
        ended_at=ended_at,
        marks=marks.all(),
    )


def read_evaluator_log(path: Path, name: str, faults: list[str]) -> EvaluatorLog:
    """Parse `log/evaluator-NAME.jsonl`."""
    when, spent = array("d"), array("d")
    works: list[Work] = []
    skipped: list[tuple[float, str]] = []
    bad: list[tuple[float, str, str]] = []
    marks = _Marks()
    for record in stream(path, faults):
        time, kind, checkpoint = record["time"], record["kind"], text(record.get("checkpoint"))
        marks.add(time)
        if kind == "usage":
            when.append(time)
            spent.append(within(record.get("cpuSeconds"), 0, LATEST))
        elif kind == "evaluated" and checkpoint:
            took = seconds(record.get("seconds")) or 0.0
            generation, step = whole(record.get("generation")), whole(record.get("step")) or 0
            works.append(Work(name, checkpoint, generation, step, time - took, time))
        elif kind == "skipped" and checkpoint:
            skipped.append((time, checkpoint))
        elif kind == "bad" and checkpoint:
            bad.append((time, checkpoint, text(record.get("why"))))
    times = _floats(when)
    use = Use(name, "evaluator", times, busy_cores(times, _floats(spent)))
    return EvaluatorLog(name, use, tuple(works), tuple(skipped), tuple(bad), marks.all())


def busy_cores(time: Floats, cpu_seconds: Floats) -> Floats:
    """Busy cores between samples of a process' CPU clock.

    The clock starts again at 0 when another process takes the name over; what it shows then was used since. The first
    sample, and one that follows a silence longer than `LOST_SECONDS`, have no beginning: NaN.
    """
    if len(time) == 0:
        return np.empty(0)
    length = np.diff(time, prepend=np.nan)
    used = np.diff(cpu_seconds, prepend=np.nan)
    used = np.where(used < 0, cpu_seconds, used)
    with np.errstate(divide="ignore", invalid="ignore"):
        busy = used / length
    # After a silence the new process' CPU time cannot be laid over the whole of it.
    return np.where((length > 0) & (length <= LOST_SECONDS) & (busy <= MOST_CORES), busy, np.nan)


class _Samples:
    """Values by name, each name present in some of the samples."""

    def __init__(self, most: float = MOST_CORES) -> None:
        self._most = most
        self._columns: dict[str, tuple[array[int], array[float], array[float]]] = {}

    def add(self, sample: int, values: Record, before: Record) -> None:
        """
        Args:
            before: by name, seconds from when a value was measured to the sample.
        """
        for name, value in values.items():
            if name not in self._columns:
                self._columns[name] = (array("q"), array("d"), array("d"))
            indices, column, ages = self._columns[name]
            indices.append(sample)
            column.append(within(value, 0, self._most))
            ages.append(seconds(before.get(name)) or 0.0)

    def uses(self, kind: Kind, time: Floats) -> tuple[Use, ...]:
        """One `Use` for each name, each value when it was measured. One that two samples tell is one."""
        found = []
        for name, values in self.columns(time):
            indices, _, ages = self._columns[name]
            at = time.copy()
            at[np.array(indices, np.int64)] -= _floats(ages)
            again = np.diff(at, prepend=-np.inf) < SAME_SECONDS
            found.append(Use(name, kind, at[~again], values[~again]))
        return tuple(found)

    def columns(self, time: Floats) -> Iterator[tuple[str, Floats]]:
        """Each name and its values over all samples: NaN in those that do not mention it."""
        for name in sorted(self._columns, key=natural):
            values = np.full(len(time), np.nan)
            values[np.array(self._columns[name][0], np.int64)] = _floats(self._columns[name][1])
            yield name, values


def natural(name: str) -> list[tuple[bool, int, str]]:
    """A sort key that puts rank 10 after rank 9."""
    parts = re.findall(r"[0-9]+|[^0-9]+", name)
    return [(False, int(part), "") if part[0] in "0123456789" else (True, 0, part) for part in parts]


def _save(record: Record) -> Save | None:
    name, step = text(record.get("name")), whole(record.get("step"))
    if not name or step is None:
        return None
    return Save(
        name=name,
        step=step,
        at=record["time"],
        stall_seconds=seconds(record.get("stallSeconds")),
        commit_seconds=seconds(record.get("commitSeconds")),
        size=whole(record.get("bytes")),
    )


def _rates(rows: list[tuple[float, float, float, Record]]) -> Rates:
    names = list(dict.fromkeys(name for *_, phases in rows for name in phases))
    return Rates(
        time=np.array([row[0] for row in rows], np.float64),
        throughput=np.array([row[1] for row in rows], np.float64),
        seconds=np.array([row[2] for row in rows], np.float64),
        phases={name: np.array([seconds(row[3].get(name)) or 0.0 for row in rows], np.float64) for name in names},
    )


def _told(measures: "dict[str, array[float]]") -> dict[str, Floats]:
    """Those that were logged at all."""
    found = {name: _floats(values) for name, values in measures.items()}
    return {name: values for name, values in found.items() if np.isfinite(values).any()}


def _floats(values: "array[float]") -> Floats:
    return np.array(values, np.float64)
