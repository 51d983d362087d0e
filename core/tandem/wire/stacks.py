"""Stacks of the threads of a job's ranks: the output of `python -m tandem_trainer.inspection`, for `tandem debug`.

The command line that reads it may have another version than the job's image (docs/decisions/0020-versions.md).
"""

from typing import Annotated

from pydantic import Field

from tandem.model import MessageText, Model, truncated_to

Short = Annotated[str, truncated_to(316)]


class Frame(Model):
    """A call that has not returned."""

    file: MessageText
    line: int
    function: MessageText


class ThreadStack(Model):
    """One thread of a rank."""

    number: int
    """Thread id of the kernel; that of the main thread is the process id."""
    name: Short = ""
    """Name of the thread in the kernel."""
    state: Short = ""
    """State of the thread in the kernel: `S (sleeping)`."""
    waits_in: Short = ""
    """Kernel function that it waits in."""
    frames: Annotated[list[Frame], Field(max_length=1000)] = []
    """Calls, the innermost last. Empty for a thread that runs no Python, and for one that was not inspected."""


class RankStacks(Model):
    """One rank, and its stacks at this moment."""

    rank: int
    """Global rank."""
    replica: Short = ""
    """The worker that it belongs to."""
    pid: int
    """Process id."""
    generation: int = 0
    """The generation that it belongs to; 0 outside of one."""
    step: int | None = None
    """Optimizer steps completed; None for a script that does not report them."""
    phase: Short = ""
    """The phase that it last reported; empty if it reports none."""
    silent_seconds: float | None = None
    """Time since its last report."""
    trouble: MessageText = ""
    """Reason for which there are no stacks."""
    threads: Annotated[list[ThreadStack], Field(max_length=100_000)] = []
    """Threads, the main thread first."""


class Inspection(Model):
    """The ranks of one worker, or of all workers of this machine."""

    ranks: list[RankStacks] = []
    members: list[Short] = []
    """Workers in rank order, each with the same number of ranks; empty where not known."""


class Attachment(Model):
    """Address at which a debugger attaches to a rank: the output of `python -m tandem_trainer.inspection --attach`."""

    rank: int
    """Global rank."""
    replica: Short = ""
    """The worker that it belongs to."""
    pid: int
    """Process id."""
    port: int | None = None
    """Port on the loopback address of its machine or pod."""
    folder: MessageText = ""
    """Working directory, which mostly contains its source files."""
    trouble: MessageText = ""
    """Reason for which there is no port."""
