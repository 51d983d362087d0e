"""Confidence intervals of scores, and whether two scores differ by more than chance.

Test data is a sample: on other samples of the same kind a checkpoint would score a little better or worse. The interval
of a score contains, in 95 of 100 such data sets, the score on infinitely many samples.

- **Shares**, where each sample is right or wrong: Wilson's interval. (Wilson 1927,
  https://doi.org/10.1080/01621459.1927.10502953)
- **Means**, also with weights, such as the loss of each token where texts are the samples: the normal interval of a
  ratio of sums. There is none where a few samples make up most of the mean, as of the losses of a model that is nearly
  always right. All it needs are sums (`tandem.evaluation.Moments`), so shards add up.
- **Two scores** differ if the interval of their difference, made from the two intervals as if they were of different
  samples, excludes 0. (Newcombe 1998; Zou and Donner 2008: MOVER)

docs/decisions/0062-intervals.md has the alternatives.
"""

import math
from collections.abc import Iterable, Sequence
from typing import Literal, NamedTuple

from tandem.evaluation import MAX_EXPONENT, GeometricMean, Mean

Z = 1.959963984540054
"""The normal distribution has 95 % of its mass within this many standard deviations."""
MIN_SAMPLES = 30
"""Minimum number of samples for the interval of a mean: with fewer the normal distribution is too narrow."""
SKEWNESS_FACTOR = 25
"""The interval of a mean needs more samples than this multiple of their squared skewness. (Cochran 1977, Sampling
Techniques, 2.15)"""
ROUNDING = 1e-12
"""Variance relative to the mean square below which it is taken for rounding errors."""


class Interval(NamedTuple):
    """A 95 % confidence interval."""

    low: float
    high: float


class Estimate(NamedTuple):
    """A score with its interval; None if that is not known."""

    value: float
    interval: Interval | None = None


def share_interval(right: float, count: float) -> Interval | None:
    """Wilson's interval of the share `right / count`; None without samples."""
    if count <= 0:
        return None
    share, square = right / count, Z * Z / count
    center = (share + square / 2) / (1 + square)
    half = math.sqrt(share * (1 - share) * square + square * square / 4) / (1 + square)
    # Rounding must not take the score itself out of its interval.
    return Interval(max(0.0, min(center - half, share)), min(1.0, max(center + half, share)))


def mean_interval(mean: Mean | GeometricMean) -> Interval | None:
    """The interval of a mean over all shards; None if it does not follow from what was reported."""
    moments = mean.moments
    total = float(mean.total if isinstance(mean, Mean) else mean.log_total)
    count = float(mean.count)
    if moments is None or count <= 0:
        return None
    samples, tt, tw, ww, ttt, ttw, tww, www = map(float, moments)
    if isinstance(mean, Mean) and samples == ww == count and tt == total and 0 <= total <= count:
        # Each sample is 0 or 1.
        return share_interval(total, count)
    # The sums of the second and third powers of what the ratio leaves of each sample, t - ratio * w.
    ratio = total / count
    second = tt - 2 * ratio * tw + ratio * ratio * ww
    third = ttt - 3 * ratio * ttw + 3 * ratio * ratio * tww - ratio * ratio * ratio * www
    # Samples that are all alike say nothing about how far others differ.
    if samples < MIN_SAMPLES or not second > ROUNDING * tt:
        return None
    skewness = math.sqrt(samples) * third / second / math.sqrt(second)
    if not samples > SKEWNESS_FACTOR * skewness * skewness:
        return None
    half = Z * math.sqrt(second * samples / (samples - 1)) / count
    ends = Interval(ratio - half, ratio + half)
    if isinstance(mean, Mean):
        return ends if math.isfinite(half) else None
    return Interval(math.exp(ends.low), math.exp(ends.high)) if ends.high <= MAX_EXPONENT else None


def differ(first: Estimate, second: Estimate) -> bool:
    """Whether two scores differ by more than chance; False if an interval is not known."""
    lower, higher = sorted((first, second), key=lambda estimate: estimate.value)
    if lower.interval is None or higher.interval is None:
        return False
    margin = math.hypot(higher.value - higher.interval.low, lower.interval.high - lower.value)
    return higher.value - lower.value > margin


def steps_forward(scores: Sequence[Estimate], goal: Literal["Maximize", "Minimize"]) -> list[bool]:
    """Whether each score is better than the best of those before it by more than chance; False for the first."""
    sign = 1.0 if goal == "Maximize" else -1.0
    best: Estimate | None = None
    forward = []
    for score in scores:
        is_better = best is not None and sign * score.value > sign * best.value
        forward.append(best is not None and is_better and differ(score, best))
        best = score if best is None or is_better else best
    return forward


def count_tied(best: Estimate, scores: Iterable[Estimate]) -> int | None:
    """Number of scores that do not differ from the best by more than chance; None if its interval is not known, or
    there are no scores.

    Args:
        scores: all but the best.
    """
    differences = [differ(best, score) for score in scores]
    return None if best.interval is None or not differences else differences.count(False)
