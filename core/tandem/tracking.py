"""Where a job is tracked: the address of the MLflow server or store, the same for what sends to it and what opens it."""

import re
from collections.abc import Mapping
from pathlib import Path

from tandem.job import DistributedTrainingJob
from tandem.launch import POD

URI = "MLFLOW_TRACKING_URI"
"""The variable that names a tracking server where the manifest does not; MLflow's own."""
SQLITE = "sqlite:///"
STORE, ARTIFACTS = "mlflow.db", "mlflow-artifacts"
"""The local store: a database, and a folder beside it."""
FILE = "run.json"
"""In the folder `tracking` of a run directory: which run of which server it is."""
QUIET = {
    "MLFLOW_DISABLE_TELEMETRY": "true",
    "GIT_PYTHON_REFRESH": "quiet",
}
"""Variables of every MLflow process that Tandem starts: it tells its makers nothing, and asks for no git."""


def tracking_uri(job: DistributedTrainingJob, run_dir: Path, environment: Mapping[str, str]) -> str | None:
    """The server or store that a job is tracked on; None where there is none.

    Args:
        environment: variables of the process that sends.
    """
    given = job.spec.tracking.mlflow and job.spec.tracking.mlflow.uri
    if found := given or environment.get(URI):
        return found
    # A database of files on a volume that several nodes mount is damaged sooner or later.
    return None if environment.get(POD) else local_store(run_dir)


def local_store(run_dir: Path) -> str:
    """The store in the folder that a run directory is in."""
    return f"{SQLITE}{run_dir.resolve().parent / STORE}"


def database(uri: str) -> Path | None:
    """The file of a SQLite store; None for another one."""
    return Path(uri.removeprefix(SQLITE)).absolute() if uri.startswith(SQLITE) else None


def without_password(uri: str) -> str:
    """An address that may be shown and kept."""
    return re.sub(r"//[^/@]*@", "//", uri)
