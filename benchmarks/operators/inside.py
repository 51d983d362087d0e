"""Runs in a coordinator's pod, and prints the state of the run directory for each generation.

It reads the log of the first rank of each generation, with its clock: exact to milliseconds, and independent of the
time of reading. A plain script leaves no records of generations; its first line has the number of ranks.
"""

import json
import os
from pathlib import Path
from typing import Any

from tandem.rundir.layout import RunDir


def main() -> None:
    """Print one JSON object."""
    rundir = RunDir(os.environ["TANDEM_RUN_DIR"])
    generations = []
    for record in rundir.generation_records():
        ends = first_and_last(rundir.path / "log" / f"train-g{record.generation:06d}.jsonl")
        generations.append(about(record.generation, record.world_size, record.started_at, ends))
    for path in sorted(rundir.path.glob("script-g*.jsonl")):
        if ends := first_and_last(path):
            number = int(path.stem.removeprefix("script-g"))
            generations.append(about(number, ends[0]["world"], ends[0]["time"], ends))
    print(json.dumps({"generations": generations, "damaged": rundir.damaged()}))


def first_and_last(path: Path) -> list[dict[str, Any]]:
    """Read the first and the last step of a log; empty if it has none."""
    lines = path.read_text().splitlines() if path.exists() else []
    # The last line may be incomplete.
    steps = [line for line in lines if '"kind": "step"' in line and line.endswith("}")]
    return [json.loads(line) for line in (steps[0], steps[-1])] if steps else []


def about(number: int, world_size: int, started_at: float, ends: list[dict[str, Any]]) -> dict[str, Any]:
    """Describe a generation, and its first and last step."""
    return {
        "generation": number,
        "worldSize": world_size,
        "startedAt": started_at,
        "first": ends[0]["time"] if ends else None,
        "last": ends[1]["time"] if ends else None,
        "from": ends[0]["step"] if ends else None,
        "to": ends[1]["step"] if ends else None,
    }


main()
