"""The ledger of a run as its coordinator recorded it last."""

from contextlib import suppress

from tandem.ledger import Ledger
from tandem.rundir.layout import RunDir
from tandem.rundir.log import LogReader
from tandem.rundir.records import COORDINATOR, Accounted, Sample

TAIL_BYTES = 2**20
"""Of the coordinator's log: more than it writes between two of these records, whatever the size of the job."""


def newest_ledger(rundir: RunDir) -> Accounted | None:
    """The last record; None if there is none that can be read."""
    with suppress(OSError, ValueError):
        size = rundir.coordinator_log.stat().st_size
        for start in sorted({max(0, size - TAIL_BYTES), 0}, reverse=True):
            newest = None
            for record in LogReader(rundir.coordinator_log, COORDINATOR, start, skip=Sample):
                newest = record if isinstance(record, Accounted) else newest
            if newest is not None:
                return newest
    return None


def of_record(record: Accounted) -> Ledger:
    """What a record says to people."""
    return Ledger(**{name: getattr(record, name) for name in Ledger.model_fields})
