"""The comparison of runs: the differences of their jobs and of their results. Pure."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tandem.confidence import Estimate, Interval, count_tied
from tandem.formatting import confidence, count_noun, duration, metric_name, number, score, share
from tandem.job.secrecy import hide_secrets
from tandem.model import Model
from tandem.rundir.evaluations import direction
from tandem.wire.ledger import Ledger, ledger_rows
from tandem.wire.status import phase_word
from tandem_cli.report import clock
from tandem_cli.report.run import RunData
from tandem_cli.report.summary import summarize

ComparisonRow = tuple[str, tuple[str, ...]]
"""Label, and a text for each run."""
NOT_SET = "–"


@dataclass(frozen=True)
class Outcome:
    """Result of a run."""

    name: str
    """Name of its job."""
    path: str
    """Its run directory."""
    state: str
    """Succeeded, Failed, Running or Stopped."""
    steps: int
    """Steps that made the model."""
    total_steps: int | None
    """Steps of the whole run."""
    loss: float | None
    """Training loss of the last step that has one."""
    metric: str
    """Metric that ranks its checkpoints."""
    best: str
    """The best checkpoint; empty if none was evaluated."""
    best_step: int | None
    """Step of the best checkpoint."""
    score: float | None
    """Score of the best checkpoint on the test data."""
    interval: Interval | None
    """95 % confidence interval of that score; None if it is not known."""
    base: float | None
    """Score of the base model, if it was evaluated."""
    evaluated: int
    """Number of checkpoints with a score."""
    seconds: float
    """Active time, without pauses."""
    throughput: float | None
    """Median of the samples a second, over all ranks."""
    restarts: int
    """Generations formed because of a failure or a loss."""
    ledger: Ledger | None = None
    """GPU time, CPU time and cost by purpose."""


def outcome(run: RunData, path: str) -> Outcome:
    """Determine the result of a run."""
    summary = summarize(run, clock.make_clock(run.marks))
    best_score = run.best.evaluation.metrics.get(run.metric) if run.best and run.best.evaluation else None
    return Outcome(
        name=run.name,
        path=path,
        state=phase_word(run.result, run.message),
        steps=summary.steps,
        total_steps=run.total_steps,
        loss=run.model_steps.last_loss,
        metric=run.metric,
        best=run.best.name if run.best else "",
        best_step=run.best.step if run.best else None,
        score=best_score,
        interval=run.best.evaluation.intervals.get(run.metric) if run.best and run.best.evaluation else None,
        base=run.base.evaluation.metrics.get(run.metric) if run.base and run.base.evaluation else None,
        evaluated=summary.evaluated,
        seconds=summary.seconds,
        throughput=summary.throughput,
        restarts=summary.restarts,
        ledger=run.ledger,
    )


def differences(runs: Sequence[RunData]) -> dict[str, tuple[Any, ...]]:
    """Find the fields of `spec` in which the jobs of runs differ, by their path in a manifest: a value for each run,
    None if it is not set or unknown."""
    # Values of variables that are probably secrets are hidden, as on the page of a report.
    specs = [dict(_fields("", hide_secrets(run.job.spec.dump()))) if isinstance(run.job, Model) else {} for run in runs]
    paths = sorted({path for spec in specs for path in spec})
    values = {path: tuple(spec.get(path) for spec in specs) for path in paths}
    return {path: of_runs for path, of_runs in values.items() if any(value != of_runs[0] for value in of_runs)}


def rows(runs: Sequence[RunData], outcomes: Sequence[Outcome]) -> list[ComparisonRow]:
    """Build the table: the settings that differ, then the results."""
    table = [(path, tuple(_formatted(value) for value in values)) for path, values in differences(runs).items()]
    table.append(("state", tuple(outcome.state for outcome in outcomes)))
    table.append(("steps", tuple(_steps(outcome) for outcome in outcomes)))
    table.append(("training loss", tuple(number(outcome.loss) for outcome in outcomes)))
    for metric in dict.fromkeys(outcome.metric for outcome in outcomes):
        own = [outcome if outcome.metric == metric else None for outcome in outcomes]
        table.append((best_label(metric), tuple(_score(outcome) for outcome in own)))
        if any(outcome is not None and outcome.base is not None for outcome in own):
            table.append((f"base model's {metric_name(metric)}", tuple(_base(outcome) for outcome in own)))
    table.append(
        ("at step", tuple(NOT_SET if outcome.best_step is None else f"{outcome.best_step:,}" for outcome in outcomes))
    )
    table.append(("evaluated", tuple(f"{outcome.evaluated:,}" for outcome in outcomes)))
    table.append(("duration", tuple(duration(outcome.seconds) for outcome in outcomes)))
    table.append(("samples/s", tuple(number(outcome.throughput) for outcome in outcomes)))
    table.append(("restarts", tuple(f"{outcome.restarts:,}" for outcome in outcomes)))
    walls = [None if outcome.ledger is None else outcome.ledger.wall for outcome in outcomes]
    if any(walls):
        table.append(("ETTR", tuple(share(None if wall is None else wall.ettr) for wall in walls)))
    totals = [
        {name: written(hours.total) for name, hours, written in ledger_rows(outcome.ledger)} for outcome in outcomes
    ]
    names = dict.fromkeys(name for total in totals for name in total)
    return table + [(name, tuple(total.get(name, NOT_SET) for total in totals)) for name in names]


def best_label(metric: str) -> str:
    """Label of the row of best scores."""
    return f"best {metric_name(metric)}"


def warning(runs: Sequence[RunData]) -> str:
    """Say why the scores of runs cannot be compared although they have one metric; empty if nothing is known against
    it."""
    scored = [run for run in runs if run.best is not None and run.best.evaluation is not None]
    if any(_test_data(run) != _test_data(scored[0]) for run in scored):
        reason = "trainer.parameters.data"
    else:
        samples = [run.best.evaluation.samples for run in scored if run.best and run.best.evaluation]
        counts = list(dict.fromkeys(count for count in samples if count is not None))
        if len(counts) < 2:
            return ""
        reason = f"{' and '.join(map(number, counts))} samples"
    return f"The runs were evaluated on different data ({reason}), so their scores cannot be compared."


def _test_data(run: RunData) -> Any:
    """The settings of a built-in task that decide which samples its checkpoints are evaluated on."""
    trainer = run.job.spec.dump()["trainer"] if isinstance(run.job, Model) else {}
    data = (trainer.get("parameters") or trainer.get("config") or {}).get("data")
    if not isinstance(data, Mapping):
        return data
    return [_test_source(source) for source in data.get("mixture") or [data]]


def _test_source(source: Mapping[str, Any]) -> Mapping[str, Any]:
    """The settings of one source of data that decide which samples are evaluated."""
    if isinstance(source.get("test"), str) and not source.get("dataset"):
        # A file of its own.
        return {"test": source["test"]}
    # Images have test data of their own, whatever is taken of the others. Of a text, the last samples are tested.
    of_training = {"weight", *(("validation", "start", "end") if "name" in source else ())}
    return {name: value for name, value in source.items() if name not in of_training}


def winner(runs: Sequence[RunData], outcomes: Sequence[Outcome]) -> int | None:
    """Choose the run with the best score; None if runs are scored by different metrics or on different data, fewer than
    two have a score, or several share the best one."""
    scored = {index: outcome.score for index, outcome in enumerate(outcomes) if outcome.score is not None}
    if len(scored) < 2 or len({outcomes[index].metric for index in scored}) > 1 or warning(runs):
        return None
    first = next(iter(scored))
    is_more_better = direction(runs[first].job, outcomes[first].metric) == "Maximize"
    best = (max if is_more_better else min)(scored.values())
    holders = [index for index, value in scored.items() if value == best]
    return holders[0] if len(holders) == 1 else None


def certainty(outcomes: Sequence[Outcome], first: int) -> str:
    """Say whether the best score differs from the others by more than chance, in words that follow "it"; empty if that
    is not known.

    Args:
        first: the run with the best score.
    """
    estimates = {
        place: Estimate(outcome.score, outcome.interval)
        for place, outcome in enumerate(outcomes)
        if outcome.score is not None
    }
    best = estimates.pop(first)
    tied = count_tied(best, estimates.values())
    if tied is None:
        return ""
    if not tied:
        return "is ahead of all others by more than chance"
    return f"differs from {count_noun(tied, 'other')} by no more than chance"


def _fields(path: str, value: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(value, Mapping) and value:
        for key, inner in value.items():
            yield from _fields(f"{path}.{key}" if path else str(key), inner)
    else:
        yield path, value


def _steps(outcome: Outcome) -> str:
    return f"{outcome.steps:,} of {outcome.total_steps:,}" if outcome.total_steps else f"{outcome.steps:,}"


def _score(outcome: Outcome | None) -> str:
    if outcome is None or outcome.score is None:
        return NOT_SET
    return score(outcome.metric, outcome.score) + confidence(outcome.metric, outcome.interval)


def _base(outcome: Outcome | None) -> str:
    return NOT_SET if outcome is None or outcome.base is None else score(outcome.metric, outcome.base)


def _formatted(value: Any) -> str:
    if isinstance(value, list):
        return " ".join(_formatted(item) for item in value) or NOT_SET
    if isinstance(value, Mapping):
        if value.keys() == {"name", "value"}:
            return f"{value['name']}={value['value']}"
        return " ".join(f"{key}={_formatted(item)}" for key, item in value.items())
    return NOT_SET if value is None else str(value).lower() if isinstance(value, bool) else str(value)
