"""The interfaces of platforms. A platform is a package with one class for each of the two interfaces:

    package     Run             Cluster
    local       OnThisMachine   ThisMachine: starts `tandem run --detach`
    slurm       OnSlurm         Slurm
    kubernetes  OnKubernetes    Kubernetes

`runs.find_run` decides which run a name refers to. A new platform needs such a package, a case in `find_run`, its own
options of `tandem submit`, and arguments of `client.Client`. No method prints, except those that need a terminal or a
browser: `page`, `attach`, `shell`, and the warnings of `inspect`.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from tandem.errors import UserError
from tandem.job.manifest.reading import apply_overrides, parse_job
from tandem.job.manifest.source import Source
from tandem.job.resource import DistributedTrainingJob
from tandem.rundir.layout import RunDir
from tandem.wire.stacks import Attachment, Inspection, RankStacks
from tandem_cli.log_lines import Line, LogSelection, Notify
from tandem_cli.packing import Pack
from tandem_cli.view import JobEvent, JobView


class PlatformError(UserError):
    """The platform does not answer, or refuses. Commands that watch try again."""


class RunNotFoundError(PlatformError):
    """The run or job does not exist, or does not exist any more."""


IsClosed = Callable[[], bool]
"""Whether the reader of a log has left."""
ShowPage = Callable[[str, str, bool], None]
"""Shows a live page. Arguments: host and port of the coordinator, the token, and whether a browser of this machine can
open the page."""
ShowAttachment = Callable[[Attachment], None]
"""Prints how to attach a debugger.

Raises:
    UserError: no debugger can attach.
"""


class Run(ABC):
    """A run, or a job on a cluster. Every method raises UserError if the platform cannot do it now."""

    on_leaving = "Ctrl-C leaves; the run continues"
    """Effect of Ctrl-C on a command that follows the run."""
    forgets = ""
    """Reason why there may be no events, as the end of a sentence."""
    copies_run_dir = False
    """Whether `run_dir` copies files from elsewhere, which may take a while."""

    @abstractmethod
    def view(self, events: tuple[JobEvent, ...] | None = None) -> JobView:
        """Fetch the status, the processes and the events.

        Args:
            events: known events, which are then not fetched again.

        Raises:
            RunNotFoundError: the run does not exist.
            PlatformError: the platform does not answer.
        """

    @abstractmethod
    def is_over(self, view: JobView) -> bool:
        """Whether the run has ended, according to its last view."""

    @abstractmethod
    def run_dir(self, checkpoints: Sequence[str] = ()) -> RunDir:
        """Return its run directory; of a job on a cluster, bring the copy in `runs/NAME` up to date.

        Args:
            checkpoints: `latest`, `best`, or names of checkpoints to have there too, where this is a copy.
        """

    @abstractmethod
    def log(
        self, selection: LogSelection, follow: bool, notify: Notify, is_closed: IsClosed = lambda: False
    ) -> Iterator[Line]:
        """Yield the lines of its processes in order of time; with `follow` also new lines, until the end.

        Args:
            is_closed: asked several times a second while it follows; once it is true, the lines end.
        """

    @abstractmethod
    def page(self, port: int, show: ShowPage) -> int:
        """Show its live page, and keep the connection to it open while it is needed; return the exit code.

        Args:
            port: local port of the connection, if it needs one; 0: a free port.
        """

    @abstractmethod
    def inspect(self, rank: int | None) -> Inspection:
        """Inspect the stacks of all ranks, or of one."""

    @abstractmethod
    def attach(self, stacks: RankStacks, show: ShowAttachment) -> int:
        """Let a debugger attach to a rank, and keep the connection open while it is needed; return the exit code."""

    @abstractmethod
    def shell(self, process: str) -> int:
        """Open a shell with the environment of one of its processes on this terminal; return its exit code."""

    @abstractmethod
    def scale(self, replicas: int) -> str:
        """Change the target number of workers while it runs; return a sentence for the user."""

    def resume(self) -> str:
        """Resume a suspended job; return a sentence for the user. Only jobs on Kubernetes are resumed this way."""
        raise UserError("a run continues when it is started again by the same command")

    @abstractmethod
    def stop(self, immediately: bool) -> str:
        """Save and stop, or stop without saving; return a sentence for the user once the run has ended."""


Checked = tuple[DistributedTrainingJob, dict[str, Any], Source]
"""A validated job, its manifest with the overrides of the command line, and the source of the manifest."""


def checked(source: Source, settings: Sequence[str]) -> Checked:
    """Validate the manifest of a job with overrides.

    Raises:
        ManifestError: with every mistake.
    """
    # Only the fields that the user wrote: the cluster sets defaults, and other managers keep their fields.
    return parse_job(source, settings), apply_overrides(source.data, settings), source


Report = Callable[[str, bool], None]
"""Receives a message about a submission. Arguments: the text, and whether it is a warning or a delay."""


@dataclass(frozen=True, kw_only=True)
class SubmittedJob:
    """A job that a cluster has accepted."""

    run: Run
    outcome: str
    """Past participle of the effect: created, changed, unchanged, submitted, started."""
    description: str
    """Description of the job and its place, which follows the outcome."""
    next_steps: tuple[str, ...] = ()
    """Commands that watch the job, and notes on it."""


class Cluster(ABC):
    """A place to which jobs are submitted."""

    @abstractmethod
    def submit(
        self, jobs: Sequence[Checked], settings: tuple[str, ...], pack: Pack | None, report: Report
    ) -> Iterator[SubmittedJob]:
        """Validate all jobs as far as this machine can, then submit them, and yield each as soon as it is accepted.

        Raises:
            UserError: some jobs are invalid, or the cluster refuses, or does not answer.
        """
