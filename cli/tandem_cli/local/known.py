"""The runs of this machine: those in `runs/` here, and those that `tandem run` has recorded for this user.

Each run that is begun is a file of its own in the user's state folder, named after the path of its run directory: so
runs that begin at the same time need no lock, and what cannot be written costs nothing but a row of `tandem ls`. Moved
and deleted runs drop out when somebody looks.
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
from tandem_cli.slurm import jobs

RUNS = Path("runs")
"""Where `tandem run` keeps runs unless told otherwise."""
MAX_COUNT = 500
"""Runs that are remembered; the oldest are forgotten."""
MAX_NAMED = 8
"""Runs that an error names."""


def state_folder() -> Path:
    """The folder of Tandem among the user's states; it need not be there."""
    return Path(os.environ.get("XDG_STATE_HOME") or "~/.local/state").expanduser() / "tandem"


def remember(path: Path) -> None:
    """Write down that a run is here. A home that cannot be written ends no run."""
    folder, text = state_folder() / "runs", str(path.resolve())
    with suppress(OSError):
        folder.mkdir(parents=True, exist_ok=True)
        (folder / hashlib.sha256(text.encode()).hexdigest()[:16]).write_text(text)
        for old in sorted(folder.iterdir(), key=lambda file: file.stat().st_mtime)[:-MAX_COUNT]:
            old.unlink(missing_ok=True)


def known() -> list[Path]:
    """Run directories that are there, the one that was begun last first; paths below this folder as one would type
    them."""
    found: dict[Path, Path] = {}
    with suppress(OSError):
        for folder in RUNS.iterdir():
            if (folder / "job.json").is_file():
                found[folder.resolve()] = folder
    for path in _remembered():
        found.setdefault(path, _typed(path))
    return sorted(found.values(), key=_begun, reverse=True)


def named(name: str) -> list[Path]:
    """The runs that a name may mean: that in `runs/` here alone if there is one, else all whose folder or job is called
    so."""
    if (RUNS / name / "job.json").is_file():
        return [RUNS / name]
    return [path for path in known() if name in (path.name, job_name(path))]


def other_runs() -> str:
    """Runs that may have been meant, as the end of a sentence."""
    some = [str(path) for path in known()[:MAX_NAMED]]
    return f". Runs here: {', '.join(some)}" if some else ". Give the run directory that `tandem run` named"


def job_name(path: Path) -> str:
    """The name of a run's job, empty where it cannot be read."""
    content = read_json_or_none(path / "job.json")
    metadata = content.get("metadata") if isinstance(content, dict) else None
    return str(metadata.get("name", "")) if isinstance(metadata, dict) else ""


def own_command(path: Path) -> bool:
    """Whether a run's job is a command of the user's own, which may keep checkpoints of its own."""
    content = read_json_or_none(path / "job.json")
    for name in ("spec", "trainer", "command"):
        content = content.get(name) if isinstance(content, dict) else None
    return content is not None


def is_alive(path: Path) -> bool:
    """Whether a `tandem run`, or the guardian of one, is at work in a run directory, or SLURM has a job of it."""
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
    """Give a run directory another place or name, and remember it there.

    Raises:
        UserError: the run is going on, something is at that place, or the disk refuses.
    """
    if target.exists() or target.is_symlink():
        raise UserError(f"{target} exists; give a name that is free")
    with _resting(path):
        try:
            path.rename(target)
        except OSError as error:
            raise UserError(f"{path} cannot be moved to {target}: {error.strerror}") from error
    remember(target)


def delete(path: Path) -> None:
    """Delete a run directory with all that is in it. What cannot be deleted to the end is no run any more.

    Raises:
        UserError: the run is going on, or the disk refuses.
    """
    whole = path.resolve()
    with _resting(path):
        aside = whole.with_name(f".{whole.name}.deleted-{os.getpid()}")
        try:
            whole.rename(aside)
            shutil.rmtree(aside)
        except OSError as error:
            raise UserError(f"{path} cannot be deleted: {error.filename}: {error.strerror}") from error


@contextmanager
def _resting(path: Path) -> Iterator[None]:
    """No `tandem run` begins in a run directory meanwhile.

    Raises:
        UserError: one is at work in it.
    """
    busy = UserError(f"{path} is running; first: tandem stop {shlex.quote(str(path))}")
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


def _remembered() -> list[Path]:
    found = []
    with suppress(OSError):
        for file in (state_folder() / "runs").iterdir():
            with suppress(OSError, UnicodeDecodeError):
                path = Path(file.read_text())
                if (path / "job.json").is_file():
                    found.append(path)
                elif not path.exists():
                    file.unlink()
    return found


def _typed(path: Path) -> Path:
    here = Path.cwd()
    return path.relative_to(here) if path.is_relative_to(here) else path


def _begun(path: Path) -> float:
    with suppress(OSError):
        return (path / LOCK).stat().st_mtime
    return 0.0
