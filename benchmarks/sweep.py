"""A sweep of the digits without a pruner, with ASHA, and with promotion: `python -m benchmarks.sweep [--trials 20]`.

All sides try the same values, drawn by the sampler `random` with the same seed, one trial after the other, on one
worker and one evaluator. Measured are the CPU-seconds in the trials' ledgers that are spent on steps, starts and saves,
the best score, and the time from the score for which a trial is stopped to the end of its last process.

The goals: with promotion half of the worker hours of ASHA, for a best score within NOISE of a sweep without a pruner;
and a stop within STOP_SECONDS.
"""

import argparse
import os
import statistics
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC
from pathlib import Path

import optuna
import yaml
from optuna.storages import JournalStorage
from optuna.storages.journal import JournalFileBackend

from benchmarks.goals import Outcome, Verdict, conclude, judge_median
from tandem import Client
from tandem.rundir.catalog import Results
from tandem.rundir.layout import RunDir
from tandem_cli.client.sweep import SweepHandle
from tandem_cli.sweep.study import JOURNAL
from tests.support import ROOT

SHARE, NOISE, STOP_SECONDS = 0.5, 0.01, 2.0
SIDES = ("none", "asha", "promotion")


@dataclass(frozen=True)
class Measured:
    """One sweep."""

    best: float
    """Best score."""
    worker_seconds: float
    """Seconds of workers in all trials."""
    pruned: int
    """Trials that were stopped."""
    stops: tuple[float, ...]
    """Seconds from the score to the end of the last process, of each stopped trial."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run both sides for each seed; returns the exit code."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.sweep")
    parser.add_argument("--trials", type=int, default=20)
    parser.add_argument("--epochs", type=int, default=400)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    options = parser.parse_args(arguments)
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    results: dict[str, list[Measured]] = {side: [] for side in SIDES}
    with tempfile.TemporaryDirectory(prefix="tandem-sweep-") as folder:
        os.environ["XDG_STATE_HOME"] = f"{folder}/state"
        for seed in options.seeds:
            # The order alternates: a change of the machine's pace hits all sides.
            for side in SIDES if seed % 2 == 0 else reversed(SIDES):
                measured = swept(Path(folder) / f"{side}-{seed}", side, options.trials, options.epochs, seed)
                results[side].append(measured)
                print(
                    f"seed {seed}  {side:<5}  best {measured.best:.4f}  workers {measured.worker_seconds:6.1f} s  "
                    f"pruned {measured.pruned} of {options.trials}",
                    flush=True,
                )
    return conclude(judged(results))


def swept(folder: Path, side: str, trials: int, epochs: int, seed: int) -> Measured:
    """Run one sweep to its end, and measure it."""
    job = yaml.safe_load((ROOT / "examples/digits.yaml").read_text())
    spec = {
        "space": {
            "trainer.loop.optimizer.learningRate": {"low": 1e-5, "high": 1.0, "log": True},
            "trainer.loop.globalBatchSize": {"values": [32, 64, 128]},
        },
        "sampler": "random",
        "seed": seed,
        "pruner": {"name": side, "minSteps": 100},
        "budget": {"trials": trials},
    }
    overrides = {
        "trainer.loop.epochs": epochs,
        "checkpoint.everySteps": 100,
        "workers.replicas": 1,
        "evaluators.processesPerReplica": 1,
    }
    sweep = Client().sweep(spec, job=job, name="swept", overrides=overrides, folder=folder)
    sweep.wait()
    best = sweep.best()
    if best is None or best.score is None:
        raise SystemExit((folder / "sweep.log").read_text())
    finished = sweep.trials()
    seconds = 0.0
    for trial in finished:
        ledger = sweep.run(trial).status().ledger
        if ledger is not None:
            usage = ledger.cpu_seconds
            seconds += usage.compute + usage.recomputed + usage.waiting
    stops = tuple(_stop_seconds(sweep))
    return Measured(best.score, seconds, sum(trial.state == "Pruned" for trial in finished), stops)


def _stop_seconds(sweep: SweepHandle) -> list[float]:
    storage = JournalStorage(JournalFileBackend(str(sweep.folder / JOURNAL)))
    study = optuna.load_study(storage=storage, study_name=sweep.name)
    seconds = []
    for trial in study.get_trials(states=(optuna.trial.TrialState.PRUNED,)):
        if " at step " not in str(trial.user_attrs.get("verdict")) or "paused" in trial.user_attrs:
            continue
        step = int(str(trial.user_attrs["verdict"]).rsplit(" ", 1)[1].replace(",", ""))
        results = Results(RunDir(sweep.folder / str(trial.user_attrs["run"]))).new(0.0)
        scored_at = next(result.finished_at for result, _ in results if result.checkpoint.step == step)
        if trial.datetime_complete is not None and scored_at is not None:
            seconds.append(trial.datetime_complete.astimezone(UTC).timestamp() - scored_at)
    return seconds


def judged(results: Mapping[str, Sequence[Measured]]) -> list[Verdict]:
    """Judge the goals.

    Args:
        results: sweeps of each side, by seed.
    """
    full, asha, promotion = (results[side] for side in SIDES)
    shares = [sweep.worker_seconds / other.worker_seconds for sweep, other in zip(promotion, asha, strict=True)]
    of_all = [sweep.worker_seconds / other.worker_seconds for sweep, other in zip(asha, full, strict=True)]
    losses = [
        max(other.best - sweep.best for sweep in pair) for other, *pair in zip(full, asha, promotion, strict=True)
    ]
    share, loss = statistics.median(shares), max(losses)
    print(f"ASHA takes {statistics.median(of_all):.0%} of the worker hours without a pruner (median)")
    met = {True: Outcome.MET, False: Outcome.MISSED}
    return [
        Verdict(met[share <= SHARE], f"promotion: worker hours ≤ {SHARE:.0%} of those of ASHA", f"median {share:.0%}"),
        Verdict(met[loss <= NOISE], f"a best score within {NOISE:g}", f"at most {loss:.4f} lower"),
        judge_median(
            f"stopped ≤ {STOP_SECONDS:g} s after the score", [s for sweep in asha for s in sweep.stops], STOP_SECONDS
        ),
    ]


if __name__ == "__main__":
    sys.exit(main())
