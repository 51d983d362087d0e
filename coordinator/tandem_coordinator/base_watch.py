"""Watches for the evaluation of the base model, and compares the best checkpoint with it."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from tandem.job.resource import Evaluators
from tandem.rundir import catalog, evaluations
from tandem.rundir.against_base import compare_with_base, count_worse, worse_than_base_message
from tandem.rundir.catalog import EvaluationResult
from tandem.rundir.layout import RunDir
from tandem.wire.status import CheckpointRef, Compared, Score


@dataclass(frozen=True)
class AgainstBase:
    """A comparison of checkpoints with the base model."""

    compared: tuple[Compared, ...] = ()
    """Metrics of the base model and of the best checkpoint, the deciding metric first; empty while the base model is
    not evaluated."""
    worse: int = 0
    """Number of the last evaluated checkpoints that are all worse (tandem.rundir.against_base)."""
    message: str = ""
    """Metrics in which they are worse, as a sentence."""


class BaseWatch:
    """A watch over the evaluation of one run's base model. For one thread."""

    def __init__(self, rundir: RunDir, evaluation: Evaluators) -> None:
        self._rundir, self._evaluation = rundir, evaluation
        self._base: EvaluationResult | None = None
        self._best: CheckpointRef | None = None
        self._scores: Mapping[str, float] = {}

    def poll(self, best: CheckpointRef | None, newest: Sequence[Score], is_over: bool) -> AgainstBase:
        """Compare again, with what is new.

        Args:
            best: the best checkpoint; None while there is none.
            newest: the scores of the newest evaluated checkpoints, at most as many as decide.
            is_over: whether training is.
        """
        if self._base is None:
            # A result, or the note that there will be none, is never replaced.
            result = catalog.read_base_result(self._rundir)
            if result is None:
                return AgainstBase()
            self._base = result[0]
        scores, direction = self._base.metrics, self._evaluation.direction
        count = count_worse(scores, newest, direction, is_over)
        return AgainstBase(
            compared=tuple(compare_with_base(scores, self._scores_of(best), self._evaluation.metric)),
            worse=count,
            message=worse_than_base_message(scores, newest) if count else "",
        )

    def _scores_of(self, best: CheckpointRef | None) -> Mapping[str, float]:
        """The scores of the best checkpoint, whose file is read once."""
        if best != self._best:
            self._scores = {} if best is None else evaluations.scores(catalog.merged_result(self._rundir, best))
            self._best = best
        return self._scores
