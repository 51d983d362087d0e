"""A survey of the checkpoints that a script writes in a way of its own (`evaluators.watch`, tandem.rundir.watched).

Their files are linked when they are found, so a script may delete one, or rename the next one into its place, while it
is evaluated. A script that writes into the same file again changes what is evaluated: after the evaluation it is looked
at once more, and what has changed has no result.
"""

from pathlib import Path

from tandem.rundir import evaluations, watched
from tandem.rundir.checkpoint import Manifest
from tandem.rundir.layout import RunDir
from tandem.rundir.watched import OVERWRITTEN, Finder
from tandem.status import CheckpointRef
from tandem_evaluator.survey import Survey


class WatchSurvey(Survey):
    """Looks at one run directory whose checkpoints are the script's own.

    Args:
        pattern: of their paths in the run directory.
        settle_seconds: how long one rests before it counts, where its format does not say that it is complete.
    """

    def __init__(self, rundir: RunDir, shards: int, pattern: str, settle_seconds: float) -> None:
        super().__init__(rundir, shards)
        self._finder = Finder(rundir, pattern, settle_seconds)
        self._let_go: set[CheckpointRef] = set()
        """Those that nobody evaluates any more."""

    def open(self, reference: CheckpointRef) -> tuple[Path, Manifest | None]:
        """The script's file or folder.

        Raises:
            FileNotFoundError: it is gone, or another one by now.
        """
        found = self._finder.known.get(reference.name)
        if found is None or not self._finder.is_there(found):
            raise FileNotFoundError(reference.name)
        return watched.content(self._rundir, found), None

    def _references(self, ended: bool, final: CheckpointRef | None) -> list[CheckpointRef]:
        self.broken = {}
        self._unsure = self._finder.look(ended)
        references = []
        for found in self._finder.known.values():
            reference = found.reference
            if reference in self._let_go:
                references.append(reference)
            elif reference in self._merged or self._has_last_word(reference):
                watched.let_go(self._rundir, found)
                self._let_go.add(reference)
                references.append(reference)
            elif self._finder.is_there(found):
                references.append(reference)
            else:
                evaluations.skip(self._rundir, reference, OVERWRITTEN)
        return references
