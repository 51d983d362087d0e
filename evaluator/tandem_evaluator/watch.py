"""A survey of the checkpoints that a script writes in its own format (`evaluators.watch`, tandem.rundir.watched).

Their files are linked or copied when they are found, so a script may delete one, or write the next one over it, while
it is evaluated. Where a link was all there could be, and the script has written into the same file, the evaluation gets
no result: the file is checked once more after it.
"""

from pathlib import Path

from tandem.rundir import evaluations, watched
from tandem.rundir.checkpoint import Manifest
from tandem.rundir.layout import RunDir
from tandem.rundir.watched import OVERWRITTEN, Finder, Policy, Watched
from tandem.wire.status import CheckpointRef
from tandem_evaluator.evaluator_log import log_event
from tandem_evaluator.survey import Survey


class WatchSurvey(Survey):
    """The survey of a run directory whose checkpoints are in the script's own format.

    Args:
        pattern: glob pattern of their paths in the run directory.
        settle_seconds: time without a change after which one counts as complete, where its format does not mark that.
        policy: under `Latest`, those that are skipped stay so.
    """

    def __init__(
        self, rundir: RunDir, shards: int, pattern: str, settle_seconds: float, policy: Policy = "Every"
    ) -> None:
        super().__init__(rundir, shards)
        self._finder, self._policy = Finder(rundir, pattern, settle_seconds, policy), policy
        self._released: set[CheckpointRef] = set()
        """Checkpoints that no process evaluates any more."""
        self._dropped: set[CheckpointRef] = set()
        """Skipped checkpoints whose copy or links are removed."""

    def open(self, reference: CheckpointRef) -> tuple[Path, Manifest | None]:
        """The script's file or folder.

        Raises:
            FileNotFoundError: it is gone, or was replaced.
        """
        checkpoint = self._finder.recorded.get(reference.name)
        if checkpoint is None or not self._finder.is_there(checkpoint):
            raise FileNotFoundError(reference.name)
        return watched.evaluated_path(self._rundir, checkpoint), None

    def _references(self, ended: bool, final: CheckpointRef | None) -> list[CheckpointRef]:
        self.broken = {}
        self._unsure = self._finder.look(ended)
        for problem in self._finder.take_problems():
            log_event("watch", why=problem)
        checkpoints = list(self._finder.recorded.values())
        newest = max((checkpoint.step for checkpoint in checkpoints), default=None)
        references = []
        for checkpoint in checkpoints:
            reference = checkpoint.reference
            if reference in self._released:
                references.append(reference)
            elif reference in self._merged or self._has_final_result(reference):
                self._release(checkpoint, ended)
                references.append(reference)
            else:
                if self._policy == "Latest" and checkpoint.step != newest:
                    self._drop_if_skipped(checkpoint)
                if self._finder.is_there(checkpoint):
                    references.append(reference)
                elif reference not in self._dropped:
                    reason = "; ".join(filter(None, (OVERWRITTEN, checkpoint.no_copy_reason)))
                    evaluations.record_skipped_evaluation(self._rundir, reference, reason)
                    self._drop(checkpoint)
        return references

    def _release(self, checkpoint: Watched, ended: bool) -> None:
        """Remove the files of an evaluated checkpoint, unless it is the best one and nothing else has its content."""
        best = evaluations.best(self._rundir)
        if best is not None and best.name == checkpoint.reference.name:
            original = self._rundir.path / checkpoint.path
            if not ended or not watched.is_unchanged(original, checkpoint):
                return
        watched.remove_files(self._rundir, checkpoint)
        self._released.add(checkpoint.reference)

    def _drop_if_skipped(self, checkpoint: Watched) -> None:
        reference = checkpoint.reference
        note = evaluations.folder(self._rundir, reference) / evaluations.skipped_name(reference)
        if reference not in self._dropped and note.exists():
            self._drop(checkpoint)

    def _drop(self, checkpoint: Watched) -> None:
        watched.remove_files(self._rundir, checkpoint)
        self._dropped.add(checkpoint.reference)
