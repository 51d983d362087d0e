"""Runs in a coordinator's pod, and prints what the run directory says of each generation.

It reads what the first rank of each generation wrote, with its clock: exact to milliseconds, and no question of who
looked when.
"""

import json
import os

from tandem.rundir import RunDir


def main() -> None:
    """Print one JSON object."""
    rundir = RunDir(os.environ["TANDEM_RUN_DIR"])
    generations = []
    for record in rundir.generation_records():
        named = f"g{record.generation:06d}.jsonl"
        path = rundir.path / "log" / f"train-{named}"
        if not path.exists():
            path = rundir.path / f"script-{named}"
        lines = path.read_text().splitlines() if path.exists() else []
        # The last line may be half written.
        steps = [line for line in lines if '"kind": "step"' in line and line.endswith("}")]
        ends = [json.loads(line) for line in (steps[0], steps[-1])] if steps else []
        generations.append(
            {
                "generation": record.generation,
                "worldSize": record.world_size,
                "startedAt": record.started_at,
                "first": ends[0]["time"] if ends else None,
                "last": ends[1]["time"] if ends else None,
                "from": ends[0]["step"] if ends else None,
                "to": ends[1]["step"] if ends else None,
            }
        )
    print(json.dumps({"generations": generations, "damaged": rundir.damaged()}))


main()
