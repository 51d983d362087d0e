"""The lineage: whatever superseded writers do, the checkpoints that count are one history."""

from dataclasses import dataclass, field

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tandem.rundir.layout import checkpoint_name
from tandem.rundir.lineage import Chain, Continuation, GenerationRecord, Origin, chain, counts, origin_of
from tandem.wire.status import CheckpointRef


def ref(generation: int, step: int) -> CheckpointRef:
    return CheckpointRef(name=checkpoint_name(step), step=step, generation=generation)


def record(generation: int, resumed_from: CheckpointRef | None = None) -> GenerationRecord:
    return GenerationRecord(generation=generation, resumed_from=resumed_from, world_size=1, started_at=0.0)


def test_without_records_nothing_counts() -> None:
    assert chain([]) == {}
    assert not counts({}, ref(1, 10))


def test_the_first_generation_counts_without_limit() -> None:
    assert chain([record(1)]) == {1: None}
    assert counts(chain([record(1)]), ref(1, 10))


def test_of_a_superseded_generation_the_steps_count_up_to_where_its_successor_began() -> None:
    links = chain([record(7), record(9, ref(7, 500))])
    assert links == {9: None, 7: 500}
    assert counts(links, ref(7, 500))
    assert not counts(links, ref(7, 501))


def test_a_generation_that_was_passed_over_does_not_count_at_all() -> None:
    links = chain([record(7), record(8, ref(7, 400)), record(9, ref(7, 500))])
    assert not counts(links, ref(8, 450))


def test_the_origin_is_that_of_the_first_generation_of_a_history() -> None:
    first = ref(1, 10)
    origin = Origin(path="/runs/earlier/checkpoints/step-000000007")
    began = GenerationRecord(generation=1, origin=origin, world_size=1, started_at=0.0)
    resumed, anew = record(2, first), record(3)
    records = [began, resumed, anew]
    assert [origin_of(generation, records) for generation in (1, 2, 3, 4)] == [origin, origin, None, None]
    assert origin_of(2, [resumed]) is None


def test_a_generation_that_continued_another_one_counts_it_up_to_that_step_and_not_up_to_a_checkpoint() -> None:
    origin = Origin(path="/weights")
    began = GenerationRecord(generation=1, origin=origin, world_size=2, started_at=0.0)
    resumed = record(2, ref(1, 10))
    continues = Continuation(generation=2, step=17)
    survived = GenerationRecord(
        generation=4, resumed_from=ref(1, 10), continues=continues, world_size=1, started_at=0.0
    )
    records = [began, resumed, record(3, ref(1, 10)), survived]
    links = chain(records)
    assert links == {4: None, 2: 17, 1: 10}
    assert [counts(links, ref(2, step)) for step in (17, 18)] == [True, False]
    assert not counts(links, ref(3, 12))
    assert origin_of(4, records) == origin
    assert [each.start_step for each in records] == [0, 10, 10, 17]


def test_a_start_from_the_beginning_forgets_all_before() -> None:
    assert chain([record(1), record(2, ref(1, 5)), record(3)]) == {3: None}


def test_the_order_of_the_records_does_not_matter() -> None:
    records = [record(1), record(2, ref(1, 5)), record(3, ref(2, 9))]
    assert chain(records) == chain(reversed(records)) == {3: None, 2: 9, 1: 5}


def test_a_record_that_is_missing_ends_the_chain_at_its_limit() -> None:
    assert chain([record(9, ref(7, 500))]) == {9: None, 7: 500}


@pytest.mark.parametrize("parent", [3, 4])
def test_a_generation_cannot_resume_from_itself_or_a_later_one(parent: int) -> None:
    with pytest.raises(ValueError, match="generation 3 says it resumed"):
        chain([record(3, ref(parent, 1)), record(4, ref(3, 1))] if parent == 4 else [record(3, ref(3, 1))])


@dataclass
class World:
    """A job on a disk, as the argument sees it. What a checkpoint holds is the history of who did each step."""

    records: list[GenerationRecord] = field(default_factory=list)
    disk: dict[CheckpointRef, tuple[int, ...]] = field(default_factory=dict)
    memory: dict[int, tuple[int, ...]] = field(default_factory=dict)
    last: int = 0

    def links(self) -> Chain:
        return chain(self.records)

    def counting(self) -> list[CheckpointRef]:
        return [one for one in self.disk if counts(self.links(), one)]

    def open(self, skip: int, choice: int) -> None:
        """A new generation resumes from any checkpoint that counts: mostly the newest, an older one if that is bad."""
        found = self.counting()
        start = found[choice % len(found)] if found else None
        self.last += 1 + skip
        self.records.append(record(self.last, start))
        self.memory[self.last] = self.disk[start] if start else ()

    def commit(self, writer: int, steps: int) -> None:
        """Any generation there ever was does steps and commits: cut off, stalled or asleep, it does not know."""
        generation = sorted(self.memory)[writer % len(self.memory)]
        self.memory[generation] += (generation,) * steps
        self.disk[ref(generation, len(self.memory[generation]))] = self.memory[generation]

    def happens(self, kind: str, first: int, second: int) -> None:
        if kind == "open":
            self.open(first, second)
        else:
            self.commit(first, second)


OPEN = st.tuples(st.just("open"), st.integers(0, 2), st.integers(0, 50))
COMMIT = st.tuples(st.just("commit"), st.integers(0, 50), st.integers(1, 4))


@given(st.lists(OPEN | COMMIT, min_size=1, max_size=40))
def test_checkpoints_that_count_are_one_history_whatever_old_writers_do(events: list[tuple[str, int, int]]) -> None:
    world = World()
    world.open(0, 0)
    for event in events:
        world.happens(*event)
        newest = world.memory[world.last]
        for one in world.counting():
            history = world.disk[one]
            assert newest[: len(history)] == history, f"{one} is not of the newest generation's past"


@given(st.lists(OPEN | COMMIT, min_size=1, max_size=40), st.integers(0, 50), st.integers(1, 9))
def test_a_late_commit_never_becomes_the_newest(events: list[tuple[str, int, int]], writer: int, steps: int) -> None:
    world = World()
    world.open(0, 0)
    for event in events:
        world.happens(*event)
    world.open(0, 0)
    world.commit(len(world.memory) - 1, 1)
    newest = max(world.counting(), key=lambda one: one.step)
    generation = sorted(world.memory)[writer % len(world.memory)]
    if generation != world.last:
        world.commit(writer, steps)
    assert max(world.counting(), key=lambda one: one.step) == newest


def test_the_argument_fails_without_the_limit() -> None:
    """The property above can fail: with the limits of superseded generations ignored, a late commit counts."""
    world = World()
    world.open(0, 0)
    world.commit(0, 2)
    world.open(0, 0)
    world.commit(0, 3)
    late = ref(1, 5)
    assert late in world.disk
    assert late not in world.counting()
    assert counts(dict.fromkeys(world.links()), late)
