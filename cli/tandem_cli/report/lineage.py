"""Which of the steps that were logged made the model.

After a restart, steps after the checkpoint are done again, so several generations log the same step. The rule is that
of `tandem.rundir.lineage`: of a generation, the steps up to the one its successor on the lineage resumed from count. A
report must also make sense of a directory whose generation records are lost, so it uses an equal form that needs only
where each generation began: of a generation, the steps count that no later generation began at or before. (Equal, since
each generation resumes from a checkpoint that counted at its start; a test compares the two over random histories.)
"""

import math
from collections.abc import Mapping

import numpy as np

from tandem_cli.report.run import Steps

Limits = Mapping[int, float]
"""For each generation, the last step of it that counts; infinite for the newest."""


def limits(began_after: Mapping[int, int]) -> Limits:
    """From the step that each generation resumed from (0: from the beginning), the last step of each that counts."""
    found: dict[int, float] = {}
    lowest = math.inf
    for generation in sorted(began_after, reverse=True):
        found[generation] = lowest
        lowest = min(lowest, began_after[generation])
    return found


def counts(bounds: Limits, generation: int | None, step: int) -> bool:
    """Whether a step of a generation counts. One of an unknown generation is given the benefit of the doubt."""
    return generation is None or step <= bounds.get(generation, math.inf)


def resolve(logged: Mapping[int, Steps], bounds: Limits) -> tuple[Steps, tuple[Steps, ...]]:
    """Split what each generation logged: the steps that count, ascending and each once, and those that were redone."""
    kept, lost = [], []
    for generation in sorted(logged):
        steps = logged[generation]
        good = steps.step <= bounds.get(generation, math.inf)
        kept.append(steps.where(good))
        if not good.all():
            lost.append(steps.where(~good))
    if not kept:
        return Steps(np.empty(0, np.int64), np.empty(0), np.empty(0)), ()
    joined = Steps(
        np.concatenate([steps.step for steps in kept]),
        np.concatenate([steps.time for steps in kept]),
        np.concatenate([steps.loss for steps in kept]),
        {
            name: np.concatenate([steps.measures.get(name, np.full(len(steps), np.nan)) for steps in kept])
            for name in dict.fromkeys(name for steps in kept for name in steps.measures)
        },
    )
    # np.unique names the first of equal ones: look from the end, where the later generation stands.
    last = len(joined) - 1 - np.unique(joined.step[::-1], return_index=True)[1]
    return joined.where(last), tuple(lost)
