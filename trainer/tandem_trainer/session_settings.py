"""Checkpoint settings of a session: those of its job, or those that the script gives."""

import re
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from tandem.job.resource import API_VERSION, KIND, CheckpointSpec, DistributedTrainingJob
from tandem.rundir.durable import is_transient
from tandem.rundir.layout import RunDir
from tandem_trainer.failure import ConfigurationError
from tandem_trainer.process_group import Group, PeerFault

ARGUMENT = "Session(checkpoint=…)"
MANIFEST_PATH = ("spec", "checkpoint")


def parse_settings(settings: CheckpointSpec | Mapping[str, Any] | None) -> CheckpointSpec:
    """Parse the settings that a script gives to its session.

    Args:
        settings: settings, or a dictionary with the names of `spec.checkpoint` in a manifest.

    Raises:
        ConfigurationError: it is neither, or a value is wrong.
    """
    if settings is None or isinstance(settings, CheckpointSpec):
        return settings or CheckpointSpec()
    if not isinstance(settings, Mapping):
        raise ConfigurationError(f'{ARGUMENT} takes a dictionary such as {{"everySteps": 100}}, not {settings!r}')
    data = dict(settings)
    try:
        return CheckpointSpec.parse(data)
    except ValidationError as error:
        details = [{**detail, "loc": (*MANIFEST_PATH, *detail["loc"])} for detail in error.errors(include_url=False)]
    # Imported here: only a mistake needs these modules, and a rank that starts again has made none.
    from tandem.job.manifest.reading import problems
    from tandem.job.manifest.source import Source

    mistakes = problems(details, Source(ARGUMENT, [""]), {MANIFEST_PATH[0]: {MANIFEST_PATH[1]: data}}, [])  # type: ignore[arg-type]
    messages = (
        f"{mistake.message}{f'; did you mean {mistake.suggestion}?' if mistake.suggestion else ''}"
        for mistake in mistakes
    )
    raise ConfigurationError(f"{ARGUMENT}: {'; '.join(messages)}")


def agreed_settings(rundir: RunDir, group: Group, settings: CheckpointSpec) -> CheckpointSpec:
    """Return the checkpoint settings of the job. Creates the job if there is none. Collective.

    Raises:
        ConfigurationError: the folder holds something else.
        OSError: the disk fails, on rank 0.
        PeerFault: the disk of rank 0 fails, on the other ranks.
    """
    problem, is_passing = "", False
    if group.rank == 0:
        try:
            rundir.create()
            if not rundir.job_file.exists():
                rundir.write_job(_job(rundir.path, settings))
            settings = rundir.read_job().spec.checkpoint
        except (OSError, ValueError) as error:
            problem, is_passing = f"the run directory {rundir.path} cannot be used: {error}", is_transient(error)
    answer = group.tell({"problem": problem, "passes": is_passing, "checkpoint": settings.dump()})
    if answer["problem"]:
        fault = ConfigurationError if not answer["passes"] else OSError if group.rank == 0 else PeerFault
        raise fault(str(answer["problem"]))
    return CheckpointSpec.parse(answer["checkpoint"])


def _job(folder: Path, checkpoint: CheckpointSpec) -> DistributedTrainingJob:
    name = re.sub(r"[^a-z0-9]+", "-", folder.resolve().name.lower()).strip("-")[:63].strip("-") or "session"
    return DistributedTrainingJob.parse(
        {
            "apiVersion": API_VERSION,
            "kind": KIND,
            "metadata": {"name": name},
            "spec": {"trainer": {"command": ["python", *sys.argv][:64]}, "checkpoint": checkpoint.dump()},
        }
    )
