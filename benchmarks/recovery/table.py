"""Results as a markdown table. Pure: records in, text out. A failure stays in every count."""

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from benchmarks.recovery.analysis import PHASES


@dataclass(frozen=True)
class Cell:
    """One side's results for one stage of one fault."""

    seconds: list[float]
    """Recovery times of those that recovered, in order."""
    failures: int
    splits: int
    """Shots after which two groups trained and both wrote the checkpoint."""
    doubles: int
    """Shots with two groups at once, for however short a time."""
    pause: float
    """Median of the longest time without any step, from the fault to the recovery, in seconds."""
    repeated: list[int]
    """Steps taken again, of each shot."""
    lost: int
    """Shots that went back behind a committed checkpoint."""
    orphans: int
    """Shots that left processes without an agent."""
    gave_up: int
    """Agents that ended by themselves and were started again by the supervisor."""

    @property
    def shots(self) -> int:
        """All of them."""
        return len(self.seconds) + self.failures

    @property
    def median(self) -> float | None:
        """Over all shots, a failure counting as longer than anything; None if the median shot failed."""
        return quantile(self.seconds, self.failures, 0.5)

    @property
    def p95(self) -> float | None:
        """In the same way."""
        return quantile(self.seconds, self.failures, 0.95)


Row = tuple[str, str]
WHOLE = "recovery"
"""The stage of a fault that has one only."""


def quantile(seconds: Sequence[float], failures: int, part: float) -> float | None:
    """The smallest recovery time that this part of all shots does not exceed; None if that is a failure."""
    ordered = sorted(seconds)
    total = len(ordered) + failures
    if total == 0:
        return None
    if part == 0.5 and failures == 0:
        return statistics.median(ordered)
    index = max(0, -int(-part * total // 1) - 1)
    return ordered[index] if index < len(ordered) else None


def rows(records: Sequence[dict[str, Any]]) -> list[Row]:
    """Fault and stage, in the order of their first appearance."""
    found = {(record["fault"], stage["name"]): None for record in _shots(records) for stage in record["stages"]}
    return list(found)


def cell(records: Sequence[dict[str, Any]], row: Row, side: str) -> Cell | None:
    """What one side has for a row; None if it was not measured."""
    fault, name = row
    shots = [record for record in _shots(records) if record["fault"] == fault and record["side"] == side]
    stages = [stage for record in shots for stage in record["stages"] if stage["name"] == name]
    stuck = sum(
        1 for record in records if record["kind"] == "stuck" and record["fault"] == fault and record["side"] == side
    )
    if not stages and not stuck:
        return None
    good = sorted(stage["seconds"] for stage in stages if stage["seconds"] is not None)
    return Cell(
        seconds=good,
        failures=len(stages) - len(good) + stuck,
        splits=sum(record["split"] for record in shots),
        doubles=sum(bool(record["overlaps"]) for record in shots),
        pause=statistics.median(record["pauseSeconds"] for record in shots) if shots else math.nan,
        repeated=sorted(record["repeatedSteps"] for record in shots),
        lost=sum(record["lostSteps"] > 0 for record in shots),
        orphans=sum(bool(record["orphans"]) for record in shots),
        gave_up=sum(record["gaveUp"] for record in shots),
    )


def written(records: Sequence[dict[str, Any]], sides: Sequence[str]) -> str:
    """The tables of times and of damages."""
    present = [side for side in sides if any(record.get("side") == side for record in records)]
    found = {(row, side): cell(records, row, side) for row in rows(records) for side in present}
    times = _table(present, {row: [_times(found[row, side]) for side in present] for row in rows(records)})
    # What a fault cost is counted once, not for each of its stages.
    first = {fault: (fault, stage) for fault, stage in reversed(rows(records))}
    damages = _table(
        present,
        {(fault, WHOLE): [_damages(found[first[fault], side]) for side in present] for fault in dict(rows(records))},
    )
    left = [record for record in records if record["kind"] == "end" and record["left"]]
    lines = [
        "Recovered of all; seconds: median, p95, range of those that recovered.",
        "",
        times,
        "",
        "What it cost: longest pause of training (median); steps taken again (median, most); what should never be.",
        "",
        damages,
        "",
        "Where a worker kill's recovery goes, in seconds, medians.",
        "",
        breakdown(records, present),
        "",
        f"After the end of a job something was left behind {len(left)} times"
        f" in {sum(record['kind'] == 'end' for record in records)} jobs.",
    ]
    lines += [f"- {record['side']}, {record['fault']}: {'; '.join(record['left'])}" for record in left]
    return "\n".join(lines)


def breakdown(records: Sequence[dict[str, Any]], sides: Sequence[str], fault: str = "worker-kill") -> str:
    """Where the time of one fault's recovery goes: medians of the phases, for the sides that tell them."""
    lines = ["| " + " | ".join(["side", *PHASES]) + " |", "|---" * (len(PHASES) + 1) + "|"]
    for side in sides:
        shots = [record for record in _shots(records) if record["fault"] == fault and record["side"] == side]
        told = [stage["phases"] for record in shots for stage in record["stages"] if PHASES[0] in stage["phases"]]
        if told:
            medians = [f"{statistics.median(phases[name] for phases in told):.2f}" for name in PHASES]
            lines.append(f"| {side} | " + " | ".join(medians) + " |")
    return "\n".join(lines)


def _shots(records: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    return [record for record in records if record["kind"] == "shot"]


def _table(sides: Sequence[str], body: dict[Row, list[str]]) -> str:
    lines = ["| fault | " + " | ".join(sides) + " |", "|---" * (len(sides) + 1) + "|"]
    for (fault, stage), cells in body.items():
        name = fault if stage == WHOLE else f"{fault}: {stage}"
        lines.append(f"| {name} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def _times(found: Cell | None) -> str:
    if found is None:
        return "–"
    text = f"{len(found.seconds)} of {found.shots}"
    if found.seconds:
        median, p95 = _seconds(found.median), _seconds(found.p95)
        text += f"; {median}, {p95}; {_seconds(found.seconds[0])} to {_seconds(found.seconds[-1])}"
    return text


def _seconds(value: float | None) -> str:
    return "never" if value is None else f"{value:.2f}" if value < 10 else f"{value:.1f}"


def _damages(found: Cell | None) -> str:
    if found is None:
        return "–"
    parts = []
    if found.repeated:
        parts = [f"{found.pause:.1f} s; {found.repeated[len(found.repeated) // 2]}, {found.repeated[-1]}"]
    named = {
        "SPLIT, both wrote": found.splits,
        "two groups at once": found.doubles - found.splits,
        "went behind a checkpoint": found.lost,
        "orphans": found.orphans,
        "agents gave up": found.gave_up,
    }
    return "; ".join(parts + [f"{name}: {count}" for name, count in named.items() if count])
