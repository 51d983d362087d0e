"""The generations of a run, merged from records, the trainers' logs and the coordinator's log, and which of the logged
steps the final model contains.

After a restart, steps after the checkpoint are done again, so several generations log the same step. The rule is that
of `tandem.rundir.lineage`: of a generation, the steps up to the one its successor on the lineage resumed from count. A
report must also make sense of a directory whose generation records are lost, so it uses an equal form that needs only
where each generation began: of a generation, the steps count that no later generation began at or before. (Equal, since
each generation resumes from a checkpoint that counted at its start; a test compares the two over random histories.)
"""

import math
from collections.abc import Mapping, Sequence
from typing import TypeVar

import numpy as np

from tandem.measures import Generation
from tandem.rundir.lineage import GenerationRecord
from tandem.rundir.records import Closed, Formed
from tandem.script import MAX_VALUES
from tandem_cli.report.logs import CoordinatorLog, TrainLog
from tandem_cli.report.run import Steps

Records = Mapping[int, GenerationRecord]
Known = TypeVar("Known")
AnyOfGeneration = TypeVar("AnyOfGeneration", Formed, Closed)


def beginnings(records: Records, train: Sequence[TrainLog]) -> dict[int, int]:
    """The step that each generation went on from: from its record, else from its log."""
    found = {}
    for log in train:
        if log.start_step is not None:
            found[log.generation] = log.start_step
        elif len(log.steps):
            found[log.generation] = int(log.steps.step.min()) - 1
    for number, record in records.items():
        found[number] = record.resumed_from.step if record.resumed_from else 0
    return found


def collect(records: Records, train: Sequence[TrainLog], coordinator: CoordinatorLog) -> tuple[Generation, ...]:
    """All memberships anybody knows of, oldest first."""
    logs = {log.generation: log for log in train}
    formed = _by_number(coordinator.formed)
    closed = _by_number(coordinator.closed)
    began = beginnings(records, train)
    found = [
        _membership(number, records.get(number), logs.get(number), formed.get(number), closed.get(number), began)
        for number in sorted({*records, *logs, *formed})
    ]
    return tuple(found)


def _membership(
    number: int,
    record: GenerationRecord | None,
    log: TrainLog | None,
    formed: Formed | None,
    closed: Closed | None,
    began: Mapping[int, int],
) -> Generation:
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
            log.world_size if log else None,
        ),
        members=tuple((formed and formed.members) or (record.members if record else ())),
        reason=(formed and formed.reason) or "",
        detail=(formed and formed.detail) or "",
        resumed_step=began.get(number),
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
    """The first line of each generation: a coordinator that restarted may say it again."""
    found: dict[int, AnyOfGeneration] = {}
    for line in lines:
        found.setdefault(line.generation, line)
    return found


def _first(*values: Known | None) -> Known | None:
    """The first that is known."""
    return next((value for value in values if value is not None), None)


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


MAX_MEASURES = 2 + MAX_VALUES
"""What is told of a step beside its loss: learning rate, gradient norm, and the values of a script."""


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
            for name in [*dict.fromkeys(name for steps in kept for name in steps.measures)][:MAX_MEASURES]
        },
        None
        if all(steps.lossless is None for steps in kept)
        else np.concatenate(
            [np.zeros(len(steps), np.bool_) if steps.lossless is None else steps.lossless for steps in kept]
        ),
    )
    # np.unique names the first of equal ones: look from the end, where the later generation stands.
    last = len(joined) - 1 - np.unique(joined.step[::-1], return_index=True)[1]
    return joined.where(last), tuple(lost)
