"""What an evaluator process does with a shard of a checkpoint: the seam between the loop and the ways to evaluate.

The loop surveys, chooses, claims and publishes, and knows no model. A built-in task is scored in this process
(`evaluation.TaskScoring`, which loads torch), anything else by a program (`program.ProgramScoring`): the user's, or,
for a task of the user's own, `task_program`.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from tandem.rundir.checkpoint import Manifest
from tandem.rundir.layout import RunDir
from tandem.status import CheckpointRef
from tandem_evaluator.result import Merged, Shard


class Misfit(Exception):  # noqa: N818 - it is a state of the checkpoint, and reads as one
    """A checkpoint that this process cannot use, such as one with the weights of another model."""


class ProgramFailed(Exception):  # noqa: N818 - it says what happened
    """The user's program cannot evaluate this checkpoint, here or anywhere else; carries one line for the user."""


@dataclass(frozen=True)
class Work:
    """One shard of one checkpoint."""

    reference: CheckpointRef
    shard: int
    """Which one, from 0."""
    shards: int
    """How many there are."""
    evaluator: str = ""
    """The process that does it."""
    started: float = 0.0
    """When it was claimed, seconds since the epoch."""


class Scoring(Protocol):
    """One way to evaluate."""

    def read(self, folder: Path, manifest: Manifest | None) -> Any:
        """Take from a checkpoint what `score` needs, every byte verified; without a manifest it is the script's own.

        Raises:
            FileNotFoundError: the checkpoint is gone.
            Broken: it is damaged.
            OSError: the disk fails.
        """

    def score(self, read: Any, work: Work, going_on: Callable[[], bool]) -> Shard | None:
        """Evaluate one shard; None if `going_on` said no.

        Raises:
            Misfit: this process cannot evaluate the checkpoint.
            ProgramFailed: nobody can.
        """

    def read_shard(self, content: Any, work: Work) -> Shard:
        """A published shard.

        Raises:
            ValueError, ValidationError: it is not the result of this work.
        """

    def merge(self, shards: Sequence[Any]) -> Merged:
        """Put all shards of a checkpoint together, whatever their order."""

    def read_merged(self, content: Any) -> Merged:
        """A published result.

        Raises:
            ValidationError: it is none.
        """

    def best_changed(self, rundir: RunDir) -> None:
        """The merged results have changed, and best.json with them.

        Raises:
            OSError: the run directory cannot be read or written.
        """

    def rest(self) -> None:
        """There is nothing to do: let go of what is not needed meanwhile."""

    def close(self) -> None:
        """The work is over."""
