"""Series made short, time without pauses, and numbers in words."""

import numpy as np
import pytest

from tandem.formatting import ascii_name, count_noun, duration, number, reason, score, share, size
from tandem_cli.report import clock
from tandem_cli.report.clock import envelope, means, smooth, thin


class TestTheEnvelope:
    def test_of_a_million_values_is_short_and_keeps_a_single_spike(self) -> None:
        y = np.random.default_rng(0).normal(size=1_000_000)
        y[437_211] = 99.0
        x, shown = envelope(np.arange(1_000_000.0), y, 400)
        assert len(x) == len(shown) == 800
        assert shown.max() == 99.0
        assert shown.min() == y.min()
        assert x[shown.argmax()] == pytest.approx(437_211, abs=2500)

    def test_passes_over_what_is_not_a_number_and_leaves_a_gap_where_nothing_is(self) -> None:
        y = np.ones(1000)
        y[10] = np.nan
        y[500:600] = np.nan
        _, shown = envelope(np.arange(1000.0), y, 20)
        assert np.isnan(shown).sum() == 2 * 2
        assert not np.isnan(shown[0])

    def test_of_a_short_series_is_the_series(self) -> None:
        x, y = np.arange(5.0), np.array([3.0, np.nan, 1.0, 2.0, 5.0])
        assert envelope(x, y, 10) == (x, y)

    def test_copes_with_values_at_one_place(self) -> None:
        x, y = envelope(np.zeros(100), np.arange(100.0), 10)
        assert (y.min(), y.max(), len(x)) == (0.0, 99.0, 2)


def test_a_thinned_series_has_one_value_for_each_column() -> None:
    x, y = thin(np.arange(10_000.0), np.arange(10_000.0), 100)
    assert len(x) == 100
    assert (x == y).all()


class TestTheRunningMean:
    def test_of_a_constant_is_the_constant_up_to_the_ends(self) -> None:
        assert smooth(np.full(50, 3.0), 9).tolist() == [3.0] * 50

    def test_passes_over_what_is_not_finite(self) -> None:
        assert smooth(np.array([1.0, np.nan, 3.0, np.inf, 5.0]), 3).tolist() == [1.0, 2.0, 3.0, 4.0, 5.0]

    def test_is_unknown_where_nothing_is_known(self) -> None:
        assert np.isnan(smooth(np.full(9, np.nan), 3)).all()


def test_means_are_taken_of_what_falls_between_two_edges() -> None:
    found = means(np.array([0.5, 0.6, 2.5, 9.0]), np.array([1.0, 3.0, 7.0, 100.0]), np.array([0.0, 1.0, 2.0, 3.0]))
    assert found[[0, 2]].tolist() == [2.0, 7.0]
    assert np.isnan(found[1])


class TestTheClock:
    def test_leaves_out_a_night_in_which_nothing_ran(self) -> None:
        ticks = clock.make_clock(np.concatenate([np.arange(1000.0, 1100.0), np.arange(40_000.0, 40_051.0)]))
        assert ticks.seconds == pytest.approx(99 + 50)
        assert [pause.seconds for pause in ticks.pauses] == [40_000.0 - 1099.0]
        assert ticks.pauses[0].position == pytest.approx(99.0)
        assert ticks.axis(np.array([1000.0, 1099.0, 20_000.0, 40_000.0, 40_050.0])) == pytest.approx(
            [0, 99, 99, 99, 149]
        )

    def test_keeps_a_minute_without_a_line(self) -> None:
        assert clock.make_clock(np.array([0.0, 60.0, 120.0])).pauses == ()

    def test_copes_with_two_pauses_side_by_side(self) -> None:
        ticks = clock.make_clock(np.array([0.0, 1000.0, 2000.0, 2001.0]))
        assert ticks.seconds == pytest.approx(1.0)
        assert [pause.position for pause in ticks.pauses] == [0.0, 0.0]

    @pytest.mark.parametrize(("seconds", "unit"), [(30, "s"), (1800, "min"), (40_000, "h"), (900_000, "days")])
    def test_reads_in_the_unit_that_suits_the_length(self, seconds: float, unit: str) -> None:
        ticks = clock.make_clock(np.arange(0.0, seconds + 1, 30.0))
        assert ticks.unit == unit
        assert ticks.seconds == pytest.approx(seconds, abs=30)

    @pytest.mark.parametrize("marks", [[], [5.0]])
    def test_of_next_to_nothing_has_no_length(self, marks: list[float]) -> None:
        assert clock.make_clock(np.array(marks)).length == 0.0

    def test_can_be_seen_from_a_window(self) -> None:
        ticks = clock.make_clock(np.arange(0.0, 40_000.0, 30.0)).seen_from(7200.0, 120.0)
        assert ticks.unit == "s"
        assert ticks.position(7260.0) == pytest.approx(60.0)


class TestWords:
    @pytest.mark.parametrize(
        ("seconds", "words"),
        [
            (0.0, "0 ms"), (0.00034, "0.3 ms"), (0.0123, "12 ms"), (0.5, "0.5 s"), (61.0, "1 min 1 s"),
            (100.0, "1 min 40 s"),
            (3599.6, "1 h"), (7260.0, "2 h 1 min"), (200_000.0, "2 d 7 h"), (float("nan"), "–"), (None, "–"),
        ],
    )  # fmt: skip
    def test_lengths_of_time(self, seconds: float | None, words: str) -> None:
        assert duration(seconds) == words

    @pytest.mark.parametrize(
        ("count", "words"), [(0, "0 B"), (999, "999 B"), (14_412_316, "14.4 MB"), (999_999, "1.0 MB"), (None, "–")]
    )
    def test_sizes(self, count: int | None, words: str) -> None:
        assert size(count) == words

    def test_shares_and_scores(self) -> None:
        assert [share(value) for value in (0.971, 0.0014, 0.00000001, 0.0)] == [*("97 %", "0.14 %", "< 0.01 %", "0 %")]
        assert score("accuracy", 0.98611) == "98.61 %"
        assert score("loss", 0.049312) == "0.0493"
        scored = [score("perplexity", value) for value in (9.1234, 98.06, 123.46, 999.94, 1265.4)]
        assert scored == ["9.123", "98.1", "123.5", "999.9", "1,265"]

    def test_counts(self) -> None:
        assert (number(1234.5), number(0.123456), number(None)) == ("1,234", "0.1235", "–")
        assert (count_noun(1, "restart"), count_noun(1200, "restart")) == ("1 restart", "1,200 restarts")

    def test_reasons_and_names_from_outside(self) -> None:
        assert reason("MemberLost") == "member lost"
        assert ascii_name("evaluator-\x1b[31m-漢") == "evaluator-?[31m-?"
