"""What the threads of a job's ranks are doing: the answer of `python -m tandem_trainer.inspection`, for `tandem debug`.

It is read by a command line of perhaps another version than that of the job's image (docs/decisions/0020-versions.md).
"""

from typing import Annotated

from pydantic import Field

from tandem.model import Model, Words, cut

Short = Annotated[str, cut(316)]


class Frame(Model):
    """A call that has not returned."""

    file: Words
    line: int
    function: Words


class ThreadStack(Model):
    """One thread of a rank."""

    number: int
    """As the kernel counts threads; that of the main thread is the number of the process."""
    name: Short = ""
    """As the kernel knows it."""
    state: Short = ""
    """As the kernel shows it: `S (sleeping)`."""
    waits_in: Short = ""
    """Function of the kernel."""
    frames: Annotated[list[Frame], Field(max_length=1000)] = []
    """The innermost call last. Empty for a thread that runs no Python, and for one that was not asked."""


class RankStacks(Model):
    """One rank, and what it does at this moment."""

    rank: int
    """Global rank."""
    replica: Short = ""
    """The worker that it is a part of."""
    pid: int
    """Its process."""
    generation: int = 0
    """The generation that it is a part of; 0 outside of one."""
    step: int | None = None
    """Optimizer steps completed; None for a script that does not report them."""
    phase: Short = ""
    """What it said last that it is doing; empty where it says nothing."""
    silent_seconds: float | None = None
    """Since when it has said nothing."""
    trouble: Words = ""
    """Why there are no stacks."""
    threads: Annotated[list[ThreadStack], Field(max_length=100_000)] = []
    """The main thread first."""


class Inspection(Model):
    """The ranks of one worker, or of all workers of this machine."""

    ranks: list[RankStacks] = []
    members: list[Short] = []
    """Workers in rank order, each with as many ranks; empty where nobody knows."""


class Attachment(Model):
    """Where a debugger attaches to a rank: the answer of `python -m tandem_trainer.inspection --attach`."""

    rank: int
    """Global rank."""
    replica: Short = ""
    """The worker that it is a part of."""
    pid: int
    """Its process."""
    port: int | None = None
    """Of the loopback address of its machine or pod."""
    folder: Words = ""
    """Where it works, and where its source files mostly are."""
    trouble: Words = ""
    """Why there is no port."""
