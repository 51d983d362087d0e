"""`tandem track RUN`: sends what MLflow lacks of a run."""

import json
import os
import subprocess

from tandem.errors import UserError
from tandem.launch import RUN_DIR, module_command
from tandem.rundir.layout import RunDir
from tandem.tracking import tracking_uri, without_password
from tandem_cli.output import echo
from tandem_cli.runs import RunArgument, opened


def track(run: RunArgument) -> None:
    """Send to MLflow what it lacks of a run.

    A run sends everything by itself while it is alive. Use this command when the server was away at the end of the run,
    or to add a report that you wrote later. Nothing is sent twice.
    """
    path = opened(run).path.resolve()
    job = RunDir(path).read_job()
    if (mlflow := job.spec.tracking.mlflow) is None:
        raise UserError(f"{run} is not tracked; give its job `tracking: {{mlflow: {{}}}}` in spec, and run it again")
    variables = {**os.environ, **mlflow.literal, RUN_DIR: str(path)}
    command = module_command("tandem_coordinator.tracking", "--once")
    done = subprocess.run(command, env=variables, stdout=subprocess.PIPE, text=True, check=False)
    said = done.stdout.strip().splitlines()
    failing = json.loads(said[-1])["failing"] if said else f"it ended with exit code {done.returncode}"
    if failing:
        raise UserError(f"not everything was sent to MLflow: {failing}")
    uri = tracking_uri(mlflow, path, variables)
    echo(f"everything of {run} is at {without_password(uri or '')}")
