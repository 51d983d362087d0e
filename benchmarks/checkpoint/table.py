"""Results as a Markdown table. Pure: records in, text out. A failure is counted everywhere."""

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

EVERY = 50
"""Steps between two saves, for the share of training time."""


@dataclass(frozen=True)
class Cost:
    """Cost of one side's saves, in seconds; medians over its saves unless stated otherwise."""

    saves: int
    failed: int
    blocked: list[float]
    """Stall of training on the slowest rank for each save, in ascending order."""
    computed: float
    """Processor time of the training thread in the stall: on busy cores it also waits for its turn."""
    commit: float
    """Time from the call until all ranks are done."""
    step: float
    """A step without a save."""
    slower: float
    """Steps during the commit over steps without a save."""
    total: float
    """Time that a save adds to training: the stall, and the slowdown of the steps until its end."""

    @property
    def share(self) -> float:
        """Share of the training time, with a save every EVERY steps."""
        return self.total / (EVERY * self.step + self.total)


def cost(records: Sequence[dict[str, Any]], side: str) -> Cost | None:
    """Compute the cost of a side's saves; None if none succeeded."""
    saves = [record for record in records if record["kind"] == "save" and record["side"] == side]
    good = [record for record in saves if not record["failed"]]
    if not good:
        return None
    normal = [statistics.median(record["before"]) for record in good]
    return Cost(
        saves=len(saves),
        failed=len(saves) - len(good),
        blocked=sorted(record["blocked"] for record in good),
        computed=statistics.median(record["computed"] for record in good),
        commit=statistics.median(record["commit"] for record in good),
        step=statistics.median(normal),
        slower=statistics.median(
            statistics.fmean(record["after"]) / step for record, step in zip(good, normal, strict=True)
        ),
        total=statistics.median(
            record["blocked"] + sum(record["after"]) - len(record["after"]) * step
            for record, step in zip(good, normal, strict=True)
        ),
    )


def p95(ordered: Sequence[float]) -> float:
    """The smallest value that 95 % of all do not exceed."""
    return ordered[math.ceil(0.95 * len(ordered)) - 1]


def written(records: Sequence[dict[str, Any]], sides: Sequence[str]) -> str:
    """Format the table."""
    memory = {record["side"]: record for record in records if record["kind"] == "memory"}
    lines = [
        "| side | saves | blocked, s: median, p95, range | computing | done after, s | steps meanwhile "
        f"| a save costs, s | every {EVERY} steps | memory, GB: most, after |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for side in sides:
        side_cost, side_memory = cost(records, side), memory.get(side)
        space = "–" if side_memory is None else f"{side_memory['peak'] / 1e9:.2f}, {side_memory['after'] / 1e9:.2f}"
        if side_cost is None:
            failed = sum(record["kind"] == "save" and record["side"] == side for record in records)
            lines.append(f"| {side} | 0 of {failed} | – | – | – | – | – | – | {space} |")
            continue
        low, high = side_cost.blocked[0], side_cost.blocked[-1]
        middle = statistics.median(side_cost.blocked)
        lines.append(
            f"| {side} | {side_cost.saves - side_cost.failed} of {side_cost.saves} "
            f"| **{middle:.3f}**, {p95(side_cost.blocked):.3f}, {low:.3f} to {high:.3f} "
            f"| {side_cost.computed:.3f} | {side_cost.commit:.2f} "
            f"| × {side_cost.slower:.2f} | {side_cost.total:.2f} | {side_cost.share:.1%} | {space} |"
        )
    return "\n".join(lines)
