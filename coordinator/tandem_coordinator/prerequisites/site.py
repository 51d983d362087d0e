"""The machine or volume where a job would run, as far as this process can inspect it.

`tandem run` is on the very machine, with the very folder and variables: it sees everything. The coordinator of a job on
a cluster shares one volume with the workers and nothing else: neither their image nor their node. What a process cannot
see it says nothing about, so that no check is ever a false alarm.
"""

import os
import stat
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from tandem.code import REQUIREMENTS
from tandem.datasets import data_folder
from tandem.errors import Unmet
from tandem.job import DistributedTrainingJob
from tandem.manifest.fields import dotted
from tandem.manifest.reading import similar_file
from tandem.rundir.durable import may_pass
from tandem.rundir.layout import RunDir

CONFIG = ("spec", "trainer", "config")
"""Path of a built-in task's configuration."""
LOOP = ("spec", "trainer", "loop")
"""Path of how a task of the user's own is trained."""


@dataclass(frozen=True)
class Machine:
    """What a machine has for all processes of a job together."""

    cores: int
    """Logical cores that may be used."""
    memory: int | None = None
    """Bytes, swap included; None: not known."""
    processes: int | None = None
    """How many there may be at a time; None: not known."""
    has_gpu: bool | None = None
    """Whether the ranks train on GPUs; None: not known."""


@dataclass(frozen=True)
class Site:
    """Where a job would run."""

    run_dir: RunDir
    """The run directory."""
    machine: Machine | None = None
    """This machine, where all processes of the job are to run on it; None: they run elsewhere."""
    variables: Mapping[str, str] | None = None
    """Variables of the training processes; None: not known."""
    volume: Path | None = None
    """The one folder that is the same here as there; None: all are."""
    hidden: Sequence[Path] = ()
    """Folders below it where something else is mounted there."""
    is_fresh: bool = False
    """Whether an earlier run is moved aside first."""
    code: Path | None = None
    """The folder that is packed for the processes, and is where they work (--code); None: they work where we do."""
    awaited: Path | None = None
    """The run directory that the job waits for: what it will hold is not there yet."""

    @property
    def is_here(self) -> bool:
        """Whether the job runs on this machine, with this Python."""
        return self.machine is not None

    @property
    def folder(self) -> Path:
        """Where the processes work."""
        return Path.cwd() if self.code is None else self.code.absolute()

    @property
    def installs(self) -> bool:
        """Whether packages are installed for the job, so that it may use what is not here now."""
        return self.code is not None and (self.code / REQUIREMENTS).is_file()

    @property
    def resumes(self) -> bool:
        """Whether there is a checkpoint to go on from."""
        return not self.is_fresh and bool(self.run_dir.checkpoint_names())

    def look(self, text: str, expands: bool = False) -> Path | None:
        """A path of the manifest as it is seen from here; None where it cannot be seen.

        Args:
            expands: whether a `~` at its beginning is the home folder.
        """
        home = (self.variables or {}).get("HOME", "")
        if expands and text.split("/", 1)[0] == "~" and home:
            text = home + text[1:]
        path = Path(text) if self.code is None else self.code / text
        if expands:
            with suppress(RuntimeError):  # there is no such user
                path = path.expanduser()
        return path if self._is_seen(path) else None

    def data_folder(self) -> Path | None:
        """Where data sets are looked for that no path is given for; None where it cannot be seen."""
        if self.variables is None:
            return None
        folder = data_folder(self.variables)
        return folder if self._is_seen(folder) else None

    def _is_seen(self, path: Path) -> bool:
        if self.awaited is not None and path.resolve().is_relative_to(self.awaited.resolve()):
            return False
        if self.volume is None:
            return True
        whole = Path(os.path.normpath(path))
        return (
            path.is_absolute()
            and whole.is_relative_to(self.volume)
            and not any(whole.is_relative_to(folder) for folder in self.hidden)
        )


def pod(run_dir: RunDir, job: DistributedTrainingJob) -> Site:
    """A job on a cluster, as its coordinator sees it: the volume that holds the run directory."""
    templates = (job.spec.workers.template, job.spec.evaluation.template)
    hidden = [Path(path) for template in templates for path in _mounted(template)]
    volume = run_dir.path.parent
    return Site(run_dir, volume=volume, hidden=[path for path in hidden if path.is_relative_to(volume)])


def _mounted(template: Mapping[str, object]) -> list[str]:
    """Where the containers of a pod template mount volumes."""
    spec = template.get("spec")
    found = []
    for kind in ("containers", "initContainers"):
        containers = spec.get(kind) if isinstance(spec, dict) else None
        for container in containers if isinstance(containers, list) else []:
            mounts = container.get("volumeMounts") if isinstance(container, dict) else None
            mounts = mounts if isinstance(mounts, list) else []
            found += [mount.get("mountPath") for mount in mounts if isinstance(mount, dict)]
    return [path for path in found if isinstance(path, str)]


def fault_of_file(path: Path, text: str) -> tuple[str, str]:
    """Why a path is no file that can be read, as a sentence, and what was probably meant; both empty if it is one.

    Args:
        text: the path as it was written.

    Raises:
        OSError: the disk fails, which says nothing about the file.
    """
    try:
        facts = path.stat()
    except (FileNotFoundError, NotADirectoryError):
        if path.is_symlink():
            return f"{text} is a link to {path.readlink()}, which does not exist", ""
        near = similar_file(path) if not text.startswith(("~", "$")) else ""
        return f"there is no file {text}{unexpanded(text)}{_beginning(path, text)}", near
    except OSError as error:
        if may_pass(error):
            raise
        return f"{text} cannot be read: {error.strerror}", ""
    if stat.S_ISDIR(facts.st_mode):
        return f"{text} is a folder; a file is needed", ""
    if not os.access(path, os.R_OK):
        return f"{text} cannot be read: Permission denied", ""
    return "", ""


def is_folder(path: Path) -> bool:
    """Whether a path is a folder, and no path at all is none."""
    try:
        return path.is_dir()
    except OSError:
        return False


def unexpanded(text: str) -> str:
    """What to say of a path in which somebody expected a shell."""
    if text.startswith("~"):
        return ": ~ is not expanded here; write the full path"
    if "$" in text or "*" in text:
        return ": no shell runs this, so variables and * are not expanded; write the full path"
    return ""


def _beginning(path: Path, text: str) -> str:
    if path.is_absolute() or text.startswith(("~", "$")):
        return ""
    return f" in {Path.cwd()}"


def nearest_there(path: Path) -> Path:
    """The folder itself, or the nearest one above it that is there."""
    whole = path.absolute()
    return next((one for one in (whole, *whole.parents) if one.exists()), Path(whole.anchor))


def fault_of_folder(path: Path) -> str:
    """Why nothing can be written into a folder, made or still to be made; empty if something can be, as far as one can
    see without doing it.

    Raises:
        OSError: the disk fails, which says nothing about the folder.
    """
    try:
        there = nearest_there(path)
    except OSError as error:
        if may_pass(error):
            raise
        return str(error.strerror)
    if not there.is_dir():
        return f"{there} is a file; a folder is needed"
    if not os.access(there, os.W_OK | os.X_OK):
        return f"{there} may not be written"
    return ""


def variables(job: DistributedTrainingJob, site: Site) -> Iterator[Unmet]:
    """Variables that come from somewhere else and are not set here."""
    if not site.is_here or site.variables is None:
        return
    for path, variable in job.spec.variables:
        source = variable.value_from
        if source is not None and not source.optional and variable.name not in site.variables:
            message = (
                f"{dotted(path[:-1])}: {variable.name} comes from a Secret, a ConfigMap or a pod on a cluster; here it "
                f"is taken from the environment: set {variable.name} and try again"
            )
            yield Unmet((*path, "name"), message)
