"""A program of this machine that runs beside the cluster while tests need it."""

import signal
import subprocess
import urllib.request
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Self

from tests.support.waiting import until

STOP_SECONDS = 20.0


class Background:
    """Starts it, kills it, starts it again. As a context it is killed in the end, whatever happens.

    Args:
        log: what it says is added to this file.
    """

    def __init__(self, log: Path) -> None:
        self._log = log
        self._process: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if not self.has_ended:
            self.kill()

    def run(self, command: Sequence[str | Path], environment: Mapping[str, str] | None = None) -> None:
        """Start one; without an environment it has ours."""
        with self._log.open("ab") as log:
            self._process = subprocess.Popen(command, env=environment, stdin=subprocess.DEVNULL, stdout=log, stderr=log)

    def becomes(self, look: Callable[[], object], what: str, seconds: float) -> None:
        """Wait for something while it runs; that it ends is an error that shows its log."""

        def seen() -> object:
            assert not self.has_ended, self.log()
            return look()

        until(seen, what, seconds, otherwise=self.log)

    @property
    def pid(self) -> int:
        return self._running.pid

    @property
    def has_ended(self) -> bool:
        return self._process is None or self._process.poll() is not None

    def log(self) -> str:
        return self._log.read_text()

    def kill(self) -> None:
        """SIGKILL, as a lost node would."""
        self._running.kill()
        self._running.wait(STOP_SECONDS)

    def stop(self) -> int:
        """SIGTERM; the exit code."""
        self._running.send_signal(signal.SIGTERM)
        return self._running.wait(STOP_SECONDS)

    @property
    def _running(self) -> subprocess.Popen[bytes]:
        assert self._process is not None, "it was never started"
        return self._process


def answers(address: str) -> bool:
    """Whether something answers there, and with 200."""
    try:
        with urllib.request.urlopen(address, timeout=5) as answer:
            return bool(answer.status == 200)
    except OSError:
        return False
