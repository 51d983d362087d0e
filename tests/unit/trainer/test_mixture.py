"""Mixtures: each source has its share of an epoch, none of its samples comes twice before all came, and seed, epoch and
place alone decide."""

import dataclasses
import json
import logging
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tandem_trainer.data.mixture import Mixture, apportioned
from tandem_trainer.data.order import Batches, Order, Passes, check_position, share
from tandem_trainer.failure import ConfigurationError, UnusableInput
from tandem_trainer.language.fine_tuning import FineTuning, FineTuningConfig
from tandem_trainer.train import mixture_of, order_of
from tests.support.language import pretrained

sources = st.lists(st.tuples(st.integers(20, 200), st.floats(0.5, 5)), min_size=2, max_size=5)


def mixture(given: list[tuple[int, float]]) -> Mixture:
    return Mixture([samples for samples, _ in given], [weight for _, weight in given])


@given(sources, st.integers(0, 2**31), st.integers(1, 4))
def test_an_epoch_has_the_shares_and_no_sample_comes_twice_before_all_of_its_source_came(
    given: list[tuple[int, float]], seed: int, epochs: int
) -> None:
    made, whole = mixture(given), sum(samples for samples, _ in given)
    seen: Counter[int] = Counter()
    for epoch in range(epochs):
        ids = made.ids(seed, epoch).tolist()
        seen.update(ids)
        assert len(ids) == whole
        first = 0
        for (samples, weight), taken in zip(given, made.taken, strict=True):
            assert sum(first <= one < first + samples for one in ids) == taken
            assert abs(taken - whole * weight / sum(weight for _, weight in given)) < 1
            first += samples
    first = 0
    for samples, _ in given:
        times = [seen[one] for one in range(first, first + samples)]
        assert max(times) - min(times) <= 1
        first += samples


def test_largest_remainders_get_what_is_left() -> None:
    assert apportioned(10, [1, 1, 1]) == (4, 3, 3)
    assert apportioned(100, [0.5, 0.3, 0.2]) == (50, 30, 20)
    with pytest.raises(ValueError, match="source 1 has so small a weight that none of the 20 samples"):
        Mixture([10, 10], [1, 1e-6])


@given(sources, st.integers(1, 40), st.integers(0, 200), st.lists(st.integers(1, 7), min_size=1, max_size=9))
def test_a_group_that_resumes_anywhere_on_other_ranks_takes_the_same_samples(
    given: list[tuple[int, float]], batch: int, step: int, sizes: list[int]
) -> None:
    made = mixture(given)
    order = Order(sum(made.samples), batch, seed=3, mixture=made)
    walked, jumping = Batches(order), Batches(order)
    for one in range(step, step + len(sizes)):
        ids = walked.ids(one)
        world_size = sizes[one - step]
        assert torch.equal(torch.cat([share(ids, rank, world_size) for rank in range(world_size)]), ids)
    assert torch.equal(jumping.ids(step + len(sizes) - 1), ids)


def test_sources_come_mixed_and_epochs_and_seeds_differ() -> None:
    made = Mixture([1000, 1000], [3, 1])
    ids = made.ids(0, 0)
    for part in ids.split(200):
        assert 120 <= (part < 1000).sum() <= 180
    assert not torch.equal(ids, made.ids(0, 1))
    assert not torch.equal(ids, made.ids(1, 0))
    assert torch.equal(ids, Mixture([1000, 1000], [6, 2]).ids(0, 0))


def test_a_checkpoint_of_other_shares_is_not_gone_on_with() -> None:
    one = Order(40, 4, seed=1, mixture=Mixture([20, 20], [1, 1]))
    other = dataclasses.replace(one, mixture=Mixture([20, 20], [3, 1]))
    check_position(one.position(7), Passes(one, 2), 7)
    with pytest.raises(ConfigurationError, match=r"takes 20 and 20 samples of its sources, now .* 30 and"):
        check_position(one.position(7), Passes(other, 2), 7)
    with pytest.raises(ConfigurationError, match="now no mixture of sources"):
        check_position(one.position(7), Passes(dataclasses.replace(one, mixture=None), 2), 7)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return pretrained(tmp_path_factory.mktemp("pretrained"))


def written(path: Path, word: str, count: int) -> str:
    path.write_text("".join(json.dumps({"text": f"{word} {number}. " * 20}) + "\n" for number in range(count)))
    return str(path)


def tuning(model: Path, *mixture: dict[str, Any]) -> FineTuning:
    given = {"pretrained": str(model), "length": 64, "data": {"mixture": list(mixture)}}
    return FineTuning(FineTuningConfig.model_validate(given))


def test_sources_of_a_model_are_packed_apart_and_taken_by_weight(
    model: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    few, many = written(tmp_path / "few.jsonl", "few", 20), written(tmp_path / "many.jsonl", "many", 60)
    task = tuning(model, {"path": few, "weight": 1.0}, {"path": many, "weight": 1.0, "start": 10, "end": 50})
    with caplog.at_level(logging.INFO):
        rows = task.data("train")
    first, second = [record.getMessage() for record in caplog.records if "source=" in record.getMessage()]
    assert first.startswith(f"source={few} documents=")
    assert second.startswith(f"source={many} documents=")
    assert f"rows_per_epoch={len(rows) // 2}" in second
    words = task.tokenizer
    for number in range(len(rows)):
        text = words.decode(rows[number][0].tolist())
        assert ("few" in text, "many" in text) == (number < rows.counts[0], number >= rows.counts[0])
    order = order_of(_loop(), 0, len(rows), mixture_of(rows))
    taken = [one for step in range(order.steps_per_epoch) for one in Batches(order).ids(step).tolist()]
    assert sum(one < rows.counts[0] for one in taken) in {len(rows) // 2, -(-len(rows) // 2)}
    # What evaluators take is what each source holds out, once.
    held_out = task.data("test")
    assert held_out.mixture is None
    assert min(held_out.counts) >= 1


def test_the_mean_over_drawn_rows_is_the_mean_over_their_tokens(model: Path, tmp_path: Path) -> None:
    path = tmp_path / "asked.jsonl"
    path.write_text('{"prompt": "What is it that you are asking me here?", "completion": "A."}\n' * 30)
    task = tuning(
        model, {"path": str(path), "weight": 2}, {"path": written(tmp_path / "a.jsonl", "a", 30), "weight": 1}
    )
    rows = task.data("train")
    drawn = rows.mixture.ids(0, 0).tolist()
    targets = [int((rows[number][1] != -100).sum()) for number in range(len(rows))]
    network = torch.nn.Linear(1, 1).train()
    mean = sum(targets[number] for number in drawn) / len(drawn)
    assert task._mean_targets(network) == pytest.approx(mean, rel=0.05)


def test_without_weights_each_row_is_taken_once(model: Path, tmp_path: Path) -> None:
    one, other = written(tmp_path / "one.jsonl", "one", 10), written(tmp_path / "other.jsonl", "other", 30)
    rows = tuning(model, {"path": one}, {"path": other}).data("train")
    assert rows.mixture is None
    assert len(rows) == sum(rows.counts)


@pytest.mark.parametrize(
    ("data", "why"),
    [
        ({"mixture": [{"path": "a.jsonl", "weight": 1}, {"path": "b.jsonl"}]}, "give a weight to each source"),
        ({"mixture": [{"path": "a.jsonl"}, {}]}, "give exactly one of path and dataset"),
        ({"mixture": [{"path": "a.jsonl"}, {"path": "b.jsonl"}], "test": 0.2}, "with mixture, test belongs to each"),
        ({"mixture": [{"path": "a.jsonl"}]}, "at least 2 items"),
        ({"mixture": [{"path": "a.jsonl", "weight": 0}, {"path": "b.jsonl", "weight": 1}]}, "greater than 0"),
    ],
)
def test_a_mixture_that_says_too_little_or_too_much_is_refused(model: Path, data: Any, why: str) -> None:
    with pytest.raises(ValueError, match=why):
        FineTuningConfig.model_validate({"pretrained": str(model), "data": data})


def test_a_source_without_a_sample_is_named(model: Path, tmp_path: Path) -> None:
    empty = tmp_path / "empty.jsonl"
    empty.write_text("")
    with pytest.raises(UnusableInput, match=r"no sample of .*empty.jsonl is left to train with"):
        tuning(model, {"path": written(tmp_path / "a.jsonl", "a", 9)}, {"path": str(empty)}).data("train")


def _loop() -> Any:
    from tandem.job.tasks import Loop

    return Loop(global_batch_size=4)
