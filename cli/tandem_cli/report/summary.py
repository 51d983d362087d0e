"""The key figures at the top of the page. Times are in seconds; None means unknown."""

from dataclasses import dataclass
from statistics import median

import numpy as np

from tandem.measures import outages, restarts
from tandem_cli.report.clock import Clock
from tandem_cli.report.run import Run, RunCheckpoint


@dataclass(frozen=True)
class Summary:
    """What a reader wants to know first."""

    seconds: float
    """How long the run was going on, pauses left out."""
    pauses: int
    """How often it paused."""
    steps: int
    """Optimizer steps that made the model."""
    redone: int
    """Steps that were done again after restarts."""
    throughput: float | None
    """Median of the measured samples a second."""
    tokens: float | None
    """Tokens a second at that pace, without padding."""
    learned: float | None
    """Those that the loss is over."""
    restarts: int
    """Memberships that were formed because something had failed or was lost."""
    checkpoints: int
    """Written, on the lineage."""
    evaluated: int
    """Of these, how many have a score."""
    skipped: int
    """Of these, how many were passed over for newer ones."""
    stall_median: float | None
    """How long training waited for a checkpoint."""
    stall_most: float | None
    """The longest it waited for one."""
    stall_share: float | None
    """All of that waiting, as a share of the run's time."""
    lag_seconds: float | None
    """Median time from a committed checkpoint to its score."""
    lag_steps: int | None
    """Median steps training had gone on meanwhile."""
    trainer_busy: float | None
    """Mean busy cores of a rank."""
    evaluator_busy: float | None
    """Mean busy cores of an evaluator."""


def summarize(run: Run, clock: Clock) -> Summary:
    """Work out the summary."""
    stalls = [c.stall_seconds for c in run.checkpoints if c.stall_seconds is not None]
    lags = [lag for c in run.checkpoints if (lag := _lag(c, run, clock)) is not None]
    rate = run.rates.throughput if len(run.rates) else run.world.throughput
    rate = rate[np.isfinite(rate)]
    pace = float(np.median(rate)) if len(rate) else None
    return Summary(
        seconds=clock.seconds,
        pauses=len(clock.pauses),
        steps=int(run.counted.step[-1]) if len(run.counted) else 0,
        redone=sum(len(steps) for steps in run.superseded),
        throughput=pace,
        tokens=_times(pace, run.tokens_per_sample),
        learned=_times(pace, run.learned_per_sample),
        restarts=restarts(run.generations),
        checkpoints=sum(c.counts for c in run.checkpoints),
        evaluated=sum(c.counts and c.evaluation is not None for c in run.checkpoints),
        skipped=sum(c.counts and c.evaluation is None and c.skipped is not None for c in run.checkpoints),
        stall_median=median(stalls) if stalls else None,
        stall_most=max(stalls, default=None),
        stall_share=sum(stalls) / clock.seconds if stalls and clock.seconds > 0 else None,
        lag_seconds=median(seconds for seconds, _ in lags) if lags else None,
        lag_steps=round(median(steps for _, steps in lags)) if lags else None,
        trainer_busy=_busy(run, "trainer"),
        evaluator_busy=_busy(run, "evaluator"),
    )


def _times(pace: float | None, each: float | None) -> float | None:
    return None if pace is None or each is None else pace * each


def time_by_phase(run: Run, clock: Clock) -> dict[str, float]:
    """Seconds of each phase over the whole run, the largest first; then the time that no phase accounts for. A time in
    which nothing ran, because it was stopped, is not training's.

    "start" is the time until the first step, "restart" that from the last step of one membership to the first step of
    the next, "other" what no phase names between steps, where it is worth a mention.
    """
    found = {name: float(np.nansum(seconds)) for name, seconds in run.rates.phases.items()}
    found = dict(sorted(((n, s) for n, s in found.items() if s > 0), key=lambda entry: -entry[1]))
    measured = float(np.nansum(run.rates.seconds))
    without = {"other": measured - sum(found.values()), "start": 0.0, "restart": 0.0}
    if without["other"] < 0.001 * measured:
        del without["other"]
    without["restart"] = sum(clock.between(outage.begin, outage.end) for outage in outages(run.generations))
    began = next((one for one in run.generations if one.first_step_at is not None), None)
    if began is not None and began.first_step_at is not None and run.generations[0].opened_at is not None:
        without["start"] = clock.between(run.generations[0].opened_at, began.first_step_at)
    for name, seconds in without.items():
        if seconds > 0:
            found[name] = found.get(name, 0.0) + seconds
    return found


def _lag(checkpoint: RunCheckpoint, run: Run, clock: Clock) -> tuple[float, int] | None:
    evaluation = checkpoint.evaluation
    if not checkpoint.counts or evaluation is None or evaluation.finished_at is None or checkpoint.at is None:
        return None
    seconds = clock.between(checkpoint.at, evaluation.finished_at)
    reached = run.counted.step[run.counted.time <= evaluation.finished_at]
    return seconds, max(0, int(reached[-1]) - checkpoint.step) if len(reached) else 0


def _busy(run: Run, kind: str) -> float | None:
    means = [float(np.nanmean(use.busy)) for use in run.uses if use.kind == kind and np.isfinite(use.busy).any()]
    return float(np.mean(means)) if means else None
