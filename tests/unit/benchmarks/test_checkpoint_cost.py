"""What the checkpoint benchmark makes of its records."""

from typing import Any

import pytest

from tests.bench.checkpoint.table import cost, p95, written


def save(side: str, blocked: float, after: list[float], failed: bool = False) -> dict[str, Any]:
    times = {"blocked": blocked, "computed": blocked / 2, "commit": 2.0, "before": [1.0, 1.0, 9.0], "after": after}
    return {"kind": "save", "side": side, "failed": failed} | times


def test_a_save_costs_its_stall_and_what_later_steps_take_longer() -> None:
    found = cost([save("a", 0.5, [1.5, 1.0, 1.0])], "a")
    assert found is not None
    assert found.step == 1.0, "one slow step before the save is no normal step"
    assert found.total == pytest.approx(1.0)
    assert found.share == pytest.approx(1 / 51)
    assert found.slower == pytest.approx(3.5 / 3)


def test_failed_saves_are_counted_and_their_times_are_not() -> None:
    records = [save("a", 0.1, [1.0]), save("a", 7.0, [1.0], failed=True), save("b", 7.0, [1.0], failed=True)]
    found = cost(records, "a")
    assert found is not None
    assert (found.saves, found.failed, found.blocked) == (2, 1, [0.1])
    assert cost(records, "b") is None
    text = written([*records, {"kind": "memory", "side": "b", "peak": 2e9, "after": 1e9}], ["a", "b"])
    assert "| a | 1 of 2 | **0.100**" in text
    assert "| b | 0 of 1 |" in text
    assert "2.00, 1.00" in text


def test_the_95th_percentile_is_one_of_the_values() -> None:
    assert p95([float(number) for number in range(1, 101)]) == 95.0
    assert p95([3.0]) == 3.0
