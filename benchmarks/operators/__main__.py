"""Cost and speed of the operator, on a real Kubernetes: `make bench-operator`, or

    python -m benchmarks.operators [--only scale|pods|nodes] [--jobs 1000] [--seconds 60] [--rounds 20]
    python -m benchmarks.operators --only scale --operators tandem kubeflow kubeflow=250   beside another operator
    python -m benchmarks.operators --table FILE…       tables of earlier results

KUBECONFIG names the cluster (docs/development/testing.md says how to start one). Each part works in a namespace of its
own, and deletes it. Results go to runs/operator/, one record a line, with the load of the machine.

Exit codes: 0 where all goals of `table` are met; 1 where one is missed; 3 where one could not be judged, because the
rounds were too few, and none is missed.
"""

import argparse
import asyncio
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from benchmarks.goals import conclude
from benchmarks.operators import kubeflow, nodes, ours, pods, scale, table
from benchmarks.operators.subject import Subject
from benchmarks.operators.table import Record
from tests.support import ROOT
from tests.support.cluster.machine.places import KUBECONFIG

RESULTS = ROOT / "runs" / "operator"
PARTS = ("scale", "pods", "nodes")
SUBJECTS = {"tandem": ours.TANDEM, "kubeflow": kubeflow.DEFAULT, "kubeflow-raised": kubeflow.RAISED}


def main() -> None:
    """Measure, or show earlier results."""
    options = _options()
    if options.table:
        _show([json.loads(line) for path in options.table for line in path.read_text().splitlines()])
        return
    if "KUBECONFIG" not in os.environ:
        sys.exit("set KUBECONFIG to a cluster: `make cluster` starts one (docs/development/testing.md)")
    # Like Ctrl-C: the operator and the proxy are ended, and the namespace is deleted.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    folder = RESULTS / f"{time.strftime('%Y%m%d-%H%M%S')}-{os.getpid()}"
    folder.mkdir(parents=True)
    print(f"{os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}; results in {folder.relative_to(ROOT)}", flush=True)
    records: list[Record] = []
    with (folder / "records.jsonl").open("a", buffering=1) as file:

        def keep(record: Record) -> None:
            records.append(record | _surroundings())
            print(json.dumps(records[-1]), file=file)

        _measure(options, folder, keep)
    _show(records)
    verdicts = table.judge(records)
    sys.exit(conclude(verdicts))


def _measure(options: argparse.Namespace, folder: Path, keep: Callable[[Record], None]) -> None:
    if options.only in (None, "scale"):
        for number, (subject, jobs) in enumerate(turns(options.operators, options.jobs)):
            own = folder / f"scale-{number}"
            own.mkdir()
            keep(asyncio.run(scale.measure(subject, jobs, options.seconds, options.start, options.limit, own)))
    if options.only in (None, "pods"):
        asyncio.run(pods.measure(options.rounds, tuple(options.faults), folder, keep))
    if options.only in (None, "nodes") and os.environ["KUBECONFIG"] == str(KUBECONFIG):
        asyncio.run(nodes.measure(options.rounds, folder, keep))


def turns(operators: Sequence[str], jobs: Sequence[int]) -> list[tuple[Subject, int]]:
    """List the operators to measure and their numbers of jobs, in order.

    Raises:
        ValueError: there is no such operator, or the text after `=` is not a number of jobs.
    """
    subjects = []
    for count in jobs:
        for text in operators:
            name, equals, own = text.partition("=")
            if name not in SUBJECTS or (equals and not own.isdecimal()):
                raise ValueError(f"{text!r} is none of {', '.join(SUBJECTS)}, nor one of them with =JOBS")
            subjects.append((SUBJECTS[name], int(own) if equals else count))
    return subjects


def _surroundings() -> Record:
    commit = subprocess.run(["git", "describe", "--always", "--dirty"], cwd=ROOT, capture_output=True, text=True)
    facts = {"commit": commit.stdout.strip(), "cores": os.cpu_count(), "at": time.time()}
    # Over the last minute and the last five.
    return facts | {"load": list(os.getloadavg()[:2])}


def _show(records: list[Record]) -> None:
    for part in (table.scale(records), table.pods(records)):
        if part:
            print(f"\n{part}")


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.operators", description="What the operator costs, and how fast it is."
    )
    parser.add_argument("--only", choices=PARTS, help="one part alone")
    parser.add_argument("--jobs", type=int, nargs="+", default=[1000], help="scale: jobs at once")
    parser.add_argument(
        "--operators",
        nargs="+",
        default=["tandem"],
        metavar="NAME[=JOBS]",
        help=f"scale: whose, one after the other: {', '.join(SUBJECTS)}; with a number of jobs of its own after =",
    )
    parser.add_argument("--seconds", type=float, default=60.0, help="scale: how long to watch while all train")
    parser.add_argument("--start", type=float, default=1.0, help="scale: seconds between a pod's making and its start")
    parser.add_argument("--limit", type=float, default=600.0, help="scale: give up on a stage after so many seconds")
    parser.add_argument("--rounds", type=int, default=20, help="pods, nodes: of each kind")
    parser.add_argument("--faults", nargs="+", choices=pods.FAULTS, default=pods.FAULTS, help="pods: only these")
    parser.add_argument("--table", nargs="+", type=Path, metavar="FILE", help="show results that are there")
    options = parser.parse_args()
    try:
        turns(options.operators, options.jobs)
    except ValueError as problem:
        parser.error(f"--operators: {problem}")
    return options


if __name__ == "__main__":
    main()
