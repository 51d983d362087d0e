"""Results as a Markdown table. Pure: records in, text out. A failure is counted everywhere."""

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from benchmarks.recovery.analysis import PHASES


@dataclass(frozen=True)
class Cell:
    """Results of one side for one stage of one fault."""

    seconds: list[float]
    """Recovery times of the shots that recovered, ascending."""
    failures: int
    splits: int
    """Shots after which two groups trained and both wrote the checkpoint."""
    doubles: int
    """Shots with two groups at the same time, however briefly."""
    pause: float
    """Median of the longest time without any step, from the fault to the recovery, in seconds."""
    repeated: list[int]
    """Repeated steps of each shot."""
    dropped: int
    """Batches of ranks that took no part in any step."""
    lost: int
    """Shots that went back behind a committed checkpoint."""
    orphans: int
    """Shots that left processes without an agent."""
    gave_up: int
    """Agents that ended by themselves and were restarted by the supervisor."""

    @property
    def shots(self) -> int:
        """Number of shots."""
        return len(self.seconds) + self.failures

    @property
    def median(self) -> float | None:
        """Median over all shots, a failure counting as longer than anything; None if the median shot failed."""
        return quantile(self.seconds, self.failures, 0.5)

    @property
    def p95(self) -> float | None:
        """95th percentile over all shots; None if that shot failed."""
        return quantile(self.seconds, self.failures, 0.95)


Row = tuple[str, str]
SINGLE_STAGE = "recovery"
"""Stage of a fault that has only one."""


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
    """List fault and stage, in the order of their first appearance."""
    keys = {(record["fault"], stage["name"]): None for record in _shots(records) for stage in record["stages"]}
    return list(keys)


def cell(records: Sequence[dict[str, Any]], row: Row, side: str) -> Cell | None:
    """Results of one side for a row; None if it was not measured."""
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
        dropped=sum(record.get("droppedBatches", 0) for record in shots),
        lost=sum(record["lostSteps"] > 0 for record in shots),
        orphans=sum(bool(record["orphans"]) for record in shots),
        gave_up=sum(record["gaveUp"] for record in shots),
    )


def written(records: Sequence[dict[str, Any]], sides: Sequence[str]) -> str:
    """Format the tables of times and of damage."""
    present = [side for side in sides if any(record.get("side") == side for record in records)]
    cells = {(row, side): cell(records, row, side) for row in rows(records) for side in present}
    times = _table(present, {row: [_times(cells[row, side]) for side in present] for row in rows(records)})
    # The cost of a fault is counted once, not for each of its stages.
    first = {fault: (fault, stage) for fault, stage in reversed(rows(records))}
    damages = _table(
        present,
        {
            (fault, SINGLE_STAGE): [_damages(cells[first[fault], side]) for side in present]
            for fault in dict(rows(records))
        },
    )
    leftovers = [record for record in records if record["kind"] == "end" and record["left"]]
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
        f"After the end of a job something was left behind {len(leftovers)} times"
        f" in {sum(record['kind'] == 'end' for record in records)} jobs.",
    ]
    lines += [f"- {record['side']}, {record['fault']}: {'; '.join(record['left'])}" for record in leftovers]
    return "\n".join(lines)


def breakdown(records: Sequence[dict[str, Any]], sides: Sequence[str], fault: str = "worker-kill") -> str:
    """Phases of one fault's recovery: medians, for the sides that report them."""
    lines = ["| " + " | ".join(["side", *PHASES]) + " |", "|---" * (len(PHASES) + 1) + "|"]
    for side in sides:
        shots = [record for record in _shots(records) if record["fault"] == fault and record["side"] == side]
        reported = [stage["phases"] for record in shots for stage in record["stages"] if PHASES[0] in stage["phases"]]
        if reported:
            medians = [f"{statistics.median(phases[name] for phases in reported):.2f}" for name in PHASES]
            lines.append(f"| {side} | " + " | ".join(medians) + " |")
    return "\n".join(lines)


def _shots(records: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    return [record for record in records if record["kind"] == "shot"]


def _table(sides: Sequence[str], body: dict[Row, list[str]]) -> str:
    lines = ["| fault | " + " | ".join(sides) + " |", "|---" * (len(sides) + 1) + "|"]
    for (fault, stage), cells in body.items():
        name = fault if stage == SINGLE_STAGE else f"{fault}: {stage}"
        lines.append(f"| {name} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def _times(result: Cell | None) -> str:
    if result is None:
        return "–"
    text = f"{len(result.seconds)} of {result.shots}"
    if result.seconds:
        median, p95 = _seconds(result.median), _seconds(result.p95)
        text += f"; {median}, {p95}; {_seconds(result.seconds[0])} to {_seconds(result.seconds[-1])}"
    return text


def _seconds(value: float | None) -> str:
    return "never" if value is None else f"{value:.2f}" if value < 10 else f"{value:.1f}"


def _damages(result: Cell | None) -> str:
    if result is None:
        return "–"
    parts = []
    if result.repeated:
        parts = [f"{result.pause:.1f} s; {result.repeated[len(result.repeated) // 2]}, {result.repeated[-1]}"]
    damages = {
        "SPLIT, both wrote": result.splits,
        "two groups at once": result.doubles - result.splits,
        "went behind a checkpoint": result.lost,
        "batches dropped": result.dropped,
        "orphans": result.orphans,
        "agents gave up": result.gave_up,
    }
    return "; ".join(parts + [f"{name}: {count}" for name, count in damages.items() if count])
