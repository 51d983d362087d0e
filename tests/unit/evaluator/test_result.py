"""Shards put together are one pass over the whole data; the best checkpoint follows from the merged results."""

import json
import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from sklearn.metrics import accuracy_score, confusion_matrix, f1_score, log_loss

from tandem.confidence import share_interval
from tandem.evaluation import Mean
from tandem.rundir.durable import encode
from tandem.rundir.evaluations import Goal
from tandem.rundir.layout import checkpoint_name
from tandem_evaluator.publication import best
from tandem_evaluator.result import MergedResult, ShardResult, macro_f1_interval, merge, scores, shard_samples


def shard_result(
    shard: int = 0, shards: int = 1, loss_sum: float | None = 1.0, confusion: list[list[int]] | None = None
) -> ShardResult:
    confusion = confusion or [[3, 1], [0, 4]]
    return ShardResult(
        checkpoint=checkpoint_name(10),
        step=10,
        generation=1,
        shard=shard,
        shards=shards,
        samples=int(np.sum(confusion)),
        loss_sum=loss_sum,
        confusion=confusion,
        seconds=2.0,
        evaluator=f"evaluator-0-{shard}",
        at=100.0 + shard,
    )


@given(
    st.integers(2, 6).flatmap(
        lambda classes: st.tuples(
            st.just(classes),
            st.lists(st.tuples(st.integers(0, classes - 1), st.integers(0, classes - 1)), min_size=1, max_size=80),
        )
    ),
    st.integers(1, 9),
    st.randoms(use_true_random=False),
)
def test_any_split_gives_what_scikit_learn_says_of_the_whole(
    pairs: tuple[int, list[tuple[int, int]]], shards: int, random: np.random.Generator
) -> None:
    classes, samples = pairs
    true, predicted = (np.array(column) for column in zip(*samples, strict=True))
    probabilities = np.random.default_rng(len(samples)).dirichlet(np.ones(classes), len(samples))
    losses = -np.log(probabilities[np.arange(len(true)), true])
    results = [
        shard_result(
            shard,
            shards,
            loss_sum=float(losses[shard::shards].sum()),
            confusion=_confusion(true[shard::shards], predicted[shard::shards], classes),
        )
        for shard in range(shards)
    ]
    random.shuffle(results)

    merged = merge(results)

    assert merged.confusion == _confusion(true, predicted, classes)
    assert merged.samples == len(samples)
    assert merged.metrics.accuracy == pytest.approx(accuracy_score(true, predicted), abs=1e-12)
    assert merged.metrics.macro_f1 == pytest.approx(f1_score(true, predicted, average="macro"), abs=1e-12)
    assert merged.metrics.loss is not None
    assert merged.metrics.loss == pytest.approx(log_loss(true, probabilities, labels=range(classes)), abs=1e-9)
    present = sorted({*true, *predicted})
    expected = dict(zip(present, f1_score(true, predicted, average=None), strict=True))
    assert merged.per_class_f1 == [
        pytest.approx(expected[one], abs=1e-12) if one in expected else None for one in range(classes)
    ]


def _confusion(true: np.ndarray, predicted: np.ndarray, classes: int) -> list[list[int]]:
    if len(true) == 0:
        return [[0] * classes for _ in range(classes)]
    matrix: list[list[int]] = confusion_matrix(true, predicted, labels=range(classes)).tolist()
    return matrix


@given(st.permutations(range(5)), st.lists(st.floats(0, 1e6), min_size=5, max_size=5))
def test_the_order_of_the_shards_changes_not_one_bit(order: list[int], sums: list[float]) -> None:
    results = [shard_result(shard, 5, loss_sum=value) for shard, value in enumerate(sums)]
    assert encode(merge([results[index] for index in order]).to_json()) == encode(merge(results).to_json())


def test_the_merged_result_spans_the_time_of_its_shards() -> None:
    merged = merge([shard_result(0, 2), shard_result(1, 2)])
    assert (merged.started_at, merged.finished_at) == (98.0, 101.0)


@pytest.mark.parametrize(("total", "shards"), [(10, 1), (10, 3), (2, 5), (0, 2)])
def test_the_shards_have_all_samples_once(total: int, shards: int) -> None:
    assert sum(shard_samples(total, shard, shards) for shard in range(shards)) == total


def test_a_loss_that_is_not_finite_is_null_in_json_and_says_so() -> None:
    merged = merge([shard_result(0, 2), shard_result(1, 2, loss_sum=None)])
    body = json.loads(encode(merged.to_json()))
    assert body["metrics"]["loss"] is None
    assert "not finite" in body["note"]
    assert MergedResult.parse(body) == merged


def test_a_sum_that_overflows_is_not_finite_either() -> None:
    merged = merge([shard_result(shard, 3, loss_sum=1.5e308) for shard in range(3)])
    assert merged.metrics.loss is None


def test_a_sound_result_carries_no_note() -> None:
    assert "note" not in merge([shard_result()]).to_json()


def test_a_class_that_never_occurs_has_no_score_and_does_not_lower_the_mean() -> None:
    _, macro, each = scores(np.array([[4, 0, 0], [0, 4, 0], [0, 0, 0]]))
    assert each == [1.0, 1.0, None]
    assert macro == 1.0


def test_a_class_that_is_never_found_has_score_0() -> None:
    _, macro, each = scores(np.array([[4, 0], [4, 0]]))
    assert each == [pytest.approx(2 / 3), 0.0]
    assert macro == pytest.approx(1 / 3)


def result(step: int, right: int, loss: float | None = 0.5, generation: int = 1) -> MergedResult:
    """Of 100 samples in two classes so many are right."""
    merged = merge([shard_result(confusion=[[right, 100 - right], [0, 0]])])
    fields = {"checkpoint": checkpoint_name(step), "step": step, "generation": generation}
    return merged.model_copy(update=fields | {"metrics": merged.metrics.model_copy(update={"loss": loss})})


@pytest.mark.parametrize(
    ("metric", "goal", "step"), [("accuracy", "Maximize", 20), ("accuracy", "Minimize", 10), ("loss", "Minimize", 30)]
)
def test_the_best_by_metric_and_goal(metric: str, goal: Goal, step: int) -> None:
    results = [result(10, 50, loss=2.0), result(20, 90, loss=1.0), result(30, 70, loss=0.1)]
    found = best(results, {1: None}, metric, goal)
    assert (found["step"], found["name"], found["metric"]) == (step, checkpoint_name(step), metric)


def test_of_equals_the_earlier_one_is_the_best() -> None:
    results = [result(30, 90), result(10, 90), result(20, 90)]
    for order in (results, results[::-1]):
        assert best(order, {1: None}, "accuracy", "Maximize")["step"] == 10


def test_of_equals_the_one_with_the_lower_loss_is_the_best() -> None:
    results = [result(10, 90, loss=0.4), result(20, 90, loss=0.3), result(30, 90, loss=0.3), result(40, 80, loss=0.1)]
    for order in (results, results[::-1]):
        assert best(order, {1: None}, "accuracy", "Maximize")["step"] == 20


def test_only_checkpoints_on_the_lineage_count() -> None:
    links = {3: None, 1: 10}
    results = [result(10, 50), result(20, 99), result(15, 98, generation=2), result(20, 60, generation=3)]
    found = best(results, links, "accuracy", "Maximize")
    assert {"name": checkpoint_name(20), "step": 20, "generation": 3, "metric": "accuracy", "value": 0.6}.items() <= (
        found or {}
    ).items()


def test_a_checkpoint_whose_loss_is_not_finite_never_becomes_the_best() -> None:
    results = [result(10, 50), result(20, 99, loss=None)]
    for metric in ("loss", "accuracy", "macroF1"):
        assert best(results, {1: None}, metric, "Maximize")["step"] == 10
    assert best(results[1:], {1: None}, "accuracy", "Maximize") is None


def test_the_best_says_with_how_many_others_it_is_tied() -> None:
    results = [result(10, 50), result(20, 80), result(30, 85), result(40, 90), result(50, 99, generation=2)]
    found = best(results, {1: None}, "accuracy", "Maximize")
    assert found is not None
    interval = share_interval(90, 100)
    assert interval is not None
    assert (found["low"], found["high"], found["tied"]) == (*interval, 1), "80 of 100 differ from 90, 85 do not"


def test_a_result_of_the_version_before_has_no_interval_of_the_loss_and_leaves_the_whole_without() -> None:
    sums = Mean.from_samples(number % 7 for number in range(40)).moments
    assert sums is not None
    new = [shard_result(shard, 2, confusion=[[20, 20], [0, 0]], loss_sum=117.0) for shard in (0, 1)]
    new = [shard.model_copy(update={"loss_moments": list(sums)}) for shard in new]
    assert set(merge(new).intervals) == {"accuracy", "loss", "macroF1"}
    body = {name: value for name, value in new[1].to_json().items() if name != "lossMoments"}
    merged = merge([new[0], ShardResult.read(body)])
    assert set(merged.intervals) == {"accuracy", "macroF1"}
    old = {name: value for name, value in merged.to_json().items() if name != "intervals"}
    assert MergedResult.read(old).intervals == {}
    assert "tied" not in (best([MergedResult.read(old)] * 2, {1: None}, "accuracy", "Maximize") or {})


def test_the_value_is_the_score_itself_whatever_the_goal() -> None:
    found = best([result(10, 50)], {1: None}, "accuracy", "Minimize")
    assert found["value"] == 0.5
    assert math.isfinite(found["value"])


def test_the_interval_of_macro_f1_holds_the_true_value_as_often_as_it_says() -> None:
    generator = np.random.default_rng(1)
    cells = np.full((4, 4), 0.05)
    np.fill_diagonal(cells, 0.85)
    cells = cells * np.array([0.4, 0.3, 0.2, 0.1])[:, None] / cells.sum(axis=1)[:, None]
    _, true, _ = scores((cells * 1_000_000).round().astype(np.int64))
    hits = 0
    for _ in range(1000):
        interval = macro_f1_interval(generator.multinomial(300, cells.ravel()).reshape(4, 4))
        assert interval is not None
        hits += interval.low <= true <= interval.high
    assert 930 <= hits <= 970


@pytest.mark.parametrize(
    "matrix",
    [[[0, 0], [0, 0]], [[30, 0], [0, 30]], [[0, 30], [30, 0]], [[9, 1], [1, 9]], [[40]]],
    ids=["empty", "no mistake", "nothing right", "too few", "one class"],
)
def test_macro_f1_has_no_interval_where_it_would_not_hold(matrix: list[list[int]]) -> None:
    assert macro_f1_interval(np.array(matrix)) is None


def test_a_class_that_does_not_occur_does_not_count_in_the_interval_of_macro_f1() -> None:
    small = np.array([[40, 3], [2, 50]])
    padded = np.zeros((3, 3), dtype=np.int64)
    padded[:2, :2] = small
    assert macro_f1_interval(padded) == macro_f1_interval(small) is not None
