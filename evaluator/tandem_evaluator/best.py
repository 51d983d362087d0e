"""Which checkpoint is the best: a pure function of all merged results, so that nobody has to remember anything."""

from collections.abc import Iterable
from operator import itemgetter
from typing import Any, Literal

from tandem.rundir.lineage import Chain, counts
from tandem.rundir.ranking import METRICS, VALIDATION, Goal, deciding, rank
from tandem_evaluator.result import MergedResult

Metric = Literal["loss", "accuracy", "macroF1"]


def best(results: Iterable[MergedResult], links: Chain, metric: Metric, goal: Goal) -> dict[str, Any] | None:
    """The content of best.json; None if no checkpoint qualifies.

    Only checkpoints on the chain count. Its value is that on the test data, whatever has decided.
    """
    ranked = []
    for result in results:
        scores = deciding(result.model_dump(by_alias=True, include={METRICS, VALIDATION}))
        place = rank(scores, metric, goal, result.step, result.generation)
        if place is not None and counts(links, result.reference):
            ranked.append((place, result))
    if not ranked:
        return None
    _, winner = min(ranked, key=itemgetter(0))
    return winner.reference.dump() | {"metric": metric, "value": winner.metrics.dump().get(metric)}
