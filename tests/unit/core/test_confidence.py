"""Intervals contain the truth as often as they say, and do not depend on how the data is split."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy.stats import binom, binomtest

from tandem.confidence import Estimate, Interval, count_tied, differ, mean_interval, share_interval, steps_forward
from tandem.evaluation import GeometricMean, Mean, Moments, added


@pytest.mark.parametrize(("right", "count"), [(0, 1), (0, 360), (7, 9), (297, 300), (360, 360), (90_211, 100_000)])
def test_the_interval_of_a_share_is_that_of_wilson(right: int, count: int) -> None:
    expected = binomtest(right, count).proportion_ci(0.95, "wilson")
    assert share_interval(right, count) == pytest.approx((expected.low, expected.high), abs=1e-12)


def test_no_samples_have_no_interval() -> None:
    assert share_interval(0, 0) is None
    assert mean_interval(Mean.from_samples([])) is None


@given(st.integers(1, 5000).flatmap(lambda count: st.tuples(st.integers(0, count), st.just(count))))
def test_a_share_is_inside_its_interval(counts: tuple[int, int]) -> None:
    interval = share_interval(*counts)
    assert interval is not None
    assert 0 <= interval.low <= counts[0] / counts[1] <= interval.high <= 1


@pytest.mark.parametrize("share", [0.5, 0.9, 0.98])
def test_95_of_100_intervals_of_a_share_contain_it(share: float) -> None:
    """Computed, not drawn: the sum over all results of their probability."""
    for count in (360, 10_000):
        right = np.arange(count + 1)
        intervals = [share_interval(int(number), count) for number in right]
        hits = [interval is not None and interval.low <= share <= interval.high for interval in intervals]
        assert 0.93 < (binom.pmf(right, count, share) * hits).sum() < 0.97


def test_95_of_100_intervals_of_a_mean_contain_it() -> None:
    random = np.random.default_rng(7)
    # Texts of different lengths; the loss of each token depends on its text.
    hits = []
    for _ in range(1000):
        tokens = random.integers(5, 60, 400)
        nats = tokens * random.gamma(4.0, 0.25, 400)
        hits.append(_contains(mean_interval(Mean.from_samples(nats, tokens)), 1.0))
        hits.append(_contains(mean_interval(GeometricMean.from_samples(nats, tokens)), math.e))
    assert 0.93 < sum(hits) / len(hits) < 0.97
    # As if each token had been drawn by itself, the interval is too narrow.
    sums = tokens.sum()
    naive = mean_interval(Mean(nats.sum(), sums, Moments(sums, *map(float, _token_sums(nats, tokens)))))
    honest = mean_interval(Mean.from_samples(nats, tokens))
    assert naive is not None
    assert honest is not None
    assert naive.high - naive.low < 0.4 * (honest.high - honest.low)


def _contains(interval: Interval | None, truth: float) -> bool:
    assert interval is not None
    return interval.low <= truth <= interval.high


def _token_sums(nats: np.ndarray, tokens: np.ndarray) -> list[float]:
    losses = nats / tokens
    return [(tokens * losses**power).sum() for power in (2, 1, 0, 3, 2, 1, 0)]


def test_few_data_sets_whose_mean_hangs_on_a_few_samples_have_a_wrong_interval() -> None:
    """A model that is nearly always right: one sample in a hundred makes up the loss."""
    random = np.random.default_rng(7)
    wrong, missing = 0, 0
    for _ in range(1000):
        losses = np.where(random.random(1000) < 0.01, random.exponential(3.0, 1000), 0.003)
        interval = mean_interval(Mean.from_samples(losses))
        missing += interval is None
        wrong += interval is not None and not interval.low <= 0.01 * 3.0 + 0.99 * 0.003 <= interval.high
    assert missing > 900
    assert wrong < 50


@pytest.mark.parametrize(
    "mean",
    [
        Mean(3.0, 100),
        Mean.from_samples([1.5] * 100),
        Mean.from_samples(range(29)),
        Mean.from_samples([math.inf, *range(50)]),
        Mean.from_samples([math.nan, *range(50)]),
        Mean.from_samples([0.0] * 40, [0] * 40),
    ],
    ids=["no-sums", "all-alike", "too-few", "infinite", "nan", "no-weight"],
)  # fmt: skip
def test_what_does_not_follow_from_the_data_is_not_said(mean: Mean) -> None:
    assert mean_interval(mean) is None


def test_values_that_a_float_cannot_square_have_no_interval() -> None:
    assert mean_interval(Mean.from_samples([1e200 * number for number in range(50)])) is None
    assert mean_interval(GeometricMean.from_samples([100.0 * number for number in range(50)])) is None


def test_a_mean_of_hits_has_the_interval_of_a_share() -> None:
    assert mean_interval(Mean.from_samples([True] * 7 + [False] * 2)) == share_interval(7, 9)


@given(
    st.lists(st.tuples(st.floats(-1e3, 1e3), st.integers(1, 50)), min_size=40, max_size=120),
    st.integers(1, 9),
    st.sampled_from([Mean, GeometricMean]),
)
def test_any_split_into_shards_gives_the_interval_of_the_whole(
    samples: list[tuple[float, int]], shards: int, kind: type[Mean] | type[GeometricMean]
) -> None:
    # Eighths of whole numbers: their products, and the sums of these, fit into a float exactly.
    terms = [(round(total) / 8, count) for total, count in samples]
    parts = [terms[shard::shards] for shard in range(shards)]
    merged = added([kind.from_samples([t for t, _ in part], [w for _, w in part]) for part in reversed(parts)])
    whole = kind.from_samples([t for t, _ in terms], [w for _, w in terms])
    assert isinstance(merged, Mean | GeometricMean)
    assert merged.moments == whole.moments
    assert mean_interval(merged) == mean_interval(whole)


def test_a_shard_without_sums_leaves_all_without_an_interval() -> None:
    merged = added([Mean.from_samples(range(100)), Mean(1.0, 3)])
    assert isinstance(merged, Mean)
    assert merged.moments is None


def test_two_scores_of_one_truth_differ_in_few_data_sets() -> None:
    """Drawn from different samples; of the same samples two checkpoints differ even less."""
    random = np.random.default_rng(7)
    rights = random.binomial(400, 0.9, (2000, 2))
    pairs = [[Estimate(right / 400, share_interval(int(right), 400)) for right in pair] for pair in rights]
    assert 0.03 < sum(differ(*pair) for pair in pairs) / len(pairs) < 0.07


def test_scores_differ_in_either_order_and_never_without_an_interval() -> None:
    low, high = Estimate(0.5, Interval(0.45, 0.55)), Estimate(0.6, Interval(0.55, 0.65))
    assert differ(low, high)
    assert differ(high, low)
    assert not differ(low, low)
    assert not differ(low, Estimate(0.56, Interval(0.51, 0.61)))
    assert not differ(low, Estimate(0.9))


def test_the_best_is_tied_with_what_does_not_differ() -> None:
    scores = [Estimate(value, Interval(value - 0.02, value + 0.02)) for value in (0.9, 0.89, 0.88, 0.85)]
    assert count_tied(scores[0], scores[1:]) == 2
    assert count_tied(scores[0], scores[3:]) == 0
    assert count_tied(scores[0], []) is None
    assert count_tied(Estimate(0.9), scores) is None


@pytest.mark.parametrize(("goal", "sign"), [("Maximize", 1), ("Minimize", -1)])
def test_a_step_forward_is_better_than_the_best_before(goal: str, sign: int) -> None:
    values = [sign * value for value in (0.5, 0.6, 0.4, 0.61, 0.62, 0.7)]
    scores = [Estimate(value, Interval(value - 0.02, value + 0.02)) for value in values]
    assert steps_forward(scores, goal) == [False, True, False, False, False, True]  # type: ignore[arg-type]
    assert not any(steps_forward([Estimate(value) for value in values], goal))  # type: ignore[arg-type]
