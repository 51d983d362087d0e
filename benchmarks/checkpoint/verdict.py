"""Verdicts on the goals for a save. Pure: records in, verdicts out.

The bounds are for SIZE megabytes of state. Measurements with another size are not judged against them.
"""

import statistics
from collections.abc import Sequence
from typing import Any

from benchmarks.checkpoint.table import EVERY, Cost, cost
from benchmarks.goals import MIN_VALUES, Outcome, Verdict

TANDEM = "tandem"
SIZE = 744.0
BLOCKED_SECONDS = 0.05
SHARE = 0.01


def judge(records: Sequence[dict[str, Any]], sides: Sequence[str], megabytes: float) -> list[Verdict]:
    """Judge Tandem's side beside all others; no verdict if it was not measured and nothing failed.

    Args:
        megabytes: size of the state on each rank.
    """
    failed = [record for record in records if record["kind"] == "failed" or record.get("failed")]
    if failed:
        names = ", ".join(dict.fromkeys(str(record.get("side") or record.get("mode")) for record in failed))
        return [Verdict(Outcome.MISSED, "no save fails", f"{len(failed)} failed: {names}")]
    costs = {side: side_cost for side in sides if (side_cost := cost(records, side)) is not None}
    if TANDEM not in sides:
        return []
    if TANDEM not in costs:
        return [Verdict(Outcome.MISSED, "no save fails", "none was measured")]
    bounds = [
        _bound(
            f"blocked at most {BLOCKED_SECONDS:g} s",
            costs[TANDEM],
            _blocked(costs[TANDEM]),
            BLOCKED_SECONDS,
            "{:.3f} s",
        ),
        _bound(
            f"a save every {EVERY} steps costs at most {SHARE:.0%}", costs[TANDEM], costs[TANDEM].share, SHARE, "{:.1%}"
        ),
    ]
    if megabytes != SIZE:
        bounds = [_of_another_size(verdict) for verdict in bounds]
    return [*bounds, *_shortest_stall(costs)]


def _shortest_stall(costs: dict[str, Cost]) -> list[Verdict]:
    """Judge that Tandem stalls training for less time than each other side."""
    own = _blocked(costs[TANDEM])
    by_side = {side: _blocked(side_cost) for side, side_cost in costs.items() if side != TANDEM}
    if not by_side:
        return []
    nearest = min(by_side, key=lambda side: by_side[side])
    outcome = Outcome.MET if own < by_side[nearest] else Outcome.MISSED
    if min(side_cost.saves for side_cost in costs.values()) < MIN_VALUES:
        outcome = Outcome.UNJUDGED
    reason = f"{own:.3f} s, and {nearest} {by_side[nearest]:.3f} s"
    return [Verdict(outcome, "blocked for less time than every other side", reason)]


def _bound(goal: str, side_cost: Cost, value: float, bound: float, form: str) -> Verdict:
    reason = f"{form.format(value)}, median of {side_cost.saves} saves"
    if side_cost.saves < MIN_VALUES:
        return Verdict(Outcome.UNJUDGED, goal, f"{reason}; at least {MIN_VALUES} are needed")
    return Verdict(Outcome.MET if value <= bound else Outcome.MISSED, goal, reason)


def _of_another_size(verdict: Verdict) -> Verdict:
    return Verdict(Outcome.UNJUDGED, verdict.goal, f"{verdict.reason}; the goal is for {SIZE:g} MB")


def _blocked(side_cost: Cost) -> float:
    return statistics.median(side_cost.blocked)
