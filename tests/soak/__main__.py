"""Random faults against one job for a given time, everything checked after each: `make soak SECONDS=600 SEED=1`.

The schedule follows from the seed alone. After every fault the group must be whole again within the limit, and then:
one writer, no step that counts lost or taken twice, each with its samples, no process without an agent. At the end the
loss of every step that counts is compared with a run that nobody disturbed. On a violation the seed and the schedule so
far are printed and the run directory is kept.
"""

import argparse
import random
import shutil
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from benchmarks.recovery.faults import FAULTS, STALLED, Fault, Scene, Story, Wait
from benchmarks.recovery.measurement import Turn
from benchmarks.recovery.sides import AUTHORITY
from benchmarks.recovery.surroundings import Network
from tests.soak.job import SoakJob, SoakSession

MAX_STALL = 12.0
LIMIT_SECONDS = 90.0


def evaluator_kill(scene: Scene) -> Story:
    """The evaluator dies and is started again; training must not notice."""
    assert isinstance(scene.side, SoakJob)
    at = time.time()
    scene.side.kill_evaluator()
    scene.side.start_evaluator()
    yield Wait("recovery", at, scene.side.full, STALLED)


POSSIBLE = [*(fault for fault in FAULTS.values() if not fault.scripted), Fault(evaluator_kill)]


JOBS: dict[str, type[SoakJob]] = {"task": SoakJob, "session": SoakSession}


def schedule(seed: int) -> Iterator[tuple[Fault, int]]:
    """The faults in order, each with the number that decides on its victims. Endless."""
    chance = random.Random(f"schedule {seed}")
    while True:
        yield chance.choice(POSSIBLE), chance.randrange(1_000_000)


def main() -> int:
    """Soak; exit code 1 on a violation."""
    parser = argparse.ArgumentParser(prog="python -m tests.soak", description="Random faults against one job.")
    parser.add_argument("--seconds", type=float, default=600.0, help="how long")
    parser.add_argument("--seed", type=int, default=1, help="of the schedule")
    parser.add_argument("--keep", action="store_true", help="keep the run directory in any case")
    parser.add_argument("--job", choices=JOBS, default="task", help="the built-in task, or a script of one's own")
    options = parser.parse_args()
    job = JOBS[options.job]
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    folder = Path(tempfile.mkdtemp(prefix="tandem-soak-"))
    places = [AUTHORITY, *(f"worker-{index}" for index in range(SoakJob.full))]
    print(f"seed {options.seed}, {options.seconds:g} s, {SoakJob.full} replicas, in {folder}", flush=True)
    with Network(places) as network:
        turn = Turn(job, folder / "job", network, LIMIT_SECONDS, MAX_STALL)
        try:
            violations = _soak(turn, options.seed, options.seconds)
        finally:
            left = turn.close()
    violations += [f"left behind: {thing}" for thing in left]
    assert isinstance(turn.side, SoakJob)
    verdict = turn.side.verdict()
    violations += [violation for violation in verdict.violations if not violation.startswith("the evaluator ended")]
    steps = f"{len(verdict.counting)} steps count, {verdict.unlogged} more were not logged"
    print(f"{steps}; {turn.side.evaluated()} evaluations")
    print("comparing their losses with an undisturbed run …", flush=True)
    deviations = turn.side.deviations(verdict)
    violations += turn.side.violations_at_end()
    violations += deviations[:10] + ([f"… {len(deviations)} such steps in all"] if len(deviations) > 10 else [])
    for violation in dict.fromkeys(violations):
        print(f"VIOLATION: {violation}")
    if violations or options.keep:
        print(f"kept: {folder}")
    else:
        shutil.rmtree(folder)
        print("no violation")
    return 1 if violations else 0


def _soak(turn: Turn, seed: int, seconds: float) -> list[str]:
    assert isinstance(turn.side, SoakJob)
    turn.begin()
    until = time.monotonic() + seconds
    done: Counter[str] = Counter()
    told: list[str] = []
    for number, (fault, shot) in enumerate(schedule(seed)):
        if time.monotonic() > until:
            break
        record = turn.play(fault, random.Random(f"{seed} {number}"), shot)
        verdict = turn.side.verdict()
        violations = _of_record(record) + verdict.violations
        done[fault.name] += 1
        told.append(f"{number}: {fault.name} {record['facts']}")
        times = ", ".join(f"{stage['name']} {_seconds(stage['seconds'])}" for stage in record["stages"])
        print(f"  {number}: {fault.name}: {times}; {len(verdict.counting)} steps count", flush=True)
        if violations:
            print(f"seed {seed}; the schedule so far:\n" + "\n".join(told))
            return violations
    print("played: " + ", ".join(f"{count} × {name}" for name, count in done.most_common()))
    return []


def _of_record(record: dict[str, Any]) -> list[str]:
    found = [f"not whole again: {stage['name']}" for stage in record["stages"] if stage["seconds"] is None]
    return found + [f"without an agent: {orphan}" for orphan in record["orphans"]]


def _seconds(value: float | None) -> str:
    return "FAILED" if value is None else f"{value:.2f} s"


if __name__ == "__main__":
    sys.exit(main())
