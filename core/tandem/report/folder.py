"""Whether a folder is a run directory at all; apart from `reading`, so that it can be asked without numpy."""

import re

from tandem.rundir import RunDir

TRAIN_LOG = re.compile(r"^train-g([0-9]{1,9})\.jsonl$")


class NoRun(Exception):  # noqa: N818 - it is what was found, and reads as such
    """The folder is not a run directory; says what was looked for."""


def expect_run(rundir: RunDir) -> None:
    """Refuse a folder with nothing of a run in it.

    Raises:
        NoRun: it is none.
    """
    path = rundir.path
    if not path.exists():
        raise NoRun(f"{path} does not exist")
    if not path.is_dir():
        raise NoRun(f"{path} is a file; a run is a folder")
    try:
        known = {entry.name for entry in path.iterdir()}
    except OSError as error:
        raise NoRun(f"{path} cannot be read: {error.strerror}") from error
    if not known & {"job.json", "DONE", "FAILED.json", "generations", "checkpoints"} and not _has_logs(rundir):
        raise NoRun(
            f"{path} is not a run directory: it has neither job.json nor log/coordinator.jsonl nor log/train-*.jsonl"
        )


def _has_logs(rundir: RunDir) -> bool:
    try:
        names = [entry.name for entry in rundir.log.iterdir()]
    except OSError:
        return False
    return any(TRAIN_LOG.match(name) or name == "coordinator.jsonl" for name in names)
