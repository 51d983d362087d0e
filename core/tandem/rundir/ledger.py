"""The newest ledger of a run that its coordinator recorded."""

from contextlib import suppress

from tandem.rundir.bucket_usage import bucket_usage
from tandem.rundir.layout import RunDir
from tandem.rundir.log import LogReader
from tandem.rundir.records import COORDINATOR, LedgerRecord, Sample
from tandem.wire.ledger import Ledger

TAIL_BYTES = 4 * 2**20
"""Bytes read from the end of the coordinator's log: far more than it writes between two ledger records, whatever the
size of the job."""


def newest_ledger(rundir: RunDir) -> LedgerRecord | None:
    """The last ledger record; None if there is none that can be read."""
    newest = None
    with suppress(OSError, ValueError):
        path = rundir.coordinator_log
        for record in LogReader(path, COORDINATOR, max(0, path.stat().st_size - TAIL_BYTES), skip=Sample):
            newest = record if isinstance(record, LedgerRecord) else newest
    return newest


def ledger_of(rundir: RunDir, record: LedgerRecord | None) -> Ledger | None:
    """The ledger of a run: that of its newest record, without the coordinator's internal fields, and the requests to
    its bucket that were counted since; None if there is neither."""
    bucket = bucket_usage(rundir)
    if record is None:
        return None if bucket is None else Ledger(bucket=bucket)
    return Ledger(**{name: getattr(record, name) for name in Ledger.model_fields} | {"bucket": bucket})
