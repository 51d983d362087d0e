"""The requests of a run to its bucket, counted by the processes that send them.

    log/bucket-HOST.jsonl   a line every INTERVAL_SECONDS, and one at the end: the totals of this machine or pod

Such a log goes where all logs of a run go, so the coordinator can add up those of all pods, and a report those of a run
that has ended. A process continues the totals of the one before it. One that is killed loses what it has counted since
its last line.
"""

import json
import re
import socket
import threading
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from pydantic import ValidationError

from tandem.rundir.durable import list_folder
from tandem.rundir.layout import RunDir
from tandem.rundir.store import Store
from tandem.wire.ledger import BucketUsage

FIRST_SECONDS, INTERVAL_SECONDS = 30.0, 300.0
"""Time before the first line, and between two lines, in seconds: each costs a request, and one in each other pod."""
TAIL_BYTES = 4096
_NAME = re.compile(r"bucket-.+\.jsonl")


class UsageLog:
    """The log of one process.

    Args:
        store: its bucket, which counts the requests.
    """

    def __init__(self, rundir: RunDir, store: Store) -> None:
        self._store = store
        self._path = rundir.log / f"bucket-{re.sub(r'[^A-Za-z0-9._-]', '-', socket.gethostname())}.jsonl"
        self._before: BucketUsage | None = None

    def write(self) -> None:
        """Write the totals so far. A disk that takes no line costs a line."""
        with suppress(OSError):
            if self._before is None:
                # Not earlier: a new pod gets the log of the one before it with its first exchange.
                self._before = _last(self._path) or BucketUsage()
            usage = self._before + self._store.usage
            with self._path.open("ab") as file:
                file.write(json.dumps({"time": time.time(), **usage.dump()}).encode() + b"\n")

    @contextmanager
    def recording(self, ending: threading.Event) -> Iterator[None]:
        """Write a line at each interval while the block runs, and one as soon as `ending` is set."""

        def record() -> None:
            pause = FIRST_SECONDS
            while not ending.wait(pause):
                self.write()
                pause = INTERVAL_SECONDS
            self.write()

        threading.Thread(target=record, name="bucket usage", daemon=True).start()
        yield


class UsageReader:
    """Adds up the logs of a run, and reads again only those that have changed."""

    def __init__(self) -> None:
        self._usages: dict[Path, tuple[int, BucketUsage | None]] = {}

    def total(self, logs: Iterable[Path]) -> BucketUsage | None:
        """The requests of all processes; None if no log has any.

        Args:
            logs: all logs of the run.
        """
        total = None
        for path in logs:
            if not _NAME.fullmatch(path.name):
                continue
            with suppress(OSError):
                size = path.stat().st_size
                if self._usages.get(path, (None,))[0] != size:
                    self._usages[path] = size, _last(path)
            usage = self._usages.get(path, (0, None))[1]
            if usage is not None:
                total = usage if total is None else total + usage
        return total


def bucket_usage(rundir: RunDir) -> BucketUsage | None:
    """The requests of a run so far; None if it has no bucket, or nothing was counted."""
    return UsageReader().total(list_folder(rundir.log))


def _last(path: Path) -> BucketUsage | None:
    """The last line that can be read."""
    with suppress(FileNotFoundError), path.open("rb") as file:
        file.seek(max(0, path.stat().st_size - TAIL_BYTES))
        for line in reversed(file.read().splitlines()):
            with suppress(ValidationError):
                return BucketUsage.read_json(line)
    return None
