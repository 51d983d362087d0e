"""The end of training by a score (`runPolicy.stopWhen`)."""

from collections.abc import Iterable
from typing import Annotated, ClassVar, Literal

from pydantic import Field

from tandem.confidence import Estimate, differ
from tandem.formatting import count_noun, metric_name, number, score
from tandem.job.tasks import Positive
from tandem.model import Model, Rule


class StopWhen(Model):
    """Scores at which training ends: the job saves and succeeds with the reason `StoppedEarly`. The score is the one
    that decides which checkpoint is the best (`evaluators.metric`)."""

    reaches: Annotated[float, Field(allow_inf_nan=False)] | None = None
    """A checkpoint has this score, or a better one."""
    no_better_for: Positive | None = None
    """This many checkpoints were evaluated one after the other without a better score."""
    min_improvement: Annotated[float, Field(ge=0, allow_inf_nan=False)] = 0.0
    """Difference above which a score is better, for noBetterFor."""
    beyond_chance: bool = False
    """Whether a score is better, for noBetterFor, only if it differs by more than chance, as far as its confidence
    interval is known."""

    rules: ClassVar[tuple[Rule, ...]] = (
        Rule(
            lambda s: s.reaches is not None or s.no_better_for is not None,
            "has(self.reaches) || has(self.noBetterFor)",
            "stopWhen needs reaches or noBetterFor",
            "reaches",
        ),
    )

    def reason(
        self, scores: Iterable[tuple[int, Estimate | None]], metric: str, goal: Literal["Maximize", "Minimize"]
    ) -> str:
        """Return the reason to end training, as a clause; empty if there is none.

        Args:
            scores: step and score of the checkpoints that count, oldest first; None: it is not finite.
        """
        sign = 1.0 if goal == "Maximize" else -1.0
        best: tuple[int, Estimate] | None = None
        waited = 0
        for step, estimate in scores:
            if estimate is None:
                waited += 1
                continue
            value = estimate.value
            if self.reaches is not None and sign * value >= sign * self.reaches:
                return f"{metric_name(metric)} is {score(metric, value)} at step {number(step)}"
            if best is None or (
                sign * (value - best[1].value) > self.min_improvement and self._differ(best[1], estimate)
            ):
                best, waited = (step, estimate), 0
            else:
                waited += 1
        if best is None or self.no_better_for is None or waited < self.no_better_for:
            return ""
        step, estimate = best
        chance = ", by more than chance," if self.beyond_chance else ""
        return (
            f"{metric_name(metric)} has not become better than {score(metric, estimate.value)} (step {number(step)})"
            f"{chance} in {count_noun(waited, 'evaluation')}"
        )

    def _differ(self, best: Estimate, other: Estimate) -> bool:
        is_known = best.interval is not None and other.interval is not None
        return not (self.beyond_chance and is_known) or differ(best, other)
