"""The process of a pod that exchanges its run directory with the bucket: `python -m tandem.rundir.sync_service`.

It exchanges every few seconds, and answers processes that wait for it (tandem.rundir.sync_client). SIGTERM asks for a
last exchange; the end of standard input ends it at once, because the pod's first process is gone.

In the coordinator's pod it has the right to write the bucket (tandem.rundir.bucket.Writer) and deletes what uploads
that broke off have left. In the others it checks that the coordinator of this job has that right. Standard output says
why something is missing, as JSON lines {"failing": "…", "blocks": true}; `blocks` says that no record arrives in the
bucket, so that no generation can begin.
"""

import json
import logging
import os
import signal
import socketserver
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from pathlib import Path
from typing import Any

from tandem.job.resource import DistributedTrainingJob, Storage
from tandem.processes.exitcode import ExitCode
from tandem.processes.launch import RUN_DIR, STORAGE, UID, UID_ANNOTATION
from tandem.rundir.bucket import BucketRecord, JobWriter, Occupied, SupersededWriter, Writer, claim, open_bucket
from tandem.rundir.bucket_usage import UsageLog
from tandem.rundir.checkpoint import Broken
from tandem.rundir.layout import RunDir
from tandem.rundir.store import Store
from tandem.rundir.sync import DeletedCheckpoint, Synchronizer
from tandem.rundir.sync_client import MAX_LINE_BYTES, PATIENCE_SECONDS, SOCKET
from tandem.rundir.upload import FINAL_SECONDS, end_with_parent

EXCHANGE_SECONDS = 2.0
"""Interval of exchanges in seconds: each costs a listing."""
LOOK_SECONDS = 0.5
"""Interval at which the disk is searched for a checkpoint that nobody waits for, in seconds."""
OPERATION_SECONDS = 20.0
"""Time for one operation in the bucket with its retries, in seconds: an exchange that fails is repeated anyway."""
RETRY_SECONDS = 1.0
SWEEP_SECONDS = 3600.0
RECORDS = "records"
"""Name of the exchange, among what may fail."""

log = logging.getLogger("tandem.sync")


class SyncService:
    """The exchange of one pod.

    Args:
        report: called with the reason why something is missing in the bucket, and whether no record arrives there;
            with "" once nothing is missing.
        ending: set to have `run` end after a last exchange.
    """

    def __init__(
        self, synchronizer: Synchronizer, report: Callable[[str, bool], None], ending: threading.Event
    ) -> None:
        self._synchronizer, self._report, self._ending = synchronizer, report, ending
        self._problems: dict[str, str] = {}
        self._reported: tuple[str, bool] | None = None
        self._lock = threading.Lock()

    def run(self, path: Path | None, sweeps: bool) -> None:
        """Exchange until `ending` is set.

        Args:
            path: socket for processes that wait; None: there are none.
            sweeps: delete what uploads that broke off have left in the bucket.
        """
        server = None if path is None else _Server(str(path), self.answer)
        threads = [
            threading.Thread(target=self._repeat, args=(RECORDS, self._synchronizer.exchange, EXCHANGE_SECONDS)),
            threading.Thread(target=self._repeat, args=("checkpoints", self._synchronizer.upload, LOOK_SECONDS)),
        ]
        if sweeps:
            threads.append(threading.Thread(target=self._sweep, daemon=True))
        if server is not None:
            threading.Thread(target=server.serve_forever, daemon=True).start()
        for thread in threads:
            thread.start()
        for thread in threads[:2]:
            thread.join()
        # The end of the run comes after its checkpoints.
        if not self._problems:
            self._last(RECORDS, self._synchronizer.exchange)
        if server is not None:
            server.server_close()

    def answer(self, request: Mapping[str, Any]) -> dict[str, str]:
        """Do what a process waits for; returns `error` and its `kind`, or nothing."""
        name, digest = str(request.get("name")), str(request.get("digest"))
        until = time.monotonic() + request.get("patience", PATIENCE_SECONDS)
        while True:
            try:
                match request.get("do"):
                    case "exchange":
                        self._synchronizer.exchange()
                    case "upload":
                        self._synchronizer.upload()
                        self._synchronizer.require_sent(name, digest)
                    case "fetch":
                        self._synchronizer.fetch(name, digest, request.get("paths"))
                    case "repair":
                        self._synchronizer.repair(name, request.get("paths"))
                    case other:
                        return {"kind": "failed", "error": f"unknown request {other}"}
            except DeletedCheckpoint as error:
                return {"kind": "gone", "error": str(error)}
            except Broken as error:
                return {"kind": "broken", "error": str(error)}
            except (OSError, SupersededWriter) as error:
                if time.monotonic() > until or self._ending.is_set():
                    return {"kind": "failed", "error": str(error)}
                time.sleep(RETRY_SECONDS)
                continue
            return {}

    def _repeat(self, kind: str, work: Callable[[], None], interval: float) -> None:
        while not self._ending.is_set():
            try:
                work()
            except (OSError, SupersededWriter) as error:
                self._tell(kind, str(error))
                self._ending.wait(RETRY_SECONDS)
            except Exception as error:
                # A defect here must not end a job whose training goes on.
                log.exception("event=defect kind=%s", kind)
                self._tell(kind, f"{type(error).__name__}: {error}")
                self._ending.wait(10 * RETRY_SECONDS)
            else:
                self._tell(kind, "")
                self._ending.wait(interval)
        self._last(kind, work)

    def _last(self, kind: str, work: Callable[[], None]) -> None:
        until = time.monotonic() + FINAL_SECONDS
        while True:
            try:
                work()
            except (OSError, SupersededWriter) as error:
                self._tell(kind, str(error))
                if time.monotonic() > until:
                    return
                time.sleep(RETRY_SECONDS)
            else:
                self._tell(kind, "")
                return

    def _sweep(self) -> None:
        suspects: dict[str, frozenset[str]] = {}
        while not self._ending.wait(SWEEP_SECONDS):
            with suppress(OSError, SupersededWriter):  # the next one deletes it
                suspects = self._synchronizer.sweep(suspects)

    def _tell(self, kind: str, problem: str) -> None:
        with self._lock:
            if problem != self._problems.get(kind, ""):
                if problem:
                    log.warning("event=failing kind=%s why=%r", kind, problem)
                    self._problems[kind] = problem
                else:
                    log.info("event=recovered kind=%s", kind)
                    del self._problems[kind]
            # Also the first success: a process before this one may have reported a problem.
            state = next(iter(self._problems.values()), ""), RECORDS in self._problems
            if state != self._reported:
                self._reported = state
                self._report(*state)


class _Server(socketserver.ThreadingMixIn, socketserver.UnixStreamServer):
    """Answers one request a connection, each on a thread of its own."""

    daemon_threads = True

    def __init__(self, path: str, answer: Callable[[Mapping[str, Any]], dict[str, str]]) -> None:
        # One that died has left its socket.
        Path(path).unlink(missing_ok=True)
        self.answer = answer
        super().__init__(path, _Handler)


class _Handler(socketserver.StreamRequestHandler):
    def handle(self) -> None:
        request = json.loads(self.rfile.readline(MAX_LINE_BYTES))
        assert isinstance(self.server, _Server)
        answer = self.server.answer(request)
        with suppress(BrokenPipeError):  # nobody waits any more
            self.wfile.write(json.dumps(answer).encode() + b"\n")


def begin(store: Store, rundir: RunDir, owner: str, waiting: Callable[[str], None]) -> None:
    """Get the run from the bucket before the coordinator decides about it; its pod has a new, empty directory.

    Args:
        owner: the job's object.
        waiting: called with the name of a writer of another job that has to be waited for.

    Raises:
        Occupied, StoreAccessError, StoreUnavailableError, OSError: as tandem.rundir.bucket.claim.
    """
    store.probe()
    writer = claim(store, rundir, _is_new(store, rundir), waiting=waiting, owner=owner)
    rundir.create()
    with writer.renewing():
        Synchronizer(store, rundir, writer).exchange()


def owner_of(job: DistributedTrainingJob) -> str:
    """The object in Kubernetes that a job belongs to; empty: none."""
    return _object(job.metadata.annotations.get(UID_ANNOTATION, ""))


def _writer(store: Store, rundir: RunDir) -> tuple[Writer | JobWriter, AbstractContextManager[None]]:
    if os.environ.get(STORAGE):
        return JobWriter(store, _object(os.environ.get(UID, ""))), nullcontext()
    writer = claim(store, rundir, _is_new(store, rundir), owner=owner_of(rundir.read_job()))
    return writer, writer.renewing()


def _is_new(store: Store, rundir: RunDir) -> bool:
    """Whether this directory has never been a copy of a run in the bucket. One that has may be older than the bucket,
    if another job has written since."""
    return BucketRecord.load(rundir, str(store.location)) is None


def _object(incarnation: str) -> str:
    # A retry of a job has a number after the object's UID.
    return incarnation.partition(".")[0]


def main(arguments: Sequence[str]) -> int:
    """Exchange the run directory in $TANDEM_RUN_DIR until SIGTERM."""
    logging.basicConfig(level=logging.INFO, format="%(asctime)s level=%(levelname)s %(message)s")
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    ending = threading.Event()
    signal.signal(signal.SIGTERM, lambda number, frame: ending.set())
    threading.Thread(target=end_with_parent, name="parent", daemon=True).start()
    rundir = RunDir(os.environ[RUN_DIR])

    def report(text: str, blocks: bool) -> None:
        print(json.dumps({"failing": text, "blocks": blocks}), flush=True)

    text = os.environ.get(STORAGE)
    storage = Storage.read_json(text) if text else rundir.read_job().spec.checkpoint.storage
    rundir.create()
    try:
        store = open_bucket(storage, OPERATION_SECONDS)
        writer, renewing = _writer(store, rundir)
    except (OSError, SupersededWriter, Occupied) as error:
        log.error("%s", error)  # noqa: TRY400 - the sentence is enough
        report(str(error), True)
        return ExitCode.CONFIGURATION if isinstance(error, Occupied) else ExitCode.FAILED
    service = SyncService(Synchronizer(store, rundir, writer), report, ending)
    path = os.environ.get(SOCKET)
    with renewing, UsageLog(rundir, store).recording(ending):
        service.run(Path(path) if path else None, sweeps=isinstance(writer, Writer))
    if isinstance(writer, Writer):
        writer.end()
    return ExitCode.DONE


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
