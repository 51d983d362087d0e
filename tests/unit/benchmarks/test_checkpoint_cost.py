"""What the checkpoint benchmark makes of its records."""

from typing import Any

import pytest

from benchmarks.checkpoint import loading
from benchmarks.checkpoint.table import cost, p95, written
from benchmarks.checkpoint.verdict import SIZE, judge
from benchmarks.goals import Outcome, exit_code


def save(side: str, blocked: float, after: list[float], failed: bool = False) -> dict[str, Any]:
    times = {"blocked": blocked, "computed": blocked / 2, "commit": 2.0, "before": [1.0, 1.0, 9.0], "after": after}
    return {"kind": "save", "side": side, "failed": failed} | times


def test_a_save_costs_its_stall_and_what_later_steps_take_longer() -> None:
    found = cost([save("a", 0.5, [1.5, 1.0, 1.0])], "a")
    assert found.step == 1.0, "one slow step before the save is no normal step"
    assert found.total == pytest.approx(1.0)
    assert found.share == pytest.approx(1 / 51)
    assert found.slower == pytest.approx(3.5 / 3)


def test_failed_saves_are_counted_and_their_times_are_not() -> None:
    records = [save("a", 0.1, [1.0]), save("a", 7.0, [1.0], failed=True), save("b", 7.0, [1.0], failed=True)]
    found = cost(records, "a")
    assert (found.saves, found.failed, found.blocked) == (2, 1, [0.1])
    assert cost(records, "b") is None
    text = written([*records, {"kind": "memory", "side": "b", "peak": 2e9, "after": 1e9}], ["a", "b"])
    assert "| a | 1 of 2 | **0.100**" in text
    assert "| b | 0 of 1 |" in text
    assert "2.00, 1.00" in text


def test_the_95th_percentile_is_one_of_the_values() -> None:
    assert p95([float(number) for number in range(1, 101)]) == 95.0
    assert p95([3.0]) == 3.0


def saves(side: str, blocked: float, later: float = 0.0, count: int = 5) -> list[dict[str, Any]]:
    """Saves that block for so long, and whose steps take so much longer in all."""
    return [save(side, blocked, [1.0 + later, 1.0, 1.0]) for _ in range(count)]


def outcomes(records: list[dict[str, Any]], megabytes: float = SIZE) -> list[Outcome]:
    return [verdict.outcome for verdict in judge(records, ["tandem", "torch.save"], megabytes)]


def test_the_goals_of_a_save_are_its_stall_its_share_of_the_time_and_to_be_below_the_others() -> None:
    met, missed = Outcome.MET, Outcome.MISSED
    assert outcomes(saves("tandem", 0.05) + saves("torch.save", 2.0)) == [met, met, met]
    assert outcomes(saves("tandem", 0.06) + saves("torch.save", 2.0)) == [missed, met, met]
    assert outcomes(saves("tandem", 0.05, later=0.5) + saves("torch.save", 2.0)) == [met, missed, met]
    assert outcomes(saves("tandem", 0.05) + saves("torch.save", 0.04)) == [met, met, missed]


def test_a_save_of_any_side_that_failed_misses_the_goal() -> None:
    records = [*saves("tandem", 0.05), save("torch.save", 2.0, [1.0], failed=True)]
    (verdict,) = judge(records, ["tandem", "torch.save"], SIZE)
    assert str(verdict) == "missed: no save fails: 1 failed: torch.save"
    (verdict,) = judge([{"kind": "failed", "mode": "time", "sides": [], "code": 1}], ["tandem"], SIZE)
    assert verdict.outcome is Outcome.MISSED
    assert exit_code(judge([], ["tandem"], SIZE)) == 1


def test_few_saves_and_a_state_of_another_size_are_not_judged() -> None:
    few = saves("tandem", 0.05, count=4) + saves("torch.save", 2.0)
    assert outcomes(few) == [Outcome.UNJUDGED] * 3
    other = saves("tandem", 0.01) + saves("torch.save", 2.0)
    assert outcomes(other, megabytes=50.0) == [Outcome.UNJUDGED, Outcome.UNJUDGED, Outcome.MET]


def test_where_our_side_is_not_measured_there_is_no_goal() -> None:
    assert judge(saves("torch.save", 2.0), ["torch.save"], SIZE) == []


def loaded(most: float, pages: float = 0.0) -> dict[str, Any]:
    return {"seconds": 0.1, "most": most, "pages": pages, "read": 100.0}


def test_the_table_of_loading_says_who_verifies_and_counts_what_failed() -> None:
    found = {
        "tandem": [loaded(105.0)],
        "torch.load": [loaded(104.0, 100.0), {"problem": "no memory"}],
        "dcp": [{"problem": "no"}],
    }
    text = loading.written(found, {"tandem": "Broken", "torch.load": None, "dcp": None}, 100)
    assert "| tandem | every byte | 0.10 (0.10 to 0.10) | 1.05 | 0.00 | 1.00 | 0 of 1 |" in text
    assert "| torch.load | no | 0.10 (0.10 to 0.10) | 1.04 | 1.00 | 1.00 | 1 of 2 |" in text
    assert "| dcp | no | – | – | – | – | 1 of 1 |" in text


def test_an_evaluator_must_hold_weights_once_and_refuse_those_that_have_changed() -> None:
    def found(most: float, refused: str | None) -> list[Outcome]:
        return [
            one.outcome for one in loading.judged({"tandem": [loaded(90.0), loaded(most)]}, {"tandem": refused}, 100)
        ]

    assert found(119.0, "Broken") == [Outcome.MET, Outcome.MET]
    assert found(121.0, "Broken") == [Outcome.MISSED, Outcome.MET]
    assert found(119.0, None) == [Outcome.MET, Outcome.MISSED]
    (verdict,) = loading.judged({"tandem": [loaded(90.0)], "dcp": [{"problem": "no"}]}, {"tandem": "Broken"}, 100)
    assert str(verdict) == "missed: every side loads the weights: dcp: no"
