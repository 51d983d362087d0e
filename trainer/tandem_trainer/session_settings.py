"""The checkpoint settings of a session: those of its job, or what the script gives."""

import re
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from tandem.job import API_VERSION, KIND, Checkpoint, DistributedTrainingJob
from tandem.rundir.durable import may_pass
from tandem.rundir.layout import RunDir
from tandem_trainer.failure import ConfigurationError
from tandem_trainer.process_group import Group, PeerFault

WHERE = "Session(checkpoint=…)"
IN_A_JOB = ("spec", "checkpoint")


def given_settings(given: Checkpoint | Mapping[str, Any] | None) -> Checkpoint:
    """What a script gives its session.

    Args:
        given: a dictionary has the names that `spec.checkpoint` of a manifest has.

    Raises:
        ConfigurationError: it is no such thing.
    """
    if given is None or isinstance(given, Checkpoint):
        return given or Checkpoint()
    if not isinstance(given, Mapping):
        raise ConfigurationError(f'{WHERE} takes a dictionary such as {{"everySteps": 100}}, not {given!r}')
    data = dict(given)
    try:
        return Checkpoint.parse(data)
    except ValidationError as error:
        details = [{**one, "loc": (*IN_A_JOB, *one["loc"])} for one in error.errors(include_url=False)]
    # Words for mistakes are not needed by a rank that starts again.
    from tandem.manifest.reading import problems
    from tandem.manifest.source import Source

    found = problems(details, Source(WHERE, [""]), {IN_A_JOB[0]: {IN_A_JOB[1]: data}}, [])  # type: ignore[arg-type]
    told = (f"{one.message}{f'; did you mean {one.suggestion}?' if one.suggestion else ''}" for one in found)
    raise ConfigurationError(f"{WHERE}: {'; '.join(told)}")


def agreed_settings(rundir: RunDir, group: Group, given: Checkpoint) -> Checkpoint:
    """When to save: as the job says, which is made where there is none. Collective.

    Raises:
        ConfigurationError: the folder holds something else.
        OSError: rank 0's disk fails.
        PeerFault: so it does, for the other ranks.
    """
    problem, passes = "", False
    if group.rank == 0:
        try:
            rundir.create()
            if not rundir.job_file.exists():
                rundir.write_job(_job(rundir.path, given))
            given = rundir.read_job().spec.checkpoint
        except (OSError, ValueError) as error:
            problem, passes = f"the run directory {rundir.path} cannot be used: {error}", may_pass(error)
    told = group.tell({"problem": problem, "passes": passes, "checkpoint": given.dump()})
    if told["problem"]:
        fault = ConfigurationError if not told["passes"] else OSError if group.rank == 0 else PeerFault
        raise fault(str(told["problem"]))
    return Checkpoint.parse(told["checkpoint"])


def _job(folder: Path, checkpoint: Checkpoint) -> DistributedTrainingJob:
    name = re.sub(r"[^a-z0-9]+", "-", folder.resolve().name.lower()).strip("-")[:63].strip("-") or "session"
    return DistributedTrainingJob.parse(
        {
            "apiVersion": API_VERSION,
            "kind": KIND,
            "metadata": {"name": name},
            "spec": {"trainer": {"command": ["python", *sys.argv][:64]}, "checkpoint": checkpoint.dump()},
        }
    )
