"""A child process across its restarts, with one name and one log."""

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

from tandem_launcher.local import starter
from tandem_launcher.local.guardian import MARK, sweep
from tandem_launcher.local.placement import Cores
from tandem_launcher.printed_log import LogLimiter, read_tail

AGENT_LINE = re.compile(r"^\d{4}-\d\d-\d\d [\d:,]+ level=\w+ event=|^[IWEF]\d{4} [\d:.]+ +\d+ \S*torch/")
"""Prefix of the lines of an agent and of torchrun, in the log that they share with the ranks."""
JOINED_LINE = re.compile(r"^\d{4}-\d\d-\d\d [\d:,]+ level=INFO event=joined generation=")
"""Prefix of the line with which an agent begins a generation."""
MAX_SHOWN = 500
"""Characters of a line that are shown where a run's last lines are."""


@dataclass
class Process:
    """A child process: how to start it, and its current life.

    Start it on the main thread: the kernel kills the child when the thread that started it ends.
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

    def __post_init__(self) -> None:
        self.limiter = LogLimiter(self.log)

    def start(self) -> None:
        """Start a new life in a session of its own, so that the terminal's Ctrl-C does not reach it."""
        self.limiter.wait()
        self.lives += 1
        settings = {"parent": os.getpid(), "background": self.background, "cores": list(self.cores)}
        command = [sys.executable, "-I", "-S", starter.__file__, json.dumps(settings), *self.command]
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
        """Return the exit code once the current life is over, -N for signal N; None while it runs.

        Kills the descendants that it left behind: ranks of a killed agent would train on beside their successors.
        """
        if self._running is None or (code := self._running.poll()) is None:
            return None
        sweep(self._life, seconds=5.0)
        return code

    def ask(self) -> None:
        """Ask it to save and exit, by SIGTERM."""
        self._signal(signal.SIGTERM)

    def kill(self) -> None:
        """Kill it, by SIGKILL."""
        self._signal(signal.SIGKILL)

    def step_back(self) -> None:
        """Lower its priority to idle, in this life and all later ones."""
        self.background = True
        if self._running is not None and self._running.poll() is None:
            starter.step_back(self._running.pid)

    def step_forward(self) -> None:
        """Restore its normal priority, in all later lives, and in this one if the kernel allows it."""
        self.background = False
        if self._running is not None and self._running.poll() is None:
            starter.step_forward(self._running.pid)

    def close(self) -> None:
        """Kill it if it runs, and wait for its end."""
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


def last_lines(log: Path, count: int, of_ranks: bool = False, rank: int | None = None) -> list[str]:
    """Return the last non-empty lines of the newest life, each up to MAX_SHOWN characters.

    Args:
        of_ranks: omit the lines of the agent and torchrun, if there are others, and those of earlier generations, if
            the newest one has printed something: ranks that fail twice print their error twice.
        rank: return only the lines of this rank, if the log names ranks.
    """
    newest = read_tail(log).rpartition("\n--- ")[2]
    lines = [line.rstrip() for line in newest.splitlines()[1:] if line.strip()]
    selected = (_lines_of_ranks(lines, rank) or lines) if of_ranks else lines
    return [line if len(line) <= MAX_SHOWN else f"{line[:MAX_SHOWN]} …" for line in selected[-count:]]


def _lines_of_ranks(lines: list[str], rank: int | None) -> list[str]:
    """The lines of the newest generation's ranks, or else of all; of one rank, if the log names ranks."""
    starts = [number for number, line in enumerate(lines) if JOINED_LINE.match(line)]
    newest_lines = lines[starts[-1] :] if starts else []
    own = _of_ranks(newest_lines) or _of_ranks(lines)
    of_one = [line for line in own if line.startswith(f"[rank {rank}] ")]
    return of_one or own


def _of_ranks(lines: list[str]) -> list[str]:
    return [line for line in lines if not AGENT_LINE.match(line)]
