"""The newest ledger of a run that its coordinator recorded."""

from tandem.rundir.bucket_usage import bucket_usage
from tandem.rundir.layout import RunDir
from tandem.rundir.log import last_record
from tandem.rundir.records import COORDINATOR, LedgerRecord, Sample
from tandem.wire.ledger import Ledger


def newest_ledger(rundir: RunDir) -> LedgerRecord | None:
    """The last ledger record; None if there is none that can be read."""
    return last_record(rundir.coordinator_log, COORDINATOR, LedgerRecord, skip=Sample)


def ledger_of(rundir: RunDir, record: LedgerRecord | None) -> Ledger | None:
    """The ledger of a run: that of its newest record, without the coordinator's internal fields, and the requests to
    its bucket that were counted since; None if there is neither."""
    bucket = bucket_usage(rundir)
    if record is None:
        return None if bucket is None else Ledger(bucket=bucket)
    return Ledger(**{name: getattr(record, name) for name in Ledger.model_fields} | {"bucket": bucket})
