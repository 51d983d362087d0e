"""Runs in a coordinator's pod, and prints what the run directory says of each generation.

It reads what the first rank of each generation wrote, with its clock: exact to milliseconds, and no question of who
looked when. A plain script leaves no records of generations; its first line says how many ranks there are.
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
    """The first and the last step of a log, none if it has none."""
    lines = path.read_text().splitlines() if path.exists() else []
    # The last line may be half written.
    steps = [line for line in lines if '"kind": "step"' in line and line.endswith("}")]
    return [json.loads(line) for line in (steps[0], steps[-1])] if steps else []


def about(number: int, world_size: int, started_at: float, ends: list[dict[str, Any]]) -> dict[str, Any]:
    """A generation, and where its steps begin and end."""
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
