"""The stub that torchrun starts for a rank: requests the rank from the agent's fork server and represents it.

A forked rank is a child of the fork server, but torchrun watches, signals and reaps its own children. So the stub takes
only milliseconds to start (it runs without site-packages and imports nothing but the standard library), sends its
arguments, environment, working directory and standard files to the fork server, forwards the signals that it gets, and
ends exactly as the rank ends, by the same signal if it was one. When the stub is killed, the fork server notices that
the connection has ended and kills the rank.

If the fork server is gone, the stub becomes the rank itself.
"""

import array
import contextlib
import json
import os
import resource
import signal
import socket
import struct
import sys
from types import FrameType

ADDRESS = "TANDEM_FORK_SERVER"
"""Environment variable with the name of the fork server's socket, in the abstract namespace, which leaves no file."""
LENGTH = struct.Struct("!I")
FORWARDED_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)


def main() -> None:
    """Represent the rank that the arguments describe."""
    connection = _request(sys.argv[1:])
    if connection is None:
        os.execv(sys.executable, [sys.executable, "-u", *sys.argv[1:]])  # noqa: S606 - as torchrun would

    def forward(number: int, frame: FrameType | None) -> None:
        with contextlib.suppress(OSError):
            connection.sendall(bytes([number]))

    for number in FORWARDED_SIGNALS:
        signal.signal(number, forward)
    with contextlib.suppress(OSError):
        answer = connection.recv(LENGTH.size, socket.MSG_WAITALL)
        if len(answer) == LENGTH.size:
            end(LENGTH.unpack(answer)[0])
    print("the fork server is gone, and the rank with it", file=sys.stderr)
    end(signal.SIGKILL)


def end(status: int) -> None:
    """End this process with the wait status of another one."""
    if os.WIFEXITED(status):
        os._exit(os.WEXITSTATUS(status))
    number = os.WTERMSIG(status)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    if number != signal.SIGKILL:
        signal.signal(number, signal.SIG_DFL)
    os.kill(os.getpid(), number)


def _request(arguments: list[str]) -> socket.socket | None:
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    request = json.dumps({"arguments": arguments, "environment": dict(os.environ), "folder": os.getcwd()}).encode()  # noqa: PTH109 - pathlib takes longer to import than all of this
    files = array.array("i", [0, 1, 2])
    try:
        connection.connect("\0" + os.environ.get(ADDRESS, ""))
        connection.sendmsg([LENGTH.pack(len(request))], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, files)])
        connection.sendall(request)
        # One byte once the rank runs; the end of the connection if the server has died or refuses.
        return connection if connection.recv(1) else None
    except OSError:
        return None


if __name__ == "__main__":
    main()
