"""The process that exchanges the run directory of this pod with the bucket, as a child of the pod's first process."""

import os
import subprocess
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from tandem.processes.launch import STORAGE, module_command
from tandem.rundir.sync_client import SOCKET

RESTART_SECONDS = 1.0
"""Pause before the process is started again after its death, in seconds."""


def is_needed() -> bool:
    """Whether this pod has a run directory of its own, because the job has no volume."""
    return bool(os.environ.get(STORAGE))


class SyncProcess:
    """The process, started again when it dies. `prepare` comes first, before anything is forked that asks it."""

    @staticmethod
    def prepare() -> None:
        """Choose the socket on which it will listen, and record it for all processes that are started or forked."""
        os.environ[SOCKET] = str(Path(tempfile.mkdtemp(prefix="tandem-sync-")) / "socket")

    def __init__(self) -> None:
        self._closing = threading.Event()
        self._process = self._start()
        self._thread = threading.Thread(target=self._watch, name="sync process", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Have it send what is left, and wait for its end."""
        self._closing.set()
        with suppress(ProcessLookupError):
            self._process.terminate()
        self._thread.join()

    @staticmethod
    def _start() -> "subprocess.Popen[bytes]":
        # Its standard input ends with this process. A session of its own: a terminal's Ctrl-C is not for it.
        return subprocess.Popen(
            module_command("tandem.rundir.sync_service"),
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            start_new_session=True,
        )

    def _watch(self) -> None:
        while True:
            self._process.wait()
            if self._closing.wait(RESTART_SECONDS):
                return
            # No process or memory now: the next attempt may find some.
            with suppress(OSError):
                self._process = self._start()
            # `close` may have ended the process before this one.
            if self._closing.is_set():
                self._process.terminate()


@contextmanager
def exchanging() -> Iterator[None]:
    """Have such a process beside this one, where it is needed."""
    if not is_needed():
        yield
        return
    SyncProcess.prepare()
    process = SyncProcess()
    try:
        yield
    finally:
        process.close()
