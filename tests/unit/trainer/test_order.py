"""The data order: every sample exactly once in each epoch, whatever the number of ranks."""

import dataclasses
import itertools
import operator
from collections import Counter

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tandem_trainer.data import order as order_module
from tandem_trainer.data.keyed import Permutation, mixed
from tandem_trainer.data.order import Batches, Order, Passes, digest, share

orders = st.builds(
    Order,
    samples=st.integers(1, 300),
    global_batch_size=st.integers(1, 70),
    seed=st.integers(0, 2**31 - 1),
    first=st.integers(0, 1000),
)


def epoch(order: Order, number: int) -> list[int]:
    """The ids of one epoch, in order."""
    batches, steps = Batches(order), order.steps_per_epoch
    return [id_ for step in range(number * steps, (number + 1) * steps) for id_ in batches.ids(step).tolist()]


@given(orders, st.lists(st.integers(1, 7), min_size=1, max_size=40), st.integers(0, 3))
def test_a_group_that_changes_its_size_at_every_step_sees_each_sample_once(
    order: Order, sizes: list[int], number: int
) -> None:
    batches, seen = Batches(order), []
    for step in range(number * order.steps_per_epoch, (number + 1) * order.steps_per_epoch):
        world_size = sizes[step % len(sizes)]
        ids = batches.ids(step)
        parts = [share(ids, rank, world_size) for rank in range(world_size)]
        assert torch.equal(torch.cat(parts), ids)
        assert max(map(len, parts)) - min(map(len, parts)) <= 1
        seen += ids.tolist()
    assert sorted(seen) == list(range(order.first, order.first + order.samples))


@given(orders, st.integers(0, 3))
def test_without_its_last_partial_batch_an_epoch_has_whole_batches_alone(order: Order, number: int) -> None:
    whole = dataclasses.replace(order, drop_last=True)
    steps = order.samples // order.global_batch_size
    assert whole.steps_per_epoch == steps
    assert Passes(whole, epochs=3).data_steps == 3 * steps
    if steps:
        assert epoch(whole, number) == epoch(order, number)[: steps * order.global_batch_size]
        assert whole.position(number * steps).epoch == number


def test_every_sample_has_its_turn_though_the_last_partial_batch_is_left_out() -> None:
    order = Order(samples=10, global_batch_size=4, seed=0, drop_last=True)
    assert {id_ for number in range(20) for id_ in epoch(order, number)} == set(range(10))


@pytest.mark.parametrize("listed", [2**22, 10], ids=["listed", "computed"])
def test_epochs_and_seeds_have_unrelated_orders(listed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(order_module, "MAX_PERMUTED", listed)
    first, again, other = (Order(1000, 10, seed) for seed in (0, 0, 1))
    assert epoch(first, 3) == epoch(again, 3)
    for stranger in (epoch(first, 4), epoch(other, 3), list(range(1000))):
        assert sum(map(operator.eq, epoch(first, 3), stranger)) < 20


@settings(deadline=None)
@given(order=orders, number=st.integers(0, 3))
def test_an_epoch_that_is_computed_has_each_sample_once_too(order: Order, number: int) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(order_module, "MAX_PERMUTED", 0)
        assert sorted(epoch(order, number)) == list(range(order.first, order.first + order.samples))


@given(st.integers(1, 5000), st.integers(0, 2**62))
def test_a_permutation_has_each_number_once(size: int, seed: int) -> None:
    assert sorted(Permutation(size, seed).values(0, size).tolist()) == list(range(size))


@given(st.integers(1, 2**62), st.integers(0, 2**62), st.data())
def test_a_part_of_a_permutation_of_any_size_costs_the_same(size: int, seed: int, data: st.DataObject) -> None:
    start = data.draw(st.integers(0, max(0, size - 64)))
    found = Permutation(size, seed).values(start, min(start + 64, size)).tolist()
    assert len(set(found)) == min(64, size)
    assert all(0 <= number < size for number in found)


def test_every_sample_is_equally_likely_at_every_place() -> None:
    """A chi-square test with 999 degrees of freedom: above 1143 once in a thousand."""
    seeds = 5_000
    for place in (0, 999):
        counts = Counter(int(Permutation(1000, seed).values(place, place + 1)) for seed in range(seeds))
        expected = seeds / 1000
        assert sum((counts[number] - expected) ** 2 / expected for number in range(1000)) < 1143


def test_what_stands_at_one_place_says_nothing_about_the_next() -> None:
    """Of 2,450 pairs; above 2,670 once in a thousand."""
    seeds = 12_250
    counts = Counter(tuple(Permutation(50, seed).values(0, 2).tolist()) for seed in range(seeds))
    expected = seeds / 2450
    assert sum((counts[pair] - expected) ** 2 / expected for pair in itertools.permutations(range(50), 2)) < 2670


def test_neighbours_in_a_large_order_are_strangers() -> None:
    ids = Permutation(10**12, 7).values(0, 20_000).double() / 10**12
    assert ids.mean().item() == pytest.approx(0.5, abs=0.01)
    assert ids.std().item() == pytest.approx(12**-0.5, rel=0.02)
    assert abs(torch.corrcoef(torch.stack([ids[1:], ids[:-1]]))[0, 1].item()) < 0.03


def test_a_step_can_be_asked_for_out_of_order() -> None:
    order = Order(50, 7, seed=3)
    forwards, jumping = Batches(order), Batches(order)
    expected = {step: forwards.ids(step).clone() for step in range(30)}
    for step in (29, 0, 8, 7, 15, 8):
        assert torch.equal(jumping.ids(step), expected[step])


def test_the_digest_tells_order_and_content_apart() -> None:
    ids = torch.tensor([1, 2, 3])
    assert digest(ids) == digest(ids.clone())
    assert len({digest(ids), digest(ids.flip(0)), digest(torch.tensor([1, 2, 4]))}) == 3
    assert len(digest(ids)) == 16


def test_mixed_seeds_fit_torch_and_differ() -> None:
    seeds = {mixed(a, b) for a in range(20) for b in range(20)}
    assert len(seeds) == 400
    torch.manual_seed(max(seeds))
