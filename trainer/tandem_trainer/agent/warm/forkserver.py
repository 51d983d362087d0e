"""The fork server: it has imported torch and everything that a rank needs, and forks a rank in milliseconds.

It is forked from the agent before the agent has started any thread, so that the two share their imports: a replica
imports torch once, for its agent and for all ranks of all generations, and holds it in memory once. Modules that only
ranks need are imported after that, while the agent joins the others; a rank that is requested earlier waits.

**Why a fork is safe here.** A forked process has only the thread that forked; a lock that another thread held stays
locked in it for ever. The server always has one thread: it imports, and executes nothing of torch (no kernel, so no
OpenMP pool; no CUDA context). It refuses to start if an import has started a thread or CUDA's driver, which cannot be
used after a fork. Ranks create their threads and their CUDA context after the fork.

Rejected: spare processes that wait with torch imported and are used up (each must be replaced at the very moment at
which the recovering ranks need the processor, and a second fault within these seconds finds none; and they need memory
twice), forking from the agent itself (its heartbeat thread may hold any lock), keeping the ranks' processes over
generations (torch does not reliably tear down a process group whose peers are gone: that is why ranks `_exit`).

**How a rank has ended** only the server can learn from the kernel. It tells the agent (`Endings`) before it tells the
stub: once torchrun has seen all stubs of a generation end, the agent knows how each rank ended, even where torchrun was
told to restart before it looked.

Requires Linux (pidfd, the abstract socket namespace, a signal at the parent's death).
"""

import ctypes
import json
import os
import secrets
import selectors
import signal
import socket
import struct
import sys
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

from tandem_trainer.agent.warm.leftovers import end_leftovers
from tandem_trainer.agent.warm.stub import ADDRESS, LENGTH
from tandem_trainer.gpu import open_driver
from tandem_trainer.pulse import die_with_parent

MAX_REQUEST_BYTES = 8 * 2**20
"""Maximum size of a request in bytes. A pod may have many variables; the kernel's own limit for a process's start
suffices."""
REQUEST_SECONDS = 10.0
"""Timeout for a request, in seconds; a stub sends it at once."""
_CREDENTIALS = struct.Struct("3i")
_RANK_EXIT = struct.Struct("2i")
"""A rank's process id and its wait status. Shorter than a pipe's atomic unit, so each is written and read whole."""


@dataclass(frozen=True)
class Request:
    """Request of a stub for a rank."""

    arguments: list[str]
    """Arguments as for Python: `-m MODULE ARGUMENTS…` or `SCRIPT ARGUMENTS…`."""
    environment: dict[str, str]
    folder: str
    """Working directory."""
    files: tuple[int, ...]
    """Descriptors for standard input, output and errors."""


@dataclass
class _Rank:
    pid: int
    connection: socket.socket
    ended: bool = False
    """Whether the rank was reaped, so that its process id may refer to another process by now."""


class Endings:
    """Exits of the ranks that were forked for this agent, which the server reports through a pipe."""

    def __init__(self, descriptor: int) -> None:
        os.set_blocking(descriptor, False)
        self.descriptor: int | None = descriptor
        """Descriptor that is readable when there are new exits; None once the server is gone."""

    def read(self) -> dict[int, int]:
        """Return the exits since the last call, by process id: exit codes, or negated signal numbers."""
        exits: dict[int, int] = {}
        with suppress(BlockingIOError):
            while self.descriptor is not None:
                if not (content := os.read(self.descriptor, 64 * _RANK_EXIT.size)):
                    os.close(self.descriptor)
                    self.descriptor = None
                exits |= {pid: os.waitstatus_to_exitcode(status) for pid, status in _RANK_EXIT.iter_unpack(content)}
        return exits


endings: Endings | None = None
"""Exits of the ranks of the server that was forked from this process."""


def available() -> bool:
    """Return whether ranks can be forked: on Linux, while this process has one thread and no GPU driver is open."""
    if sys.platform != "linux" or not hasattr(os, "pidfd_open"):
        return False
    return len(list(Path("/proc/self/task").iterdir())) == 1 and open_driver(Path("/proc/self/fd").iterdir()) is None


def fork_server(prepare: Callable[[], bool]) -> Request | None:
    """Fork the server. Returns None to the caller, and, in every rank that is forked later, its request.

    Args:
        prepare: called in the server before it serves; it exits if this returns False.
    """
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    name = f"tandem-{secrets.token_hex(16)}"
    listener.bind("\0" + name)
    listener.listen(256)
    reads, writes = os.pipe()
    agent = os.getpid()
    sys.stdout.flush()
    sys.stderr.flush()
    if os.fork() != 0:
        listener.close()
        os.close(writes)
        global endings
        endings = Endings(reads)
        os.environ[ADDRESS] = name
        return None
    os.close(reads)
    # An agent that does not read, such as torchrun's own, must not block the server.
    os.set_blocking(writes, False)
    die_with_parent()
    if os.getppid() != agent:
        os._exit(0)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    _name("tandem-spare")
    if not prepare():
        print(
            "fork server: an import has started a thread or a GPU's driver; ranks start without it",
            file=sys.stderr,
            flush=True,
        )
        os._exit(1)
    return _Server(listener, writes).serve()


class _Server:
    def __init__(self, listener: socket.socket, endings: int) -> None:
        self._listener, self._endings = listener, endings
        self._selector = selectors.DefaultSelector()
        self._selector.register(listener, selectors.EVENT_READ, self._accept)

    def serve(self) -> Request:
        """Fork ranks until killed; returns only in the ranks."""
        while True:
            for key, _ in self._selector.select():
                if (request := key.data()) is not None:
                    return cast(Request, request)

    def _accept(self) -> Request | None:
        connection, _ = self._listener.accept()
        connection.settimeout(REQUEST_SECONDS)
        try:
            request = _receive(connection)
        except (OSError, ValueError) as error:
            print(f"fork server: a request was refused: {error}", file=sys.stderr, flush=True)
            connection.close()
            return None
        pid = os.fork()
        if pid == 0:
            self._close_server_files()
            connection.close()
            _take_over(request)
            return request
        for descriptor in request.files:
            os.close(descriptor)
        rank = _Rank(pid, connection)
        pidfd = os.pidfd_open(pid)
        self._selector.register(pidfd, selectors.EVENT_READ, lambda: self._reap(pidfd, rank))
        self._selector.register(connection, selectors.EVENT_READ, lambda: self._forward_signals(rank))
        with suppress(OSError):
            connection.sendall(b"!")
        return None

    def _forward_signals(self, rank: _Rank) -> None:
        """Forward the signals that a stub sends, a byte each; the end of a stub kills its rank."""
        if rank.ended:
            return
        try:
            signals = rank.connection.recv(64)
        except OSError:
            signals = b""
        if not signals:
            self._selector.unregister(rank.connection)
            signals = bytes([signal.SIGKILL])
        for number in signals:
            os.kill(rank.pid, number)

    def _reap(self, pidfd: int, rank: _Rank) -> None:
        # Leftovers first: once the rank is reaped, its process id and group may be reused.
        end_leftovers(rank.pid)
        _, status = os.waitpid(rank.pid, 0)
        rank.ended = True
        self._selector.unregister(pidfd)
        os.close(pidfd)
        with suppress(KeyError):
            self._selector.unregister(rank.connection)
        with suppress(BlockingIOError, BrokenPipeError):
            os.write(self._endings, _RANK_EXIT.pack(rank.pid, status))
        with suppress(OSError):
            rank.connection.sendall(LENGTH.pack(status))
        rank.connection.close()

    def _close_server_files(self) -> None:
        """Close all descriptors of the server, in a forked rank."""
        for key in list(self._selector.get_map().values()):
            if isinstance(key.fileobj, int):
                os.close(key.fileobj)
            else:
                cast(socket.socket, key.fileobj).close()
        self._selector.close()
        os.close(self._endings)


def _receive(connection: socket.socket) -> Request:
    """Read a request.

    Raises:
        OSError, ValueError: it is not one, or comes from another user.
    """
    if user_of(connection) != os.getuid():
        raise PermissionError("it comes from another user")
    head, files, _, _ = socket.recv_fds(connection, LENGTH.size, 3)
    try:
        if len(head) < LENGTH.size or len(files) != 3:
            raise ValueError("it is not complete")
        (length,) = LENGTH.unpack(head)
        if length > MAX_REQUEST_BYTES:
            raise ValueError(f"it has {length} bytes")
        content = bytearray()
        while len(content) < length:
            part = connection.recv(length - len(content))
            if not part:
                raise ValueError("it is not complete")
            content += part
        fields: dict[str, Any] = json.loads(content)
        return Request(fields["arguments"], fields["environment"], fields["folder"], tuple(files))
    except (OSError, KeyError, TypeError, ValueError) as error:
        for descriptor in files:
            os.close(descriptor)
        raise ValueError(f"it cannot be read: {error!r}") from error


def user_of(peer: socket.socket) -> int:
    """Return the user id of the process at the other end of a Unix socket, according to the kernel."""
    credentials = peer.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    return int(_CREDENTIALS.unpack(credentials)[1])


def _take_over(request: Request) -> None:
    """Take over in a rank what torchrun passed to the stub."""
    die_with_parent()
    _name("tandem-rank")
    os.setsid()
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    for target, descriptor in enumerate(request.files):
        os.dup2(descriptor, target)
        os.close(descriptor)
    os.environ.clear()
    os.environ.update(request.environment)
    os.chdir(request.folder)


def _name(name: str) -> None:
    """Set the process name that `ps -o comm` shows."""
    set_name = 15
    ctypes.CDLL(None).prctl(set_name, name.encode(), 0, 0, 0)
