"""The TCP connections that a process group has opened, and how to end them from another thread.

gloo has no way to leave a collective: `ProcessGroupGloo.abort()` returns, and frees no thread (torch 2.15). A
connection that is shut down makes a call that is blocked on it raise within a millisecond, also where the peer is
stopped, or where the network drops all packets. The listening socket stays open: gloo aborts the process without it.

Linux only, because the kernel lists the sockets of a process in /proc.
"""

import os
import re
import socket
from contextlib import suppress
from pathlib import Path

_SOCKET = re.compile(r"socket:\[(\d+)\]")
_DESCRIPTORS = Path("/proc/self/fd")


class Connections:
    """The connections that this process opens from now on, until `settle`."""

    def __init__(self) -> None:
        self._before = frozenset(_sockets().values())
        self._own: dict[int, int] | None = None

    def settle(self, store_port: int) -> None:
        """Leave out connections that are opened later, and those to a store.

        Args:
            store_port: port of the store.
        """
        self._own = {
            descriptor: inode for descriptor, inode in self._opened().items() if store_port not in _ports(descriptor)
        }

    def shut_down(self) -> None:
        """End the connections. Calls that wait on them raise; their descriptors stay open for who owns them. Before
        `settle` it ends all that were opened so far, also those to a store."""
        own = self._opened() if self._own is None else self._own
        current = _sockets()
        for descriptor, inode in own.items():
            # The number may stand for another socket by now.
            if current.get(descriptor) == inode:
                with suppress(OSError), socket.socket(fileno=os.dup(descriptor)) as connection:
                    connection.shutdown(socket.SHUT_RDWR)

    def _opened(self) -> dict[int, int]:
        return {
            descriptor: inode
            for descriptor, inode in _sockets().items()
            if inode not in self._before and _is_connection(descriptor)
        }


def _sockets() -> dict[int, int]:
    """Return the inode of each open socket of this process, by descriptor."""
    sockets = {}
    with suppress(FileNotFoundError):
        for link in _DESCRIPTORS.iterdir():
            # The descriptor of the listing itself is gone by now.
            with suppress(OSError):
                if match := _SOCKET.fullmatch(str(link.readlink())):
                    sockets[int(link.name)] = int(match[1])
    return sockets


def _is_connection(descriptor: int) -> bool:
    """Whether a socket is a TCP connection, and not a listening socket."""
    with suppress(OSError), socket.socket(fileno=os.dup(descriptor)) as opened:
        is_tcp = opened.family in (socket.AF_INET, socket.AF_INET6) and opened.type == socket.SOCK_STREAM
        return is_tcp and not opened.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN)
    return False


def _ports(descriptor: int) -> tuple[int, ...]:
    """Return the ports of both ends; empty for a connection that has ended."""
    with suppress(OSError), socket.socket(fileno=os.dup(descriptor)) as opened:
        return opened.getpeername()[1], opened.getsockname()[1]
    return ()
