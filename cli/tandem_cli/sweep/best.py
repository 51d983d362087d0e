"""The best trial as files in the sweep's folder: its manifest, and the weights of its best checkpoint."""

from pathlib import Path
from typing import TYPE_CHECKING

import yaml

from tandem.errors import UserError
from tandem.rundir.durable import replace_bytes
from tandem_cli.sweep.definition import LABEL, Definition, SweepFolder
from tandem_cli.sweep.study import Trial

if TYPE_CHECKING:
    from tandem_cli.client.client import Client
    from tandem_cli.client.run import RunHandle

MANIFEST, WEIGHTS = "best.yaml", "best.safetensors"


def run_of(trial: Trial, folder: SweepFolder, client: "Client") -> "RunHandle":
    """The run of a trial.

    Raises:
        UserError: it was not submitted, or was deleted.
    """
    if not trial.run:
        raise UserError(f"trial {trial.number} has no run")
    return client.run(trial.run if client.is_on_kubernetes else folder.run_dir(trial.run))


def write_manifest(trial: Trial, definition: Definition, folder: SweepFolder) -> Path:
    """Write the manifest of the job with the values of a trial, and return its path.

    Raises:
        UserError: it cannot be written.
    """
    manifest = folder.path / MANIFEST
    data = definition.manifest(trial.values, definition.name)
    data["metadata"]["labels"].pop(LABEL)
    if not data["metadata"]["labels"]:
        del data["metadata"]["labels"]
    try:
        replace_bytes(manifest, yaml.safe_dump(data, sort_keys=False, allow_unicode=True).encode())
    except OSError as error:
        raise UserError(f"{manifest} cannot be written: {error.strerror}") from error
    return manifest


def export_weights(trial: Trial, folder: SweepFolder, client: "Client") -> Path:
    """Write the weights of the best checkpoint of a trial, and return their path.

    Raises:
        UserError: it is a file of the job's own script, which has no weights that Tandem knows; or it is gone or
            damaged, or cannot be written.
    """
    return run_of(trial, folder, client).checkpoint("best").export(folder.path / WEIGHTS)
