"""Watches what evaluators say of the base model, and sets the best checkpoint beside it."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from tandem.against_base import compared, sentence, worse
from tandem.job import Evaluators
from tandem.rundir import catalog, evaluations
from tandem.rundir.catalog import Result
from tandem.rundir.layout import RunDir
from tandem.status import CheckpointRef, Compared, Score


@dataclass(frozen=True)
class AgainstBase:
    """What is evaluated beside the base model."""

    compared: tuple[Compared, ...] = ()
    """Its metrics beside those of the best checkpoint, the one that decides first; empty while it is not evaluated."""
    worse: int = 0
    """Checkpoints that were evaluated last and are all worse (tandem.against_base)."""
    message: str = ""
    """In what they are worse, a sentence."""


class BaseWatch:
    """Looks at the evaluation of the base model of one run. For one thread."""

    def __init__(self, rundir: RunDir, evaluation: Evaluators) -> None:
        self._rundir, self._evaluation = rundir, evaluation
        self._base: Result | None = None
        self._best: CheckpointRef | None = None
        self._scores: Mapping[str, float] = {}

    def look(self, best: CheckpointRef | None, newest: Sequence[Score], is_over: bool) -> AgainstBase:
        """See what is new.

        Args:
            best: the best checkpoint; None while there is none.
            newest: the scores of the newest evaluated checkpoints, at most as many as decide.
            is_over: whether training is.
        """
        if self._base is None:
            # A result, or the note that there will be none, is never replaced.
            found = catalog.base(self._rundir)
            if found is None:
                return AgainstBase()
            self._base = found[0]
        scores, goal = self._base.metrics, self._evaluation.direction
        count = worse(scores, newest, goal, is_over)
        return AgainstBase(
            compared=tuple(compared(scores, self._of(best), self._evaluation.metric)),
            worse=count,
            message=sentence(scores, newest) if count else "",
        )

    def _of(self, best: CheckpointRef | None) -> Mapping[str, float]:
        """The scores of the best checkpoint, whose file is read once."""
        if best != self._best:
            self._scores = {} if best is None else evaluations.scores(catalog.merged_result(self._rundir, best))
            self._best = best
        return self._scores
