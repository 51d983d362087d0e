"""What a tracked job needs of this machine: MLflow, and a whole one for a store without a server."""

import os
from collections.abc import Iterator
from importlib.util import find_spec

from tandem.errors import Unmet
from tandem.job import DistributedTrainingJob
from tandem.tracking import database, tracking_uri
from tandem_coordinator.prerequisites.site import Site


def tracking(job: DistributedTrainingJob, site: Site) -> Iterator[Unmet]:
    """Whether this machine can send to a job's server or store. Whether a server answers is not asked: it may later."""
    mlflow = job.spec.tracking.mlflow
    if mlflow is None or not site.is_here:
        return
    uri = tracking_uri(mlflow, site.run_dir.path, os.environ)
    is_local = uri is not None and database(uri) is not None
    if find_spec("mlflow") is None or (is_local and find_spec("sqlalchemy") is None):
        yield Unmet(("spec", "tracking", "mlflow"), "mlflow is not installed here (pip install 'tandem[mlflow]')")
