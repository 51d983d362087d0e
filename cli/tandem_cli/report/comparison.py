"""The comparison of runs: the differences of their jobs and of their results. Pure."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tandem.formatting import duration, metric_name, number, score
from tandem.ledger import Ledger, amounts
from tandem.model import Model
from tandem.rundir.evaluations import direction
from tandem.secrecy import hidden
from tandem.status import phase_word
from tandem_cli.report import clock
from tandem_cli.report.run import Run
from tandem_cli.report.summary import summarize

Row = tuple[str, tuple[str, ...]]
"""What it is about, and a text for each run."""
NOT_SET = "–"


@dataclass(frozen=True)
class Outcome:
    """What became of a run."""

    name: str
    """Of its job."""
    path: str
    """Its folder."""
    state: str
    """Succeeded, Failed, Running or Stopped."""
    steps: int
    """Steps that made the model."""
    total_steps: int | None
    """Steps that were to be made."""
    loss: float | None
    """Training loss of the last step that has one."""
    metric: str
    """What the best checkpoint is best in."""
    best: str
    """The best checkpoint; empty where none was evaluated."""
    best_step: int | None
    """Its step."""
    score: float | None
    """Its score on the test data."""
    base: float | None
    """The base model's, where it was evaluated."""
    evaluated: int
    """Checkpoints that have a score."""
    seconds: float
    """How long it was going on, pauses left out."""
    throughput: float | None
    """Median of the samples a second, over all ranks."""
    restarts: int
    """Generations that were formed because something had failed or was lost."""
    ledger: Ledger | None = None
    """GPU time, CPU time and cost by what they were for."""


def outcome(run: Run, path: str) -> Outcome:
    """What became of a run."""
    summary = summarize(run, clock.of(run.marks))
    found = run.best.evaluation.metrics.get(run.metric) if run.best and run.best.evaluation else None
    return Outcome(
        name=run.name,
        path=path,
        state=phase_word(run.result, run.message),
        steps=summary.steps,
        total_steps=run.total_steps,
        loss=run.counted.last_loss,
        metric=run.metric,
        best=run.best.name if run.best else "",
        best_step=run.best.step if run.best else None,
        score=found,
        base=run.base.evaluation.metrics.get(run.metric) if run.base and run.base.evaluation else None,
        evaluated=summary.evaluated,
        seconds=summary.seconds,
        throughput=summary.throughput,
        restarts=summary.restarts,
        ledger=run.ledger,
    )


def differences(runs: Sequence[Run]) -> dict[str, tuple[Any, ...]]:
    """The fields of `spec` in which the jobs of runs differ, by their path in a manifest: a value for each run, None
    where it is not set or nobody knows."""
    # Values of variables that are probably secrets are hidden, as on the page of a report.
    specs = [dict(_fields("", hidden(run.job.spec.dump()))) if isinstance(run.job, Model) else {} for run in runs]
    paths = sorted({path for spec in specs for path in spec})
    values = {path: tuple(spec.get(path) for spec in specs) for path in paths}
    return {path: found for path, found in values.items() if any(value != found[0] for value in found)}


def rows(runs: Sequence[Run], outcomes: Sequence[Outcome]) -> list[Row]:
    """The table: what differs in the jobs, then what became of them."""
    found = [(path, tuple(_shown(value) for value in values)) for path, values in differences(runs).items()]
    found.append(("state", tuple(one.state for one in outcomes)))
    found.append(("steps", tuple(_steps(one) for one in outcomes)))
    found.append(("training loss", tuple(number(one.loss) for one in outcomes)))
    for metric in dict.fromkeys(one.metric for one in outcomes):
        own = [one if one.metric == metric else None for one in outcomes]
        found.append((best_label(metric), tuple(_score(one) for one in own)))
        if any(one is not None and one.base is not None for one in own):
            found.append((f"base model's {metric_name(metric)}", tuple(_base(one) for one in own)))
    found.append(("at step", tuple(NOT_SET if one.best_step is None else f"{one.best_step:,}" for one in outcomes)))
    found.append(("evaluated", tuple(f"{one.evaluated:,}" for one in outcomes)))
    found.append(("duration", tuple(duration(one.seconds) for one in outcomes)))
    found.append(("samples/s", tuple(number(one.throughput) for one in outcomes)))
    found.append(("restarts", tuple(f"{one.restarts:,}" for one in outcomes)))
    totals = [{name: written(spent.total) for name, spent, written in amounts(one.ledger)} for one in outcomes]
    names = dict.fromkeys(name for one in totals for name in one)
    return found + [(name, tuple(one.get(name, NOT_SET) for one in totals)) for name in names]


def best_label(metric: str) -> str:
    """Label of the row of best scores."""
    return f"best {metric_name(metric)}"


def winner(runs: Sequence[Run], outcomes: Sequence[Outcome]) -> int | None:
    """Which run has the best score; None if they are scored by different metrics, fewer than two have a score, or the
    best one is not the only one."""
    scored = {index: one.score for index, one in enumerate(outcomes) if one.score is not None}
    if len(scored) < 2 or len({outcomes[index].metric for index in scored}) > 1:
        return None
    first = next(iter(scored))
    is_more_better = direction(runs[first].job, outcomes[first].metric) == "Maximize"
    best = (max if is_more_better else min)(scored.values())
    holders = [index for index, value in scored.items() if value == best]
    return holders[0] if len(holders) == 1 else None


def _fields(path: str, value: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(value, Mapping) and value:
        for key, inner in value.items():
            yield from _fields(f"{path}.{key}" if path else str(key), inner)
    else:
        yield path, value


def _steps(one: Outcome) -> str:
    return f"{one.steps:,} of {one.total_steps:,}" if one.total_steps else f"{one.steps:,}"


def _score(one: Outcome | None) -> str:
    return NOT_SET if one is None or one.score is None else score(one.metric, one.score)


def _base(one: Outcome | None) -> str:
    return NOT_SET if one is None or one.base is None else score(one.metric, one.base)


def _shown(value: Any) -> str:
    if isinstance(value, list):
        return " ".join(_shown(one) for one in value) or NOT_SET
    if isinstance(value, Mapping):
        if value.keys() == {"name", "value"}:
            return f"{value['name']}={value['value']}"
        return " ".join(f"{key}={_shown(one)}" for key, one in value.items())
    return NOT_SET if value is None else str(value).lower() if isinstance(value, bool) else str(value)
