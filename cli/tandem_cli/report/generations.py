"""The memberships of a run, put together from three witnesses: records, the trainers' logs, the coordinator's log."""

from collections.abc import Mapping, Sequence

from tandem.numbers import whole
from tandem.rundir.lineage import GenerationRecord
from tandem_cli.report.lines import Record, text
from tandem_cli.report.logs import CoordinatorLog, TrainLog
from tandem_cli.report.run import Generation

Records = Mapping[int, GenerationRecord]


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
    opened = _by_number(coordinator.opened)
    closed = _by_number(coordinator.closed)
    began = beginnings(records, train)
    found = [
        _membership(
            number, records.get(number), logs.get(number), opened.get(number, {}), closed.get(number, {}), began
        )
        for number in sorted({*records, *logs, *opened})
    ]
    return tuple(found)


def _membership(
    number: int,
    record: GenerationRecord | None,
    log: TrainLog | None,
    opened: Record,
    closed: Record,
    began: Mapping[int, int],
) -> Generation:
    steps = log.steps if log and len(log.steps) else None
    moments = [opened.get("time"), record.started_at if record else None, log.first_at if log else None]
    sizes = [whole(opened.get("worldSize")), record.world_size if record else None, log.world_size if log else None]
    return Generation(
        number=number,
        opened_at=next((moment for moment in moments if moment is not None), None),
        closed_at=closed.get("time"),
        world_size=next((size for size in sizes if size is not None), None),
        members=_members(opened.get("members")) or tuple(record.members if record else ()),
        reason=text(opened.get("reason")),
        detail=text(opened.get("detail")),
        resumed_step=began.get(number),
        first_step_at=float(steps.time.min()) if steps else None,
        last_step=int(steps.step.max()) if steps else None,
        last_step_at=float(steps.time.max()) if steps else None,
        last_line_at=log.last_at if log else None,
        ended=_ended(log, closed),
    )


def _ended(log: TrainLog | None, closed: Record) -> str:
    own = log.ended if log else ""
    return own or text(closed.get("detail")) or text(closed.get("reason"))


def _members(value: object) -> tuple[str, ...]:
    """Names of members; the coordinator may list them as names or as objects with a name."""
    if not isinstance(value, list):
        return ()
    names = (text(member.get("replica")) if isinstance(member, dict) else text(member) for member in value)
    return tuple(name for name in names if name)


def _by_number(lines: Sequence[Record]) -> dict[int, Record]:
    """The first line of each generation: a coordinator that restarted may say it again."""
    found: dict[int, Record] = {}
    for line in lines:
        if (number := whole(line.get("generation"))) is not None:
            found.setdefault(number, line)
    return found
