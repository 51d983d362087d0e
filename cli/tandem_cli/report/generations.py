"""The memberships of a run, put together from three witnesses: records, the trainers' logs, the coordinator's log."""

from collections.abc import Mapping, Sequence
from typing import TypeVar

from tandem.rundir.lineage import GenerationRecord
from tandem.rundir.records import Closed, Formed
from tandem_cli.report.logs import CoordinatorLog, TrainLog
from tandem_cli.report.run import Generation

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
