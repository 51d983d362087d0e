"""Cost of mirrors, and the work that a killed rank costs with them and without: `python -m benchmarks.mirrors`.

**Cost.** The same job runs with mirrors and without, A B A B, and what is compared is the processor time of everything
that the job has started: on CPUs it is what training has less of, and a shared machine changes it less than time.

**Work.** A rank is killed again and again. Work that is lost is the time between the last step of the group and the
step from which the next one starts, by the training log. Without mirrors a job saves once a minute.
"""

import argparse
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import psutil

from benchmarks.goals import Outcome, Verdict, conclude, interval, judge_median
from tandem.processes.launch import RUN_DIR
from tandem.rundir.layout import RunDir
from tandem.rundir.log import LogReader
from tandem.rundir.records import TRAINING, Mirrored, Start, Step
from tandem_trainer.process_group import VOTE_SECONDS

MODELS = {"0.6 MB": ("cnn", 256, 1500), "134 MB": ("resnet-18", 16, 150)}
"""Model, batch and steps of a run, by the size of its state."""
MAX_COST = 1.01
"""Goal: processor time with mirrors over that without them."""
SECONDS_BETWEEN_KILLS = (6.0, 9.0, 7.5)
LIMIT_SECONDS = 600.0


def manifest(size: str, mirror: bool, **elasticity: Any) -> dict[str, Any]:
    """Make the manifest of a job with two workers of one process."""
    model, batch, steps = MODELS[size]
    return {
        "apiVersion": "tandem.dev/v1alpha1",
        "kind": "DistributedTrainingJob",
        "metadata": {"name": "mirrors"},
        "spec": {
            "trainer": {
                "task": "image-classification",
                "parameters": {"model": model, "data": {"name": "digits"}},
                "loop": {"globalBatchSize": batch, "epochs": 10_000, "maxSteps": steps},
            },
            "workers": {"replicas": 2},
            "evaluators": {"replicas": 0},
            "checkpoint": {"everySeconds": 60},
            "elasticity": {"mirror": mirror, **elasticity},
        },
    }


def start(folder: Path, job: dict[str, Any]) -> "subprocess.Popen[bytes]":
    """Start a job in a folder of its own."""
    folder.mkdir()
    (folder / "job.yaml").write_text(json.dumps(job))
    program = str(Path(sys.executable).with_name("tandem"))
    command = [program, "run", str(folder / "job.yaml"), "--run-dir", str(folder / "run")]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    return subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)


def processor_seconds(folder: Path, size: str, mirror: bool) -> float:
    """Run a job to its end; returns the processor time of all its processes."""
    # Ranks that start cold are children of their agents, which wait for them, so that their time is counted.
    run = start(folder, manifest(size, mirror, warmStart=False))
    _, status, usage = os.wait4(run.pid, 0)
    if status != 0:
        raise RuntimeError(f"the job failed; see {folder}")
    return usage.ru_utime + usage.ru_stime


def measure_cost(size: str, rounds: int, folder: Path) -> Verdict:
    """Compare a job with mirrors and without in turns."""
    ratios = []
    for number in range(rounds):
        order = (False, True) if number % 2 == 0 else (True, False)
        seconds = {mirror: processor_seconds(folder / f"cost-{number}-{mirror}", size, mirror) for mirror in order}
        ratios.append(seconds[True] / seconds[False])
    print(
        f"{size}: processor time with mirrors {statistics.median(ratios):.4f} of that without "
        f"({min(ratios):.4f} to {max(ratios):.4f}), {rounds} rounds",
        flush=True,
    )
    goal, bounds = f"{size}: mirrors cost at most 1 %", interval(ratios)
    if bounds is None or bounds[0] <= MAX_COST < bounds[1]:
        reason = f"too few rounds, or too noisy: {min(ratios):.3f} to {max(ratios):.3f} in {rounds} rounds"
        return Verdict(Outcome.UNJUDGED, goal, reason)
    return judge_median(goal, ratios, MAX_COST, "of it")


def kill_rank(run_dir: Path) -> None:
    """Kill one rank of a run."""
    for process in psutil.process_iter():
        try:
            if process.name() == "tandem-rank" and process.environ().get(RUN_DIR) == str(run_dir):
                os.kill(process.pid, signal.SIGKILL)
                return
        except psutil.Error:
            continue


def lost_work(folder: Path, mirror: bool, kills: int) -> list[float]:
    """Kill ranks of a job; returns the seconds of work that each kill has cost, less, with mirrors, their interval."""
    size = "0.6 MB"
    job = manifest(size, mirror, maxRestarts=kills)
    job["spec"]["trainer"]["loop"]["maxSteps"] = 10_000_000
    rundir = RunDir(folder / "run")
    run = start(folder, job)
    try:
        for number in range(kills):
            _wait_for_step(rundir, number + 1, run)
            time.sleep(SECONDS_BETWEEN_KILLS[number % len(SECONDS_BETWEEN_KILLS)])
            kill_rank(rundir.path)
        _wait_for_step(rundir, kills + 1, run)
    finally:
        run.terminate()
        run.wait()
    return [_lost(rundir, generation, mirror) for generation in range(1, kills + 1)]


def _wait_for_step(rundir: RunDir, generation: int, run: "subprocess.Popen[bytes]") -> None:
    log, deadline = rundir.training_log(generation), time.monotonic() + LIMIT_SECONDS
    while not (log.exists() and any(isinstance(record, Step) for record in LogReader(log, TRAINING))):
        if time.monotonic() > deadline or run.poll() is not None:
            raise RuntimeError(f"generation {generation} took no step; see {rundir.path}")
        time.sleep(0.1)


def _lost(rundir: RunDir, generation: int, mirror: bool) -> float:
    """Seconds of steps of a generation that the next one has repeated."""
    records = [*LogReader(rundir.training_log(generation), TRAINING)]
    following = next(record for record in LogReader(rundir.training_log(generation + 1), TRAINING))
    assert isinstance(following, Start)
    repeated = [record.time for record in records if isinstance(record, Step) and record.step > following.step]
    lost = max(repeated) - min(repeated) if repeated else 0.0
    intervals = [record.interval_seconds or 0.0 for record in records if isinstance(record, Mirrored)]
    return lost - (max(intervals, default=0.0) if mirror else 0.0)


def main() -> int:
    """Measure cost and lost work. Returns the exit code."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.mirrors", description=__doc__)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--kills", type=int, default=9)
    parser.add_argument("--only", nargs="*", choices=[*MODELS, "work"], default=[*MODELS, "work"])
    options = parser.parse_args()
    verdicts: list[Verdict] = []
    with tempfile.TemporaryDirectory() as folder:
        if "work" in options.only:
            without = lost_work(Path(folder) / "without", False, options.kills)
            beyond = lost_work(Path(folder) / "with", True, options.kills)
            print(
                f"work lost to a kill: {statistics.median(without):.2f} s without mirrors ({min(without):.2f} to "
                f"{max(without):.2f}); with them {statistics.median(beyond):.2f} s ({min(beyond):.2f} to "
                f"{max(beyond):.2f}) beyond an interval, {options.kills} kills",
                flush=True,
            )
            goal = "a kill costs at most an interval, and the time between two votes"
            verdicts.append(judge_median(goal, beyond, VOTE_SECONDS))
        sizes = [size for size in options.only if size in MODELS]
        verdicts += [measure_cost(size, options.rounds, Path(folder)) for size in sizes]
    return conclude(verdicts)


if __name__ == "__main__":
    sys.exit(main())
