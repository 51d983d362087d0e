"""Health: what is bad, and what only looks so."""

import math
import random

from tandem_trainer.loss_spikes import MEMORY, SPIKE_SPAN_STEPS, LossSpikes


def curve(steps: int, seed: int = 0) -> list[float]:
    """A run that learns well, with noise and a hard sample now and then."""
    noise = random.Random(seed)
    return [
        2.3 * math.exp(-n / 60) * noise.uniform(0.3, 3) + (0.8 if noise.random() < 0.02 else 0) for n in range(steps)
    ]


def test_a_run_that_learns_is_well() -> None:
    for seed in range(20):
        assert LossSpikes().first_bad(1, curve(2000, seed)) is None


def test_nan_and_infinity_are_bad_at_once() -> None:
    for bad in (math.nan, math.inf, -math.inf):
        assert LossSpikes().first_bad(1, [2.3, 2.2, bad, 2.1]) == 3


def test_a_loss_worse_than_untrained_for_a_while_is_a_spike_from_where_it_began() -> None:
    spikes = LossSpikes()
    assert spikes.first_bad(1, curve(500)) is None
    assert 501 - SPIKE_SPAN_STEPS <= spikes.first_bad(501, [9.0] * 50) <= 501


def test_a_short_spike_heals_by_itself() -> None:
    assert LossSpikes().first_bad(1, [*curve(500), 9.0, 9.0, *curve(700)[500:]]) is None


def test_without_a_past_nothing_is_called_a_spike() -> None:
    assert LossSpikes().first_bad(1, [2.3] * SPIKE_SPAN_STEPS + [50.0] * (MEMORY // 2 - 1)) is None


def test_its_memory_travels_with_a_checkpoint() -> None:
    losses = curve(500)
    whole = LossSpikes()
    whole.first_bad(1, losses)
    first = LossSpikes()
    first.first_bad(1, losses[:260])
    second = LossSpikes(first.memory())
    second.first_bad(261, losses[260:])
    assert second.memory() == whole.memory()


def densities(steps: int, seed: int, level: float = -1.0) -> list[float]:
    """The loss of a model of densities that has learned most of what there is to learn, or of a policy."""
    noise = random.Random(seed)
    return [level + 0.4 * math.exp(-n / 30) + noise.gauss(0, 0.5) for n in range(steps)]


def test_a_loss_that_may_be_negative_is_no_spike_because_it_is_above_three_times_a_negative_number() -> None:
    for seed in range(20):
        for level in (-3.0, -1.0, -0.1, 0.0):
            assert LossSpikes().first_bad(1, densities(2000, seed, level)) is None


def test_a_loss_that_may_be_negative_spikes_when_it_rises_far_beyond_its_spread() -> None:
    spikes = LossSpikes()
    assert spikes.first_bad(1, densities(500, 0)) is None
    assert spikes.first_bad(501, [30.0] * 50) is not None


def test_spikes_count_only_where_the_user_says_so() -> None:
    for rule, found in (("Spikes", True), ("NotFinite", False), ("Never", False)):
        spikes = LossSpikes(rewind_on=rule)  # type: ignore[arg-type]
        spikes.first_bad(1, curve(500))
        assert (spikes.first_bad(501, [9.0] * 50) is not None) == found
    assert LossSpikes(rewind_on="NotFinite").first_bad(1, [2.0, math.nan]) == 2
    assert LossSpikes(rewind_on="Never").first_bad(1, [2.0, math.nan, math.inf]) is None
