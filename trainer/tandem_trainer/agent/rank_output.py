"""Output of several ranks of one replica, with the rank before each line: `[rank 3] epoch 2`.

A replica has one log. torchrun can label lines, too (`--tee`), but only of files that it also writes, on the pod's own
disk and without a bound. Here each stream of a rank is a pipe to its agent, which forwards whole lines. It works for
any program, started warm or cold. A replica of one rank writes to the log directly.

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
"""Length at which a line is broken into two, in bytes."""
READ_BYTES = 64 * 2**10
QUIET_SECONDS = 0.1
"""Silence at the agent's end after which no more output is expected, in seconds: processes that ranks have left behind
hold their pipes open, and so does torchrun, for ranks that failed."""
DRAIN_SECONDS = 2.0
"""Maximum time that processes left behind delay the agent's end by printing, in seconds."""


class RankOutput(DefaultLogsSpecs):
    """Destinations of the ranks' output: new pipes for each start of the ranks."""

    _forwarder: "_OutputForwarder | None" = None

    def reify(self, envs: dict[int, dict[str, str]]) -> LogsDest:
        """Create the destinations, by local rank."""
        destinations: LogsDest = super().reify(envs)
        if self._forwarder is not None:
            self._forwarder.close_write_ends()
        ranks = {local: environment["RANK"] for local, environment in envs.items()}
        self._forwarder = _OutputForwarder(ranks)
        destinations.stdouts, destinations.stderrs = self._forwarder.paths(1), self._forwarder.paths(2)
        return destinations


@dataclass
class RankStream:
    """One stream of one rank."""

    label: bytes
    target_fd: int
    """File descriptor of the agent's own stream."""
    partial: bytes = b""
    """Start of the line that has not ended."""

    def lines(self, content: bytes) -> bytes:
        """Add content, and return all lines that have ended, labelled. A carriage return ends a line, too: progress
        bars use it."""
        text = self.partial + content
        # Only the next byte tells whether a carriage return ends a line alone.
        complete, trailing_return = (text[:-1], text[-1:]) if text.endswith(b"\r") else (text, b"")
        *ended, partial = complete.replace(b"\r\n", b"\n").replace(b"\r", b"\r\n").split(b"\n")
        self.partial = partial + trailing_return
        if len(self.partial) > MAX_LINE_LENGTH:
            ended.append(self.partial)
            self.partial = b""
        return b"".join(self.label + line + (b"" if line.endswith(b"\r") else b"\n") for line in ended)

    def remainder(self) -> bytes:
        """Return the last line, which has not ended."""
        return self.label + self.partial.removesuffix(b"\r") + b"\n" if self.partial else b""


class _OutputForwarder:
    """Thread that forwards the output of the ranks of one start, until all of them have ended."""

    def __init__(self, ranks: Mapping[int, str]) -> None:
        self._selector = selectors.DefaultSelector()
        self._write_ends: dict[tuple[int, int], int] = {}
        self._lock = threading.Lock()
        wake_read, wake_write = os.pipe()
        self._wake_write: int | None = wake_write
        self._selector.register(wake_read, selectors.EVENT_READ)
        for local, rank in ranks.items():
            for target_fd in (1, 2):
                read_end, write_end = os.pipe()
                self._write_ends[target_fd, local] = write_end
                self._selector.register(
                    read_end, selectors.EVENT_READ, RankStream(f"[rank {rank}] ".encode(), target_fd)
                )
        self._thread = threading.Thread(target=self._run, name="output", daemon=True)
        self._thread.start()
        atexit.register(self.close)

    def paths(self, target_fd: int) -> dict[int, str]:
        """Return the paths to open, by local rank, for standard output (1) or errors (2)."""
        return {
            local: f"/dev/fd/{write_end}"
            for (stream, local), write_end in self._write_ends.items()
            if stream == target_fd
        }

    def close_write_ends(self) -> None:
        """Close the write ends of this process, once the ranks have theirs: when the last process closes its end, the
        thread ends."""
        while self._write_ends:
            os.close(self._write_ends.popitem()[1])

    def close(self) -> None:
        """Forward the last lines, and stop."""
        self.close_write_ends()
        self._wake()
        self._thread.join(DRAIN_SECONDS)

    def _wake(self) -> None:
        with self._lock:
            if self._wake_write is not None:
                os.close(self._wake_write)
                self._wake_write = None

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
                    _write(stream.target_fd, stream.lines(content) if content else stream.remainder())
                if not content:
                    self._selector.unregister(key.fd)
                    os.close(key.fd)
            if is_closing and not ready:
                for key in streams.values():
                    _write(key.data.target_fd, key.data.remainder())
                return
        self._wake()
        for key in streams.values():
            os.close(key.fd)
        self._selector.close()
        atexit.unregister(self.close)


def _write(target_fd: int, content: bytes) -> None:
    """Write all content. A log that takes nothing (a full disk) loses lines; ranks must not wait for it forever."""
    with suppress(OSError):
        while content:
            content = content[os.write(target_fd, content) :]
