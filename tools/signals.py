"""The reference page of metrics: every name with its kind, labels and meaning, for people."""

from collections.abc import Iterator

from tandem.metrics import ALL, COMMON, OPERATOR, Metric, OperatorMetric

HEAD = """\
<!-- Generated from core/tandem/metrics.py by `make generate`; do not edit. -->
# Metrics

A job's coordinator answers `/metrics` on port 7070 with the job's token, and on port 7071 without it (on a laptop with
`tandem run --metrics-port 7071`, for this machine alone). The operator answers on port 8080. Series of a rank, a worker
or an evaluator disappear with it, and those of a job with its coordinator.

The chart's monitors take `job` and `namespace` from the pod that is scraped, so that no pod can give numbers in
another's name. Where you scrape in another way, set `honorLabels: true`, and scrape only pods that you trust.
Counters begin anew with the process that counts; `rate` and `increase` know that. What is not known is absent,
never 0.
"""


def metrics_page() -> str:
    """The page as Markdown."""
    jobs = ["## A job", "", f"Each also has the labels {' and '.join(f'`{name}`' for name in COMMON)}.", ""]
    return "\n".join([HEAD, *jobs, *_table(ALL), "", "## The operator", "", *_table(OPERATOR), ""])


def _table(metrics: tuple[Metric, ...] | tuple[OperatorMetric, ...]) -> Iterator[str]:
    yield "| name | kind | labels | meaning |"
    yield "|---|---|---|---|"
    for metric in metrics:
        own = metric.own if isinstance(metric, Metric) else metric.labels
        yield f"| `{metric.name}` | {metric.kind} | {', '.join(f'`{label}`' for label in own)} | {metric.help} |"
