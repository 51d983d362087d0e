"""Dashboards for Grafana, from the names in tandem.wire.metrics.

    charts/tandem/files/dashboards/fleet.json   all jobs, and the operator
    charts/tandem/files/dashboards/job.json     one job

`make generate` writes them. They need Grafana's foundation SDK, which only a developer's environment has; nothing else
imports this package.
"""

from collections.abc import Callable, Mapping

from tools.dashboards.fleet_dashboard import fleet
from tools.dashboards.job_dashboard import job
from tools.dashboards.panels import as_json

FILES: Mapping[str, Callable[[], str]] = {
    "charts/tandem/files/dashboards/fleet.json": lambda: as_json(fleet()),
    "charts/tandem/files/dashboards/job.json": lambda: as_json(job()),
}
"""Paths below the repository's root, each with the function that generates the content."""
