"""Generators of the repository's generated files: `python -m tools`, or `make generate`.

    charts/tandem/files/crd.yaml            the CustomResourceDefinition of a job
    charts/tandem/files/rights*.yaml        permissions of the operator
    charts/tandem/files/dashboards/*.json   dashboards for Grafana: all jobs, one job
    charts/tandem/files/alerts.yaml         rules for Prometheus
    charts/tandem/README.md                 every value of the chart
    docs/reference/job.schema.json          the schema of a manifest for editors
    docs/reference/*.md                     fields of a job and a sweep, metrics, exit codes, logs, options of adapters
    docs/images/architecture.svg            the processes of a job

`python -m tools --check` lists stale files and exits with 1. No installed code imports this package; it needs a
developer's environment (`make setup`).
"""

from collections.abc import Callable, Mapping

from tools import dashboards, helm_chart
from tools.alerts import rules_yaml
from tools.architecture import architecture_svg
from tools.crd import crd_yaml, editor_json
from tools.reference import exits_page, job_page, logs_page, metrics_page, options_page, sweep_page

FILES: Mapping[str, Callable[[], str]] = {
    "charts/tandem/files/crd.yaml": crd_yaml,
    "charts/tandem/files/alerts.yaml": rules_yaml,
    **dashboards.FILES,
    **helm_chart.FILES,
    "docs/reference/job.schema.json": editor_json,
    "docs/reference/job.md": job_page,
    "docs/reference/sweep.md": sweep_page,
    "docs/reference/metrics.md": metrics_page,
    "docs/reference/exit-codes.md": exits_page,
    "docs/reference/logs.md": logs_page,
    "docs/reference/adapter-options.md": options_page,
    "docs/images/architecture.svg": architecture_svg,
}
"""Paths below the repository's root, each with the function that generates the content."""
