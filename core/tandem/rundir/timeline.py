"""The timeline of a run, read from the records and logs of its run directory for `tandem.wire.trace`.

Any file may be missing, damaged, or of another version: what is not known stays unknown. Nothing is written.
"""

from collections import deque
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any, TypeVar

from pydantic import ValidationError

from tandem.rundir.durable import list_folder, read_json, read_json_or_none
from tandem.rundir.layout import RunDir, evaluator_of_log
from tandem.rundir.lineage import GenerationRecord
from tandem.rundir.log import LogReader
from tandem.rundir.records import (
    COORDINATOR,
    EVALUATOR,
    TRAINING,
    AnyRecord,
    Closed,
    CoordinatorRecord,
    Evaluated,
    EvaluatorRecord,
    Formed,
    Saved,
    Start,
    Step,
    TrainingEnd,
    TrainingRecord,
    Uploaded,
)
from tandem.wire.measures import Generation
from tandem.wire.trace import RunTimeline, Span

AnyValue = TypeVar("AnyValue")

MAX_RECENT_STEPS = 20
MIN_HANG_SHARE = 0.8
"""Share of the duration of a hang by which it is known among the steps: a rank that is ended continues before."""
GAP_SECONDS = 5.0
"""Silence of the coordinator that counts as its absence, in seconds: it logs every second."""


@dataclass(frozen=True)
class TrainingFacts:
    """Facts about one generation from the log of its first rank."""

    start: Start | None = None
    """Its first record."""
    first_step_at: float | None = None
    """Time of its first own step."""
    last_step: int | None = None
    """Its last step."""
    last_step_at: float | None = None
    """Time of its last step."""
    recent_steps: tuple[float, ...] = ()
    """Times of its last MAX_RECENT_STEPS steps, ascending."""
    handed_over_at: float | None = None
    """Time of the last step of the generation that it continues, of which that one's log does not know."""
    last_at: float | None = None
    """Time of its last line."""
    ended: str = ""
    """Reason of its orderly end."""


def merged(
    number: int,
    record: GenerationRecord | None,
    facts: TrainingFacts | None,
    formed: Formed | None,
    closed: Closed | None,
    following: Formed | None = None,
    resumed_step: int | None = None,
) -> Generation:
    """Merge what is known of one generation; of each value the most exact source that has it.

    Args:
        following: the formation of the next one, which may know more about the failure.
        resumed_step: step from which it resumed.
    """
    facts = facts or TrainingFacts()
    start = facts.start
    failed_at = _first(closed.failed_at if closed else None, following.failed_at if following else None)
    if failed_at is not None and closed is not None:
        # Failures after the end of the generation are consequences of it.
        failed_at = min(failed_at, closed.time)
    return Generation(
        number=number,
        opened_at=_first(
            formed.time if formed else None,
            record.started_at if record else None,
            start.time if start else facts.first_step_at,
        ),
        closed_at=closed.time if closed else None,
        world_size=_first(
            formed.world_size if formed else None,
            record.world_size if record else None,
            start.world_size if start else None,
        ),
        members=tuple((formed and formed.members) or (record.members if record else ())),
        reason=(formed and formed.reason) or "",
        detail=(formed and formed.detail) or "",
        resumed_step=resumed_step,
        first_step_at=facts.first_step_at,
        last_step=facts.last_step,
        last_step_at=_before_hang(facts, closed) or facts.last_step_at,
        last_line_at=facts.last_at,
        ended=facts.ended or (closed and (closed.detail or closed.reason)) or "",
        end_reason=(closed and closed.reason) or "",
        failed_at=failed_at,
        stopped_at=formed.stopped_at if formed else None,
        ready_at=formed.ready_at if formed else None,
        process_at=start.process_at if start else None,
        joined_at=start.joined_at if start else None,
        restore_at=start.restore_at if start else None,
        restored_at=start.time if start else None,
        is_continued=record is not None and record.is_regrouped,
    )


def _before_hang(facts: TrainingFacts, closed: Closed | None) -> float | None:
    """Time of the last step before a hang; None if there was no hang, or no step after it. A rank that was stopped
    continues when it is ended, and steps that were waiting for it may still come to their end, and be logged."""
    if closed is None or closed.reason != "Hung" or closed.failed_at is None:
        return None
    seconds = MIN_HANG_SHARE * (closed.time - closed.failed_at)
    steps = facts.recent_steps
    return next((before for before, after in reversed([*pairwise(steps)]) if after - before >= seconds > 0), None)


def _first(*values: AnyValue | None) -> AnyValue | None:
    return next((value for value in values if value is not None), None)


def with_handed_over(generations: Iterable[Generation], facts: Mapping[int, TrainingFacts]) -> tuple[Generation, ...]:
    """Add to each generation the steps that only its successor has logged, because its first rank was lost with
    them."""
    corrected: list[Generation] = []
    for generation in generations:
        own = facts.get(generation.number)
        before = corrected[-1] if corrected else None
        handed_over_at = own.handed_over_at if own else None
        if before is not None and handed_over_at is not None and before.last_step_at is not None:
            corrected[-1] = replace(before, last_step_at=max(before.last_step_at, handed_over_at))
        corrected.append(generation)
    return tuple(corrected)


def save_span(saved: Saved) -> Span:
    """The span of a checkpoint's save, from the moment at which training waits until it is durable."""
    stall = saved.stall_seconds or 0.0
    values: dict[str, str | int | float | None] = {"checkpoint": saved.name, "step": saved.step}
    values |= {"stall_seconds": stall, "bytes": saved.bytes}
    return Span(
        "save",
        saved.time - stall - (saved.commit_seconds or 0.0),
        saved.time,
        f"step {saved.step:,}",
        attributes={name: value for name, value in values.items() if value is not None},
    )


def evaluation_span(evaluator: str, checkpoint: str, step: int, begin: float, end: float) -> Span:
    """The span in which an evaluator evaluated a shard of a checkpoint."""
    values: dict[str, str | int | float] = {"checkpoint": checkpoint, "step": step, "evaluator": evaluator}
    return Span("evaluation", begin, end, f"step {step:,}, {evaluator}", values)


def upload_span(uploaded: Uploaded) -> Span:
    """The span in which a checkpoint was brought into the bucket."""
    values: dict[str, str | int | float] = {"checkpoint": uploaded.checkpoint}
    values |= {} if uploaded.bytes is None else {"bytes": uploaded.bytes}
    return Span("upload", uploaded.time - (uploaded.seconds or 0.0), uploaded.time, uploaded.checkpoint, values)


class TrainingFold:
    """Collects the facts about one generation from the records of its log, in any order."""

    def __init__(self) -> None:
        self._start: Start | None = None
        self._first: float | None = None
        self._last: float | None = None
        self._recent: deque[float] = deque(maxlen=MAX_RECENT_STEPS)
        self._handed_over: float | None = None
        self._last_step: int | None = None
        self.last_at: float | None = None
        """Time of the last record."""
        self._ended = ""

    def add(self, record: TrainingRecord) -> None:
        """Take the next record."""
        self.last_at = record.time
        match record:
            case Start():
                self._start = self._start or record
            case Step():
                self._last_step = max(record.step, self._last_step or 0)
                if self._start is not None and record.time < self._start.time:
                    self._handed_over = max(record.time, self._handed_over or 0.0)
                else:
                    self._first = min(record.time, self._first or record.time)
                    self._last = max(record.time, self._last or 0.0)
                    self._recent.append(record.time)
            case TrainingEnd():
                self._ended = record.why or ""

    @property
    def facts(self) -> TrainingFacts:
        """The facts so far."""
        return TrainingFacts(
            start=self._start,
            first_step_at=self._first,
            last_step=self._last_step,
            last_step_at=self._last,
            recent_steps=tuple(sorted(self._recent)),
            handed_over_at=self._handed_over,
            last_at=self.last_at,
            ended=self._ended,
        )


class TimelineReader:
    """Reads the timeline of a run, again and again: each log from where the last call ended."""

    def __init__(self, rundir: RunDir) -> None:
        self._rundir = rundir
        self._training: dict[int, LogReader[TrainingRecord]] = {}
        self._folds: dict[int, TrainingFold] = {}
        self._evaluators: dict[str, LogReader[EvaluatorRecord]] = {}
        self._coordinator = LogReader(rundir.coordinator_log, COORDINATOR)
        self._formed: dict[int, Formed] = {}
        self._closed: dict[int, Closed] = {}
        self._gaps: list[tuple[float, float]] = []
        self._began_at: float | None = None
        self._coordinator_at: float | None = None
        self._evaluated_at: float | None = None
        self._work: list[Span] = []
        self._unreadable: dict[str, str] = {}

    def read(self) -> RunTimeline:
        """The timeline as the run directory has it now."""
        self._unreadable.clear()
        self._read(self._rundir.coordinator_log, self._coordinator, self._add_of_coordinator)
        for number, path in self._rundir.training_logs().items():
            log = self._training.setdefault(number, LogReader(path, TRAINING))
            fold = self._folds.setdefault(number, TrainingFold())
            self._read(path, log, partial(self._add_of_training, fold))
        for path in list_folder(self._rundir.log):
            if (name := evaluator_of_log(path)) is not None:
                reader = self._evaluators.setdefault(name, LogReader(path, EVALUATOR))
                self._read(path, reader, partial(self._add_of_evaluator, name))
        facts = {number: fold.facts for number, fold in self._folds.items()}
        records = self._records()
        formed, closed = self._formed, self._closed
        generations = [
            merged(
                number,
                *(records.get(number), facts.get(number), formed.get(number), closed.get(number)),
                formed.get(number + 1),
            )
            for number in sorted({*records, *facts, *formed})
        ]
        failed = self._rundir.failed()
        ending = failed or self._rundir.done()
        ended_at = ending.get("at") if ending else None
        signs = [self._coordinator_at, *(fold.last_at for fold in self._folds.values())]
        newest = max((time for time in signs if time is not None), default=None)
        return RunTimeline(
            name=self._name(),
            generations=with_handed_over(generations, facts),
            began_at=self._began_at,
            ended_at=float(ended_at) if isinstance(ended_at, int | float) else newest,
            has_failed=failed is not None,
            is_over=ending is not None,
            gaps=tuple(self._gaps),
            work=tuple(self._work),
        )

    @property
    def faults(self) -> list[str]:
        """Problems of the last call, and damaged lines of all calls, a sentence for each log."""
        logs: list[tuple[str, LogReader[Any]]] = [(self._rundir.coordinator_log.name, self._coordinator)]
        logs += [(self._rundir.training_log(number).name, log) for number, log in sorted(self._training.items())]
        logs += [(self._rundir.evaluator_log(name).name, log) for name, log in sorted(self._evaluators.items())]
        return [*self._unreadable.values(), *(damaged_lines(name, log.damaged) for name, log in logs if log.damaged)]

    def _read(self, path: Path, log: LogReader[AnyRecord], add: Callable[[AnyRecord], None]) -> None:
        try:
            for record in log:
                add(record)
        except OSError as error:
            self._unreadable[path.name] = f"log/{path.name} could not be read to its end: {error.strerror}"

    def _add_of_coordinator(self, record: CoordinatorRecord) -> None:
        before, self._coordinator_at = self._coordinator_at, record.time
        self._began_at = record.time if self._began_at is None else self._began_at
        if before is not None and record.time - before > GAP_SECONDS:
            self._gaps.append((before, record.time))
        if isinstance(record, Formed):
            self._formed.setdefault(record.generation, record)
        elif isinstance(record, Closed):
            self._closed.setdefault(record.generation, record)
        elif isinstance(record, Uploaded):
            self._work.append(upload_span(record))

    def _add_of_training(self, fold: TrainingFold, record: TrainingRecord) -> None:
        fold.add(record)
        if isinstance(record, Saved):
            self._work.append(save_span(record))

    def _add_of_evaluator(self, name: str, record: EvaluatorRecord) -> None:
        if isinstance(record, Evaluated):
            begin = record.time - (record.seconds or 0.0)
            self._work.append(evaluation_span(name, record.checkpoint, record.step or 0, begin, record.time))

    def _records(self) -> dict[int, GenerationRecord]:
        by_number = {}
        for path in list_folder(self._rundir.generations):
            if path.name.endswith(".json") and not path.name.startswith("."):
                with suppress(ValidationError, OSError):
                    record = GenerationRecord.read(read_json_or_none(path))
                    by_number[record.generation] = record
        return by_number

    def _name(self) -> str:
        with suppress(OSError, ValueError, KeyError, TypeError):
            return str(read_json(self._rundir.job_file)["metadata"]["name"])
        return self._rundir.path.absolute().name


def damaged_lines(name: str, count: int) -> str:
    """Describe the lines of a log that are no records, as a sentence."""
    return f"log/{name} has {count:,} {'line that is' if count == 1 else 'lines that are'} not a record; passed over"
