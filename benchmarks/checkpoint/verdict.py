"""What became of the goals for a save. Pure: records in, verdicts out.

The bounds are for SIZE megabytes of state. What is measured with another size is not judged against them.
"""

import statistics
from collections.abc import Sequence
from typing import Any

from benchmarks.checkpoint.table import EVERY, Cost, cost
from benchmarks.goals import MIN_VALUES, Outcome, Verdict

OURS = "tandem"
SIZE = 744.0
BLOCKED_SECONDS = 0.05
SHARE = 0.01


def judge(records: Sequence[dict[str, Any]], sides: Sequence[str], megabytes: float) -> list[Verdict]:
    """The verdicts on our side beside all others; nothing where ours was not measured and nothing failed.

    Args:
        megabytes: of state, on each rank.
    """
    failed = [record for record in records if record["kind"] == "failed" or record.get("failed")]
    if failed:
        what = ", ".join(dict.fromkeys(str(record.get("side") or record.get("mode")) for record in failed))
        return [Verdict(Outcome.MISSED, "no save fails", f"{len(failed)} failed: {what}")]
    found = {side: one for side in sides if (one := cost(records, side)) is not None}
    if OURS not in sides:
        return []
    if OURS not in found:
        return [Verdict(Outcome.MISSED, "no save fails", "none was measured")]
    bounds = [
        _bound(
            f"blocked at most {BLOCKED_SECONDS:g} s", found[OURS], _blocked(found[OURS]), BLOCKED_SECONDS, "{:.3f} s"
        ),
        _bound(
            f"a save every {EVERY} steps costs at most {SHARE:.0%}", found[OURS], found[OURS].share, SHARE, "{:.1%}"
        ),
    ]
    if megabytes != SIZE:
        bounds = [_of_another_size(verdict) for verdict in bounds]
    return [*bounds, *_beside(found)]


def _beside(found: dict[str, Cost]) -> list[Verdict]:
    """Blocked for less time than each other side."""
    ours = _blocked(found[OURS])
    others = {side: _blocked(one) for side, one in found.items() if side != OURS}
    if not others:
        return []
    nearest = min(others, key=lambda side: others[side])
    outcome = Outcome.MET if ours < others[nearest] else Outcome.MISSED
    if min(one.saves for one in found.values()) < MIN_VALUES:
        outcome = Outcome.UNJUDGED
    why = f"{ours:.3f} s, and {nearest} {others[nearest]:.3f} s"
    return [Verdict(outcome, "blocked for less time than every other side", why)]


def _bound(goal: str, found: Cost, value: float, bound: float, form: str) -> Verdict:
    why = f"{form.format(value)}, median of {found.saves} saves"
    if found.saves < MIN_VALUES:
        return Verdict(Outcome.UNJUDGED, goal, f"{why}; at least {MIN_VALUES} are needed")
    return Verdict(Outcome.MET if value <= bound else Outcome.MISSED, goal, why)


def _of_another_size(verdict: Verdict) -> Verdict:
    return Verdict(Outcome.UNJUDGED, verdict.goal, f"{verdict.why}; the goal is for {SIZE:g} MB")


def _blocked(found: Cost) -> float:
    return statistics.median(found.blocked)
