"""Recovery from faults, Tandem beside plain torchrun and torchft: `make bench-recovery`, or

    python -m benchmarks.recovery [--rounds 3] [--shots 4 [--reference-shots 1]] [--only FAULT …] [--sides tandem,c10d]
    python -m benchmarks.recovery --table FILE…      a table of earlier results

The sides take turns (A B C A B C), because the speed of a shared machine drifts; in each turn a new job is started
and disturbed several times. A recovery that takes longer than the limit is a failure and is counted; then a new job is
started. Results go to runs/recovery/, one record a line, as they come.

Sides whose name ends in `-best` have the best settings found, Tandem's as well as c10d's; the others have the defaults.

Exit codes: 0 where all goals of `verdict` are met; 1 where one is missed; 3 where one could not be judged, because the
faults were too few, and none is missed.
"""

import argparse
import json
import os
import platform
import random
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Generator
from contextlib import closing
from pathlib import Path
from typing import Any

from benchmarks.goals import Verdict, exit_code
from benchmarks.recovery.faults import FAULTS
from benchmarks.recovery.measurement import Turn, version
from benchmarks.recovery.sides import AUTHORITY, SIDES, Scripted
from benchmarks.recovery.surroundings import Network
from benchmarks.recovery.table import written
from benchmarks.recovery.verdict import judge
from tests.support import ROOT

RESULTS = ROOT / "runs" / "recovery"
DEFAULT = ["worker-kill", "node-loss", "coordinator-kill", "stall-member-kill"]


def main() -> None:
    """Measure, or show earlier results."""
    options = _options()
    if options.table:
        _show(options.table)
        return
    # Ctrl-C and a polite kill both take everything down.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    RESULTS.mkdir(parents=True, exist_ok=True)
    for side in [side for side in options.sides if not SIDES[side].is_installed()]:
        print(f"  {side}: left out; it needs a package that is not installed (uv pip install torchft==0.2.0)")
        options.sides.remove(side)
    results = RESULTS / f"{time.strftime('%Y%m%d-%H%M%S')}-{os.getpid()}.jsonl"
    print(f"{platform.machine()}, {os.cpu_count()} cores; results in {results.relative_to(ROOT)}", flush=True)
    for side, fault in ((side, fault) for side in options.sides for fault in options.only):
        if FAULTS[fault].hangs and not _plays(side, fault, options.limit):
            print(f"  {fault} {side}: left out; it is noticed after {SIDES[side].hang_seconds:g} s, beyond --limit")
    with results.open("a", buffering=1) as file:
        facts = {"kind": "run", "commit": version(), "cores": os.cpu_count(), "seed": options.seed, "at": time.time()}
        print(json.dumps(facts | {"limit": options.limit}), file=file)
        try:
            for number in range(options.rounds):
                for fault in options.only:
                    for side in options.sides:
                        if not _plays(side, fault, options.limit):
                            continue
                        with closing(_turn(side, fault, number, options)) as records:
                            for record in records:
                                print(json.dumps(record), file=file)
        except KeyboardInterrupt:
            print("stopped; what was measured is kept")
            _show([results])
            sys.exit(128 + signal.SIGINT)
    sys.exit(exit_code(_show([results])))


def _plays(side: str, fault: str, limit: float) -> bool:
    """Whether a side can be hit by a fault, and can recover from it within the limit."""
    kind = SIDES[side]
    return not (FAULTS[fault].scripted and not issubclass(kind, Scripted)) and not (
        FAULTS[fault].hangs and kind.hang_seconds > limit
    )


def _turn(side: str, fault: str, number: int, options: argparse.Namespace) -> Generator[dict[str, Any], None, None]:
    """Play one side's turn; yields its records. After a failure a new job is started."""
    shot, shots = 0, options.shots if not side.startswith("c10d") else options.reference_shots or options.shots
    while shot < shots:
        folder = Path(tempfile.mkdtemp(prefix="tandem-recovery-"))
        sound = True
        with Network([AUTHORITY, "worker-0", "worker-1"]) as network:
            turn = Turn(SIDES[side], folder / side, network, options.limit)
            try:
                turn.begin()
                while shot < shots and sound:
                    index = number * options.shots + shot
                    record = turn.play(FAULTS[fault], random.Random(f"{options.seed} {fault} {index}"), index)
                    record |= {"kind": "shot", "round": number, "shot": shot}
                    shot += 1
                    sound = record["whole"]
                    print(f"  {number + 1}/{options.rounds} {fault} {side}: {_described(record)}", flush=True)
                    yield record
            except TimeoutError as error:
                # A failure of the side: it counts for the shot that could not be played.
                print(f"  {number + 1}/{options.rounds} {fault} {side}: {error}", flush=True)
                sound = False
                shot += 1
                yield {"kind": "stuck", "side": side, "fault": fault, "round": number, "why": str(error)}
            finally:
                leftovers = turn.close()
        yield {"kind": "end", "side": side, "fault": fault, "round": number, "left": leftovers}
        if leftovers:
            print(f"  {number + 1}/{options.rounds} {fault} {side}: left behind: {'; '.join(leftovers)}", flush=True)
        if options.keep or not sound:
            print(f"    kept: {folder}")
        else:
            shutil.rmtree(folder)


def _described(record: dict[str, Any]) -> str:
    stages = [
        f"{stage['name']} {'FAILED' if stage['seconds'] is None else format(stage['seconds'], '.2f') + ' s'}"
        for stage in record["stages"]
    ]
    notes = [f"pause {record['pauseSeconds']:.2f} s, {record['repeatedSteps']} steps repeated"]
    if record["droppedBatches"]:
        notes.append(f"{record['droppedBatches']} batches dropped")
    if record["lostSteps"]:
        notes.append(f"{record['lostSteps']} COMMITTED STEPS LOST")
    if record["overlaps"]:
        longest = max(overlap["seconds"] for overlap in record["overlaps"])
        notes.append(f"TWO GROUPS for {longest:.2f} s" + (", BOTH SAVED" if record["split"] else ""))
    if record["orphans"]:
        notes.append(f"{len(record['orphans'])} orphans")
    if record["gaveUp"]:
        notes.append(f"{record['gaveUp']} agents gave up")
    notes += [f"{name} {value}" for name, value in record["facts"].items() if "Seconds" in name or name == "missed"]
    return ", ".join(stages) + f" ({', '.join(notes)})"


def _show(paths: list[Path]) -> list[Verdict]:
    """Print the tables and the verdicts; returns the verdicts."""
    records = [json.loads(line) for path in paths for line in path.read_text().splitlines()]
    print(written(records, list(SIDES)) + "\n")
    verdicts = judge(records)
    for verdict in verdicts:
        print(verdict)
    return verdicts


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description="Recovery from faults, compared.", prog="python -m benchmarks.recovery"
    )
    parser.add_argument("--rounds", type=int, default=3, help="turns of each side")
    parser.add_argument("--shots", type=int, default=4, help="faults in each turn")
    parser.add_argument("--reference-shots", type=int, help="faults in each turn of c10d, which takes longer")
    parser.add_argument("--only", nargs="+", choices=[*FAULTS, "all"], default=DEFAULT, metavar="FAULT", help=_faults())
    parser.add_argument("--sides", type=_sides, default=list(SIDES), help=f"some of {','.join(SIDES)}")
    parser.add_argument("--limit", type=float, default=90.0, help="seconds after which a recovery has failed")
    parser.add_argument("--seed", type=int, default=1, help="of victims and stalls")
    parser.add_argument("--keep", action="store_true", help="keep the folders of all jobs")
    parser.add_argument("--table", nargs="+", type=Path, metavar="FILE", help="show these results instead of measuring")
    options = parser.parse_args()
    if "all" in options.only:
        options.only = list(FAULTS)
    return options


def _sides(text: str) -> list[str]:
    names = text.split(",")
    unknown = [name for name in names if name not in SIDES]
    if unknown:
        raise argparse.ArgumentTypeError(f"{unknown[0]!r} is none of {', '.join(SIDES)}")
    return names


def _faults() -> str:
    return "some of " + ", ".join(FAULTS) + f", or all (default: {' '.join(DEFAULT)})"


if __name__ == "__main__":
    main()
