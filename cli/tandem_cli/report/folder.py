"""The files of a run directory, and the check whether a folder is one. Separate from `reading`, which needs numpy."""

from contextlib import suppress
from pathlib import Path

from tandem.rundir.layout import RunDir, generation_of_log


class NoRun(Exception):  # noqa: N818 - it is what was found, and reads as such
    """The folder is not a run directory; the message says what is missing."""


def expect_run(rundir: RunDir) -> None:
    """Check that a folder is a run directory.

    Raises:
        NoRun: the folder is not one.
    """
    path = rundir.path
    if not path.exists():
        raise NoRun(f"{path} does not exist")
    if not path.is_dir():
        raise NoRun(f"{path} is a file; a run is a folder")
    try:
        names = {entry.name for entry in path.iterdir()}
    except OSError as error:
        raise NoRun(f"{path} cannot be read: {error.strerror}") from error
    if not names & {"job.json", "DONE", "FAILED.json", "generations", "checkpoints"} and not _has_logs(rundir):
        raise NoRun(
            f"{path} is not a run directory: it has neither job.json nor log/coordinator.jsonl nor log/train-*.jsonl"
        )


def entries(folder: Path) -> list[Path]:
    """List a folder by name; empty if it does not exist or cannot be read: a report shows what there is."""
    with suppress(OSError):
        return sorted(folder.iterdir())
    return []


def folders(folder: Path) -> list[Path]:
    """List the folders in a folder likewise."""
    with suppress(OSError):
        return sorted(path for path in folder.iterdir() if path.is_dir())
    return []


def _has_logs(rundir: RunDir) -> bool:
    return any(generation_of_log(path) is not None or path == rundir.coordinator_log for path in entries(rundir.log))
