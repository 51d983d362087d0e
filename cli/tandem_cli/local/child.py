"""One child process over all its restarts, under the same name and with the same log."""

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from tandem_cli.local import starter
from tandem_cli.local.guardian import MARK, sweep
from tandem_cli.local.placement import Cores

OF_AGENT = re.compile(r"^\d{4}-\d\d-\d\d [\d:,]+ level=\w+ event=|^[IWEF]\d{4} [\d:.]+ +\d+ \S*torch/")
"""How lines of an agent and of torchrun begin, in the file that they share with the ranks."""
TAIL_BYTES = 64 * 1024
"""How much of the end of a log is looked at."""


@dataclass
class Process:
    """How to run one child, and its current life.

    Starting must happen on the main thread: the kernel kills the child when the thread that started it ends.
    """

    name: str
    command: Sequence[str]
    environment: dict[str, str]
    log: Path
    mark: str
    cores: Cores = ()
    background: bool = False
    lives: int = 0
    _running: subprocess.Popen[bytes] | None = field(default=None, repr=False)

    def start(self) -> None:
        """Begin a new life in a session of its own, so that the terminal's Ctrl-C does not reach it."""
        self.lives += 1
        wish = {"parent": os.getpid(), "background": self.background, "cores": list(self.cores)}
        command = [sys.executable, "-I", "-S", starter.__file__, json.dumps(wish), *self.command]
        with self.log.open("ab", buffering=0) as log:
            log.write(f"--- {time.strftime('%Y-%m-%d %H:%M:%S')} {self.name}, start {self.lives}\n".encode())
            self._running = subprocess.Popen(
                command,
                env=self.environment | {MARK: self._life},
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    @property
    def pid(self) -> int | None:
        """The process id of the current life."""
        return None if self._running is None else self._running.pid

    def ended(self) -> int | None:
        """The exit code if the current life is over, minus the signal's number if one ended it; None while it runs.

        What it started and left behind is killed then: ranks of a killed agent would train on beside their successors.
        """
        if self._running is None or (code := self._running.poll()) is None:
            return None
        sweep(self._life, seconds=5.0)
        return code

    def ask(self) -> None:
        """Ask it to save and leave."""
        self._signal(signal.SIGTERM)

    def kill(self) -> None:
        """End it at once."""
        self._signal(signal.SIGKILL)

    def step_back(self) -> None:
        """From now on, run only on what others leave free, in this life and all later ones."""
        self.background = True
        if self._running is not None and self._running.poll() is None:
            starter.step_back(self._running.pid)

    def step_forward(self) -> None:
        """Run as others do: all later lives, and this one if the kernel allows it."""
        self.background = False
        if self._running is not None and self._running.poll() is None:
            starter.step_forward(self._running.pid)

    def close(self) -> None:
        """Kill it if it runs, and wait for that."""
        self.kill()
        if self._running is not None:
            self._running.wait()

    @property
    def _life(self) -> str:
        return f"{self.mark}/{self.name}/{self.lives}"

    def _signal(self, number: signal.Signals) -> None:
        if self._running is not None:
            with suppress(ProcessLookupError):
                self._running.send_signal(number)


def last_lines(log: Path, count: int, of_ranks: bool = False) -> list[str]:
    """The last lines of the newest life that say something.

    Args:
        of_ranks: leave out what the agent and torchrun say, if anything else is said.
    """
    try:
        with log.open("rb") as file:
            file.seek(0, os.SEEK_END)
            file.seek(max(0, file.tell() - TAIL_BYTES))
            text = file.read().decode(errors="replace")
    except OSError:
        return []
    newest = text.rpartition("\n--- ")[2]
    lines = [line.rstrip() for line in newest.splitlines()[1:] if line.strip()]
    own = [line for line in lines if not OF_AGENT.match(line)] if of_ranks else []
    return (own or lines)[-count:]
