"""Orders of an epoch: weighted, by length, and one's own, each a function of seed and epoch alone."""

from collections import Counter
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tandem_trainer.data.feeding import RankBatch, Reading
from tandem_trainer.data.sampling import Bucketed, Listing, Weighted
from tandem_trainer.failure import ConfigurationError

LENGTHS = torch.randint(1, 200, (3000,), generator=torch.Generator().manual_seed(0))


def test_a_weighted_sample_comes_as_often_as_its_weight_says() -> None:
    """A chi-square test with 98 degrees of freedom: above 147 once in a thousand."""
    weights = [0.0, *range(1, 100)]
    counts = Counter(Weighted(weights, samples=200_000)(3, 0).tolist())
    assert 0 not in counts
    expected = [200_000 * weight / sum(weights) for weight in weights]
    assert sum((counts[id_] - expected[id_]) ** 2 / expected[id_] for id_ in range(1, 100)) < 147


def test_without_replacement_no_sample_comes_twice_and_heavy_ones_come_first() -> None:
    weights = torch.ones(1000)
    weights[:100], weights[100:200] = 50, 0
    first = Weighted(weights, replacement=False, samples=300)(3, 0).tolist()
    assert len(set(first)) == 300
    assert not any(100 <= id_ < 200 for id_ in first)
    assert sum(id_ < 100 for id_ in first) > 95
    assert sum(id_ < 100 for id_ in first[:100]) > 70


@pytest.mark.parametrize(
    "order",
    [Weighted(range(1, 900)), Weighted(range(1, 900), replacement=False), Bucketed(LENGTHS, samples=8)],
    ids=["weighted", "without-replacement", "bucketed"],
)
def test_an_order_follows_from_seed_and_epoch(order: Callable[[int, int], Any]) -> None:
    def ids(seed: int, epoch: int) -> list[int]:
        given = order(seed, epoch)
        flat: list[int] = (given if isinstance(given, torch.Tensor) else torch.cat(given)).tolist()
        return flat

    assert ids(1, 2) == ids(1, 2)
    for other in (ids(1, 3), ids(2, 2)):
        assert sum(one == two for one, two in zip(ids(1, 2), other, strict=True)) < 20


def test_batches_of_similar_length_hold_each_sample_once_and_pad_little() -> None:
    batches = Bucketed(LENGTHS, samples=16)(0, 0)
    assert sorted(torch.cat(batches).tolist()) == list(range(3000))
    assert len(batches) == len(Bucketed(LENGTHS, samples=16))
    padded = sum(len(batch) * int(LENGTHS[batch].max()) for batch in batches)
    assert padded < 1.05 * int(LENGTHS.sum())
    assert sum(int(LENGTHS[one].max()) > int(LENGTHS[other].max()) for one, other in pairwise(batches)) > 50
    early = [float(LENGTHS[batch[: len(batch) // 2]].float().mean()) for batch in batches]
    late = [float(LENGTHS[batch[len(batch) // 2 :]].float().mean()) for batch in batches]
    assert sum(one < other for one, other in zip(early, late, strict=True)) < 0.75 * len(batches), (
        "no rank gets the longest"
    )


def test_a_budget_of_tokens_is_kept_and_used() -> None:
    batches = Bucketed(LENGTHS, tokens=2000)(0, 0)
    assert sorted(torch.cat(batches).tolist()) == list(range(3000))
    padded = [len(batch) * int(LENGTHS[batch].max()) for batch in batches]
    assert max(padded) <= 2000
    assert sum(padded) / len(padded) > 1700
    with pytest.raises(TypeError, match="the number of batches differs between epochs"):
        len(Bucketed(LENGTHS, tokens=2000))


@given(count=st.integers(1, 300), samples=st.integers(1, 40), pool=st.none() | st.integers(1, 400))
def test_the_length_of_an_order_is_how_many_batches_it_gives(count: int, samples: int, pool: int | None) -> None:
    order = Bucketed(range(1, count + 1), samples=samples, pool=pool)
    assert len(order) == len(order(0, 0))


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda: Weighted([1.0, -1.0]), "none negative"),
        (lambda: Weighted([0.0, 0.0]), "not all 0"),
        (lambda: Weighted([1.0, 0.0], replacement=False), "2 samples cannot be drawn without replacement from 1"),
        (lambda: Bucketed([3, 4]), "either samples="),
        (lambda: Bucketed([3, 9], tokens=8), "sample 1 is 9 long, and a global batch may have tokens=8"),
        (lambda: Bucketed([3, 0], samples=8), "at least 1 for each sample"),
    ],
)
def test_what_cannot_be_is_refused_where_it_is_written(make: Callable[[], object], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        make()


def growing(seed: int, epoch: int) -> list[int]:
    """A curriculum: more of the data in each epoch."""
    return [(7 * place + seed) % 29 for place in range(5 + 8 * epoch)]


def pairs_and_threes(seed: int, epoch: int) -> list[list[int]]:
    """Batches of different sizes, as many as the epoch has."""
    return [[number, number + 1] if number % 2 else [number, 28, number] for number in range(3 + 4 * epoch)]


ORDERS: list[tuple[Callable[[int, int], Any], int | None]] = [
    (Weighted(range(1, 30)), 4),
    (Weighted(range(1, 30), samples=13), 4),
    (Bucketed(range(1, 30), samples=5, pool=12), None),
    (Bucketed(range(1, 30), tokens=60), None),
    (growing, 4),
    (pairs_and_threes, None),
]
orders = st.sampled_from(ORDERS)


def never(step: int) -> bool:
    return False


def reading(world_size: int, rank: int = 0) -> Reading:
    return Reading(rank, world_size, seed=5, transform=lambda value: (value, torch.rand(()).item()))


def values(fed: RankBatch) -> list[tuple[int, float]]:
    """What a rank got: which samples, and how they were augmented."""
    if not fed.weight:
        return []
    return [(int(value), float(drawn)) for value, drawn in zip(*fed.data, strict=True)]


def listing(order: tuple[Callable[[int, int], Any], int | None], max_steps: int | None = None) -> Listing:
    return Listing(order[0], 29, order[1], 3, max_steps, seed=5)


@settings(deadline=None)
@given(
    order=orders,
    stops=st.lists(st.integers(0, 12), max_size=3),
    worlds=st.lists(st.integers(1, 4), min_size=4, max_size=4),
)
def test_restarts_and_numbers_of_ranks_change_nothing(
    order: tuple[Callable[[int, int], Any], int | None], stops: list[int], worlds: list[int]
) -> None:
    whole = [(fed.ids.tolist(), values(fed)) for fed in listing(order).feed(range(29), None, 0, never, reading(1))]
    assert listing(order).data_steps in (None, len(whole))
    position, taken, seen = None, 0, []
    for stop, world in zip([*stops, None], worlds, strict=False):
        ranks = [listing(order) for _ in range(world)]
        pages = [one.feed(range(29), position, taken, never, reading(world, rank)) for rank, one in enumerate(ranks)]
        steps = 0
        while (stop is None or steps < stop) and {page.more() for page in pages} == {True}:
            fed = [next(page) for page in pages]
            seen.append((fed[0].ids.tolist(), [value for one in fed for value in values(one)]))
            steps += 1
        taken += steps
        (position,) = {one.position(taken).model_dump_json() for one in ranks}
        position = type(ranks[0].position(0)).model_validate_json(position)
    assert seen == whole


def test_a_sample_that_comes_twice_is_augmented_in_two_ways_and_drops_out_in_two() -> None:
    fed = next(
        iter(Listing(lambda seed, epoch: [3, 3, 3], 29, 3, 1, None, 5).feed(range(29), None, 0, never, reading(1)))
    )
    assert fed.ids.tolist() == [3, 3, 3]
    assert len({drawn for _, drawn in values(fed)}) == 3
    assert len(set(fed.mine.tolist())) == 3


def test_what_a_rewind_says_is_left_out_and_the_run_ends_after_its_steps() -> None:
    fed = [one.ids.tolist() for one in listing(ORDERS[0]).feed(range(29), None, 0, never, reading(1))]
    short = listing(ORDERS[0], max_steps=10)
    left = list(short.feed(range(29), None, 0, lambda step: step in (2, 7, 8), reading(1)))
    assert [one.ids.tolist() for one in left] == [ids for step, ids in enumerate(fed[:10]) if step not in (2, 7, 8)]
    assert listing(ORDERS[3], max_steps=4).data_steps == 4


@pytest.mark.parametrize(
    ("order", "batch", "said"),
    [
        (lambda seed, epoch: [0, 29], 4, "ids from 0 to 29 in epoch 0; the data set has those from 0 to 28"),
        (lambda seed, epoch: [], 4, "gives no batch for epoch 0"),
        (lambda seed, epoch: [[1], []], None, "a batch is empty"),
        (lambda seed, epoch: [0.5], 4, "neither a sequence of integers"),
        (lambda seed, epoch: (number for number in range(3)), 4, "order <lambda> in epoch 0"),
        (growing, None, "set global_batch_size, the number of samples in a step"),
        (pairs_and_threes, 4, "so it determines their size"),
    ],
)
def test_an_order_that_cannot_be_used_is_named(order: Callable[[int, int], Any], batch: int | None, said: str) -> None:
    with pytest.raises(ConfigurationError, match=said):
        Listing(order, 29, batch, 3, None, seed=5)


@pytest.mark.parametrize(("steps", "is_refused"), [(3, True), (4, False)], ids=["within an epoch", "between epochs"])
def test_a_function_that_gives_an_epoch_otherwise_is_refused_within_it(steps: int, is_refused: bool) -> None:
    def rows(seed: int, epoch: int) -> list[int]:
        return [*range(12)]

    def other_rows(seed: int, epoch: int) -> list[int]:
        return rows(seed, epoch)[::-1]

    first = Listing(rows, 12, 3, 2, None, seed=5)
    pages = first.feed(range(12), None, 0, never, reading(1))
    for _ in range(steps):
        next(pages)
    behind = first.position(0)
    assert pages.more()
    assert behind.order is not None, "a run may end here, and go on with more steps"
    assert first.position(0).order == (behind.order if is_refused else None)
    position = type(first.position(0)).model_validate_json(first.position(0).model_dump_json())
    assert Listing(rows, 12, 3, 2, None, seed=5).feed(range(12), position, steps, never, reading(1)).more()
    other = Listing(other_rows, 12, 3, 2, None, seed=5)
    if is_refused:
        with pytest.raises(ConfigurationError, match="order other_rows gives other samples for epoch 0 than it gave"):
            other.feed(range(12), position, steps, never, reading(1))
    else:
        assert other.feed(range(12), position, steps, never, reading(1)).more()


def test_a_checkpoint_of_another_order_is_refused() -> None:
    other = listing(ORDERS[2])
    position = other.position(0).model_copy(update={"epoch": 1, "cursor": 3})
    with pytest.raises(ConfigurationError, match="where no batch of this order ends"):
        other.feed(range(29), position, 6, never, reading(1))
