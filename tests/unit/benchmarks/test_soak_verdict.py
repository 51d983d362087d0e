"""What the soak takes for a violation, and what it does not."""

from itertools import islice

from tandem.rundir.lineage import GenerationRecord
from tandem.wire.status import CheckpointRef
from tests.soak.__main__ import POSSIBLE, schedule
from tests.soak.verdict import Log, Step, compare, judge, second_writers


def record(generation: int, resumed: tuple[int, int] | None = None) -> GenerationRecord:
    """One that resumed from (generation, step)."""
    found = None
    if resumed is not None:
        found = CheckpointRef(name=f"step-{resumed[1]:09d}", step=resumed[1], generation=resumed[0])
    return GenerationRecord(generation=generation, resumed_from=found, world_size=1, started_at=0.0)


def log(start: int, last: int, at: float = 0.0, saved: dict[int, float] | None = None) -> Log:
    found = Log(saved=saved or {})
    found.take({"kind": "start", "step": start})
    for step in range(start + 1, last + 1):
        found.take({"kind": "step", "step": step, "time": at + step, "ids": digest(step), "loss": 1.0 / step})
    return found


def digest(step: int) -> str:
    return f"samples of {step}"


RECORDS = [record(1), record(2, (1, 50))]
OPENED = {1: 0.0, 2: 100.0}


def violations(logs: dict[int, Log], records: list[GenerationRecord] = RECORDS) -> list[str]:
    return judge(records, logs, OPENED, digest).violations


def test_steps_behind_the_checkpoint_that_was_resumed_from_do_not_count() -> None:
    found = judge(RECORDS, {1: log(0, 60, saved={50: 51.0}), 2: log(50, 80)}, OPENED, digest)
    assert found.violations == []
    assert sorted(found.counting) == list(range(1, 81))
    assert found.unlogged == 0


def test_a_generation_that_nobody_resumed_from_does_not_count() -> None:
    records = [*RECORDS, record(3, (1, 50))]
    wrong = log(50, 70)
    wrong.steps[60] = Step(0.0, "other samples", None)
    found = judge(records, {1: log(0, 60), 2: wrong, 3: log(50, 55)}, OPENED, digest)
    assert found.violations == []
    assert max(found.counting) == 55


def test_the_last_lines_of_a_killed_rank_may_be_missing_but_not_lines_in_between() -> None:
    found = judge(RECORDS, {1: log(0, 45), 2: log(50, 80)}, OPENED, digest)
    assert (found.violations, found.unlogged) == ([], 5)
    torn = log(0, 60)
    del torn.steps[20]
    assert "did not log 1 steps from 20 on" in violations({1: torn, 2: log(50, 80)})[0]


def test_many_missing_steps_are_a_violation() -> None:
    records = [record(1), record(2, (1, 500))]
    assert "did not log 120 steps from 381 on" in violations({1: log(0, 380), 2: log(500, 510)}, records)[0]


def test_other_samples_than_the_seed_gives_are_a_violation() -> None:
    wrong = log(50, 80)
    wrong.steps[51] = Step(0.0, digest(52), 1.0)
    assert violations({1: log(0, 50), 2: wrong}) == ["step 51 of generation 2 saw other samples than the seed gives it"]


def test_a_step_taken_twice_by_one_generation_is_a_violation() -> None:
    twice = log(0, 50)
    twice.take({"kind": "step", "step": 7, "time": 0.0, "ids": digest(7), "loss": 1.0})
    assert violations({1: twice, 2: log(50, 80)}) == ["generation 1 took step 7 twice"]


def test_starting_elsewhere_than_the_record_says_is_a_violation() -> None:
    found = violations({1: log(0, 60), 2: log(49, 80)})
    assert "generation 2 started from step 49, and its record says 50" in found
    assert "generation 2 took step 50 again" in found


def test_to_resume_from_an_older_checkpoint_than_the_newest_committed_one_is_a_violation() -> None:
    logs = {1: log(0, 80, saved={50: 51.0, 75: 76.0}), 2: log(50, 80)}
    assert violations(logs) == ["generation 2 resumed from step 50 although step 75 was committed"]
    assert violations({1: log(0, 80, saved={50: 51.0, 75: 100.5}), 2: log(50, 80)}) == []


def test_a_generation_that_trains_without_a_record_is_a_violation() -> None:
    assert violations({1: log(0, 60), 2: log(50, 80), 3: log(50, 60)}) == [
        "generation 3 logged steps and has no record"
    ]


def test_a_checkpoint_that_counts_must_not_come_after_its_successors_first_step() -> None:
    logs = {1: log(0, 60), 2: log(50, 80, at=100.0)}
    assert second_writers(RECORDS, logs, {1: {50: 120.0}, 2: {75: 180.0}}) == []
    (found,) = second_writers(RECORDS, logs, {1: {50: 152.0}})
    assert found == "generation 1 committed step 50 1.0 s after its successor began"


def test_a_loss_is_compared_with_the_undisturbed_one() -> None:
    counting = {1: Step(0.0, "", 2.0), 2: Step(0.0, "", 1.0), 3: Step(0.0, "", 0.5)}
    assert compare(counting, {1: 2.001, 2: 1.0}) == []
    assert compare(counting, {1: 2.01}) == ["the loss of step 1 is 2.000000; undisturbed it is 2.010000"]


def test_a_loss_that_is_not_a_number_is_a_violation() -> None:
    wrong = log(50, 80)
    wrong.steps[60] = Step(0.0, digest(60), None)
    assert violations({1: log(0, 50), 2: wrong}) == ["step 60 of generation 2 has no finite loss"]


def test_the_schedule_follows_from_the_seed_alone_and_holds_every_fault() -> None:
    first = [(fault.name, number) for fault, number in islice(schedule(7), 200)]
    assert first == [(fault.name, number) for fault, number in islice(schedule(7), 200)]
    assert first != [(fault.name, number) for fault, number in islice(schedule(8), 200)]
    assert {name for name, _ in first} == {fault.name for fault in POSSIBLE}
