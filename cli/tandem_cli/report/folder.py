"""The files of a run directory, and the test whether a folder is one. Apart from `reading`: without numpy."""

from contextlib import suppress
from pathlib import Path

from tandem.rundir.layout import RunDir, generation_of_log


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


def listed(folder: Path) -> list[Path]:
    """What is in a folder, by name; nothing if it is not there or cannot be read: a report is of what there is."""
    with suppress(OSError):
        return sorted(folder.iterdir())
    return []


def folders(folder: Path) -> list[Path]:
    """The folders in it alone, in the same way."""
    with suppress(OSError):
        return sorted(path for path in folder.iterdir() if path.is_dir())
    return []


def _has_logs(rundir: RunDir) -> bool:
    return any(generation_of_log(path) is not None or path == rundir.coordinator_log for path in listed(rundir.log))
