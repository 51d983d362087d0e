"""The machine or volume where a job would run, as far as this process can inspect it.

`tandem run` is on the very machine, with the very folder and variables: it sees everything. The coordinator of a job on
a cluster shares one volume with the workers and nothing else: neither their image nor their node. A check reports
nothing about what its process cannot see, so that it is never a false alarm.
"""

import os
import stat
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from tandem.errors import UnmetRequirement
from tandem.job.datasets import data_folder
from tandem.job.manifest.fields import dotted
from tandem.job.manifest.reading import similar_file
from tandem.job.resource import DistributedTrainingJob
from tandem.rundir.code import REQUIREMENTS
from tandem.rundir.durable import is_transient
from tandem.rundir.layout import RunDir


@dataclass(frozen=True)
class Machine:
    """Resources of a machine for all processes of a job together."""

    cores: int
    """Number of usable logical cores."""
    memory: int | None = None
    """Memory in bytes, swap included; None if unknown."""
    processes: int | None = None
    """Maximum number of processes; None if unknown."""
    has_gpu: bool | None = None
    """Whether the ranks train on GPUs; None if unknown."""
    open_files: int | None = None
    """Maximum number of files that a process may open; None if unknown."""
    address_space: int | None = None
    """Maximum address space of a process in bytes; None without a limit."""


@dataclass(frozen=True)
class Site:
    """The place where a job would run."""

    run_dir: RunDir
    """The run directory."""
    machine: Machine | None = None
    """This machine, if all processes of the job are to run on it; None if they run elsewhere."""
    variables: Mapping[str, str] | None = None
    """Environment of the training processes; None if unknown."""
    volume: Path | None = None
    """The only folder that is the same here as at the site; None if all are."""
    hidden: Sequence[Path] = ()
    """Folders below it where something else is mounted at the site."""
    is_fresh: bool = False
    """Whether an earlier run is moved aside first."""
    code: Path | None = None
    """The folder that is packed for the processes, and is their working directory (--code); None if they work in
    ours."""
    awaited: Path | None = None
    """The run directory that the job waits for, whose contents do not exist yet."""

    @property
    def is_here(self) -> bool:
        """Whether the job runs on this machine, with this Python."""
        return self.machine is not None

    @property
    def folder(self) -> Path:
        """Working directory of the processes."""
        return Path.cwd() if self.code is None else self.code.absolute()

    @property
    def installs(self) -> bool:
        """Whether packages are installed for the job, so that it may use packages that are not installed here."""
        return self.code is not None and (self.code / REQUIREMENTS).is_file()

    @property
    def resumes(self) -> bool:
        """Whether there is a checkpoint to resume from."""
        return not self.is_fresh and bool(self.run_dir.checkpoint_names())

    def resolve(self, text: str, expands: bool = False) -> Path | None:
        """Resolve a path of the manifest as seen from here; None if it is not visible.

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
        return path if self._is_visible(path) else None

    def data_folder(self) -> Path | None:
        """The folder of data sets without a path of their own; None if it is not visible."""
        if self.variables is None:
            return None
        folder = data_folder(self.variables)
        return folder if self._is_visible(folder) else None

    def _is_visible(self, path: Path) -> bool:
        if self.awaited is not None and path.resolve().is_relative_to(self.awaited.resolve()):
            return False
        if self.volume is None:
            return True
        normalized = Path(os.path.normpath(path))
        return (
            path.is_absolute()
            and normalized.is_relative_to(self.volume)
            and not any(normalized.is_relative_to(folder) for folder in self.hidden)
        )


def pod(run_dir: RunDir, job: DistributedTrainingJob) -> Site:
    """The site of a job on a cluster, as its coordinator sees it: the volume that holds the run directory."""
    templates = (job.spec.workers.template, job.spec.evaluation.template)
    hidden = [Path(path) for template in templates for path in _mounted(template)]
    volume = run_dir.path.parent
    return Site(run_dir, volume=volume, hidden=[path for path in hidden if path.is_relative_to(volume)])


def _mounted(template: Mapping[str, object]) -> list[str]:
    """The mount paths of a pod template's containers."""
    spec = template.get("spec")
    paths = []
    for kind in ("containers", "initContainers"):
        containers = spec.get(kind) if isinstance(spec, dict) else None
        for container in containers if isinstance(containers, list) else []:
            mounts = container.get("volumeMounts") if isinstance(container, dict) else None
            mounts = mounts if isinstance(mounts, list) else []
            paths += [mount.get("mountPath") for mount in mounts if isinstance(mount, dict)]
    return [path for path in paths if isinstance(path, str)]


def fault_of_file(path: Path, text: str) -> tuple[str, str]:
    """The reason why a path is not a readable file, as a sentence, and the probably intended path; both empty if it is
    readable.

    Args:
        text: the path as it was written.

    Raises:
        OSError: the disk fails, which says nothing about the file.
    """
    try:
        status = path.stat()
    except (FileNotFoundError, NotADirectoryError):
        if path.is_symlink():
            return f"{text} is a link to {path.readlink()}, which does not exist", ""
        suggestion = similar_file(path) if not text.startswith(("~", "$")) else ""
        return f"there is no file {text}{unexpanded(text)}{_beginning(path, text)}", suggestion
    except OSError as error:
        if is_transient(error):
            raise
        return f"{text} cannot be read: {error.strerror}", ""
    if stat.S_ISDIR(status.st_mode):
        return f"{text} is a folder; a file is needed", ""
    if not os.access(path, os.R_OK):
        return f"{text} cannot be read: Permission denied", ""
    return "", ""


def is_folder(path: Path) -> bool:
    """Whether a path is a folder. An invalid path is none."""
    try:
        return path.is_dir()
    except OSError:
        return False


def unexpanded(text: str) -> str:
    """Hint for a path that relies on shell expansion; empty for others."""
    if text.startswith("~"):
        return ": ~ is not expanded here; write the full path"
    if "$" in text or "*" in text:
        return ": no shell runs this, so variables and * are not expanded; write the full path"
    return ""


def _beginning(path: Path, text: str) -> str:
    if path.is_absolute() or text.startswith(("~", "$")):
        return ""
    return f" in {Path.cwd()}"


def nearest_existing(path: Path) -> Path:
    """The folder itself, or its nearest existing parent."""
    absolute = path.absolute()
    return next((candidate for candidate in (absolute, *absolute.parents) if candidate.exists()), Path(absolute.anchor))


def fault_of_folder(path: Path) -> str:
    """The reason why nothing can be written into a folder, existing or not; empty if something can be, as far as one
    can see without doing it.

    Raises:
        OSError: the disk fails, which says nothing about the folder.
    """
    try:
        existing = nearest_existing(path)
    except OSError as error:
        if is_transient(error):
            raise
        return str(error.strerror)
    if not existing.is_dir():
        return f"{existing} is a file; a folder is needed"
    if not os.access(existing, os.W_OK | os.X_OK):
        return f"{existing} may not be written"
    return ""


def variables(job: DistributedTrainingJob, site: Site) -> Iterator[UnmetRequirement]:
    """Find variables with an external source that are not set here."""
    if not site.is_here or site.variables is None:
        return
    for path, variable in job.spec.variables:
        source = variable.value_from
        if source is not None and not source.optional and variable.name not in site.variables:
            message = (
                f"{dotted(path[:-1])}: {variable.name} comes from a Secret, a ConfigMap or a pod on a cluster; here it "
                f"is taken from the environment: set {variable.name} and try again"
            )
            yield UnmetRequirement((*path, "name"), message)
