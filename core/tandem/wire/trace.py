"""The traces of a run: of each generation the time around its start, divided into spans. Pure.

A *change* is the time without a step around a change of the group (`tandem.wire.measures.outages`), the start of the
job, or its failure. Its spans lie end to end from the last step before it to the first step after it, because each
begins where the one before ends: so they add up to the outage, whatever is known of the times between. A time that is
not known joins its span with the next one; what nothing accounts for is a span of its own, `UNACCOUNTED`.

Times come from the clocks of the coordinator and of the first ranks. A time that lies before the end of the span before
it, as clocks of two machines may have it, gives a span without a duration, which is left out, and a note. Saves,
evaluations and what is known of pods may overlap the change. docs/decisions/0058-traces.md says more.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from hashlib import sha256
from typing import Literal

from tandem.wire.measures import PLANNED, Generation, Outage, outages

UNACCOUNTED = "not accounted"
"""Name of a span about which nothing is known."""
MAX_SKEW_SECONDS = 0.1
"""Difference of two clocks that is not worth a note, in seconds."""
MAX_WORK = 10_000
"""Maximum number of saves, evaluations and others in one trace; further ones are counted in a note."""

Kind = Literal["start", "failure", "change", "end"]
"""`start`: the job starts. `failure`: a failure or a loss. `change`: a planned change. `end`: the failure with which
the job ended."""
Value = str | int | float


@dataclass(frozen=True)
class Span:
    """A time in which one thing happened. Times are seconds since the epoch."""

    name: str
    """Name of the activity; several names, joined by commas, where the time between them is not known."""
    begin: float
    end: float
    detail: str = ""
    """More about it, in a few words."""
    attributes: Mapping[str, Value] = field(default_factory=dict)
    """Values for programs, by name."""

    @property
    def seconds(self) -> float:
        """Duration."""
        return self.end - self.begin


@dataclass(frozen=True)
class Trace:
    """The trace of one generation: how it came about, and the work in it."""

    generation: int
    """Number of the generation that made the first step after the change; for an end, that failed."""
    kind: Kind
    """Kind of the change."""
    reason: str
    """Reason for the change, one CamelCase word."""
    detail: str
    """Reason in a sentence."""
    begin: float
    """Begin of the change, in seconds since the epoch: the last step, or for a start the begin of the run."""
    end: float
    """End of the change: the first step after it, or the newest sign of life where there is none yet."""
    without: str
    """The missing activity: a step, or the whole group."""
    is_complete: bool
    """Whether the change is over."""
    first_generation: int
    """Number of the first generation of the change: of several, if those before made no step."""
    spans: tuple[Span, ...]
    """The spans of the change, end to end."""
    work: tuple[Span, ...] = ()
    """Training, saves, evaluations and others, which may overlap each other and the change."""
    is_closed: bool = False
    """Whether the generation is over."""
    notes: tuple[str, ...] = ()
    """Limits of this trace, in sentences."""
    trace_id: str = ""
    """Its id, 32 hexadecimal digits: the same for everybody who reads the run."""

    @property
    def seconds(self) -> float:
        """Duration of the change."""
        return self.end - self.begin

    @property
    def until(self) -> float:
        """End of the generation, as far as it is known."""
        return max([self.end, *(span.end for span in self.work)])

    @property
    def overlapping(self) -> tuple[Span, ...]:
        """Work that overlaps the change."""
        return tuple(span for span in self.work if span.begin < self.end and span.end > self.begin)


@dataclass(frozen=True)
class RunTimeline:
    """All that a trace is made of, as far as it is known. Times are seconds since the epoch."""

    name: str
    """Name of the job."""
    generations: tuple[Generation, ...]
    """Generations, oldest first."""
    began_at: float | None = None
    """Time of the first sign of the run."""
    ended_at: float | None = None
    """Time of its newest sign, or of its end."""
    has_failed: bool = False
    """Whether the job has failed for good."""
    is_over: bool = False
    """Whether it has ended, in whatever way."""
    gaps: tuple[tuple[float, float], ...] = ()
    """Times in which no coordinator logged anything: begin and end."""
    work: tuple[Span, ...] = ()
    """Saves, evaluations and others."""


Boundary = tuple[str, float | None]
"""Name of a span, and the time at which it ends; None if that is not known."""


def traces(timeline: RunTimeline) -> list[Trace]:
    """The traces of a run, oldest first: its start, one for each change of the group, and its failure, if it failed.

    A generation without a step is part of the change around it.
    """
    by_number = {generation.number: generation for generation in timeline.generations}
    numbers = sorted(by_number)
    traced = [trace for trace in [_start(timeline)] if trace is not None]
    for outage in outages(timeline.generations):
        between = [by_number[number] for number in numbers if outage.previous < number <= outage.generation]
        traced.append(_change(timeline, outage, by_number[outage.previous], between))
    if (end := _end(timeline)) is not None:
        traced.append(end)
    traced = [replace(trace, trace_id=trace_id(timeline, trace.generation, trace.kind == "end")) for trace in traced]
    return _with_work(timeline, traced)


def last_failure(traced: Sequence[Trace]) -> Trace | None:
    """The newest trace of a failure; None if there is none."""
    return next((trace for trace in reversed(traced) if trace.kind in ("failure", "end")), None)


def trace_id(timeline: RunTimeline, generation: int, is_end: bool = False) -> str:
    """The id of a generation's trace, from the job's name, the formation of its first generation, and the number.

    Args:
        is_end: the trace is that of the job's failure; the generation has another one.
    """
    first = timeline.generations[0].opened_at if timeline.generations else None
    run = f"{timeline.name}/{0.0 if first is None else first:.3f}"
    return sha256(f"{run}/{generation}{'/end' if is_end else ''}".encode()).hexdigest()[:32]


def root_id(trace: Trace) -> str:
    """The id of the span of the whole change, which is the parent of all others; 16 hexadecimal digits."""
    return _span_id(trace, "change")


def identified(trace: Trace) -> Iterator[tuple[str, Span]]:
    """Generate the spans of the change, and the work, each with its id."""
    for index, span in enumerate(trace.spans):
        yield _span_id(trace, f"change/{index}"), span
    for span in trace.work:
        # Its place in the list is not that of later readings, since work is known when it is over.
        yield _span_id(trace, f"{span.name}/{span.detail}/{span.begin:.3f}"), span


def _span_id(trace: Trace, path: str) -> str:
    return sha256(f"{trace.trace_id}/{path}".encode()).hexdigest()[:16]


def tile(begin: float, end: float, boundaries: Iterable[Boundary]) -> tuple[Span, ...]:
    """Divide a time into spans that lie end to end.

    Args:
        boundaries: names and ends of spans, in their order. A span whose end is not known is joined with the next; one
            that would end before it begins is left out.
    """
    spans: list[Span] = []
    names: list[str] = []
    reached = begin
    for name, boundary in boundaries:
        names.append(name)
        if boundary is None:
            continue
        until = min(max(boundary, reached), end)
        if until > reached:
            spans.append(Span(", ".join(dict.fromkeys(names)), reached, until))
        reached, names = until, []
    if end > reached:
        spans.append(Span(UNACCOUNTED, reached, end))
    return tuple(spans)


def _start(timeline: RunTimeline) -> Trace | None:
    """The start of the job: until the first step of any generation, or, where none logs steps, until the first
    group."""
    generations = timeline.generations
    if not generations:
        return None
    stepping = next((generation for generation in generations if generation.first_step_at is not None), None)
    last, first = stepping or generations[0], generations[0]
    between = [generation for generation in generations if generation.number <= last.number]
    end = last.opened_at if stepping is None else last.first_step_at
    begin = min((time for time in (timeline.began_at, first.opened_at, end) if time is not None), default=0.0)
    end = begin if end is None else end
    return Trace(
        generation=last.number,
        kind="start",
        reason=first.reason or "Started",
        detail=first.detail or "the job starts",
        begin=begin,
        end=end,
        without="group" if stepping is None else "step",
        is_complete=True,
        first_generation=first.number,
        spans=tile(begin, end, _attempts(between, ())),
        notes=tuple(_skew(between)),
    )


def _change(timeline: RunTimeline, outage: Outage, previous: Generation, between: Sequence[Generation]) -> Trace:
    """One change of the group."""
    last, end = between[-1], outage.end
    is_open = last.first_step_at is None and outage.without == "step" and last is timeline.generations[-1]
    if is_open:
        end = max(end, last.closed_at or timeline.ended_at or end)
    gaps = [gap for gap in timeline.gaps if outage.begin <= gap[0] and gap[1] <= end]
    boundaries = [*_closing(previous, outage.reason), *_attempts(between, gaps)]
    has_failed = is_open and timeline.has_failed
    if has_failed:
        boundaries.append(("end of the job", timeline.ended_at))
    # The first of several reasons: the generations between failed as a consequence.
    return Trace(
        generation=last.number,
        kind="change" if outage.reason in PLANNED and not has_failed else "failure",
        reason=outage.reason,
        detail=between[0].detail or previous.ended,
        begin=outage.begin,
        end=end,
        without=outage.without,
        is_complete=not is_open or timeline.is_over,
        first_generation=between[0].number,
        spans=tile(outage.begin, end, boundaries),
        notes=tuple(_skew([previous, *between])),
    )


def _end(timeline: RunTimeline) -> Trace | None:
    """The failure with which the job ended. Where its last generation made no step although others did, it belongs to
    the change that led to that one."""
    if not timeline.has_failed or not timeline.generations:
        return None
    last = timeline.generations[-1]
    begin = last.last_step_at
    if begin is None:
        if any(generation.first_step_at is not None for generation in timeline.generations):
            return None
        begin = last.closed_at if last.failed_at is None else last.failed_at
    if begin is None:
        return None
    end = max(begin, last.closed_at or begin, timeline.ended_at or begin)
    reason = last.end_reason or "Failed"
    return Trace(
        generation=last.number,
        kind="end",
        reason=reason,
        detail=last.ended,
        begin=begin,
        end=end,
        without="step",
        is_complete=True,
        first_generation=last.number,
        spans=tile(begin, end, [*_closing(last, reason), ("end of the job", timeline.ended_at)]),
        notes=tuple(_skew([last])),
    )


def _closing(previous: Generation, reason: str) -> Iterator[Boundary]:
    """The end of a generation."""
    if reason in PLANNED:
        yield "save", previous.closed_at
    else:
        yield "unlogged steps", previous.failed_at
        yield "detection", previous.closed_at


def _attempts(between: Sequence[Generation], gaps: Sequence[tuple[float, float]]) -> Iterator[Boundary]:
    """The start of a generation, and before it of those that came to no step."""
    pending = list(gaps)
    for index, generation in enumerate(between):
        opened = generation.opened_at
        while pending and (opened is None or pending[0][1] <= opened):
            begin, end = pending.pop(0)
            yield "stop of ranks", begin
            yield ("not running" if generation.reason == "Started" else "coordinator away"), end
        # A version that does not record it leaves both times out; without former members there is nothing to stop.
        if generation.stopped_at is not None or (generation.ready_at is None and generation.reason != "Started"):
            yield "stop of ranks", generation.stopped_at
        yield "wait for workers", generation.ready_at
        yield "decision", opened
        if index < len(between) - 1 or (generation.first_step_at is None and generation.closed_at is not None):
            yield "start that failed", generation.failed_at
            yield "detection", generation.closed_at
        else:
            yield from _start_of(generation)


def _start_of(generation: Generation) -> Iterator[Boundary]:
    process_at = generation.process_at
    if process_at is None or generation.opened_at is None or process_at >= generation.opened_at:
        yield "start of processes", process_at
    # Ranks that kept their process, or had it ready, do not start one.
    if generation.joined_at is None and process_at is not None:
        yield "start of the script", generation.restored_at
    else:
        yield "rendezvous", generation.joined_at
        yield "model and data", generation.restore_at
        yield ("regroup" if generation.is_continued else "restore"), generation.restored_at
    yield "first step", generation.first_step_at


def _skew(generations: Sequence[Generation]) -> Iterator[str]:
    """Generate a note for each clock that differs visibly from the coordinator's: an effect comes before its cause."""
    for generation in generations:
        opened = generation.opened_at
        early = [time for time in (generation.joined_at, generation.restored_at, generation.first_step_at) if time]
        behind = 0.0 if opened is None or not early else opened - min(early)
        if behind > MAX_SKEW_SECONDS:
            yield (
                f"the clock of the first rank of generation {generation.number} was at least {behind:.1f} s behind the "
                "coordinator's, so spans between the two are as much too short or too long"
            )


def _with_work(timeline: RunTimeline, traced: Sequence[Trace]) -> list[Trace]:
    """Add what happened in each generation, and during the change that led to it, to its trace."""
    changes = [trace for trace in traced if trace.kind != "end"]
    by_number = {generation.number: generation for generation in timeline.generations}
    completed: dict[int, Trace] = {}
    for index, trace in enumerate(changes):
        until = changes[index + 1].begin if index + 1 < len(changes) else float("inf")
        # Each piece of work belongs to the generation in which it began.
        own = [span for span in timeline.work if (trace.begin if index else 0.0) <= span.begin < until]
        generation = by_number[trace.generation]
        training: list[Span] = []
        if generation.first_step_at is not None and generation.last_step_at is not None:
            detail = "" if generation.last_step is None else f"to step {generation.last_step:,}"
            begin = generation.first_step_at
            training = [Span("training", begin, max(begin, generation.last_step_at), detail)]
        notes = trace.notes
        if len(own) > MAX_WORK:
            notes = (*notes, f"{len(own) - MAX_WORK:,} more saves and evaluations are left out")
        ordered = sorted(own[:MAX_WORK], key=lambda span: (span.begin, span.end))
        is_closed = index + 1 < len(changes) or generation.closed_at is not None
        completed[index] = replace(trace, work=(*training, *ordered), is_closed=is_closed, notes=notes)
    return [*completed.values(), *(trace for trace in traced if trace.kind == "end")]
