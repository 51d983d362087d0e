"""The generations of a run, merged from records, the trainers' logs and the coordinator's log, and which of the logged
steps the final model contains (`tandem.rundir.training_log` has the rule)."""

import math
from collections.abc import Mapping, Sequence
from typing import TypeVar

import numpy as np

from tandem.rundir.lineage import GenerationRecord
from tandem.rundir.records import Closed, Formed
from tandem.rundir.timeline import MAX_RECENT_STEPS, TrainingFacts, merged, with_handed_over
from tandem.script import MAX_VALUES
from tandem.wire.measures import Generation
from tandem_cli.report.logs import CoordinatorLog, TrainLog
from tandem_cli.report.run import Steps

Records = Mapping[int, GenerationRecord]
AnyOfGeneration = TypeVar("AnyOfGeneration", Formed, Closed)


def beginnings(records: Records, train: Sequence[TrainLog]) -> dict[int, int]:
    """Find the step that each generation resumed from: from its record, else from its log."""
    start_steps = {}
    for log in train:
        if log.start is not None:
            start_steps[log.generation] = log.start.step
        elif len(log.steps):
            start_steps[log.generation] = int(log.steps.step.min()) - 1
    for number, record in records.items():
        start_steps[number] = record.start_step
    return start_steps


def collect(records: Records, train: Sequence[TrainLog], coordinator: CoordinatorLog) -> tuple[Generation, ...]:
    """Collect all known generations, oldest first."""
    logs = {log.generation: log for log in train}
    formed = _by_number(coordinator.formed)
    closed = _by_number(coordinator.closed)
    start_steps = beginnings(records, train)
    facts = {log.generation: _facts(log) for log in train}
    generations = [
        merged(
            number,
            *(records.get(number), facts.get(number), formed.get(number), closed.get(number), formed.get(number + 1)),
            resumed_step=start_steps.get(number),
        )
        for number in sorted({*records, *logs, *formed})
    ]
    return with_handed_over(generations, facts)


def _facts(log: TrainLog) -> TrainingFacts:
    times = log.steps.time
    # Steps before the start are those of the generation that this one continues.
    is_own = times >= (log.start.time if log.start is not None else 0.0)
    own, handed_over = times[is_own], times[~is_own]
    return TrainingFacts(
        start=log.start,
        first_step_at=float(own.min()) if len(own) else None,
        last_step=int(log.steps.step.max()) if len(times) else None,
        last_step_at=float(own.max()) if len(own) else None,
        recent_steps=tuple(np.sort(own[-MAX_RECENT_STEPS:]).tolist()),
        handed_over_at=float(handed_over.max()) if len(handed_over) else None,
        last_at=log.last_at,
        ended=log.ended,
    )


def _by_number(lines: Sequence[AnyOfGeneration]) -> dict[int, AnyOfGeneration]:
    """Index lines by generation; the first line of each, as a coordinator that restarted may repeat it."""
    by_number: dict[int, AnyOfGeneration] = {}
    for line in lines:
        by_number.setdefault(line.generation, line)
    return by_number


Limits = Mapping[int, float]
"""Last step that counts, by generation; infinite for the newest."""


def counts(bounds: Limits, generation: int | None, step: int) -> bool:
    """Whether a step of a generation counts. A step of an unknown generation counts."""
    return generation is None or step <= bounds.get(generation, math.inf)


MAX_MEASURES = 2 + MAX_VALUES
"""Number of values of a step beside its loss: learning rate, gradient norm, and the values of a script."""


def resolve(logged: Mapping[int, Steps], bounds: Limits) -> tuple[Steps, tuple[Steps, ...]]:
    """Split the logged steps: those that count, ascending and each once, and those that were repeated."""
    valid, lost = [], []
    for generation in sorted(logged):
        steps = logged[generation]
        good = steps.step <= bounds.get(generation, math.inf)
        valid.append(steps.select(good))
        if not good.all():
            lost.append(steps.select(~good))
    if not valid:
        return Steps(np.empty(0, np.int64), np.empty(0), np.empty(0)), ()
    joined = Steps(
        np.concatenate([steps.step for steps in valid]),
        np.concatenate([steps.time for steps in valid]),
        np.concatenate([steps.loss for steps in valid]),
        {
            name: np.concatenate([steps.measures.get(name, np.full(len(steps), np.nan)) for steps in valid])
            for name in [*dict.fromkeys(name for steps in valid for name in steps.measures)][:MAX_MEASURES]
        },
        None
        if all(steps.lossless is None for steps in valid)
        else np.concatenate(
            [np.zeros(len(steps), np.bool_) if steps.lossless is None else steps.lossless for steps in valid]
        ),
    )
    # np.unique returns the first index of equal steps; in reverse that is the latest generation's.
    last = len(joined) - 1 - np.unique(joined.step[::-1], return_index=True)[1]
    return joined.select(last), tuple(lost)
