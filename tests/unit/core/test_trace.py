"""Traces: the spans of a change lie end to end and add up to it, whatever is known, and whatever the clocks say."""

from dataclasses import fields, replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tandem.wire.measures import Generation, outages
from tandem.wire.trace import UNACCOUNTED, RunTimeline, Span, Trace, identified, last_failure, root_id, tile, traces

FIRST = Generation(
    1, 100.0, 200.2, 2, reason="Started", detail="the job starts", ready_at=99.9, process_at=101.0, joined_at=102.0,
    restore_at=103.0, restored_at=104.0, first_step_at=105.0, last_step=300, last_step_at=200.0, failed_at=200.1,
    end_reason="WorkerFailed",
)  # fmt: skip
SECOND = Generation(
    2, 203.0, None, 2, reason="WorkerFailed", detail="rank 1 (worker-1) was killed", stopped_at=201.0, ready_at=202.0,
    process_at=203.5, joined_at=204.0, restore_at=205.0, restored_at=206.0, first_step_at=206.5, last_step_at=300.0,
)  # fmt: skip
TIMES = [
    field.name
    for field in fields(Generation)
    if field.name.endswith("_at") and field.name not in ("opened_at", "last_line_at")
]


def names(trace: Trace) -> list[str]:
    return [span.name for span in trace.spans]


def check(trace: Trace) -> None:
    """Its spans lie end to end, none is negative or empty, and together they are the change."""
    assert trace.seconds >= 0
    assert all(span.seconds > 0 for span in trace.spans)
    ends = [trace.begin, *(span.end for span in trace.spans)]
    assert [span.begin for span in trace.spans] == ends[:-1]
    assert ends[-1] == trace.end
    assert sum(span.seconds for span in trace.spans) == pytest.approx(trace.seconds)


def test_a_failure_is_divided_by_all_that_is_known() -> None:
    start, failure = traces(RunTimeline("digits", (FIRST, SECOND), began_at=98.0, ended_at=300.0))
    assert (failure.kind, failure.generation, failure.reason) == ("failure", 2, "WorkerFailed")
    assert {span.name: round(span.seconds, 3) for span in failure.spans} == {
        "unlogged steps": 0.1, "detection": 0.1, "stop of ranks": 0.8, "wait for workers": 1.0, "decision": 1.0,
        "start of processes": 0.5, "rendezvous": 0.5, "model and data": 1.0, "restore": 1.0, "first step": 0.5,
    }  # fmt: skip
    assert names(start)[:3] == ["wait for workers", "decision", "start of processes"]
    assert (start.begin, start.end) == (98.0, 105.0)
    for trace in (start, failure):
        check(trace)


def test_the_records_of_the_version_before_give_fewer_spans_with_joined_names() -> None:
    new = ("failed_at", "stopped_at", "ready_at", "process_at", "joined_at", "restore_at")
    old = [replace(generation, **dict.fromkeys(new)) for generation in (FIRST, SECOND)]
    failure = traces(RunTimeline("digits", tuple(old)))[-1]
    check(failure)
    assert names(failure) == [
        "unlogged steps, detection",
        "stop of ranks, wait for workers, decision",
        "start of processes, rendezvous, model and data, restore",
        "first step",
    ]


def test_ranks_that_keep_their_state_start_no_process_and_regroup() -> None:
    kept = replace(SECOND, process_at=50.0, is_continued=True)
    failure = traces(RunTimeline("digits", (FIRST, kept)))[-1]
    check(failure)
    assert "start of processes" not in names(failure)
    assert "regroup" in names(failure)
    assert not failure.notes, "a process that is older than the group is no wrong clock"


def test_a_generation_without_a_step_is_a_start_that_failed_within_the_outage() -> None:
    crashed = Generation(
        2, 203.0, 207.0, reason="WorkerFailed", detail="a", stopped_at=201.0, ready_at=201.0, failed_at=206.0
    )
    third = Generation(3, 209.0, reason="Hung", detail="b", stopped_at=208.0, first_step_at=212.0, restored_at=211.0)
    failure = traces(RunTimeline("digits", (FIRST, crashed, third)))[-1]
    check(failure)
    assert (failure.generation, failure.first_generation, failure.reason) == (3, 2, "WorkerFailed")
    assert names(failure).count("detection") == 2
    assert "start that failed" in names(failure)


def test_a_change_that_goes_on_ends_at_the_newest_sign_of_life_and_says_what_is_not_accounted() -> None:
    waiting = Generation(2, 203.0, reason="MemberLost", stopped_at=201.0, ready_at=202.0)
    failure = traces(RunTimeline("digits", (FIRST, waiting), ended_at=230.0))[-1]
    check(failure)
    assert (failure.end, failure.is_complete, names(failure)[-1]) == (230.0, False, UNACCOUNTED)


def test_the_failure_that_ends_the_job_has_a_trace_of_its_own() -> None:
    last = replace(SECOND, closed_at=300.6, failed_at=300.2, end_reason="WorkerFailed", ended="killed again")
    found = traces(RunTimeline("digits", (FIRST, last), ended_at=301.0, has_failed=True, is_over=True))
    assert [trace.kind for trace in found] == ["start", "failure", "end"]
    assert names(found[-1]) == ["unlogged steps", "detection", "end of the job"]
    assert last_failure(found) is found[-1]
    assert found[1].trace_id != found[2].trace_id, "both are of generation 2"


def test_time_in_which_nothing_ran_is_named_so() -> None:
    """A run that was stopped in the evening and resumed in the morning."""
    stopped = replace(FIRST, failed_at=None, end_reason="Stopped")
    resumed = replace(
        SECOND, reason="Started", opened_at=9000.0, stopped_at=None, ready_at=8999.0, first_step_at=9010.0
    )
    change = traces(RunTimeline("digits", (stopped, resumed), gaps=((202.0, 8990.0),)))[-1]
    check(change)
    assert change.kind == "change"
    assert {span.name: span.seconds for span in change.spans}["not running"] == 8788.0


def test_a_clock_that_differs_gives_a_note_and_no_negative_time() -> None:
    early = replace(SECOND, joined_at=202.0, restore_at=202.5, restored_at=202.6)
    failure = traces(RunTimeline("digits", (FIRST, early)))[-1]
    check(failure)
    assert failure.notes == (
        "the clock of the first rank of generation 2 was at least 1.0 s behind the coordinator's, so spans between the "
        "two are as much too short or too long",
    )


def test_of_a_plain_script_the_start_of_the_script_is_one_span() -> None:
    script = replace(SECOND, joined_at=None, restore_at=None, restored_at=206.5)
    failure = traces(RunTimeline("script", (FIRST, script)))[-1]
    check(failure)
    assert names(failure)[-1] == "start of the script"


def test_without_logged_steps_an_outage_is_the_time_between_two_groups() -> None:
    first = Generation(1, 100.0, 200.0, reason="Started")
    second = Generation(2, 203.0, reason="MemberLost", stopped_at=201.0, ready_at=202.0)
    start, failure = traces(RunTimeline("script", (first, second), began_at=98.0, ended_at=1000.0))
    assert (start.seconds, failure.seconds, failure.without) == (2.0, 3.0, "group")
    assert names(failure) == ["stop of ranks", "wait for workers", "decision"]


def test_work_belongs_to_the_generation_in_which_it_began_and_may_overlap_a_change() -> None:
    spans = (
        Span("save of step 100", 150.0, 151.0),
        Span("evaluation of step 100", 199.0, 205.0),
        Span("late", 250, 251),
    )
    start, failure = traces(RunTimeline("digits", (FIRST, SECOND), work=spans))
    assert [span.name for span in start.work] == ["training", "save of step 100", "evaluation of step 100"]
    assert [span.name for span in failure.work] == ["training", "late"]
    assert start.until == 205.0


def test_ids_follow_from_the_run_and_the_number_alone() -> None:
    one, same = (traces(RunTimeline("digits", (FIRST, SECOND), ended_at=end))[-1] for end in (300.0, 400.0))
    other = traces(RunTimeline("digits", (replace(FIRST, opened_at=100.5), SECOND)))[-1]
    assert one.trace_id == same.trace_id != other.trace_id
    ids = [root_id(one), *(identity for identity, _ in identified(one))]
    assert (len(one.trace_id), {len(identity) for identity in ids}) == (32, {16})
    assert len({*ids}) == len(ids) == len(one.spans) + len(one.work) + 1


@given(
    st.lists(st.tuples(st.sampled_from("abc"), st.none() | st.floats(0, 100))),
    st.floats(0, 100),
    st.floats(0, 100),
)
def test_a_time_is_divided_without_gaps_whatever_the_boundaries(
    boundaries: list[tuple[str, float | None]], one: float, other: float
) -> None:
    begin, end = sorted((one, other))
    spans = tile(begin, end, boundaries)
    assert sum(span.seconds for span in spans) == pytest.approx(end - begin)
    assert [span.begin for span in spans] == [begin, *(span.end for span in spans)][: len(spans)]
    assert all(span.seconds > 0 for span in spans)


@st.composite
def timelines(draw: st.DrawFn) -> RunTimeline:
    """Generations with any of their times missing or displaced."""
    reasons = st.sampled_from(["Started", "WorkerFailed", "MemberLost", "Hung", "MemberJoined", "Preempted"])
    time = st.none() | st.floats(1, 1000)
    generations = []
    for number in range(draw(st.integers(0, 5))):
        times = {name: draw(time) for name in TIMES}
        if times["first_step_at"] is None or times["last_step_at"] is None:
            times |= {"first_step_at": None, "last_step_at": None}
        generations.append(Generation(number + 1, draw(st.floats(1, 1000)), reason=draw(reasons), **times))
    intervals = st.lists(st.tuples(st.floats(1, 900), st.floats(5, 99)), max_size=3)
    gaps = tuple(sorted((begin, begin + seconds) for begin, seconds in draw(intervals)))
    work = tuple(Span("save", begin, begin + seconds) for begin, seconds in draw(intervals))
    has_failed = draw(st.booleans())
    return RunTimeline(
        "any", tuple(generations), draw(time), draw(time), has_failed, has_failed or draw(st.booleans()), gaps, work
    )


@given(timelines())
def test_whatever_is_known_the_spans_are_the_outage(timeline: RunTimeline) -> None:
    found = traces(timeline)
    for trace in found:
        check(trace)
    changes = {trace.generation: trace for trace in found if trace.kind in ("failure", "change")}
    for outage in outages(timeline.generations):
        trace = changes[outage.generation]
        assert trace.begin == outage.begin
        assert trace.end >= outage.end
        assert trace.end == outage.end or outage.generation == timeline.generations[-1].number
    assert len({trace.trace_id for trace in found}) == len(found)
