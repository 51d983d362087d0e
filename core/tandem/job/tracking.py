"""Tracking of a job by MLflow: its fields in a manifest, and the address of the server or store.

The address is the same for the sending process (tandem_coordinator.tracking) and for the commands that open it.
"""

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, ClassVar

from pydantic import Field

from tandem.job.variables import EnvVar
from tandem.model import Model, Rule
from tandem.rundir.durable import read_json_or_none

CREDENTIALS = "//[^/@]*:[^/@]*@"
TRACKING_VARIABLE = "^(MLFLOW|AWS|AZURE|GOOGLE|DATABRICKS)_"
"""Pattern of the variables that the sending process may get: it runs beside the coordinator."""


class Mlflow(Model):
    """MLflow tracking: one run on a tracking server or in a local store, across all restarts."""

    uri: Annotated[str, Field(max_length=1024, pattern=r"^(databricks|[a-z][a-z0-9+.-]*:.+)$")] | None = None
    """Tracking server or store, such as `https://mlflow.example` or `sqlite:////data/mlflow.db`. Default: the variable
    MLFLOW_TRACKING_URI, which on a cluster names the chart's server; with `tandem run` otherwise `mlflow.db` in the
    folder that the run directory is in."""
    experiment: Annotated[str, Field(min_length=1, max_length=500)] | None = None
    """Experiment of the run, which is created if it is missing. Default: the job's name."""
    register_best: bool = True
    """Upload the weights of the best checkpoint and register them as a model version, once training is complete."""
    named_model: Annotated[str | None, Field(alias="model", min_length=1, max_length=250, pattern=r"^[^/:]+$")] = None
    """Name of the registered model. Default: the job's name."""
    env: Annotated[list[EnvVar], Field(max_length=64)] = []
    """Variables of the sending process, such as MLFLOW_TRACKING_TOKEN. Names begin with MLFLOW_, AWS_, AZURE_, GOOGLE_
    or DATABRICKS_."""

    rules: ClassVar[tuple[Rule, ...]] = (
        Rule(
            lambda m: m.uri is None or not re.search(CREDENTIALS, m.uri),
            f"!has(self.uri) || !self.uri.matches('{CREDENTIALS}')",
            "uri holds a password, and would stand in the run directory; put MLFLOW_TRACKING_USERNAME and "
            "MLFLOW_TRACKING_PASSWORD, or all of MLFLOW_TRACKING_URI, into env with valueFrom",
            "uri",
        ),
        Rule(
            lambda m: all(re.match(TRACKING_VARIABLE, variable.name) for variable in m.env),
            f"!has(self.env) || self.env.all(one, one.name.matches('{TRACKING_VARIABLE}'))",
            "variables of tracking begin with MLFLOW_, AWS_, AZURE_, GOOGLE_ or DATABRICKS_",
            "env",
        ),
    )

    @property
    def literal(self) -> dict[str, str]:
        """The variables whose values are in the manifest."""
        return {variable.name: variable.value for variable in self.env if variable.value_from is None}


class Tracking(Model):
    """Trackers that receive the run's parameters, metrics and artifacts. Training never waits for them."""

    mlflow: Mlflow | None = None
    """MLflow, which needs the extra `mlflow` where the coordinator runs."""


OTLP_ENDPOINT = "OTEL_EXPORTER_OTLP_ENDPOINT"
"""Standard variable of OpenTelemetry with the address of the collector of traces."""
URI = "MLFLOW_TRACKING_URI"
"""MLflow's own variable for a tracking server, where the manifest names none."""
SQLITE = "sqlite:///"
STORE, ARTIFACTS = "mlflow.db", "mlflow-artifacts"
"""The local store: a database, and a folder beside it."""
FOLDER, FILE = "tracking", "run.json"
"""Folder and file in a run directory that identify the run on its tracking server."""
QUIET = {
    "MLFLOW_DISABLE_TELEMETRY": "true",
    "GIT_PYTHON_REFRESH": "quiet",
    "MLFLOW_SUPPRESS_PRINTING_URL_TO_STDOUT": "true",
}
"""Variables of every MLflow process that Tandem starts: no telemetry, and no need for git."""


def tracking_uri(mlflow: Mlflow, run_dir: Path, environment: Mapping[str, str], on_cluster: bool = False) -> str | None:
    """The server or store of a run; None if there is none.

    Args:
        environment: variables of the sending process.
        on_cluster: the run directory is on a volume, where there is no local store: several nodes may have mounted it,
            which would damage a database file.
    """
    if uri := mlflow.uri or {**environment, **mlflow.literal}.get(URI):
        return uri
    content = read_json_or_none(run_dir / FOLDER / FILE)
    recorded = content.get("uri") if isinstance(content, dict) else None
    if isinstance(recorded, str) and database(recorded) is None:
        # The variable was set when the run was sent there, and is not set now.
        return recorded
    return None if on_cluster else local_store(run_dir)


def local_store(run_dir: Path) -> str:
    """The store in the folder that a run directory is in."""
    return f"{SQLITE}{run_dir.resolve().parent / STORE}"


def database(uri: str) -> Path | None:
    """The file of a SQLite store; None for any other store."""
    return Path(uri.removeprefix(SQLITE)).absolute() if uri.startswith(SQLITE) else None


def without_password(uri: str) -> str:
    """An address without user and password, to show and store."""
    return re.sub(r"//[^/@]*@", "//", uri)
