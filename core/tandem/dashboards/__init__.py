"""Dashboards for Grafana and alerts for Prometheus, from the names in tandem.metrics: `python -m tandem.dashboards`.

    charts/tandem/files/dashboards/fleet.json   all jobs, and the operator
    charts/tandem/files/dashboards/job.json     one job
    charts/tandem/files/alerts.yaml             rules, as promtool reads them

`make generate` writes them. Needs Grafana's foundation SDK, which only a developer's environment has; nothing else
imports this package.
"""

from collections.abc import Callable, Mapping

from tandem.dashboards.alerts import rules_yaml
from tandem.dashboards.fleet import fleet
from tandem.dashboards.job import job
from tandem.dashboards.panels import as_json

FILES: Mapping[str, Callable[[], str]] = {
    "charts/tandem/files/dashboards/fleet.json": lambda: as_json(fleet()),
    "charts/tandem/files/dashboards/job.json": lambda: as_json(job()),
    "charts/tandem/files/alerts.yaml": rules_yaml,
}
"""Path below the repository's root, and what makes the content."""
