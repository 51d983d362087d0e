"""JSON-lines logs as a report finds them: still growing, torn by a crash, damaged, or not there.

`tandem.rundir.durable.read_lines` returns a whole log as a list, which is right for a reader that follows one. A report
meets logs of a million lines, so this one streams; and it counts what it cannot read, because a page that silently
leaves something out is worse than none.
"""

import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

Record = dict[str, Any]

LARGEST = 3.5e38
LATEST = 1e11
"""Seconds: the year 5138. A later time is damage."""

LONGEST_LINE = 2**20
"""Bytes. Nothing of ours comes near; a file without line ends is not read into memory as one line."""


def stream(path: Path, faults: list[str]) -> Iterator[Record]:
    """The records of a log, in order. Each has a `time` and a `kind`.

    A missing file has none. What cannot be read is counted, and one sentence about it is added to `faults` at the end;
    an incomplete last line is the normal state of a log that is being written, or whose writer was killed, and is not.
    """
    unreadable = 0
    try:
        with path.open("rb") as file:
            while line := file.readline(LONGEST_LINE):
                if not line.endswith(b"\n") and len(line) < LONGEST_LINE:
                    record = _parsed(line)
                    if record is not None:
                        yield record
                    break
                if line.isspace():
                    continue
                record = _parsed(line)
                if record is None:
                    unreadable += 1
                else:
                    yield record
    except FileNotFoundError:
        return
    except OSError as error:
        faults.append(f"log/{path.name} could not be read to its end: {error.strerror}")
    if unreadable:
        what = "line that is" if unreadable == 1 else "lines that are"
        faults.append(f"log/{path.name} has {unreadable:,} {what} not a record; passed over")


def number(value: object) -> float:
    """The number that a record holds, NaN for anything else. What no float32 can hold is infinite."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return math.nan
    return float(value) if not abs(value) > LARGEST else math.copysign(math.inf, value)


def within(value: object, low: float, high: float) -> float:
    """The number that a record holds if it can be true, NaN for anything else."""
    found = number(value)
    return found if low <= found <= high else math.nan


def seconds(value: object) -> float | None:
    """The length of time that a record holds, None for anything else."""
    found = within(value, 0, LATEST)
    return None if math.isnan(found) else found


def moment(value: object) -> float | None:
    """The time that a record holds, seconds since the epoch, None for anything else."""
    return seconds(value) or None


def text(value: object) -> str:
    """The text that a record holds, "" for anything else."""
    return value if isinstance(value, str) else ""


def mapping(value: object) -> Record:
    """The object that a record holds, {} for anything else."""
    return value if isinstance(value, dict) else {}


def _parsed(line: bytes) -> Record | None:
    try:
        record = json.loads(line)
    except (ValueError, RecursionError):
        return None
    if not isinstance(record, dict) or not isinstance(record.get("kind"), str):
        return None
    return record if moment(record.get("time")) is not None else None
