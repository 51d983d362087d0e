"""The Python client: `from tandem import Client`. Imports no torch.

    client     where jobs go, and which runs there are
    job_input  a path, a text, a dict or a model as the source of a manifest
    function   a Python function as a job
    run        a run: its status, logs, numbers and checkpoints
    sweep      many runs with different settings
    notebook   a run as HTML
    async_client   the same for programs with an event loop

The client calls the platforms (tandem_cli.platforms), as the commands do, and prints nothing
(docs/decisions/0057-the-client.md).
"""

from tandem_cli.client.async_client import AsyncClient, AsyncRun
from tandem_cli.client.client import Client
from tandem_cli.client.job_input import Job
from tandem_cli.client.run import CheckpointHandle, CheckpointScores, RunFailedError, RunHandle, StepLoss, frame
from tandem_cli.client.sweep import SweepHandle

__all__ = [
    "AsyncClient",
    "AsyncRun",
    "CheckpointHandle",
    "CheckpointScores",
    "Client",
    "Job",
    "RunFailedError",
    "RunHandle",
    "StepLoss",
    "SweepHandle",
    "frame",
]
