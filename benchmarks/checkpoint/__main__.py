"""Cost of a checkpoint for training, Tandem beside alternatives: `make bench-checkpoint`, or

    python -m benchmarks.checkpoint [--megabytes 744] [--rounds 10] [--seconds 480] [--ranks 2] [--sides tandem …]
    python -m benchmarks.checkpoint --table FILE…      a table of earlier results

One job of gloo ranks of one thread each trains a model whose weights and Adam moments have this size, and saves with
each side in turn (A B C A B C), because the speed of a shared machine drifts. Before each save some steps are timed,
and after it all steps until it is done. Memory is measured afterwards, in a job for each side, because looking at it
takes time. Results go to runs/checkpoint/, one record a line, as they come; so do the checkpoints, which are deleted.

Exit codes: 0 where all goals of `verdict` are met; 1 where one is missed or a save failed; 3 where one could not be
judged, because the saves were too few or the state of another size, and none is missed.
"""

import argparse
import importlib.util
import json
import os
import platform
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from benchmarks.checkpoint.table import written
from benchmarks.checkpoint.verdict import SIZE, judge
from benchmarks.goals import conclude
from tests.support import ROOT

RESULTS = ROOT / "runs" / "checkpoint"
SIDES = ("tandem", "torch.save", "dcp.save", "dcp.async_save, thread", "dcp.async_save, process", "accelerate")
MAX_CHECKPOINTS = len(SIDES) + 1
"""Checkpoints that may be on the disk at the same time; Tandem's deletes the last one once the next is committed."""
MEMORY_SECONDS = 300.0


def main() -> None:
    """Measure, or show earlier results."""
    options = _options()
    if options.table:
        records = [json.loads(line) for path in options.table for line in path.read_text().splitlines()]
        print(written(records, SIDES))
        return
    sides = [side for side in options.sides if side != "accelerate" or importlib.util.find_spec("accelerate")]
    if missing := set(options.sides) - set(sides):
        print(f"left out, because it is not installed: {', '.join(missing)}")
    RESULTS.mkdir(parents=True, exist_ok=True)
    _check_space(options.megabytes)
    path = RESULTS / f"{time.strftime('%Y%m%d-%H%M%S')}-{os.getpid()}.jsonl"
    options.output = path.with_suffix(".txt")
    records = []
    print(f"{platform.machine()}, {os.cpu_count()} cores; results in {path.relative_to(ROOT)}", flush=True)
    with path.open("a", buffering=1) as file, tempfile.TemporaryDirectory(dir=RESULTS) as folder:
        for record in _measured(sides, Path(folder), options):
            print(json.dumps(record), file=file)
            records.append(record)
            if record["kind"] == "save":
                print(f"  {record['round']}/{options.rounds} {record['side']}: {_described(record)}", flush=True)
    print(written(records, sides) + "\n")
    verdicts = judge(records, sides, options.megabytes)
    sys.exit(conclude(verdicts))


def _measured(sides: list[str], folder: Path, options: argparse.Namespace) -> Iterator[dict[str, Any]]:
    yield {
        "kind": "run",
        "commit": subprocess.run(
            ["git", "describe", "--always", "--dirty"], cwd=ROOT, capture_output=True, text=True
        ).stdout.strip(),
        "cores": os.cpu_count(),
        "load": os.getloadavg()[0],
        "at": time.time(),
        "ranks": options.ranks,
        "elsewhere": options.elsewhere,
        "megabytes": options.megabytes,
    }
    # A warm-up round, the rounds, and the slowest disk that one would wait for.
    yield from _job("time", sides, folder / "time", options, limit=2 * options.seconds + 300)
    for side in sides if options.memory else ():
        yield from _job("memory", [side], folder / f"memory-{sides.index(side)}", options, limit=MEMORY_SECONDS)


def _job(
    mode: str, sides: list[str], folder: Path, options: argparse.Namespace, limit: float
) -> Iterator[dict[str, Any]]:
    """Run the ranks; yields their records. Ranks are killed when they take too long."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={options.ranks}"]
    command += ["-m", "benchmarks.checkpoint.script", mode, "--folder", str(folder), "--sides", *sides]
    for name in ("megabytes", "rounds", "seconds", "steps", "elsewhere"):
        command += [f"--{name}", str(getattr(options, name))]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    with options.output.open("a") as output:
        process = subprocess.Popen(
            ["timeout", "--signal=INT", "--kill-after=20", str(limit), *command],
            cwd=ROOT,
            env=environment,
            stdout=subprocess.PIPE,
            stderr=output,
            text=True,
        )
    try:
        assert process.stdout is not None
        for line in process.stdout:
            if line.startswith("{"):
                yield json.loads(line)
        if process.wait(60) != 0:
            yield {"kind": "failed", "mode": mode, "sides": sides, "code": process.returncode}
            print(f"  {mode} of {', '.join(sides)}: exit code {process.returncode}; see {options.output}", flush=True)
    finally:
        process.terminate()
        process.wait(60)
        shutil.rmtree(folder, ignore_errors=True)


def _check_space(megabytes: float) -> None:
    needed, free = MAX_CHECKPOINTS * megabytes * 1e6 + 1e9, shutil.disk_usage(RESULTS).free
    if free < needed:
        sys.exit(
            f"{RESULTS} has {free / 1e9:.1f} GB left; {needed / 1e9:.1f} GB are needed for --megabytes {megabytes}"
        )


def _described(record: dict[str, Any]) -> str:
    if record["failed"]:
        return f"FAILED {record['problem']}"
    step = statistics.median(record["before"])
    return f"blocked {record['blocked']:.3f} s, done after {record['commit']:.2f} s, a step {step:.2f} s"


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description="What a checkpoint costs training, compared.", prog="python -m benchmarks.checkpoint"
    )
    parser.add_argument("--megabytes", type=float, default=SIZE, help="weights and moments, on each rank")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--elsewhere", type=int, default=0, help="ranks of these that take no steps, as if elsewhere")
    parser.add_argument("--rounds", type=int, default=10, help="saves of each side that count")
    parser.add_argument("--seconds", type=float, default=480, help="begin no further round after so long")
    parser.add_argument("--steps", type=int, default=5, help="steps timed before each save")
    parser.add_argument("--sides", nargs="+", choices=SIDES, default=list(SIDES))
    parser.add_argument("--no-memory", dest="memory", action="store_false", help="leave the memory out")
    parser.add_argument("--table", nargs="+", type=Path, metavar="FILE", help="show results that are there")
    return parser.parse_args()


if __name__ == "__main__":
    main()
