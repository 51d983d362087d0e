"""The fork server: has imported torch and everything a rank needs, and forks a rank in milliseconds.

It is forked from the agent before the agent has started any thread, so that the two share what they imported: a replica
imports torch once, for its agent and for all ranks of all generations, and their memory holds it once. What ranks alone
need is imported after that, while the agent joins the others; a rank that is asked for too soon waits.

**Why a fork is safe here.** A forked process has only the thread that forked; a lock that another thread held stays
locked in it for ever. The server has one thread, always: it imports, and executes nothing of torch (no kernel, so no
OpenMP pool; no CUDA context). It refuses to start if an import has started a thread or CUDA's driver, which cannot be
used after a fork. Ranks make their threads and their CUDA context after the fork.

Rejected: spare processes that wait with torch imported and are used up (each must be replaced at the very moment at
which the recovering ranks want the processor, and a second fault within these seconds finds none; and a second set of
memory), forking from the agent itself (its heartbeat thread may hold any lock), keeping the ranks' processes over
generations (torch cannot be trusted to tear down a process group whose peers are gone: that is why ranks `_exit`).

**How a rank has ended** the server alone can ask the kernel. It tells the agent (`Endings`) before it tells the stub:
once torchrun has seen all stubs of a generation end, the agent knows of each rank how it ended, even where torchrun was
told to begin anew before it looked.

Only Linux has what it takes (pidfd, the abstract socket namespace, a signal at the parent's death).
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

from tandem_trainer.gpu import open_driver
from tandem_trainer.pulse import die_with_parent
from tandem_trainer.warm.leftovers import end_leftovers
from tandem_trainer.warm.stub import ADDRESS, LENGTH

MAX_REQUEST_BYTES = 8 * 2**20
"""A pod's variables may be many; more than the kernel allows for a process's start is not needed."""
REQUEST_SECONDS = 10.0
"""A stub sends its request at once."""
_CREDENTIALS = struct.Struct("3i")
_ENDING = struct.Struct("2i")
"""A rank's process id and its wait status. Shorter than a pipe's unit, so each is written and read whole."""


@dataclass(frozen=True)
class Request:
    """What a stub asks for."""

    arguments: list[str]
    """As for Python: `-m MODULE ARGUMENTS…` or `SCRIPT ARGUMENTS…`."""
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
    """Whether it was reaped, so that its number may mean another process by now."""


class Endings:
    """How ranks that were forked for this agent have ended, as the server tells it through a pipe."""

    def __init__(self, descriptor: int) -> None:
        os.set_blocking(descriptor, False)
        self.descriptor: int | None = descriptor
        """Readable when there is something new; None once the server is gone."""

    def read(self) -> dict[int, int]:
        """Those since the last call, by process id: exit codes, or minus the signals."""
        found: dict[int, int] = {}
        with suppress(BlockingIOError):
            while self.descriptor is not None:
                if not (content := os.read(self.descriptor, 64 * _ENDING.size)):
                    os.close(self.descriptor)
                    self.descriptor = None
                found |= {pid: os.waitstatus_to_exitcode(status) for pid, status in _ENDING.iter_unpack(content)}
        return found


endings: Endings | None = None
"""Of the server that was forked from this process."""


def available() -> bool:
    """Whether ranks can be forked: on Linux, while this process has one thread, and no driver of a GPU."""
    if sys.platform != "linux" or not hasattr(os, "pidfd_open"):
        return False
    return len(list(Path("/proc/self/task").iterdir())) == 1 and open_driver(Path("/proc/self/fd").iterdir()) is None


def fork_server(prepare: Callable[[], bool]) -> Request | None:
    """Fork the server off. Returns None to the caller, and, in every rank that is forked later, what it has to do.

    Args:
        prepare: called in the server before it serves; it does not, if that says no.
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
    # An agent that does not read, such as torchrun's own, must not stop the server.
    os.set_blocking(writes, False)
    die_with_parent()
    if os.getppid() != agent:
        os._exit(0)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    _name("tandem-spare")
    if not prepare():
        print(
            "fork server: an import has started a thread or a GPU's driver; ranks start the ordinary way",
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
        """Fork until killed; returns in the ranks alone."""
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
            self._leave()
            connection.close()
            _become(request)
            return request
        for descriptor in request.files:
            os.close(descriptor)
        rank = _Rank(pid, connection)
        pidfd = os.pidfd_open(pid)
        self._selector.register(pidfd, selectors.EVENT_READ, lambda: self._ended(pidfd, rank))
        self._selector.register(connection, selectors.EVENT_READ, lambda: self._told(rank))
        with suppress(OSError):
            connection.sendall(b"!")
        return None

    def _told(self, rank: _Rank) -> None:
        """A stub passes signals on, a byte each; its end is the end of its rank."""
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

    def _ended(self, pidfd: int, rank: _Rank) -> None:
        end_leftovers(rank.pid)
        _, status = os.waitpid(rank.pid, 0)
        rank.ended = True
        self._selector.unregister(pidfd)
        os.close(pidfd)
        with suppress(KeyError):
            self._selector.unregister(rank.connection)
        with suppress(BlockingIOError, BrokenPipeError):
            os.write(self._endings, _ENDING.pack(rank.pid, status))
        with suppress(OSError):
            rank.connection.sendall(LENGTH.pack(status))
        rank.connection.close()

    def _leave(self) -> None:
        """In a rank: let go of everything that is the server's."""
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
    """The user id of the process at the other end of a Unix socket, as the kernel says."""
    credentials = peer.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    return int(_CREDENTIALS.unpack(credentials)[1])


def _become(request: Request) -> None:
    """In a rank: take on what torchrun gave to the stub."""
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
    """What `ps -o comm` shows."""
    set_name = 15
    ctypes.CDLL(None).prctl(set_name, name.encode(), 0, 0, 0)
