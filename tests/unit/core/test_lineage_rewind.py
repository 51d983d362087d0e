"""Rewinds: what is left out is left out once and for all, and nothing else is."""

from hypothesis import given
from hypothesis import strategies as st

from tandem.rundir.lineage import MAX_REWINDS, Rewind, data_step, decide, steps_left_out, windows


def rewind(number: int, start: int, end: int) -> Rewind:
    return Rewind(number=number, generation=1, bad_step=1, loss=None, resume_before=1, skip_from=start, skip_to=end)


spans = st.lists(st.tuples(st.integers(0, 60), st.integers(1, 20)), max_size=4)


@given(spans, st.integers(1, 150))
def test_steps_take_all_data_but_the_windows_each_once_and_in_order(spans: list[tuple[int, int]], total: int) -> None:
    skipped = windows(rewind(n, start, start + length) for n, (start, length) in enumerate(spans))
    steps = total - steps_left_out(total, skipped)
    taken = [data_step(step, skipped) for step in range(steps)]
    left_out = {step for start, length in spans for step in range(start, start + length)}
    assert taken == [step for step in range(total) if step not in left_out]


def test_a_rewind_skips_a_margin_around_the_bad_step_and_resumes_before_it() -> None:
    found = decide([], 7, bad_step=101, loss=None, total_data_steps=1000)
    assert (found.skip_from, found.skip_to, found.resume_before) == (92, 109, 93)
    assert data_step(91, windows([found])) == 91
    assert data_step(92, windows([found])) == 109


def test_the_second_rewind_counts_what_the_first_has_skipped() -> None:
    first = decide([], 1, 101, None, 1000)
    assert first is not None
    second = decide([first], 2, 200, 5.0, 1000)
    assert second.skip_from == 183 + 17
    assert second.skip_to == 215 + 17 + 1
    assert windows([first, second]) == [(92, 109), (200, 233)]


def test_it_is_given_up_after_a_few() -> None:
    earlier = [rewind(number, 0, 1) for number in range(MAX_REWINDS)]
    assert decide(earlier[:-1], 1, 10, None, 1000) is not None
    assert decide(earlier, 1, 10, None, 1000) is None


def test_it_is_given_up_when_too_little_data_would_be_left() -> None:
    assert decide([], 1, 9, None, 34) is not None
    assert decide([], 1, 9, None, 33) is None
    first = decide([], 1, 20, None, 60)
    assert first is not None
    assert decide([first], 2, 20, None, 60) is None


def test_a_failure_at_the_very_start_rewinds_to_the_beginning() -> None:
    found = decide([], 1, 1, None, 1000)
    assert (found.skip_from, found.resume_before) == (0, 1)
