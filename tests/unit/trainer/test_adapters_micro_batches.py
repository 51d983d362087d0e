"""A rank's share of a global batch as micro-batches."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tandem_trainer.adapters.micro_batches import CollateParts, count_micro_batches, cuts


@given(st.integers(1, 200), st.integers(1, 9), st.integers(1, 40))
def test_all_ranks_together_have_each_sample_once_in_as_many_parts_none_too_large(
    samples: int, world_size: int, most: int
) -> None:
    parts = count_micro_batches(samples, world_size, most)
    seen = []
    for rank in range(world_size):
        start, end = rank * samples // world_size, (rank + 1) * samples // world_size
        made = cuts(end - start, parts)
        assert len(made) == parts
        assert max(last - first for first, last in made) <= most
        seen += [start + sample for first, last in made for sample in range(first, last)]
    assert seen == list(range(samples))


def test_as_few_parts_as_fit() -> None:
    assert [count_micro_batches(16, ranks, 8) for ranks in (1, 2, 3, 4)] == [2, 1, 1, 1]
    assert count_micro_batches(17, 2, 8) == 2


@pytest.mark.parametrize(
    ("samples", "expected"),
    [([1, 2, 3, 4, 5], [[1, 2], [3, 4, 5]]), ([7], [[7], [7]])],
    ids=["each once", "one stands in where there are too few"],
)
def test_each_part_is_collated_by_itself(samples: list[int], expected: list[list[int]]) -> None:
    assert CollateParts(list, 2)(samples) == expected
