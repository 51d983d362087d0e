"""A run in a bucket: the names of its objects, who may write them, and their upload.

    run.json                              the format, and which run this is; created once
    writer.json                           the process that writes; replaced every WRITER_SECONDS (see `Writer`)
    job.json, generations/000007.json, …  as in the run directory (tandem.rundir.layout)
    bundles/000000                        copies of many results of evaluations (tandem.rundir.bundles)
    log/coordinator.jsonl/000000000000    a log, in segments named after the offset of their first byte
    checkpoints/NAME/manifest.json        the commit of a checkpoint
    parts/DIGEST/weights.safetensors/000003
                                          the fourth PIECE_BYTES of a file of the checkpoint whose manifest has that
                                          digest: a name that no other content can have

**The run directory stays the working copy.** A process of Tandem reads and writes files; one process of the job brings
what is complete into the bucket while training goes on (tandem.rundir.upload), so a save never waits for the network.
The bucket shows what the run directory shows: files that are gone there are deleted here. A machine with an empty run
directory gets the run from the bucket (tandem.rundir.download), and continues it.

**Order.** A manifest is written after the parts that it lists and after the records of its generation. DONE is written
last, so a reader that sees it can read the whole run.

**One writer.** Two machines must not continue one run. A process becomes the writer by replacing writer.json if its
writer has ended, or has shown no sign of life for TAKEOVER_SECONDS by the clock of the process that waits: no two
clocks are compared. The run directory records the last writer (`BucketRecord`). If another one has written since, this
directory is not the newest state of the run, and is refused. A writer whose last sign is older than FRESH_SECONDS
renews it before it writes anything else, and always before it commits or deletes, so one that slept through its end
stops there (`SupersededWriter`). Files that change are replaced only if they are as this writer has left them.

**Small pieces.** Parts are objects of PIECE_BYTES: an upload that breaks off continues with the next piece, several
ranks can write one file, and no provider keeps an incomplete multipart upload that costs money and shows in no listing.

Rejected: a lease that expires by a clock (the clocks of two machines differ, and a bucket has none to ask); multipart
uploads; one object for each line of a log (a million requests a day); logs as one object that is written whole each
time (the square of their length).
"""

import json
import re
import secrets
import socket
import threading
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import replace
from typing import Any

from pydantic import ValidationError

from tandem.job.resource import Storage
from tandem.model import Model
from tandem.rundir.archive import FILES, FOLDERS, NAME
from tandem.rundir.checkpoint import CHUNK_BYTES, FileEntry
from tandem.rundir.durable import encode, read_json_or_none, replace_json
from tandem.rundir.layout import RunDir
from tandem.rundir.ownership import BUCKETS
from tandem.rundir.store import RETRY_SECONDS, Location, Stale, Store, StoreAccessError, StoreUnavailableError

FORMAT = 1
IDENTITY, WRITER = "run.json", "writer.json"
CHECKPOINTS, PARTS, LOG = "checkpoints", "parts", "log"
PIECE_BYTES = 4 * CHUNK_BYTES
"""Size of a piece of a file in bytes; the last one may be smaller."""
SEGMENT_BYTES = 2**20
"""A segment of a log that has reached this size in bytes is complete; the next bytes begin a new one."""
THREADS = 4
"""Pieces that are sent or received at once: more would not be faster from one machine, and cost memory."""
WRITER_SECONDS = 10.0
"""Interval at which the writer shows that it is alive, in seconds."""
FRESH_SECONDS = 20.0
"""Age of the writer's last sign in seconds from which it renews it before it writes anything else."""
MAX_CLAIMS = 20
"""Maximum number of recorded claims whose outcome is unknown."""
TAKEOVER_SECONDS = 35.0
"""Time after which a writer that has shown no sign of life is replaced, in seconds: three signs may be lost."""


_SEGMENT = re.compile(r"^.+/[0-9]{12}$")


class SupersededWriter(Exception):  # noqa: N818 - a state of the bucket
    """Another process writes this run into the bucket now."""


class Occupied(Exception):  # noqa: N818 - a state of the bucket
    """The bucket holds another run below this prefix. The message says which."""


def open_bucket(storage: Storage, patience: float = RETRY_SECONDS) -> Store:
    """Open the bucket of a job that has one.

    Args:
        patience: seconds for one operation with its retries.

    Raises:
        StoreAccessError: it cannot be opened.
    """
    return Store(Location.parse(storage.bucket or ""), storage.endpoint or "", storage.region or "", patience)


def parts_of(digest: str) -> str:
    """The folder with the parts of the checkpoint whose manifest has this digest."""
    return f"{PARTS}/{digest[:32]}/"


def piece_name(digest: str, path: str, number: int) -> str:
    """The name of a piece of a file of that checkpoint."""
    return f"{parts_of(digest)}{path}/{number:06d}"


def pieces(entry: FileEntry) -> int:
    """The number of pieces of a file."""
    return -(-entry.size // PIECE_BYTES)


def segment_name(log: str, offset: int) -> str:
    """The name of the segment of a log that begins at this offset."""
    return f"{LOG}/{log}/{offset:012d}"


class BucketRecord(Model):
    """The run in a bucket that a run directory is a copy of."""

    url: str
    run: str
    """The run's identity in run.json."""
    writer: str
    """The writer that this directory has had last: if the bucket has had another one since, the bucket is newer."""
    claiming: list[str] = []
    """Names of claims whose outcome is unknown. A claim is recorded before it is written to the bucket, so that a
    process that crashes or gets no response recognizes its own name there."""
    complete: bool = True
    """Whether everything in the bucket has arrived here."""
    missing: str = ""
    """The reason why not everything here has arrived in the bucket; empty if it has."""

    @classmethod
    def load(cls, rundir: RunDir, url: str) -> "BucketRecord | None":
        """The record for one bucket; None if the run directory is no copy of it."""
        return next((record for record in _records(rundir) if record.url == url), None)

    def write(self, rundir: RunDir) -> None:
        """BucketRecord it in the run directory.

        Raises:
            OSError: it cannot be written.
        """
        remaining = [record.dump() for record in _records(rundir) if record.url != self.url]
        replace_json(rundir.path / BUCKETS, {"buckets": [*remaining, self.dump()]})


def _records(rundir: RunDir) -> list[BucketRecord]:
    content = read_json_or_none(rundir.path / BUCKETS)
    with suppress(ValidationError, KeyError, TypeError):
        return [BucketRecord.read(record) for record in content["buckets"]]
    return []


class Writer:
    """The right of one process to write a run into a bucket. `claim` creates it."""

    def __init__(self, store: Store, name: str, version: Mapping[str, str]) -> None:
        self._store, self._name, self._version = store, name, version
        self._lock = threading.Lock()
        self._renewed_at = time.monotonic()
        self._superseded = ""

    def renew(self, has_ended: bool = False) -> None:
        """Show that this process is alive.

        Args:
            has_ended: it writes nothing more, so that the next one need not wait.

        Raises:
            SupersededWriter: another process is the writer now.
            StoreAccessError, StoreUnavailableError: the bucket cannot be used.
        """
        with self._lock:
            if self._superseded:
                raise SupersededWriter(self._superseded)
            try:
                self._version = self._store.replace(WRITER, _sign(self._name, has_ended), self._version)
            except Stale as error:
                self._superseded = f"{self._store.location}: {error}"
                raise SupersededWriter(self._superseded) from error
            self._renewed_at = time.monotonic()

    def ensure(self) -> None:
        """Check before a write that nobody can have taken over; renew the right if its last sign is old.

        Raises:
            SupersededWriter, StoreAccessError, StoreUnavailableError: as `renew`.
        """
        if self._superseded or time.monotonic() - self._renewed_at > FRESH_SECONDS:
            self.renew()

    @contextmanager
    def renewing(self) -> Iterator[None]:
        """Renew it every WRITER_SECONDS as long as the block runs; what goes wrong shows in the next write."""
        done = threading.Event()

        def renew() -> None:
            while not done.wait(WRITER_SECONDS):
                with suppress(SupersededWriter, StoreAccessError, StoreUnavailableError):
                    self.renew()

        thread = threading.Thread(target=renew, name="bucket writer", daemon=True)
        thread.start()
        try:
            yield
        finally:
            done.set()
            thread.join()

    def end(self) -> None:
        """End the right, so that the next writer need not wait. It waits if this fails; one that was taken over stays
        with its new writer."""
        with suppress(SupersededWriter, StoreAccessError, StoreUnavailableError):
            self.renew(has_ended=True)


def claim(
    store: Store,
    rundir: RunDir,
    is_empty: bool,
    waiting: Callable[[str], None] = lambda writer: None,
    owner: str = "",
) -> Writer:
    """Become the writer of a run, and record that in the run directory, whose lock the caller holds.

    Args:
        is_empty: whether nothing was saved in the run directory, so that it may become a copy of any run. Its record
            says afterwards whether it has to be downloaded.
        waiting: called with the name of the present writer if it has to be waited for.
        owner: the job whose writer this is. A writer of the same job is replaced at once: it was in a pod that is gone,
            or stops with its next write.

    Raises:
        Occupied: the bucket holds another run, a newer state of this one, or its writer is alive.
        StoreAccessError, StoreUnavailableError: the bucket cannot be used.
        OSError: the run directory cannot be written.
    """
    url, name = str(store.location), f"{owner or socket.gethostname()}-{secrets.token_hex(8)}"
    recorded = BucketRecord.load(rundir, url)
    before = recorded or BucketRecord(url=url, run="", writer="", complete=not is_empty)
    planned = before.model_copy(
        update={"run": before.run or secrets.token_hex(16), "claiming": [*before.claiming, name][-MAX_CLAIMS:]}
    )
    planned.write(rundir)
    try:
        is_new = _create_identity(store, planned.run)
        run = planned.run if is_new else _expected_run(store, planned.run, is_empty)
        own_names = {before.writer, *before.claiming} - {""}
        is_behind, version = _take(store, name, own_names, is_empty, waiting, owner)
    except Occupied:
        before.write(rundir)
        raise
    complete = is_new or (before.complete and not is_behind)
    BucketRecord(url=url, run=run, writer=name, complete=complete, missing=before.missing).write(rundir)
    return Writer(store, name, version)


def _create_identity(store: Store, run: str) -> bool:
    """Begin a new run in the bucket. Returns False if there is one.

    Raises:
        Occupied: the prefix has other objects, which an upload would take for its own, or belongs to another run.
    """
    if store.read(IDENTITY) is not None:
        return False
    other = next((entry.name for entry in store.entries() if not entry.name.startswith(".probe-")), None)
    # Another process may have begun the run a moment ago.
    if other is not None and store.read(IDENTITY) is None:
        raise Occupied(f"{store.location} is not empty (it has {other}). Choose a prefix without objects for a new run")
    parts = store.location.prefix.split("/")
    for count in range(1, len(parts)):
        parent = replace(store.location, prefix="/".join(parts[:count]))
        if Store(parent, store.endpoint, store.region, store.patience).read(IDENTITY) is not None:
            raise Occupied(f"{store.location} lies within the run in {parent}. Choose another prefix")
    return store.create(IDENTITY, encode({"format": FORMAT, "run": run})) is not None


def _expected_run(store: Store, run: str, is_empty: bool) -> str:
    """The identity of the run in a bucket, which must be this one unless the run directory is empty."""
    identity = _object(store, IDENTITY)
    if identity.get("format") != FORMAT:
        raise Occupied(f"{store.location} was written by another version of Tandem")
    if identity.get("run") != run and not is_empty:
        raise Occupied(
            f"{store.location} holds another run. Choose another prefix; to continue that run, an empty run directory"
        )
    return str(identity.get("run"))


def _take(
    store: Store, name: str, own_names: Collection[str], is_empty: bool, waiting: Callable[[str], None], owner: str
) -> tuple[bool, Mapping[str, str]]:
    """Write this process into writer.json. Returns whether another writer has written since, and the
    version."""
    deadline, last_version = 0.0, None
    while True:
        current = store.read(WRITER)
        if current is None:
            if (created := store.create(WRITER, _sign(name, has_ended=False))) is not None:
                return False, created
            continue
        sign = parse_object(current.data)
        writer, now = str(sign.get("writer", "somebody")), time.monotonic()
        is_behind = writer not in own_names and not is_of(writer, owner)
        if is_behind and not is_empty:
            raise Occupied(
                f"{store.location} was continued by {writer} after this run directory was written. To go on from "
                "there, choose an empty run directory"
            )
        if last_version is None:
            deadline, last_version = now + TAKEOVER_SECONDS, current.version
            # The writer of this run directory has ended, because the caller holds its lock.
            if is_behind and not sign.get("ended"):
                waiting(writer)
        elif current.version != last_version:
            raise Occupied(f"{store.location} is written by {writer} now. Wait for it, or stop it there")
        if not is_behind or sign.get("ended") or now >= deadline:
            # Of all that wait, one succeeds; the others see its sign with their next look.
            with suppress(Stale):
                return is_behind, store.replace(WRITER, _sign(name, has_ended=False), current.version)
        else:
            time.sleep(min(1.0, deadline - now))


def is_of(writer: str, owner: str) -> bool:
    """Whether a writer is one of this job."""
    return bool(owner) and writer.rpartition("-")[0] == owner


class JobWriter:
    """The right of the other processes of a job to write, as long as its coordinator has that of `Writer`."""

    def __init__(self, store: Store, owner: str) -> None:
        self._store, self._owner = store, owner
        self._checked_at: float | None = None

    def renew(self) -> None:
        """Check that a writer of this job has the bucket.

        Raises:
            SupersededWriter: another job has it.
            StoreAccessError, StoreUnavailableError: it cannot be read.
        """
        current = self._store.read(WRITER)
        writer = "nobody" if current is None else str(parse_object(current.data).get("writer", "somebody"))
        if not is_of(writer, self._owner):
            raise SupersededWriter(f"{self._store.location} is written by {writer}, and not for this job")
        self._checked_at = time.monotonic()

    def ensure(self) -> None:
        """Check it again if the last check is old. Raises as `renew`."""
        if self._checked_at is None or time.monotonic() - self._checked_at > FRESH_SECONDS:
            self.renew()


def _sign(name: str, has_ended: bool) -> bytes:
    # The random value changes the version, which is a digest of the content on some servers.
    return encode({"writer": name, "ended": has_ended, "sign": secrets.token_hex(8)})


def remote_names(names: Iterable[str]) -> Iterator[str]:
    """Filter the names of objects for valid paths of a run directory. Other objects in the bucket are ignored."""
    for name in names:
        top, _, relative = name.partition("/")
        is_known = name in FILES or (relative and top in (*FOLDERS, CHECKPOINTS, PARTS))
        if top == LOG:
            is_known = _SEGMENT.match(relative) is not None
        if is_known and all(NAME.fullmatch(part) for part in name.split("/")):
            yield name


def _object(store: Store, name: str) -> dict[str, Any]:
    content = store.read(name)
    if content is None:
        raise StoreAccessError(f"{store.location}/{name} was deleted a moment ago")
    return parse_object(content.data)


def parse_object(data: bytes) -> dict[str, Any]:
    """Parse a JSON object; empty if the data is none."""
    with suppress(ValueError, RecursionError):
        value = json.loads(data)
        if isinstance(value, dict):
            return value
    return {}
