"""The output of several ranks of one replica, with the rank before each line: `[rank 3] epoch 2`.

A replica has one log. torchrun can label lines too (`--tee`), but only of files that it writes beside, on the pod's own
disk and without a bound. Here each stream of a rank is a pipe to its agent, which passes on whole lines. It works for
any program, started warm or cold. A replica of one rank keeps the log for itself, and nothing stands between.

torchrun finds `RankOutput` by the entry point `torchrun.logs_specs`.
"""

import atexit
import os
import selectors
import threading
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass

from torch.distributed.elastic.multiprocessing.api import DefaultLogsSpecs, LogsDest

MAX_LINE_LENGTH = 64 * 2**10
"""Bytes after which a line is broken into two."""
READ_BYTES = 64 * 2**10
QUIET_SECONDS = 0.1
"""At the agent's end, a pause after which nothing more is expected: whatever ranks have left behind holds their pipes
open, and so does torchrun, of those that failed."""
DRAIN_SECONDS = 2.0
"""What is left behind and goes on printing keeps the agent from its end for so long at most."""


class RankOutput(DefaultLogsSpecs):
    """Where torchrun sends what ranks print: for each start of the ranks, new pipes."""

    _pump: "_Pump | None" = None

    def reify(self, envs: dict[int, dict[str, str]]) -> LogsDest:
        """Destinations by local rank."""
        found: LogsDest = super().reify(envs)
        if self._pump is not None:
            self._pump.let_go()
        ranks = {local: environment["RANK"] for local, environment in envs.items()}
        self._pump = _Pump(ranks)
        found.stdouts, found.stderrs = self._pump.paths(1), self._pump.paths(2)
        return found


@dataclass
class RankStream:
    """One stream of one rank."""

    label: bytes
    to: int
    """Descriptor of the agent's own stream."""
    rest: bytes = b""
    """What is there of the line that has not ended."""

    def lines(self, content: bytes) -> bytes:
        """All lines that have ended, labelled. A carriage return ends one too: so progress bars draw."""
        text = self.rest + content
        # What follows a carriage return tells whether it is a line's end alone.
        whole, held = (text[:-1], text[-1:]) if text.endswith(b"\r") else (text, b"")
        *ended, rest = whole.replace(b"\r\n", b"\n").replace(b"\r", b"\r\n").split(b"\n")
        self.rest = rest + held
        if len(self.rest) > MAX_LINE_LENGTH:
            ended.append(self.rest)
            self.rest = b""
        return b"".join(self.label + line + (b"" if line.endswith(b"\r") else b"\n") for line in ended)

    def last(self) -> bytes:
        """A line that never ended."""
        return self.label + self.rest.removesuffix(b"\r") + b"\n" if self.rest else b""


class _Pump:
    """A thread that passes on what the ranks of one start print, until all of them have ended."""

    def __init__(self, ranks: Mapping[int, str]) -> None:
        self._selector = selectors.DefaultSelector()
        self._ours: dict[tuple[int, int], int] = {}
        self._lock = threading.Lock()
        woken, wakes = os.pipe()
        self._wakes: int | None = wakes
        self._selector.register(woken, selectors.EVENT_READ)
        for local, rank in ranks.items():
            for to in (1, 2):
                reads, writes = os.pipe()
                self._ours[to, local] = writes
                self._selector.register(reads, selectors.EVENT_READ, RankStream(f"[rank {rank}] ".encode(), to))
        self._thread = threading.Thread(target=self._run, name="output", daemon=True)
        self._thread.start()
        atexit.register(self.close)

    def paths(self, to: int) -> dict[int, str]:
        """What to open, by local rank, for standard output (1) or errors (2)."""
        return {local: f"/dev/fd/{writes}" for (stream, local), writes in self._ours.items() if stream == to}

    def let_go(self) -> None:
        """The ranks have ended, or begin to: when the last process has closed its end, so does the thread."""
        while self._ours:
            os.close(self._ours.popitem()[1])

    def close(self) -> None:
        """Wait for the last lines."""
        self.let_go()
        self._wake()
        self._thread.join(DRAIN_SECONDS)

    def _wake(self) -> None:
        with self._lock:
            if self._wakes is not None:
                os.close(self._wakes)
                self._wakes = None

    def _run(self) -> None:
        is_closing = False
        while len(streams := self._selector.get_map()) > (0 if is_closing else 1):
            ready = self._selector.select(QUIET_SECONDS if is_closing else None)
            for key, _ in ready:
                stream: RankStream | None = key.data
                content = b"" if stream is None else os.read(key.fd, READ_BYTES)
                if stream is None:
                    is_closing = True
                else:
                    _write(stream.to, stream.lines(content) if content else stream.last())
                if not content:
                    self._selector.unregister(key.fd)
                    os.close(key.fd)
            if is_closing and not ready:
                for key in streams.values():
                    _write(key.data.to, key.data.last())
                return
        self._wake()
        for key in streams.values():
            os.close(key.fd)
        self._selector.close()
        atexit.unregister(self.close)


def _write(to: int, content: bytes) -> None:
    """A log that takes nothing (a full disk) loses lines; ranks must not wait for it for ever."""
    with suppress(OSError):
        while content:
            content = content[os.write(to, content) :]
