"""A run goes on in its data where its checkpoint stands, or says why it cannot."""

import dataclasses
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from tandem.rundir.checkpoint import DataPosition
from tandem_trainer.data import order
from tandem_trainer.data.feeding import Reading, Stream
from tandem_trainer.data.mixture import Mixture
from tandem_trainer.data.order import Order, Passes, check_position
from tandem_trainer.failure import ConfigurationError

ORDER = Order(samples=1000, global_batch_size=100, seed=7)
STEP = 6


def resumed(checkpoint: DataPosition | None, **changed: Any) -> None:
    check_position(checkpoint, Passes(dataclasses.replace(ORDER, **changed), epochs=3), STEP)


def test_the_same_data_goes_on_for_any_number_of_epochs() -> None:
    resumed(ORDER.position(STEP))
    resumed(None)
    check_position(ORDER.position(STEP), Passes(ORDER, epochs=30, max_steps=12), STEP)


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"global_batch_size": 50}, "a global batch size of 100, now 50"),
        ({"samples": 600}, "1,000 training samples, now 600"),
        ({"seed": 8}, "the seed 7, now 8"),
        ({"drop_last": True}, "drop_last False, now True"),
        ({"first": 1000}, "training samples from number 0 on, now from 1,000 on"),
        (
            {"samples": 600, "global_batch_size": 50},
            "1,000 training samples, now 600; a global batch size of 100, now 50",
        ),
    ],
)
def test_other_data_is_refused_with_both_numbers_and_what_to_do(changed: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigurationError) as refused:
        resumed(ORDER.position(STEP), **changed)
    assert said in str(refused.value)
    assert "Undo the change, or start a new run from the checkpoint's weights" in str(refused.value)


def test_a_checkpoint_that_does_not_say_its_batch_size_is_refused_where_another_one_shows() -> None:
    told = ORDER.position(STEP)
    older = DataPosition(seed=told.seed, epoch=told.epoch, cursor=told.cursor)
    resumed(older)
    with pytest.raises(ConfigurationError, match=r"sample 600, where this run would have .* sample 300"):
        resumed(older, global_batch_size=50)


def shuffled_otherwise(monkeypatch: pytest.MonkeyPatch) -> None:
    """As another version of torch may do."""
    randperm = torch.randperm
    monkeypatch.setattr(torch, "randperm", lambda *given, **options: randperm(*given, **options).flip(0))
    order._epoch.cache_clear()
    order._digest_of_epoch.cache_clear()


@pytest.fixture(autouse=True)
def _not_listed() -> Iterator[None]:
    yield
    order._epoch.cache_clear()
    order._digest_of_epoch.cache_clear()


def test_an_epoch_that_is_begun_does_not_go_on_in_another_order(monkeypatch: pytest.MonkeyPatch) -> None:
    passes = Passes(ORDER, epochs=3)
    within, between = passes.position(STEP), passes.position(10)
    assert (within.cursor, between.cursor) == (600, 0)
    shuffled_otherwise(monkeypatch)
    with pytest.raises(ConfigurationError, match="another order of the samples in epoch 0, as another version of to"):
        check_position(within, Passes(ORDER, epochs=3), STEP)
    check_position(between, Passes(ORDER, epochs=3), 10)
    check_position(ORDER.position(STEP), Passes(ORDER, epochs=3), STEP)


def test_a_mixture_goes_on_between_epochs(monkeypatch: pytest.MonkeyPatch) -> None:
    mixed = dataclasses.replace(ORDER, mixture=Mixture([600, 400], [1, 1]))
    between, begin = (Passes(mixed, epochs=3).position(step) for step in (10, 0))
    check_position(between, Passes(mixed, epochs=3), 10)
    shuffled_otherwise(monkeypatch)
    with pytest.raises(ConfigurationError, match="another order of the samples in epoch 1"):
        check_position(between, Passes(mixed, epochs=3), 10)
    check_position(begin, Passes(mixed, epochs=3), 0)


def test_an_order_that_is_not_torchs_has_no_digest(monkeypatch: pytest.MonkeyPatch) -> None:
    large = Order(samples=order.MAX_PERMUTED + 1, global_batch_size=100, seed=7)
    monkeypatch.setattr(order, "_epoch", None)
    assert Passes(large, epochs=1).position(5).order is None


def test_a_stream_may_go_on_in_other_batches_but_not_with_another_seed() -> None:
    position = DataPosition(seed=5, epoch=1, cursor=30)
    check_position(position, Stream(range(90), 7, 2, None, Reading(0, 1, seed=5)), 12)
    with pytest.raises(ConfigurationError, match="the seed 5, now 6"):
        check_position(position, Stream(range(90), 7, 2, None, Reading(0, 1, seed=6)), 12)
