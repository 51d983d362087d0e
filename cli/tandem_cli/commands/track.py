"""`tandem track RUN`: sends the missing data of a run to MLflow."""

import json
import os
import subprocess

from tandem.errors import UserError
from tandem.job.tracking import tracking_uri, without_password
from tandem.processes.launch import RUN_DIR, module_command
from tandem.rundir.layout import RunDir
from tandem_cli.output import echo
from tandem_cli.runs import RunArgument, open_own_run


def track(run: RunArgument) -> None:
    """Send the missing data of a run to MLflow.

    A running run sends everything by itself. Use this command if the server was unavailable at the end of the run, or
    to add a report that you wrote later. Nothing is sent twice.
    """
    path = open_own_run(run, "which does not record what MLflow has; run the command where the run is").path.resolve()
    job = RunDir(path).read_job()
    if (mlflow := job.spec.tracking.mlflow) is None:
        raise UserError(f"{run} is not tracked; give its job `tracking: {{mlflow: {{}}}}` in spec, and run it again")
    variables = {**os.environ, **mlflow.literal, RUN_DIR: str(path)}
    command = module_command("tandem_coordinator.tracking", "--once")
    done = subprocess.run(command, env=variables, stdout=subprocess.PIPE, text=True, check=False)
    lines = done.stdout.strip().splitlines()
    failing = json.loads(lines[-1])["failing"] if lines else f"it ended with exit code {done.returncode}"
    if failing:
        raise UserError(f"not everything was sent to MLflow: {failing}")
    uri = tracking_uri(mlflow, path, variables)
    echo(f"everything of {run} is at {without_password(uri or '')}")
