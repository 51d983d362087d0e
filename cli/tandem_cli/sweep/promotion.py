"""The rungs of the pruner `promotion`: asynchronous successive halving that pauses trials, and continues the best.

Rung r is at step `first × factor^r`. A trial that reaches it pauses, unless its score is among the best `1 / factor` of
those that have reached it; it continues as soon as it is, for others that come later may be worse. So the first trials,
which have no others to be compared with, do not train to their ends, as they do where a pruner can only stop trials for
good. Once nothing else is left to do, the best of the highest rung continues, until a trial is complete.

A paused run resumes on its exact data, so a trial that was paused is the same as one that was not. Pure.
"""

from collections.abc import Container, Sequence
from dataclasses import dataclass

from tandem_cli.sweep.study import Trial, ascending


@dataclass(frozen=True)
class Rungs:
    """The rungs of a sweep.

    Args:
        first: step of the first rung.
        factor: factor between rungs.
        goal: Maximize or Minimize.
    """

    first: int
    factor: int
    goal: str

    def step(self, rung: int) -> int:
        """Step of a rung."""
        return self.first * int(self.factor**rung)

    def score(self, trial: Trial, rung: int) -> float | None:
        """Score of a trial at a rung: that of its first checkpoint there or after it; None if it has not reached it."""
        step = min((step for step in trial.scores if step >= self.step(rung)), default=None)
        return None if step is None else trial.scores[step]

    def passes(self, trial: Trial, trials: Sequence[Trial], slots: int | None = None) -> bool:
        """Whether the score of a trial at its rung is among the best ones.

        Args:
            trials: all trials.
            slots: number of those that pass; None: the share of the factor.
        """
        own = self.score(trial, trial.rung)
        if own is None:
            return False
        scores = [(self.score(other, trial.rung), other.number) for other in trials]
        peers = [(ascending(score, self.goal), number) for score, number in scores if score is not None]
        better = sum(peer < (ascending(own, self.goal), trial.number) for peer in peers)
        return better < (len(peers) // self.factor if slots is None else slots)

    def next(self, trials: Sequence[Trial], pausing: Container[int], is_last: bool) -> Trial | None:
        """Choose a paused trial that continues: of the highest rung, the best; None if none does.

        Args:
            pausing: numbers of trials that have not stopped yet.
            is_last: whether nothing runs, and no further trial will start.
        """
        paused = [
            trial
            for trial in trials
            if trial.is_paused and trial.number not in pausing and self.score(trial, trial.rung) is not None
        ]
        paused.sort(key=self._order)
        for trial in paused:
            if self.passes(trial, trials):
                return trial
        if is_last and paused and not any(trial.state == "Complete" for trial in trials):
            return paused[0]
        return None

    def _order(self, trial: Trial) -> tuple[int, float, int]:
        """Sort key of paused trials: the highest rung first, of each the best."""
        return -trial.rung, ascending(self.score(trial, trial.rung) or 0.0, self.goal), trial.number
