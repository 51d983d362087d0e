"""The interface between the evaluator's loop and the ways to evaluate a shard of a checkpoint.

The loop surveys, chooses, claims and publishes, and knows no model. A built-in task is scored in this process
(`evaluation.TaskScoring`, which loads torch), anything else by a program (`program.ProgramScoring`): the user's, or
`task_program` for a task of the user's own.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from tandem.rundir.checkpoint import Manifest
from tandem.rundir.layout import RunDir
from tandem.wire.status import CheckpointRef
from tandem_evaluator.result import Merged, Shard


class UnusableCheckpoint(Exception):  # noqa: N818 - it is a state of the checkpoint, and reads as one
    """A checkpoint that this process cannot use, such as one with the weights of another model."""


class ProgramFailed(Exception):  # noqa: N818 - it says what happened
    """The user's program cannot evaluate this checkpoint, in this process or any other; carries one line for the
    user."""


@dataclass(frozen=True)
class Work:
    """One shard of one checkpoint."""

    reference: CheckpointRef
    shard: int
    """Number of the shard, from 0."""
    shards: int
    """Number of shards."""
    evaluator: str = ""
    """Name of the evaluator process."""
    started: float = 0.0
    """Time of the claim, seconds since the epoch."""


class Scoring(Protocol):
    """One way to evaluate."""

    def read(self, folder: Path, manifest: Manifest | None) -> Any:
        """Load what `score` needs of a checkpoint, every byte verified; without a manifest it is in the script's own
        format.

        Raises:
            FileNotFoundError: the checkpoint is gone.
            Broken: it is damaged.
            OSError: the disk fails.
        """

    def score(self, read: Any, work: Work, should_continue: Callable[[], bool]) -> Shard | None:
        """Evaluate one shard; None if `should_continue` returned False.

        Raises:
            UnusableCheckpoint: this process cannot evaluate the checkpoint.
            ProgramFailed: no process can.
        """

    def read_shard(self, content: Any, work: Work) -> Shard:
        """Parse a published shard.

        Raises:
            ValueError, ValidationError: it is not the result of this work.
        """

    def merge(self, shards: Sequence[Any]) -> Merged:
        """Merge all shards of a checkpoint, in any order."""

    def read_merged(self, content: Any) -> Merged:
        """Parse a published result.

        Raises:
            ValidationError: it is not a merged result.
        """

    def best_changed(self, rundir: RunDir) -> None:
        """Handle a change of the merged results, and of best.json with them.

        Raises:
            OSError: the run directory cannot be read or written.
        """

    def idle(self) -> None:
        """Release resources that are not needed while there is no work."""

    def close(self) -> None:
        """Release all resources."""
