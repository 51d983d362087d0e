"""The state of an exchange: what was equal in the run directory of a pod and in the bucket after it.

It is on the disk as lines of JSON, each with what has changed since the line before, so an exchange writes as much as
has changed. When most of the lines are outdated, the file is written anew. A line that is cut off does not count, nor
those after it: the exchange then knows what was equal some time ago, as after a process that died before it wrote.
"""

import json
import logging
import os
from collections import UserDict
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeVar

from pydantic import ValidationError

from tandem.model import Model
from tandem.rundir.durable import open_regular, replace_bytes
from tandem.rundir.layout import RunDir

STATE_FILE = ".sync.jsonl"
MAX_STATE_BYTES = 2**28
MIN_OUTDATED = 1000
"""Number of outdated entries in the file up to which it is not written anew."""

logger = logging.getLogger("tandem.sync")


class SyncedFile(Model):
    """A file as it was when it was equal here and in the bucket."""

    version: dict[str, str]
    """The object's version."""
    signature: tuple[int, int, int]
    """The local file's inode, size in bytes and time in nanoseconds."""
    checksum: str


class SyncedCheckpoint(Model):
    """A checkpoint that is in the bucket."""

    version: dict[str, str]
    """Version of its manifest's object."""
    digest: str
    """Digest of its manifest."""


class SyncChange(Model):
    """A line of the file."""

    files: dict[str, SyncedFile | None] = {}
    """Entries that are new or different, by name; None: it is gone."""
    logs: dict[str, int | None] = {}
    own_logs: dict[str, bool | None] = {}
    checkpoints: dict[str, SyncedCheckpoint | None] = {}
    complete: list[str] = []
    damaged: list[str] = []

    @property
    def size(self) -> int:
        """Number of entries."""
        return len(self.files) + len(self.logs) + len(self.own_logs) + len(self.checkpoints)


Value = TypeVar("Value")


class Entries(UserDict[str, Value]):
    """Entries by name, which note the names of those that have changed."""

    def __init__(self) -> None:
        self.changed: set[str] = set()
        super().__init__()

    def __setitem__(self, name: str, value: Value) -> None:
        self.changed.add(name)
        super().__setitem__(name, value)

    def __delitem__(self, name: str) -> None:
        self.changed.add(name)
        super().__delitem__(name)

    def changes(self) -> dict[str, Value | None]:
        """The entries that have changed."""
        return {name: self.get(name) for name in self.changed}

    def apply(self, changes: Mapping[str, Value | None]) -> None:
        """Change entries, as `changes` names them."""
        for name, value in changes.items():
            if value is None:
                self.pop(name, None)
            else:
                self[name] = value


class SyncState:
    """The files that were equal here and in the bucket after the last exchange, and the file that records them."""

    def __init__(self, rundir: RunDir) -> None:
        self.files: Entries[SyncedFile] = Entries()
        self.logs: Entries[int] = Entries()
        """Bytes of each log."""
        self.own_logs: Entries[bool] = Entries()
        """Logs that are written in this pod."""
        self.checkpoints: Entries[SyncedCheckpoint] = Entries()
        self.complete: list[str] = []
        """Checkpoints whose files are here, in the order in which they were needed."""
        self.damaged: list[str] = []
        """Digests of checkpoints that were set aside here because they are damaged."""
        self._path = rundir.path / STATE_FILE
        self._recorded = 0
        """Number of entries in the lines of the file."""
        self._is_appendable = False
        self._last: tuple[list[str], list[str]] | None = None
        self._read()
        self._forget_changes()

    def record(self) -> None:
        """Write what has changed since the last call.

        Raises:
            OSError: the disk cannot be written; the next call writes everything.
        """
        lists = [*self.complete], [*self.damaged]
        change = SyncChange(
            files=self.files.changes(),
            logs=self.logs.changes(),
            own_logs=self.own_logs.changes(),
            checkpoints=self.checkpoints.changes(),
            complete=lists[0],
            damaged=lists[1],
        )
        if self._is_appendable and not change.size and lists == self._last:
            return
        size = sum(len(entries) for entries in self._entries())
        appends = self._is_appendable and self._recorded + change.size <= 2 * size + MIN_OUTDATED
        self._is_appendable = False
        if appends:
            with self._path.open("r+b") as file:
                file.seek(0, os.SEEK_END)
                file.write(_line(change))
            self._recorded += change.size
        else:
            everything = SyncChange(
                files=dict(self.files),
                logs=dict(self.logs),
                own_logs=dict(self.own_logs),
                checkpoints=dict(self.checkpoints),
                complete=lists[0],
                damaged=lists[1],
            )
            replace_bytes(self._path, _line(everything), durable=False)
            self._recorded = size
        self._is_appendable, self._last = True, lists
        self._forget_changes()

    def _entries(self) -> tuple[Entries[Any], ...]:
        return self.files, self.logs, self.own_logs, self.checkpoints

    def _forget_changes(self) -> None:
        for entries in self._entries():
            entries.changed.clear()

    def _read(self) -> None:
        try:
            with open_regular(self._path) as file:
                *lines, tail = file.read(MAX_STATE_BYTES).split(b"\n")
            for line in lines:
                change = SyncChange.read_json(line)
                self.files.apply(change.files)
                self.logs.apply(change.logs)
                self.own_logs.apply(change.own_logs)
                self.checkpoints.apply(change.checkpoints)
                self.complete, self.damaged = change.complete, change.damaged
                self._recorded += change.size
            self._is_appendable = not tail
        except FileNotFoundError:
            pass
        except ValidationError as error:
            # The content of the bucket counts for the rest.
            logger.warning("event=damaged file=%s why=%r", STATE_FILE, str(error))


def _line(change: SyncChange) -> bytes:
    return json.dumps(change.model_dump(mode="json", exclude_defaults=True), separators=(",", ":")).encode() + b"\n"


def signature_of(path: Path) -> tuple[int, int, int]:
    """The signature of a file here.

    Raises:
        FileNotFoundError: it is gone.
    """
    status = path.stat()
    return status.st_ino, status.st_size, status.st_mtime_ns


def tag_of(version: Mapping[str, str]) -> str:
    """The part of a version that listings have, too."""
    return version.get("e_tag", "")
