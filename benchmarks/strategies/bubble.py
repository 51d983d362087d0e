"""The bubble of a pipeline: the measured waiting time of its ranks beside theory, for each schedule.

The ranks record a step themselves, as for `tandem bench --profile`.
"""

import os
import statistics
import tempfile
from pathlib import Path

from benchmarks.goals import Outcome, Verdict, interval
from benchmarks.strategies.launch import NEVER, TORCHRUN, in_time, run_directory
from benchmarks.strategies.work import PIPELINED
from benchmarks.throughput.sides import Failure
from tandem.processes.launch import RUN_DIR, TRACE, schedule_path
from tandem_cli.bench.schedule import RecordedSchedule
from tandem_cli.bench.variants import TRACE_STEPS

SCHEDULES = {"gpipe": 4, "1f1b": 4, "interleaved1f1b": 4, "zeroBubble": 2}
"""Micro-batches of a step, by schedule: few, so that the bubble is large. With four, ranks under zero bubble would
wait for 4 to 6 % of a step, to which a shared machine adds a fifth by chance."""
MAX_DEVIATION = 0.15
"""Maximum deviation of a measured bubble from theory, as a share of it."""
SECONDS = 300.0


def bubble(rounds: int) -> list[Verdict]:
    """Measure each schedule in turns, and compare its bubble."""
    print(f"\nbubble of a pipeline: {PIPELINED}", flush=True)
    by_name: dict[str, list[RecordedSchedule]] = {name: [] for name in SCHEDULES}
    for number in range(rounds):
        for name in SCHEDULES:
            try:
                schedule = _recorded(name)
            except Failure as failure:
                return [Verdict(Outcome.MISSED, f"bubble of {name}", str(failure))]
            by_name[name].append(schedule)
            print(f"  {number + 1}/{rounds} {schedule.words}", flush=True)
    return [_verdict(name, schedules) for name, schedules in by_name.items()]


def _verdict(name: str, schedules: list[RecordedSchedule]) -> Verdict:
    goal = f"bubble of {name} within {MAX_DEVIATION:.0%} of theory"
    ratios = [schedule.measured / schedule.predicted for schedule in schedules]
    middle, between = statistics.median(ratios), interval(ratios)
    reason = f"{middle:.2f} of theory (median of {len(ratios)}, range {min(ratios):.2f} to {max(ratios):.2f})"
    if between is None:
        return Verdict(Outcome.UNJUDGED, goal, f"{reason}; 6 rounds are needed")
    low, high = (abs(bound - 1) <= MAX_DEVIATION for bound in between)
    if low != high and abs(middle - 1) > MAX_DEVIATION:
        return Verdict(Outcome.UNJUDGED, goal, f"{reason}; too noisy")
    return Verdict(Outcome.MET if abs(middle - 1) <= MAX_DEVIATION else Outcome.MISSED, goal, reason)


def _recorded(schedule: str) -> RecordedSchedule:
    """Record the schedule of one run.

    Raises:
        Failure: the ranks failed.
    """
    with tempfile.TemporaryDirectory() as name:
        pipeline = {"schedule": schedule, "stages": 2, "chunks": SCHEDULES[schedule]}
        run_dir = run_directory(Path(name, "run"), PIPELINED, "pipeline", TRACE_STEPS, NEVER, pipeline=pipeline)
        trace = Path(name, "trace.json")
        variables = {RUN_DIR: str(run_dir.path), TRACE: str(trace), "OMP_NUM_THREADS": "1"}
        done = in_time([*TORCHRUN, "-m", "tandem_trainer"], os.environ | variables, SECONDS)
        if done.returncode != 0:
            raise Failure(f"ended with {done.returncode}:\n{done.stderr[-2000:]}")
        return RecordedSchedule.read_json(schedule_path(trace).read_bytes())
