"""Which checkpoint is the best: a pure function of all merged results, so that nobody has to remember anything."""

from collections.abc import Iterable
from typing import Any, Literal

from tandem.lineage import Chain, counts
from tandem_evaluator.result import MergedResult

Metric = Literal["loss", "accuracy", "macroF1"]
Goal = Literal["Maximize", "Minimize"]


def best(results: Iterable[MergedResult], links: Chain, metric: Metric, goal: Goal) -> dict[str, Any] | None:
    """The content of best.json; None if no checkpoint qualifies.

    Only checkpoints on the chain count, and only ones with a finite loss. Of equals the earlier one wins: it was there
    first, and it has been trained less for the same score.
    """
    qualified = []
    for result in results:
        value = {
            "loss": result.metrics.loss,
            "accuracy": result.metrics.accuracy,
            "macroF1": result.metrics.macro_f1,
        }[metric]
        if value is not None and result.metrics.loss is not None and counts(links, result.reference):
            rank = -value if goal == "Maximize" else value
            qualified.append((rank, result.step, result.generation, value, result))
    if not qualified:
        return None
    *_, value, winner = min(qualified, key=lambda entry: entry[:3])
    return winner.reference.dump() | {"metric": metric, "value": value}
