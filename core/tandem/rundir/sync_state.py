"""The state of an exchange: the files that were equal in the run directory of a pod and in the bucket after it."""

import logging
from collections.abc import Mapping
from pathlib import Path

from pydantic import ValidationError

from tandem.model import Model
from tandem.rundir.durable import open_regular
from tandem.rundir.layout import RunDir

STATE_FILE = ".sync.json"
MAX_STATE_BYTES = 2**28

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


class SyncState(Model):
    """The files that were equal here and in the bucket after the last exchange."""

    files: dict[str, SyncedFile] = {}
    logs: dict[str, int] = {}
    """Bytes of each log."""
    own_logs: list[str] = []
    """Logs that are written in this pod."""
    checkpoints: dict[str, SyncedCheckpoint] = {}
    complete: list[str] = []
    """Checkpoints whose files are here, in the order in which they were needed."""
    damaged: list[str] = []
    """Digests of checkpoints that were set aside here because they are damaged."""


def read_state(rundir: RunDir) -> SyncState:
    """Read the recorded state; an empty one if there is none."""
    try:
        with open_regular(rundir.path / STATE_FILE) as file:
            return SyncState.read_json(file.read(MAX_STATE_BYTES))
    except FileNotFoundError:
        pass
    except ValidationError as error:
        # The content of the bucket counts then.
        logger.warning("event=damaged file=%s why=%r", STATE_FILE, str(error))
    return SyncState()


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
