"""The runs of this machine: those in `runs/` here, and those that `tandem run` has recorded for this user.

Each started run has a file of its own in the user's state folder, named after the path of its run directory. So runs
that start at the same time need no lock, and a failed write costs only a row of `tandem ls`. Moved and deleted runs are
dropped at the next listing.
"""

import fcntl
import hashlib
import os
import shlex
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from tandem.errors import UserError
from tandem.rundir.durable import read_json_or_none
from tandem.rundir.ownership import LOCK
from tandem_launcher.slurm import jobs

RUNS = Path("runs")
"""Default parent folder of the runs of `tandem run`."""
MAX_RECORDED_RUNS = 500
"""Number of recorded runs; the oldest are dropped."""
MAX_SUGGESTIONS = 8
"""Number of runs that an error suggests."""


def state_folder() -> Path:
    """Tandem's folder in the user's state directory; it may not exist."""
    return Path(os.environ.get("XDG_STATE_HOME") or "~/.local/state").expanduser() / "tandem"


def remember(path: Path) -> None:
    """Record a run of this machine. A home that cannot be written does not end the run."""
    folder, text = state_folder() / "runs", str(path.resolve())
    with suppress(OSError):
        folder.mkdir(parents=True, exist_ok=True)
        (folder / hashlib.sha256(text.encode()).hexdigest()[:16]).write_text(text)
        for old in sorted(folder.iterdir(), key=lambda file: file.stat().st_mtime)[:-MAX_RECORDED_RUNS]:
            old.unlink(missing_ok=True)


def list_runs() -> list[Path]:
    """Run directories that exist: those below the working directory, with relative paths, then all others; of both the
    newest first."""
    runs: dict[Path, Path] = {}
    with suppress(OSError):
        for folder in RUNS.iterdir():
            if (folder / "job.json").is_file():
                runs[folder.resolve()] = folder
    for path in _recorded():
        runs.setdefault(path, _relative(path))
    return sorted(runs.values(), key=lambda path: (path.is_absolute(), -_started_at(path)))


def find_runs(name: str) -> list[Path]:
    """Runs that a name matches: the one in `runs/` here if it exists, else all whose folder or job has this name."""
    if (RUNS / name / "job.json").is_file():
        return [RUNS / name]
    return [path for path in list_runs() if name in (path.name, job_name(path))]


def other_runs() -> str:
    """Suggest runs of this machine, as the end of an error message."""
    paths = [str(path) for path in list_runs()[:MAX_SUGGESTIONS]]
    return f". Runs here: {', '.join(paths)}" if paths else ". Give the run directory that `tandem run` named"


def job_name(path: Path) -> str:
    """The name of a run's job, empty where it cannot be read."""
    content = read_json_or_none(path / "job.json")
    metadata = content.get("metadata") if isinstance(content, dict) else None
    return str(metadata.get("name", "")) if isinstance(metadata, dict) else ""


def is_alive(path: Path) -> bool:
    """Whether a `tandem run` or its guardian uses a run directory, or SLURM has a job of the run."""
    if jobs.is_alive(path):
        return True
    try:
        lock = os.open(path / LOCK, os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return False
    try:
        fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:
        return False
    finally:
        os.close(lock)
    return False


def move(path: Path, target: Path) -> None:
    """Move or rename a run directory, and record its new path.

    Raises:
        UserError: the run is running, the target exists, or the disk refuses.
    """
    if target.exists() or target.is_symlink():
        raise UserError(f"{target} already exists; choose another name")
    with _locked(path):
        try:
            path.rename(target)
        except OSError as error:
            raise UserError(f"{path} cannot be moved to {target}: {error.strerror}") from error
    remember(target)


def delete(path: Path) -> None:
    """Delete a run directory with its content. A partly deleted one is no longer listed as a run.

    Raises:
        UserError: the run is running, or the disk refuses.
    """
    resolved = path.resolve()
    with _locked(path):
        doomed = resolved.with_name(f".{resolved.name}.deleted-{os.getpid()}")
        try:
            resolved.rename(doomed)
            shutil.rmtree(doomed)
        except OSError as error:
            raise UserError(f"{path} cannot be deleted: {error.filename}: {error.strerror}") from error


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    """Hold the lock of a run directory, so that no `tandem run` starts in it.

    Raises:
        UserError: one is running in it.
    """
    busy = UserError(f"{path} is running; stop it first: tandem stop {shlex.quote(str(path))}")
    if jobs.is_alive(path):
        raise busy
    try:
        lock = os.open(path / LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    except OSError as error:
        raise UserError(f"{path} cannot be written: {error.strerror}") from error
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield
    except BlockingIOError:
        raise busy from None
    finally:
        os.close(lock)


def _recorded() -> list[Path]:
    paths = []
    with suppress(OSError):
        for file in (state_folder() / "runs").iterdir():
            with suppress(OSError, UnicodeDecodeError):
                path = Path(file.read_text())
                if (path / "job.json").is_file():
                    paths.append(path)
                elif not path.exists():
                    file.unlink()
    return paths


def _relative(path: Path) -> Path:
    working_directory = Path.cwd()
    return path.relative_to(working_directory) if path.is_relative_to(working_directory) else path


def _started_at(path: Path) -> float:
    with suppress(OSError):
        return (path / LOCK).stat().st_mtime
    return 0.0
