"""The order of samples in shards: a permutation by seed, computed for any part of an epoch, that reads few shards."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tandem_trainer.data.order import Batches, Order, Passes, check_position
from tandem_trainer.data.shard_order import ShardOrder
from tandem_trainer.failure import ConfigurationError

SIZES = st.lists(st.integers(0, 9), min_size=1, max_size=30).filter(any)


def order(sizes: list[int], window: int = 3, index: str = "abc") -> ShardOrder:
    return ShardOrder(np.array(sizes, dtype=np.int64), window, index)


@settings(max_examples=60, deadline=None)
@given(SIZES, st.integers(1, 40), st.integers(0, 2**60), st.data())
def test_an_epoch_has_each_sample_once_and_any_part_of_it_is_computed_alone(
    sizes: list[int], window: int, seed: int, data: st.DataObject
) -> None:
    samples, shards = sum(sizes), order(sizes, window)
    whole = shards.ids(seed, 0, samples)
    assert sorted(whole.tolist()) == list(range(samples))
    start = data.draw(st.integers(0, samples))
    end = data.draw(st.integers(start, samples))
    assert order(sizes, window).ids(seed, start, end).tolist() == whole[start:end].tolist()


def test_other_seeds_give_other_orders_and_other_windows_do() -> None:
    sizes = [10] * 20
    orders = {tuple(order(sizes, window).ids(seed, 0, 200).tolist()) for window in (1, 3, 20) for seed in range(10)}
    assert len(orders) == 30


def test_the_samples_of_a_step_come_from_the_shards_of_two_windows_at_most() -> None:
    shards = order([10] * 100, window=4)
    for start in range(0, 1000, 32):
        ids = shards.ids(7, start, min(start + 32, 1000))
        used = set((ids // 10).tolist())
        assert used <= set(shards.shards_from(7, start))
        assert len(used) <= 8


def test_a_billion_samples_cost_no_list() -> None:
    shards = ShardOrder(np.full(100_000, 10_000, dtype=np.int64), 8, "abc")
    assert shards.ids(1, 10**9 - 64, 10**9).shape == (64,)
    at = shards.ids(1, 512_000_000, 512_000_512)
    assert len(set(at.tolist())) == 512
    assert len(set((at // 10_000).tolist())) <= 16


def test_shuffled_samples_are_spread_evenly_within_a_window() -> None:
    ids = order([1000] * 8, window=8).ids(3, 0, 8000).double()
    places = torch.arange(8000).double()
    assert abs(float(torch.corrcoef(torch.stack([ids, places]))[0, 1])) < 0.05


def test_batches_take_shards_in_their_order_and_epochs_differ() -> None:
    plan = Order(95, 10, seed=5, shards=order([10] * 9 + [5], window=2))
    batches = Batches(plan)
    epochs = [torch.cat([batches.ids(step) for step in range(first, first + 10)]) for first in (0, 10)]
    assert all(sorted(epoch.tolist()) == list(range(95)) for epoch in epochs)
    assert epochs[0].tolist() != epochs[1].tolist()


@pytest.mark.parametrize(
    ("now", "sentence"),
    [
        (order([10] * 9 + [5], 3, "def"), "digest abc, in windows of 3, now shards whose index has the digest def"),
        (order([10] * 9 + [5], 4), "in windows of 3, now shards whose index has the digest abc, in windows of 4"),
        (None, "in windows of 3, now no shards"),
    ],
)
def test_a_run_does_not_resume_with_another_index_or_window(now: ShardOrder | None, sentence: str) -> None:
    saved = Passes(Order(95, 10, seed=5, shards=order([10] * 9 + [5])), epochs=2).position(13)
    check_position(saved, Passes(Order(95, 10, seed=5, shards=order([10] * 9 + [5])), epochs=2), 13)
    with pytest.raises(ConfigurationError, match=sentence):
        check_position(saved, Passes(Order(95, 10, seed=5, shards=now), epochs=2), 13)


def test_a_run_on_files_does_not_resume_on_shards() -> None:
    saved = Passes(Order(95, 10, seed=5), epochs=2).position(13)
    with pytest.raises(ConfigurationError, match="no shards, now shards whose index"):
        check_position(saved, Passes(Order(95, 10, seed=5, shards=order([95])), epochs=2), 13)
