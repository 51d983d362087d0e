"""Agents and `tandem` commands that start in milliseconds: forked from a process that has imported what they import.

An agent imports torch and what its ranks need, four seconds of a processor, a command half a second, and tests start
hundreds. Here one process of the test session imports it once; a program is forked from it and goes on with its own
`main`, as if it had just imported everything itself. It is a process like any other, with its own number, folder,
variables and files; only its parent is the zygote, which tells how it ended. That a cold start works is shown by the
tests that start one: those with `warm=False`, and in the gate README's commands.

The fork servers of tests.support.warm, from which ranks and the processes of a `tandem run` start, are forked from it,
too: each adds what else its tests import.

Over the connection of each program: its request as one line of JSON, with descriptors for standard input, output and
errors; the answer is its process id, and at its end its exit code, as `subprocess` counts them.
"""

import array
import atexit
import contextlib
import functools
import json
import os
import selectors
import signal
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO, Any

from tandem.processes.exitcode import exit_process
from tests.support import ROOT

_LINES = (ROOT / "tests" / "support" / "zygote.txt").read_text().splitlines()
MODULES = [line.split() for line in _LINES if not line.startswith("#")]
PROGRAMS = {name: module for name, module in MODULES if name != "-"}
"""Where the `main` of each is."""
ROOM_BYTES = 100_000
"""Room for the variables of a forked process, where those of the zygote stood: at most one string of an `exec`."""
POLL_SECONDS = 0.01
REQUEST_BYTES = 1 << 20


class Forked:
    """A program, with what tests use of `subprocess.Popen`."""

    def __init__(
        self,
        module: str,
        arguments: Sequence[str],
        environment: Mapping[str, str],
        output: IO[bytes],
        *,
        errors: IO[bytes] | None = None,
        stdin: IO[bytes] | None = None,
        cwd: Path = ROOT,
        own_session: bool = False,
    ) -> None:
        """Fork it.

        Args:
            module: whose `main` it is: one of PROGRAMS.
            arguments: for `python -m` with that module.
            environment: all of its variables.
            output: for its standard output, and its errors if they have no file of their own.
            stdin: what it reads; None for nothing.
            own_session: it leads a session, and a group of processes to which a terminal would send its signals.
        """
        assert module in PROGRAMS
        self._module = module
        self._connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._connection.connect(_address())
        wanted = {"module": module, "arguments": list(arguments), "environment": dict(environment), "cwd": str(cwd)}
        wanted |= {"ownSession": own_session}
        request = json.dumps(wanted).encode() + b"\n"
        with contextlib.nullcontext(stdin) if stdin else Path(os.devnull).open("rb") as read:
            files = array.array("i", [file.fileno() for file in (read, output, errors or output)])
            self._connection.sendmsg([request[:1]], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, files)])
        self._connection.sendall(request[1:])
        self._said = b""
        self.pid = self._number()
        self.returncode: int | None = None

    def wait(self, timeout: float | None = None) -> int:
        """Its exit code, once it has ended.

        Raises:
            subprocess.TimeoutExpired: it has not ended by then.
        """
        if self.returncode is None:
            self._connection.settimeout(timeout)
            try:
                self.returncode = self._number()
            except TimeoutError:
                raise subprocess.TimeoutExpired(self._module, timeout or 0.0) from None
            self._connection.close()
        return self.returncode

    def _number(self) -> int:
        """The next line that the zygote says."""
        while b"\n" not in self._said:
            told = self._connection.recv(64)
            assert told, "the zygote is gone"
            self._said += told
        line, _, self._said = self._said.partition(b"\n")
        return int(line)

    def poll(self) -> int | None:
        """Its exit code; None while it runs."""
        try:
            return self.wait(0.001)
        except subprocess.TimeoutExpired:
            return None

    def send_signal(self, number: int) -> None:
        """Send a signal, unless it has ended."""
        if self.poll() is None:
            # The zygote has reaped it before it says so: there may be no such process any more.
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, number)

    def terminate(self) -> None:
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


@functools.cache
def _address() -> str:
    """Start the zygote of this test session; it ends with it, and its agents with it."""
    process = subprocess.Popen(
        [sys.executable, "-m", "tests.support.zygote"],
        cwd=ROOT,
        env=os.environ | {"OMP_NUM_THREADS": "1", "ROOM": "." * ROOM_BYTES},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    atexit.register(process.communicate)
    return "\0" + process.stdout.readline().strip()


def serve() -> None:
    """Be the zygote, until standard input ends."""
    from tandem_trainer.agent.torchrun import AGENT_MODULES, RANK_MODULES, preload

    modules = [module for _, module in MODULES]
    assert preload((*AGENT_MODULES, *RANK_MODULES, *modules)), "an import has started a thread"
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    name = f"tandem-tests-{os.getpid()}"
    listener.bind("\0" + name)
    listener.listen()
    print(name, flush=True)
    selector = selectors.DefaultSelector()
    selector.register(listener, selectors.EVENT_READ)
    selector.register(sys.stdin, selectors.EVENT_READ)
    running: dict[int, socket.socket] = {}
    while True:
        for key, _ in selector.select(POLL_SECONDS if running else None):
            if key.fileobj is sys.stdin:
                for pid in running:
                    os.kill(pid, signal.SIGKILL)
                return
            connection, _ = listener.accept()
            request, files = _received(connection)
            pid = os.fork()
            if pid == 0:
                if request["ownSession"]:
                    os.setsid()
                for other in (listener, selector, connection, *running.values()):
                    other.close()
                _become(request, files)
            for file in files:
                os.close(file)
            connection.sendall(f"{pid}\n".encode())
            running[pid] = connection
        for pid, connection in list(running.items()):
            ended, status = os.waitpid(pid, os.WNOHANG)
            if ended:
                # Whoever asked for it may have gone meanwhile.
                try:
                    connection.sendall(f"{os.waitstatus_to_exitcode(status)}\n".encode())
                except BrokenPipeError:
                    pass
                connection.close()
                del running[pid]


def _received(connection: socket.socket) -> tuple[dict[str, Any], list[int]]:
    data, files, _, _ = socket.recv_fds(connection, REQUEST_BYTES, 3)
    while not data.endswith(b"\n"):
        data += connection.recv(REQUEST_BYTES)
    return json.loads(data), list(files)


def _become(request: dict[str, Any], files: Sequence[int]) -> None:
    """Become what was asked for; does not return."""
    for number, file in enumerate(files):
        os.dup2(file, number)
        os.close(file)
    os.chdir(request["cwd"])
    os.environ.clear()
    os.environ.update(request["environment"])
    sys.argv = ["-m", *request["arguments"]]

    code: int | str | None = 0
    try:
        sys.modules[PROGRAMS[request["module"]]].main()
    except SystemExit as leaving:
        code = leaving.code
    except BaseException as error:
        sys.excepthook(type(error), error, error.__traceback__)
        code = 1
    exit_process(code)


if __name__ == "__main__":
    serve()
    # Python's own finalization would let torch's compiler print what it has not freed.
    exit_process(0)
