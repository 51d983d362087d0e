"""Results as a Markdown table. Pure: records in, text out. A failure stays in every count."""

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

EVERY = 50
"""Steps from save to save, for the share of the time that saves cost."""


@dataclass(frozen=True)
class Cost:
    """What one side's saves cost, in seconds; medians over its saves unless said otherwise."""

    saves: int
    failed: int
    blocked: list[float]
    """Of each save, in order of size: training stood still on the slowest rank."""
    computed: float
    """What of that the training thread itself was on a processor: on busy cores it also waits for its turn."""
    commit: float
    """From the call until all ranks were done."""
    step: float
    """A step without a save."""
    slower: float
    """Steps during the commit over steps without a save."""
    total: float
    """What a save adds to the time of training: blocked, and what the steps until its end took longer."""

    @property
    def share(self) -> float:
        """Part of the training time, with a save every EVERY steps."""
        return self.total / (EVERY * self.step + self.total)


def cost(records: Sequence[dict[str, Any]], side: str) -> Cost | None:
    """What a side's saves cost; None if none succeeded."""
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
    """The table."""
    memory = {record["side"]: record for record in records if record["kind"] == "memory"}
    lines = [
        "| side | saves | blocked, s: median, p95, range | computing | done after, s | steps meanwhile "
        f"| a save costs, s | every {EVERY} steps | memory, GB: most, after |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for side in sides:
        found, held = cost(records, side), memory.get(side)
        space = "–" if held is None else f"{held['peak'] / 1e9:.2f}, {held['after'] / 1e9:.2f}"
        if found is None:
            failed = sum(record["kind"] == "save" and record["side"] == side for record in records)
            lines.append(f"| {side} | 0 of {failed} | – | – | – | – | – | – | {space} |")
            continue
        low, high = found.blocked[0], found.blocked[-1]
        middle = statistics.median(found.blocked)
        lines.append(
            f"| {side} | {found.saves - found.failed} of {found.saves} "
            f"| **{middle:.3f}**, {p95(found.blocked):.3f}, {low:.3f} to {high:.3f} "
            f"| {found.computed:.3f} | {found.commit:.2f} "
            f"| × {found.slower:.2f} | {found.total:.2f} | {found.share:.1%} | {space} |"
        )
    return "\n".join(lines)
