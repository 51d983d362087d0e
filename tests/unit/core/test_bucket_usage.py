"""The requests to a bucket, counted by each process and added up."""

import socket
import threading
from pathlib import Path

import pytest

from tandem.rundir.bucket_usage import UsageLog, UsageReader, bucket_usage
from tandem.rundir.layout import RunDir
from tandem.rundir.ledger import ledger_of
from tandem.rundir.records import LedgerRecord
from tandem.rundir.store import Store
from tandem.wire.ledger import BucketUsage, Ledger, UsageByPurpose, format_bucket
from tests.support.buckets import store
from tests.support.waiting import until

pytestmark = pytest.mark.usefixtures("credentials")


@pytest.fixture
def rundir(tmp_path: Path) -> RunDir:
    rundir = RunDir(tmp_path / "run")
    rundir.create()
    return rundir


@pytest.fixture
def bucket(url: str) -> Store:
    return store(url)


def test_every_request_and_byte_is_counted(bucket: Store) -> None:
    bucket.create("a", b"123")
    bucket.put("b", b"45678")
    assert bucket.read("a") is not None
    assert bucket.read_range("b", 1, 2) == b"56"
    assert bucket.read("missing") is None
    assert [entry.name for entry in bucket.entries()] == ["a", "b"]
    assert list(bucket.entries("nothing/")) == []
    bucket.delete(["a", "b"])
    assert bucket.usage == BucketUsage(writes=2, reads=3, listings=2, deletions=2, sent_bytes=8, received_bytes=5)


def test_a_process_continues_the_totals_of_the_one_before_it(rundir: RunDir, bucket: Store, url: str) -> None:
    log = UsageLog(rundir, bucket)
    bucket.put("a", b"123")
    log.write()
    bucket.put("a", b"123")
    log.write()
    assert bucket_usage(rundir) == BucketUsage(writes=2, sent_bytes=6)
    again = store(url)
    log = UsageLog(rundir, again)
    assert again.read("a") is not None
    log.write()
    assert bucket_usage(rundir) == BucketUsage(writes=2, reads=1, sent_bytes=6, received_bytes=3)


def test_the_logs_of_all_pods_are_added_up_and_damage_costs_a_line(
    rundir: RunDir, bucket: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    reader = UsageReader()
    logs = lambda: list(rundir.log.iterdir())  # noqa: E731
    assert reader.total(logs()) is None
    bucket.put("a", b"123")
    for name in ("worker-0", "worker-1"):
        monkeypatch.setattr(socket, "gethostname", lambda name=name: name)
        UsageLog(rundir, bucket).write()
    (rundir.log / "bucket-worker-2.jsonl").write_bytes(b"garbage\n")
    (rundir.log / "other.jsonl").write_bytes(b'{"writes": 100}\n')
    assert reader.total(logs()) == BucketUsage(writes=2, sent_bytes=6)
    with (rundir.log / "bucket-worker-0.jsonl").open("ab") as file:
        file.write(b'{"time": 1.0, "writes": 50')
    assert reader.total(logs()) == BucketUsage(writes=2, sent_bytes=6)


def test_lines_come_while_a_process_lives_and_at_its_end(
    rundir: RunDir, bucket: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tandem.rundir.bucket_usage.FIRST_SECONDS", 0.05)
    ending = threading.Event()
    with UsageLog(rundir, bucket).recording(ending):
        until(lambda: bucket_usage(rundir), "the first line")
        bucket.put("a", b"123")
        ending.set()
        until(lambda: bucket_usage(rundir) == BucketUsage(writes=1, sent_bytes=3), "the last line")


def test_the_ledger_has_what_was_counted_since_its_record(rundir: RunDir, bucket: Store) -> None:
    record = LedgerRecord(time=1.0, gpu_seconds=UsageByPurpose(compute=5.0))
    assert ledger_of(rundir, None) is None
    assert ledger_of(rundir, record) == Ledger(gpu_seconds=UsageByPurpose(compute=5.0))
    bucket.put("a", b"123")
    UsageLog(rundir, bucket).write()
    usage = BucketUsage(writes=1, sent_bytes=3)
    assert ledger_of(rundir, None) == Ledger(bucket=usage)
    assert ledger_of(rundir, record) == Ledger(gpu_seconds=UsageByPurpose(compute=5.0), bucket=usage)


def test_it_is_shown_in_a_line() -> None:
    usage = BucketUsage(writes=34, reads=200, listings=1000, sent_bytes=1_200_000, received_bytes=5)
    assert format_bucket(usage) == (
        "1,234 requests (listings 1,000, reads 200, writes 34) · 1.2 MB sent · 5 B received"
    )
