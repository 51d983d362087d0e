"""How long the ranks of a pipeline wait: the bubble that was measured beside the one in theory, for each schedule.

A step is recorded by the ranks themselves, as `tandem bench --profile` asks for it.
"""

import os
import statistics
import tempfile
from pathlib import Path

from benchmarks.goals import Outcome, Verdict, interval
from benchmarks.strategies.launch import NEVER, TORCHRUN, in_time, run_directory
from benchmarks.strategies.work import PIPELINED
from benchmarks.throughput.sides import Failure
from tandem.launch import RUN_DIR, TRACE, schedule_beside
from tandem_cli.bench.schedule import Schedule
from tandem_cli.bench.variants import TRACE_STEPS

SCHEDULES = {"gpipe": 4, "1f1b": 4, "interleaved1f1b": 4, "zeroBubble": 2}
"""Micro-batches of a step, by schedule: few, so that the bubble is large. With four, ranks under zero bubble would wait
for 4 to 6 % of a step, to which a shared machine adds a fifth by chance."""
MAX_OFF = 0.15
"""By how much of the bubble in theory a measured one may be off."""
SECONDS = 300.0


def bubble(rounds: int) -> list[Verdict]:
    """Each schedule in turns, and how its bubble compares."""
    print(f"\nbubble of a pipeline: {PIPELINED}", flush=True)
    found: dict[str, list[Schedule]] = {name: [] for name in SCHEDULES}
    for number in range(rounds):
        for name in SCHEDULES:
            try:
                one = _recorded(name)
            except Failure as failure:
                return [Verdict(Outcome.MISSED, f"bubble of {name}", str(failure))]
            found[name].append(one)
            print(f"  {number + 1}/{rounds} {one.words}", flush=True)
    return [_verdict(name, schedules) for name, schedules in found.items()]


def _verdict(name: str, schedules: list[Schedule]) -> Verdict:
    goal = f"bubble of {name} within {MAX_OFF:.0%} of theory"
    ratios = [one.measured / one.predicted for one in schedules]
    middle, between = statistics.median(ratios), interval(ratios)
    why = f"{middle:.2f} of theory (median of {len(ratios)}, range {min(ratios):.2f} to {max(ratios):.2f})"
    if between is None:
        return Verdict(Outcome.UNJUDGED, goal, f"{why}; 6 rounds are needed")
    low, high = (abs(bound - 1) <= MAX_OFF for bound in between)
    if low != high and abs(middle - 1) > MAX_OFF:
        return Verdict(Outcome.UNJUDGED, goal, f"{why}; too noisy")
    return Verdict(Outcome.MET if abs(middle - 1) <= MAX_OFF else Outcome.MISSED, goal, why)


def _recorded(schedule: str) -> Schedule:
    """
    Raises:
        Failure: the ranks did not end well.
    """
    with tempfile.TemporaryDirectory() as name:
        pipeline = {"schedule": schedule, "stages": 2, "chunks": SCHEDULES[schedule]}
        run_dir = run_directory(Path(name, "run"), PIPELINED, "pipeline", TRACE_STEPS, NEVER, pipeline=pipeline)
        trace = Path(name, "trace.json")
        variables = {RUN_DIR: str(run_dir.path), TRACE: str(trace), "OMP_NUM_THREADS": "1"}
        done = in_time([*TORCHRUN, "-m", "tandem_trainer"], os.environ | variables, SECONDS)
        if done.returncode != 0:
            raise Failure(f"ended with {done.returncode}:\n{done.stderr[-2000:]}")
        return Schedule.read_json(schedule_beside(trace).read_bytes())
