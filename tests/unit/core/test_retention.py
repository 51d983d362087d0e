"""What a run may need is never deleted: the newest, what a rewind goes back to, what a fall-back takes."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tandem.job.resource import CheckpointSpec, Evaluators
from tandem.rundir.lineage import MARGIN, MAX_REWINDS, SPIKE_SPAN_STEPS, Rewind, decide, reach
from tandem.rundir.retention import RetentionInputs, checkpoints_to_delete, reserves
from tandem.wire.status import CheckpointRef

LATEST = Evaluators.model_validate({"policy": "Latest"})


def references(steps: list[int]) -> list[CheckpointRef]:
    return [CheckpointRef(name=f"step-{step:09d}", step=step, generation=1) for step in sorted(steps, reverse=True)]


def retained(steps: list[int], policy: CheckpointSpec, far: int) -> list[int]:
    """The steps that are left of a run that saved after these steps, in this order."""
    kept: list[int] = []
    for step in steps:
        kept.append(step)
        gone = checkpoints_to_delete(references(kept), policy, LATEST, RetentionInputs({}, None, set(), far))
        kept = [one for one in kept if f"step-{one:09d}" not in gone]
    return kept


intervals = st.lists(st.integers(1, 60), min_size=1, max_size=60)


@settings(max_examples=300)
@given(intervals, st.integers(1, 4), st.integers(0, MAX_REWINDS - 1))
def test_a_rewind_never_loses_more_than_twice_its_reach_and_an_interval(
    saves: list[int], last: int, rewinds: int
) -> None:
    steps = [sum(saves[: number + 1]) for number in range(len(saves))]
    far = reach(rewinds)
    kept = retained(steps, CheckpointSpec(keep_last=last, keep_best=0), far)
    newest = kept[-1]
    assert newest == steps[-1]
    old_enough = [step for step in kept if step <= newest - far]
    if any(step <= newest - far for step in steps):
        assert old_enough
        assert newest - old_enough[-1] <= 2 * far + max(saves)
    assert len(kept) <= last + 2


@settings(max_examples=300)
@given(intervals, st.integers(1, 4), st.integers(0, MAX_REWINDS - 1), st.integers(1, SPIKE_SPAN_STEPS), st.data())
def test_whenever_the_loss_goes_bad_there_is_a_checkpoint_to_go_back_to(
    saves: list[int], last: int, rewinds: int, seen_after: int, data: st.DataObject
) -> None:
    """A loss that is not finite is seen at once, a spike SPAN steps after it began; each before the next save."""
    steps = [sum(saves[: number + 1]) for number in range(len(saves))]
    kept = retained(steps, CheckpointSpec(keep_last=last, keep_best=0), reach(rewinds))
    seen = kept[-1] + data.draw(st.integers(1, 60))
    bad = max(1, seen - seen_after + 1)
    earlier = [rewind(number) for number in range(rewinds)]
    found = decide(earlier, 1, bad, None, 10**6, kept)
    assert found is not None
    taken = [step for step in kept if step < found.resume_before]
    if any(step < bad for step in steps):
        assert taken
        assert max(taken) < bad
    margin = MARGIN * 2**rewinds
    if any(step <= bad - 1 - margin for step in steps):
        assert max(taken) <= bad - 1 - margin


def rewind(number: int) -> Rewind:
    return Rewind(number=number, generation=1, bad_step=1, resume_before=1, skip_from=0, skip_to=1)


@given(intervals, st.integers(1, 4))
def test_there_is_always_another_one_to_fall_back_to(saves: list[int], last: int) -> None:
    steps = [sum(saves[: number + 1]) for number in range(len(saves))]
    for far in (1, reach(0)):
        kept = retained(steps, CheckpointSpec(keep_last=last, keep_best=0), far)
        assert len(kept) >= min(2, len(steps))


def test_reserves_of_a_run_that_is_over_are_let_go() -> None:
    assert reserves([100, 90, 80], 0) == (100, None)
    assert retained([10, 20, 30, 40, 50, 60, 70], CheckpointSpec(keep_last=2, keep_best=0), 0) == [60, 70]


def test_one_useless_loss_does_not_send_a_run_back_to_the_beginning() -> None:
    """Saves after each second step, of which three are kept: all of them are younger than the margin."""
    kept = retained(list(range(2, 401, 2)), CheckpointSpec(keep_last=3, keep_best=0), reach(0))
    found = decide([], 1, 401, None, 10**6, kept)
    assert found is not None
    assert max(step for step in kept if step < found.resume_before) > 400 - 2 * reach(0) - 2


@pytest.mark.parametrize(("known", "resumed"), [([396, 398, 400], 396), ([400], 400), ([100, 400], 100), ([], None)])
def test_without_one_that_is_old_enough_any_from_before_the_bad_step_is_taken(
    known: list[int], resumed: int | None
) -> None:
    found = decide([], 1, 401, None, 10**6, known)
    assert found is not None
    taken = [step for step in known if step < found.resume_before]
    assert (max(taken) if taken else None) == resumed
    # What has been learned from before that checkpoint is not left out, and nothing is taken twice.
    assert found.skip_from == (resumed if resumed is not None and resumed > 392 else 392)
    assert found.skip_to == 401 + MARGIN
