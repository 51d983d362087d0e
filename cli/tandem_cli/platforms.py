"""What commands ask of a run, on whatever platform it is. A platform is a package with one class for each of the two
interfaces here:

    package     Run             Cluster
    local       OnThisMachine   none: `tandem run` is itself the run
    slurm       OnSlurm         Slurm
    kubernetes  OnKubernetes    Kubernetes

`runs.found` decides which run a name means. A further platform is such a package, a case there, and the options of
`tandem submit` that are its own.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from tandem.errors import UserError
from tandem.job import DistributedTrainingJob
from tandem.manifest.source import Source
from tandem.stacks import Attachment, Inspection, RankStacks
from tandem_cli.log_lines import Choice, Line, Tell
from tandem_cli.packing import Pack
from tandem_cli.view import JobEvent, JobView


class PlatformError(UserError):
    """The platform does not answer, or refuses. Somebody who watches tries again."""


class Gone(PlatformError):  # noqa: N818 - reads as the sentence it is
    """What was asked for is not there, or not any more."""


ShowPage = Callable[[str, str, bool], None]
"""Shows a live page: is given host and port of its coordinator, the token, and whether a browser of this machine can
open it."""
ShowAttachment = Callable[[Attachment], None]
"""Says how a debugger attaches.

Raises:
    UserError: it cannot.
"""


class Run(ABC):
    """One run, or one job on a cluster. Every method may raise UserError where the platform cannot do it now."""

    on_leaving = "Ctrl-C leaves; the run goes on"
    """What Ctrl-C does while it is followed."""
    forgets = ""
    """Why nothing may be told of it, as the end of a sentence."""

    @abstractmethod
    def look(self, known: tuple[JobEvent, ...] | None = None) -> JobView:
        """Everything about it.

        Args:
            known: what happened, if that is not to be asked again.

        Raises:
            Gone: it is not there.
            PlatformError: nobody answers.
        """

    @abstractmethod
    def is_over(self, seen: JobView) -> bool:
        """Whether nothing more will happen, by the last look."""

    @abstractmethod
    def log(self, choice: Choice, follow: bool, tell: Tell) -> Iterator[Line]:
        """What its processes have printed, in the order of time; with `follow` also what they will, until the end."""

    @abstractmethod
    def page(self, port: int, show: ShowPage) -> int:
        """Have its live page shown, and keep the way to it open for as long as that is needed; returns the exit code.

        Args:
            port: of this machine, where the way begins here; 0 takes a free one.
        """

    @abstractmethod
    def inspect(self, rank: int | None) -> Inspection:
        """Where its ranks are in their code, or one of them."""

    @abstractmethod
    def attach(self, one: RankStacks, show: ShowAttachment) -> int:
        """Let a debugger attach to a rank, and keep the way to it open for as long as that is needed; returns the exit
        code."""

    @abstractmethod
    def shell(self, who: str) -> int:
        """A shell beside one of its processes, on this terminal; returns its exit code."""

    @abstractmethod
    def scale(self, replicas: int) -> str:
        """Change its number of workers while it runs; returns a sentence on what was requested."""

    @abstractmethod
    def stop(self, at_once: bool) -> str:
        """Have it save and leave, or end it at once; returns what became of it, once it has."""


Checked = tuple[DistributedTrainingJob, dict[str, Any], Source]
"""A job, its manifest with what was set on the command line, and where that came from."""


class Cluster(ABC):
    """Takes jobs."""

    @abstractmethod
    def submit(self, jobs: Sequence[Checked], settings: tuple[str, ...], pack: Pack | None) -> None:
        """Check all of them as far as this machine can, then give them to the cluster, and say so.

        Raises:
            UserError: the cluster refuses, or does not answer.
            Exit: some are wrong, and it was said how.
        """
