"""The surroundings of a disturbed job: network namespaces on one bridge, and the processes started in them.

Each place (a replica's node, the coordinator's node) is a namespace with one address. The bridge is in a namespace of
its own, the hub, so that nothing appears in the machine's own network and none of its filters apply. To cut off a
place, its port is removed from the bridge: packets are dropped silently, as when a switch or an overlay network stalls;
the place's own interface stays up. To heal, the port is attached again.

All names contain this process's number, so two runs do not interfere, and the next run removes the remains of one that
was killed. All processes have a mark in their environment, by which those that should have ended are found.
"""

import os
import re
import shutil
import signal
import subprocess
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Self

import psutil

PREFIX = "tandem-recovery"
MARK = "TANDEM_RECOVERY_MARK"
INTERFACE = "eth0"
BYTECODE = Path(__file__).parents[2] / "runs" / "recovery" / "bytecode"
"""Compiled Python of all started processes, as an image has it: without it, importing torch takes twice as long, or
more. Kept separately, because not every machine writes it beside the sources."""
_NAME = re.compile(rf"^{PREFIX}-(\d+)-")


class Network:
    """Places with an address each, that can be cut off. Leaving the `with` block removes everything.

    Raises:
        PermissionError: this process may not create network namespaces; run it as root.
    """

    def __init__(self, places: Sequence[str]) -> None:
        if os.geteuid() != 0 or shutil.which("ip") is None or shutil.which("nsenter") is None:
            raise PermissionError("network namespaces are needed: run this as root, with iproute2 and util-linux")
        sweep()
        self.mark = f"{PREFIX}-{os.getpid()}"
        self.places = list(places)
        self._hub = f"{self.mark}-hub"
        self._cut: set[str] = set()

    def __enter__(self) -> Self:
        try:
            self._build()
        except BaseException:
            self.remove()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.remove()

    def address(self, place: str) -> str:
        """Its address, from the range for benchmarks of network devices (RFC 2544)."""
        return f"198.18.0.{self.places.index(place) + 10}"

    def entering(self, place: str) -> list[str]:
        """Prefix of a command that runs it at a place. The command takes over the process."""
        return ["nsenter", f"--net=/var/run/netns/{self.mark}-{place}", "--"]

    def cut(self, place: str) -> None:
        """Drop every packet from and to a place."""
        _ip("-n", self._hub, "link", "set", "dev", self._port(place), "nomaster")
        self._cut.add(place)

    def heal(self, place: str) -> None:
        """Connect a place again."""
        _ip("-n", self._hub, "link", "set", "dev", self._port(place), "master", "bridge")
        self._cut.discard(place)

    def heal_all(self) -> None:
        """Connect every place that is cut off."""
        for place in list(self._cut):
            self.heal(place)

    def listeners(self) -> dict[str, list[int]]:
        """Ports on which a process still listens, by place."""
        by_place = {}
        for place in self.places:
            table = subprocess.run(
                [*self.entering(place), "cat", "/proc/net/tcp", "/proc/net/tcp6"], capture_output=True, text=True
            ).stdout
            rows = [line.split() for line in table.splitlines()]
            ports = sorted({int(row[1].rpartition(":")[2], 16) for row in rows if len(row) > 3 and row[3] == "0A"})
            if ports:
                by_place[place] = ports
        return by_place

    def remove(self) -> None:
        """End the remaining processes and remove the network."""
        end(marked(self.mark))
        for name in _namespaces():
            if name.startswith(f"{self.mark}-"):
                _ip("netns", "delete", name, check=False)

    def _build(self) -> None:
        _ip("netns", "add", self._hub)
        _ip("-n", self._hub, "link", "add", "bridge", "type", "bridge")
        _ip("-n", self._hub, "link", "set", "bridge", "up")
        for place in self.places:
            name, port = f"{self.mark}-{place}", self._port(place)
            _ip("netns", "add", name)
            _ip("-n", name, "link", "set", "lo", "up")
            _ip("-n", self._hub, "link", "add", port, "type", "veth", "peer", "name", INTERFACE, "netns", name)
            _ip("-n", name, "address", "add", f"{self.address(place)}/24", "dev", INTERFACE)
            _ip("-n", name, "link", "set", INTERFACE, "up")
            _ip("-n", self._hub, "link", "set", port, "master", "bridge", "up")

    def _port(self, place: str) -> str:
        return f"port{self.places.index(place)}"


def spawn(
    network: Network, place: str, command: Sequence[str], variables: Mapping[str, str], output: Path
) -> subprocess.Popen[bytes]:
    """Start a process at a place; its output is appended to a file."""
    own = {
        MARK: network.mark,
        "GLOO_SOCKET_IFNAME": INTERFACE,
        "OMP_NUM_THREADS": "1",
        "PYTHONUNBUFFERED": "1",
        "PYTHONPYCACHEPREFIX": str(BYTECODE),
        "PYTHONDONTWRITEBYTECODE": "",
    }
    with output.open("ab") as file:
        return subprocess.Popen(
            [*network.entering(place), *command],
            env=os.environ | own | dict(variables),
            stdin=subprocess.DEVNULL,
            stdout=file,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )


def marked(mark: str) -> list[psutil.Process]:
    """Find all living processes with this mark, except this one."""
    processes = []
    for process in psutil.process_iter():
        with suppress(psutil.Error, OSError):
            if (
                process.pid != os.getpid()
                and process.environ().get(MARK) == mark
                and process.status() != psutil.STATUS_ZOMBIE
            ):
                processes.append(process)
    return processes


def end(processes: Sequence[psutil.Process]) -> None:
    """Kill processes, even if they hang."""
    for process in processes:
        with suppress(psutil.Error):
            process.kill()
    psutil.wait_procs(list(processes), timeout=10)


def kill(pid: int, number: int = signal.SIGKILL) -> bool:
    """Signal a process; False if it is gone."""
    try:
        os.kill(pid, number)
    except ProcessLookupError:
        return False
    return True


def sweep() -> None:
    """Remove the remains of runs that were killed."""
    for mark in {match[0][:-1] for name in _namespaces() if (match := _NAME.match(name))}:
        if not psutil.pid_exists(int(mark.rpartition("-")[2])):
            end(marked(mark))
            for name in _namespaces():
                if name.startswith(f"{mark}-"):
                    _ip("netns", "delete", name, check=False)


def _namespaces() -> list[str]:
    output = subprocess.run(["ip", "netns", "list"], capture_output=True, text=True, check=True).stdout
    return [line.split()[0] for line in output.splitlines() if line.strip()]


def _ip(*args: str, check: bool = True) -> None:
    for attempt in range(5):
        done = subprocess.run(["ip", *args], capture_output=True, text=True)
        if done.returncode == 0:
            return
        # A namespace that was just deleted keeps its devices for a moment.
        time.sleep(0.1 * attempt)
    if check:
        raise OSError(f"ip {' '.join(args)}: {done.stderr.strip()}")
