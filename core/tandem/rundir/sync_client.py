"""Asks the process that exchanges this pod's run directory with the bucket (tandem.rundir.sync_service).

Where all processes share one directory there is no such process, and every function returns at once.
"""

import json
import os
import socket
import time
from collections.abc import Collection, Mapping
from typing import Any

from tandem.rundir.checkpoint import Broken
from tandem.rundir.store import StoreUnavailableError

SOCKET = "TANDEM_SYNC_SOCKET"
"""Path of the Unix socket on which that process listens."""
MAX_LINE_BYTES = 2**20
PATIENCE_SECONDS = 60.0
"""Time for which a waiting process is not told of a bucket that does not answer."""
ANSWER_SECONDS = 2.0
"""Time in seconds for which an answer may be late: the process may be in the middle of another exchange."""
CONNECT_ATTEMPTS = 50
CONNECT_PAUSE_SECONDS = 0.1
"""The process is being started, or started again, for a few seconds."""


def exchange(patience: float = PATIENCE_SECONDS) -> None:
    """Send what was written here, and get what was written elsewhere until now; without the files of checkpoints.

    Args:
        patience: seconds for which it is tried.

    Raises:
        OSError: the bucket does not answer, or refuses.
    """
    _ask({"do": "exchange", "patience": patience}, patience + ANSWER_SECONDS)


def upload(name: str, digest: str) -> None:
    """Bring a checkpoint into the bucket; returns when it is committed there.

    Args:
        digest: that of its manifest.

    Raises:
        FileNotFoundError: it is gone, or does not count any more.
        Broken: it is damaged.
        OSError: as `exchange`.
    """
    _ask({"do": "upload", "name": name, "digest": digest})


def fetch(name: str, digest: str, paths: Collection[str] | None = None) -> None:
    """Get files of a checkpoint, unless they are here.

    Args:
        digest: that of its manifest.
        paths: files in the checkpoint; None: all.

    Raises:
        FileNotFoundError: the checkpoint is gone.
        Broken: it is damaged in the bucket.
        OSError: as `exchange`.
    """
    _ask({"do": "fetch", "name": name, "digest": digest, "paths": None if paths is None else sorted(paths)})


def repair(name: str, paths: Collection[str] | None = None) -> bool:
    """Get again what is damaged of a checkpoint on the disk of this pod, before anybody calls it damaged.

    Args:
        paths: files to read beside the manifest; None: all.

    Returns:
        Whether it is sound now; False also if all processes share one directory, where nothing can be asked.

    Raises:
        OSError: as `exchange`: it is not known whether the bucket has it whole.
    """
    if not os.environ.get(SOCKET):
        return False
    try:
        _ask({"do": "repair", "name": name, "paths": None if paths is None else sorted(paths)})
    except (FileNotFoundError, Broken):
        return False
    return True


def _ask(request: Mapping[str, Any], seconds: float | None = None) -> None:
    """Send a request and wait for its answer.

    Args:
        seconds: time limit; None: none.
    """
    if not (path := os.environ.get(SOCKET)):
        return
    with _connected(path) as connection, connection.makefile("rwb") as stream:
        connection.settimeout(seconds)
        stream.write(json.dumps(request).encode() + b"\n")
        stream.flush()
        line = stream.readline(MAX_LINE_BYTES)
    if not line:
        raise StoreUnavailableError("the process that exchanges the run directory with the bucket has died")
    answer = json.loads(line)
    message = str(answer.get("error", ""))
    match answer.get("kind"):
        case None:
            return
        case "gone":
            raise FileNotFoundError(message)
        case "broken":
            raise Broken(message)
        case _:
            raise StoreUnavailableError(message)


def _connected(path: str) -> socket.socket:
    """
    Raises:
        OSError: nobody listens.
    """
    for attempt in range(CONNECT_ATTEMPTS):
        connection = socket.socket(socket.AF_UNIX)
        try:
            connection.connect(path)
        except OSError:
            connection.close()
            if attempt == CONNECT_ATTEMPTS - 1:
                raise
            time.sleep(CONNECT_PAUSE_SECONDS)
        else:
            return connection
    raise AssertionError
