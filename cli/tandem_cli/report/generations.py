"""The generations of a run, merged from records, the trainers' logs and the coordinator's log, and which of the logged
steps the final model contains (`tandem.rundir.training_log` has the rule)."""

import math
from collections.abc import Mapping, Sequence
from typing import TypeVar

import numpy as np

from tandem.rundir.lineage import GenerationRecord
from tandem.rundir.records import Closed, Formed
from tandem.script import MAX_VALUES
from tandem.wire.measures import Generation
from tandem_cli.report.logs import CoordinatorLog, TrainLog
from tandem_cli.report.run import Steps

Records = Mapping[int, GenerationRecord]
AnyValue = TypeVar("AnyValue")
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
    generations = [
        _membership(number, records.get(number), logs.get(number), formed.get(number), closed.get(number), start_steps)
        for number in sorted({*records, *logs, *formed})
    ]
    return tuple(generations)


def _membership(
    number: int,
    record: GenerationRecord | None,
    log: TrainLog | None,
    formed: Formed | None,
    closed: Closed | None,
    start_steps: Mapping[int, int],
) -> Generation:
    """Merge one generation; of each value the most exact source that has it."""
    steps = log.steps if log and len(log.steps) else None
    return Generation(
        number=number,
        opened_at=_first(
            formed.time if formed else None, record.started_at if record else None, log.first_at if log else None
        ),
        closed_at=closed.time if closed else None,
        world_size=_first(
            formed.world_size if formed else None,
            record.world_size if record else None,
            log.start.world_size if log and log.start else None,
        ),
        members=tuple((formed and formed.members) or (record.members if record else ())),
        reason=(formed and formed.reason) or "",
        detail=(formed and formed.detail) or "",
        resumed_step=start_steps.get(number),
        first_step_at=float(steps.time.min()) if steps else None,
        last_step=int(steps.step.max()) if steps else None,
        last_step_at=float(steps.time.max()) if steps else None,
        last_line_at=log.last_at if log else None,
        ended=_ended(log, closed),
    )


def _ended(log: TrainLog | None, closed: Closed | None) -> str:
    own = log.ended if log else ""
    return own or (closed and (closed.detail or closed.reason)) or ""


def _by_number(lines: Sequence[AnyOfGeneration]) -> dict[int, AnyOfGeneration]:
    """Index lines by generation; the first line of each, as a coordinator that restarted may repeat it."""
    by_number: dict[int, AnyOfGeneration] = {}
    for line in lines:
        by_number.setdefault(line.generation, line)
    return by_number


def _first(*values: AnyValue | None) -> AnyValue | None:
    """Return the first value that is not None."""
    return next((value for value in values if value is not None), None)


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
