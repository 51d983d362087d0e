"""A survey of the checkpoints that a script writes in its own format (`evaluators.watch`, tandem.rundir.watched).

Their files are hard-linked when they are found, so a script may delete one, or rename the next one over it, while it is
evaluated. A script that writes into the same file again changes what is evaluated: the file is checked once more after
the evaluation, and a changed one gets no result.
"""

from pathlib import Path

from tandem.rundir import evaluations, watched
from tandem.rundir.checkpoint import Manifest
from tandem.rundir.layout import RunDir
from tandem.rundir.watched import OVERWRITTEN, Finder
from tandem.wire.status import CheckpointRef
from tandem_evaluator.survey import Survey


class WatchSurvey(Survey):
    """The survey of a run directory whose checkpoints are in the script's own format.

    Args:
        pattern: glob pattern of their paths in the run directory.
        settle_seconds: time without a change after which one counts as complete, where its format does not mark that.
    """

    def __init__(self, rundir: RunDir, shards: int, pattern: str, settle_seconds: float) -> None:
        super().__init__(rundir, shards)
        self._finder = Finder(rundir, pattern, settle_seconds)
        self._released: set[CheckpointRef] = set()
        """Checkpoints that no process evaluates any more."""

    def open(self, reference: CheckpointRef) -> tuple[Path, Manifest | None]:
        """The script's file or folder.

        Raises:
            FileNotFoundError: it is gone, or was replaced.
        """
        checkpoint = self._finder.known.get(reference.name)
        if checkpoint is None or not self._finder.is_there(checkpoint):
            raise FileNotFoundError(reference.name)
        return watched.evaluated_path(self._rundir, checkpoint), None

    def _references(self, ended: bool, final: CheckpointRef | None) -> list[CheckpointRef]:
        self.broken = {}
        self._unsure = self._finder.look(ended)
        references = []
        for checkpoint in self._finder.known.values():
            reference = checkpoint.reference
            if reference in self._released:
                references.append(reference)
            elif reference in self._merged or self._has_final_result(reference):
                watched.remove_links(self._rundir, checkpoint)
                self._released.add(reference)
                references.append(reference)
            elif self._finder.is_there(checkpoint):
                references.append(reference)
            else:
                evaluations.record_skipped_evaluation(self._rundir, reference, OVERWRITTEN)
        return references
