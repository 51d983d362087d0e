"""The key figures at the top of the page. Times are in seconds; None means unknown."""

from dataclasses import dataclass
from statistics import median

import numpy as np

from tandem.wire.measures import outages, restarts
from tandem_cli.report.clock import Clock
from tandem_cli.report.run import RunCheckpoint, RunData


@dataclass(frozen=True)
class Summary:
    """Key figures of a run."""

    seconds: float
    """Active time, without pauses."""
    pauses: int
    """Number of pauses."""
    steps: int
    """Optimizer steps that the model contains."""
    redone: int
    """Steps that were repeated after restarts."""
    throughput: float | None
    """Median of the measured samples a second."""
    tokens: float | None
    """Tokens a second at that throughput, without padding."""
    learned_tokens: float | None
    """Tokens of these that the loss is computed over."""
    restarts: int
    """Generations formed because of a failure or a loss."""
    checkpoints: int
    """Checkpoints written, on the lineage."""
    evaluated: int
    """Checkpoints of these with a score."""
    skipped: int
    """Checkpoints of these that were skipped for newer ones."""
    stall_median: float | None
    """Median time that training waited for a checkpoint."""
    stall_longest: float | None
    """Longest wait for a checkpoint."""
    stall_share: float | None
    """Share of the run's time spent waiting for checkpoints."""
    lag_seconds: float | None
    """Median time from a committed checkpoint to its score."""
    lag_steps: int | None
    """Median steps that training took meanwhile."""
    trainer_busy: float | None
    """Mean busy cores of a rank."""
    evaluator_busy: float | None
    """Mean busy cores of an evaluator."""


def summarize(run: RunData, clock: Clock) -> Summary:
    """Compute the summary."""
    stalls = [c.stall_seconds for c in run.checkpoints if c.stall_seconds is not None]
    lags = [lag for c in run.checkpoints if (lag := _lag(c, run, clock)) is not None]
    rate = run.rates.throughput if len(run.rates) else run.world.throughput
    rate = rate[np.isfinite(rate)]
    pace = float(np.median(rate)) if len(rate) else None
    return Summary(
        seconds=clock.seconds,
        pauses=len(clock.pauses),
        steps=int(run.model_steps.step[-1]) if len(run.model_steps) else 0,
        redone=sum(len(steps) for steps in run.superseded),
        throughput=pace,
        tokens=_times(pace, run.tokens_per_sample),
        learned_tokens=_times(pace, run.learned_per_sample),
        restarts=restarts(run.generations),
        checkpoints=sum(c.counts for c in run.checkpoints),
        evaluated=sum(c.counts and c.evaluation is not None for c in run.checkpoints),
        skipped=sum(c.counts and c.evaluation is None and c.skipped is not None for c in run.checkpoints),
        stall_median=median(stalls) if stalls else None,
        stall_longest=max(stalls, default=None),
        stall_share=sum(stalls) / clock.seconds if stalls and clock.seconds > 0 else None,
        lag_seconds=median(seconds for seconds, _ in lags) if lags else None,
        lag_steps=round(median(steps for _, steps in lags)) if lags else None,
        trainer_busy=_busy(run, "trainer"),
        evaluator_busy=_busy(run, "evaluator"),
    )


def _times(pace: float | None, factor: float | None) -> float | None:
    return None if pace is None or factor is None else pace * factor


def time_by_phase(run: RunData, clock: Clock) -> dict[str, float]:
    """Compute the seconds of each phase over the whole run, the largest first; then the time that no phase accounts
    for. Time in which the run was stopped is not included.

    "start" is the time until the first step, "restart" that from the last step of one generation to the first step of
    the next, "other" what no phase accounts for between steps, if it is at least a thousandth.
    """
    seconds_by_phase = {name: float(np.nansum(seconds)) for name, seconds in run.rates.phases.items()}
    seconds_by_phase = dict(sorted(((n, s) for n, s in seconds_by_phase.items() if s > 0), key=lambda entry: -entry[1]))
    measured = float(np.nansum(run.rates.seconds))
    without = {"other": measured - sum(seconds_by_phase.values()), "start": 0.0, "restart": 0.0}
    if without["other"] < 0.001 * measured:
        del without["other"]
    without["restart"] = sum(clock.between(outage.begin, outage.end) for outage in outages(run.generations))
    first_training = next((generation for generation in run.generations if generation.first_step_at is not None), None)
    if (
        first_training is not None
        and first_training.first_step_at is not None
        and run.generations[0].opened_at is not None
    ):
        without["start"] = clock.between(run.generations[0].opened_at, first_training.first_step_at)
    for name, seconds in without.items():
        if seconds > 0:
            seconds_by_phase[name] = seconds_by_phase.get(name, 0.0) + seconds
    return seconds_by_phase


def _lag(checkpoint: RunCheckpoint, run: RunData, clock: Clock) -> tuple[float, int] | None:
    evaluation = checkpoint.evaluation
    if not checkpoint.counts or evaluation is None or evaluation.finished_at is None or checkpoint.written_at is None:
        return None
    seconds = clock.between(checkpoint.written_at, evaluation.finished_at)
    reached = run.model_steps.step[run.model_steps.time <= evaluation.finished_at]
    return seconds, max(0, int(reached[-1]) - checkpoint.step) if len(reached) else 0


def _busy(run: RunData, kind: str) -> float | None:
    means = [float(np.nanmean(use.busy)) for use in run.uses if use.kind == kind and np.isfinite(use.busy).any()]
    return float(np.mean(means)) if means else None
