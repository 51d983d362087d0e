"""The data order: every sample exactly once in each epoch, whatever the number of ranks."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tandem.manifest import DataPosition
from tandem_trainer.data.order import Batches, Order, digest, mixed, share

orders = st.builds(
    Order,
    samples=st.integers(1, 300),
    global_batch_size=st.integers(1, 70),
    seed=st.integers(0, 2**31 - 1),
)


@given(orders, st.lists(st.integers(1, 7), min_size=1, max_size=40), st.integers(0, 3))
def test_a_group_that_changes_its_size_at_every_step_sees_each_sample_once(
    order: Order, sizes: list[int], epoch: int
) -> None:
    batches, seen = Batches(order), []
    for step in range(epoch * order.steps_per_epoch, (epoch + 1) * order.steps_per_epoch):
        world_size = sizes[step % len(sizes)]
        ids = batches.ids(step)
        parts = [share(ids, rank, world_size) for rank in range(world_size)]
        assert torch.equal(torch.cat(parts), ids)
        assert max(map(len, parts)) - min(map(len, parts)) <= 1
        seen += ids.tolist()
    assert sorted(seen) == list(range(order.samples))


@given(orders, st.integers(0, 2000))
def test_a_position_names_its_step_and_back(order: Order, step: int) -> None:
    assert order.step_at(order.position(step)) == step


def test_a_position_of_another_order_is_refused() -> None:
    order = Order(samples=100, global_batch_size=8, seed=0)
    with pytest.raises(ValueError, match="no position"):
        order.step_at(DataPosition(seed=0, epoch=0, cursor=3))
    with pytest.raises(ValueError, match="no position"):
        order.step_at(DataPosition(seed=1, epoch=0, cursor=8))


def test_epochs_and_seeds_have_unrelated_orders() -> None:
    first, again, other = (Order(1000, 10, seed) for seed in (0, 0, 1))
    assert torch.equal(first.permutation(3), again.permutation(3))
    for stranger in (first.permutation(4), other.permutation(3)):
        assert (first.permutation(3) == stranger).sum() < 20


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
