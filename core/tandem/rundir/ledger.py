"""The ledger of a run as its coordinator recorded it last."""

from contextlib import suppress

from tandem.ledger import Ledger
from tandem.rundir.layout import RunDir
from tandem.rundir.log import LogReader
from tandem.rundir.records import COORDINATOR, Accounted, Sample

TAIL_BYTES = 4 * 2**20
"""Of the coordinator's log: far more than it writes between two of these records, whatever the size of the job."""


def newest_ledger(rundir: RunDir) -> Accounted | None:
    """The last record; None if there is none that can be read."""
    newest = None
    with suppress(OSError, ValueError):
        path = rundir.coordinator_log
        for record in LogReader(path, COORDINATOR, max(0, path.stat().st_size - TAIL_BYTES), skip=Sample):
            newest = record if isinstance(record, Accounted) else newest
    return newest


def of_record(record: Accounted) -> Ledger:
    """What a record says to people."""
    return Ledger(**{name: getattr(record, name) for name in Ledger.model_fields})
