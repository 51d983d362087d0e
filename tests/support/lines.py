"""Logs as dictionaries, a line each: what a test writes may be wrong in any way, and what it reads may be of any kind.

The product's own are typed (tandem.rundir.records), written by `LogWriter` and read by `LogReader`.
"""

import json
from pathlib import Path
from typing import Any

from tandem.rundir import durable


class Lines:
    """A log that a test writes."""

    def __init__(self, path: Path) -> None:
        self._lines = durable.Lines(path)

    def append(self, *records: dict[str, Any]) -> None:
        self._lines.append(*(json.dumps(record).encode() for record in records))

    def close(self) -> None:
        self._lines.close()


def read_lines(path: Path, offset: int = 0) -> tuple[list[dict[str, Any]], int]:
    """The whole lines of a log from a byte offset on, and the offset to go on from; none where there is no log.

    Raises:
        ValueError: a whole line is not JSON.
    """
    if not path.exists():
        return [], offset
    data = path.read_bytes()[offset:]
    end = data.rfind(b"\n") + 1
    return [json.loads(line) for line in data[:end].splitlines() if line], offset + end
