"""The files that are generated from the models of the job: `python -m tandem.schema`, or `make generate`.

    charts/tandem/files/crd.yaml     what the API server knows of a job
    docs/reference/job.schema.json   what an editor knows of a manifest
    docs/reference/job.md            the same for people
    docs/reference/metrics.md        every metric
    docs/reference/exit-codes.md     every exit code

`python -m tandem.schema --check` names those that are stale and ends with 1.
"""

from collections.abc import Callable, Mapping

from tandem.schema.crd import crd_yaml
from tandem.schema.editor import editor_json
from tandem.schema.exits import exits_page
from tandem.schema.reference import reference_page
from tandem.schema.signals import metrics_page

FILES: Mapping[str, Callable[[], str]] = {
    "charts/tandem/files/crd.yaml": crd_yaml,
    "docs/reference/job.schema.json": editor_json,
    "docs/reference/job.md": reference_page,
    "docs/reference/metrics.md": metrics_page,
    "docs/reference/exit-codes.md": exits_page,
}
"""Path below the repository's root, and what makes the content."""
