"""What became of the goals for Tandem's sides. Pure: records in, verdicts out.

- No side of Tandem's may leave a fault without a recovery, two groups at once, a committed step that is taken again, a
  process without an agent, or anything behind after the end of its job: not once.
- For the stages in BOUNDS the median of every warm side of Tandem's, with its defaults as with the best settings, is
  within the bound, and below the median of every side of c10d's that was measured beside it.

A failure counts in a median as longer than anything. Fewer than `goals.MIN_VALUES` faults are not judged by time.
"""

import math
import statistics
from collections.abc import Iterator, Sequence
from typing import Any

from benchmarks.goals import MIN_VALUES, Outcome, Verdict, at_most
from benchmarks.recovery.table import WHOLE, Cell, Row, cell, rows

OURS, COLD = "tandem", "tandem-cold"
"""How names of sides begin: Tandem's, and those that start cold."""
BOUNDS: dict[Row, float] = {("worker-kill", WHOLE): 0.3, ("node-loss", "the rest goes on"): 2.5}
"""Seconds."""


def judge(records: Sequence[dict[str, Any]]) -> list[Verdict]:
    """The verdicts; nothing where no side of Tandem's was measured."""
    sides = list(dict.fromkeys(record["side"] for record in records if "side" in record))
    ours = [side for side in sides if side.startswith(OURS)]
    if not ours:
        return []
    found = [*_stuck_rows(records), *rows(records)]
    cells = {(row, side): one for row in dict.fromkeys(found) for side in sides if (one := cell(records, row, side))}
    verdicts = [_sound(records, {key: one for key, one in cells.items() if key[1] in ours})]
    for row, bound in BOUNDS.items():
        for side in ours:
            if not side.startswith(COLD) and (row, side) in cells:
                peers = {other: one for (its, other), one in cells.items() if its == row and other not in ours}
                verdicts += _timed(f"{side}, {_named(row)}", cells[row, side], bound, peers)
    return verdicts


def _sound(records: Sequence[dict[str, Any]], cells: dict[tuple[Row, str], Cell]) -> Verdict:
    goal = "Tandem recovers from every fault, with one group, and leaves nothing behind"
    troubles = [f"{side}, {_named(row)}: {words}" for (row, side), one in cells.items() for words in _troubles(one)]
    troubles += [
        f"{record['side']}, {record['fault']}: left behind: {'; '.join(record['left'])}"
        for record in records
        if record["kind"] == "end" and record["left"] and record["side"].startswith(OURS)
    ]
    shots = sum(record["kind"] == "shot" and record["side"].startswith(OURS) for record in records)
    if troubles:
        return Verdict(Outcome.MISSED, goal, "; ".join(dict.fromkeys(troubles)))
    return Verdict(Outcome.MET, goal, f"{shots} faults")


def _troubles(found: Cell) -> Iterator[str]:
    named = {
        f"of {found.shots} not recovered": found.failures,
        "with two groups at once": found.doubles,
        "went behind a checkpoint": found.lost,
        "left processes without an agent": found.orphans,
    }
    yield from (f"{count} {words}" for words, count in named.items() if count)


def _timed(who: str, found: Cell, bound: float, peers: dict[str, Cell]) -> Iterator[Verdict]:
    ours = _seconds(found)
    yield at_most(f"{who}: at most {bound:g} s", ours, bound)
    for peer, one in peers.items():
        theirs, goal = _seconds(one), f"{who}: below {peer}"
        if min(len(ours), len(theirs)) < MIN_VALUES:
            yield Verdict(Outcome.UNJUDGED, goal, f"{len(ours)} and {len(theirs)} faults, {MIN_VALUES} are needed")
            continue
        own, other = statistics.median(ours), statistics.median(theirs)
        # Where both never recover, neither is below.
        outcome = Outcome.MET if own < other else Outcome.MISSED
        yield Verdict(outcome, goal, f"medians {_shown(own)} and {_shown(other)}")


def _seconds(found: Cell) -> list[float]:
    return [*found.seconds, *[math.inf] * found.failures]


def _stuck_rows(records: Sequence[dict[str, Any]]) -> list[Row]:
    """Faults that could not be played on a side, which is a failure of it."""
    return [(record["fault"], WHOLE) for record in records if record["kind"] == "stuck"]


def _named(row: Row) -> str:
    return row[0] if row[1] == WHOLE else f"{row[0]}, {row[1]}"


def _shown(seconds: float) -> str:
    return f"{seconds:.2f} s" if math.isfinite(seconds) else "never"
