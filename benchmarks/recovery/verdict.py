"""Verdicts on the goals for Tandem's sides. Pure: records in, verdicts out.

- No side of Tandem's may leave a fault without a recovery, two groups at the same time, a committed step that is
  repeated, a process without an agent, or any remains after the end of its job: not once.
- For the stages in BOUNDS the median of every warm side of Tandem's, with its defaults as with the best settings, is
  within the bound, and below the median of every side of others that was measured beside it.
- Where ranks keep their step, the pause of the others after a worker's death has a bound instead, PAUSE_SECONDS, and
  no step is taken again after a fault that a member survives.

A failure counts in a median as longer than anything. Fewer than `goals.MIN_VALUES` faults are not judged by time.
"""

import math
import statistics
from collections.abc import Iterator, Sequence
from typing import Any

from benchmarks.goals import MIN_VALUES, Outcome, Verdict, judge_median
from benchmarks.recovery.table import SINGLE_STAGE, Cell, Row, cell, rows

TANDEM, COLD = "tandem", "tandem-cold"
"""Prefixes of the names of sides: Tandem's, and those that start cold."""
REGROUPS = "tandem-regroup"
"""Prefix of the names of sides whose ranks keep their step."""
PAUSE_SECONDS = 0.35
SURVIVED = ("worker-kill", "node-loss", "preemption", "stop", "agent-kill")
"""Faults that a member survives, with what it holds."""
BOUNDS: dict[Row, float] = {("worker-kill", SINGLE_STAGE): 0.3, ("node-loss", "the rest goes on"): 2.5}
"""Goals in seconds, by row."""


def judge(records: Sequence[dict[str, Any]]) -> list[Verdict]:
    """Judge Tandem's sides; no verdict if none was measured."""
    sides = list(dict.fromkeys(record["side"] for record in records if "side" in record))
    own_sides = [side for side in sides if side.startswith(TANDEM)]
    if not own_sides:
        return []
    row_keys = [*_stuck_rows(records), *rows(records)]
    cells = {
        (row, side): result for row in dict.fromkeys(row_keys) for side in sides if (result := cell(records, row, side))
    }
    verdicts = [_sound(records, {key: result for key, result in cells.items() if key[1] in own_sides})]
    for row, bound in BOUNDS.items():
        for side in own_sides:
            if not side.startswith(COLD) and (row, side) in cells:
                peers = {
                    other: result for (its, other), result in cells.items() if its == row and other not in own_sides
                }
                keeps_step = side.startswith(REGROUPS) and row[0] == "worker-kill"
                verdicts += _timed(
                    f"{side}, {_row_title(row)}", cells[row, side], math.inf if keeps_step else bound, peers
                )
    return verdicts + [
        verdict for side in own_sides if side.startswith(REGROUPS) for verdict in _judge_steps(records, side)
    ]


def _judge_steps(records: Sequence[dict[str, Any]], side: str) -> Iterator[Verdict]:
    """Judge that the others go on at once, and take no step again."""
    shots = [record for record in records if record["kind"] == "shot" and record["side"] == side]
    pauses = [record["pauseSeconds"] for record in shots if record["fault"] == "worker-kill"]
    if pauses:
        yield judge_median(
            f"{side}, worker-kill: the rest pauses for at most {PAUSE_SECONDS:g} s", pauses, PAUSE_SECONDS
        )
    survived = [record["repeatedSteps"] for record in shots if record["fault"] in SURVIVED]
    if survived:
        repeated = sum(steps > 0 for steps in survived)
        outcome = Outcome.MISSED if repeated else Outcome.MET
        yield Verdict(outcome, f"{side}: no step is taken again", f"after {repeated} of {len(survived)} faults")


def _sound(records: Sequence[dict[str, Any]], cells: dict[tuple[Row, str], Cell]) -> Verdict:
    goal = "Tandem recovers from every fault, with one group, and leaves nothing behind"
    troubles = [
        f"{side}, {_row_title(row)}: {trouble}"
        for (row, side), result in cells.items()
        for trouble in _troubles(result)
    ]
    troubles += [
        f"{record['side']}, {record['fault']}: left behind: {'; '.join(record['left'])}"
        for record in records
        if record["kind"] == "end" and record["left"] and record["side"].startswith(TANDEM)
    ]
    shots = sum(record["kind"] == "shot" and record["side"].startswith(TANDEM) for record in records)
    if troubles:
        return Verdict(Outcome.MISSED, goal, "; ".join(dict.fromkeys(troubles)))
    return Verdict(Outcome.MET, goal, f"{shots} faults")


def _troubles(result: Cell) -> Iterator[str]:
    counts = {
        f"of {result.shots} not recovered": result.failures,
        "with two groups at once": result.doubles,
        "went behind a checkpoint": result.lost,
        "left processes without an agent": result.orphans,
    }
    yield from (f"{count} {trouble}" for trouble, count in counts.items() if count)


def _timed(subject: str, result: Cell, bound: float, peers: dict[str, Cell]) -> Iterator[Verdict]:
    own_seconds = _seconds(result)
    if math.isfinite(bound):
        yield judge_median(f"{subject}: at most {bound:g} s", own_seconds, bound)
    for peer, peer_result in peers.items():
        peer_seconds, goal = _seconds(peer_result), f"{subject}: below {peer}"
        if min(len(own_seconds), len(peer_seconds)) < MIN_VALUES:
            yield Verdict(
                Outcome.UNJUDGED, goal, f"{len(own_seconds)} and {len(peer_seconds)} faults, {MIN_VALUES} are needed"
            )
            continue
        own, other = statistics.median(own_seconds), statistics.median(peer_seconds)
        # If neither recovers, neither is below.
        outcome = Outcome.MET if own < other else Outcome.MISSED
        yield Verdict(outcome, goal, f"medians {_formatted(own)} and {_formatted(other)}")


def _seconds(result: Cell) -> list[float]:
    return [*result.seconds, *[math.inf] * result.failures]


def _stuck_rows(records: Sequence[dict[str, Any]]) -> list[Row]:
    """List faults that could not be played on a side, which is a failure of it."""
    return [(record["fault"], SINGLE_STAGE) for record in records if record["kind"] == "stuck"]


def _row_title(row: Row) -> str:
    return row[0] if row[1] == SINGLE_STAGE else f"{row[0]}, {row[1]}"


def _formatted(seconds: float) -> str:
    return f"{seconds:.2f} s" if math.isfinite(seconds) else "never"
