"""A client without a token against each server of Tandem: `make soak-strangers`, or

    python -m tests.soak.strangers [--only gzip silent]

Each attack runs in a process of its own against a real process: the operator's port of probes and metrics (with its
informer, and an API server that a test plays), and both ports of a coordinator. Meanwhile `/healthz` is asked ten times
a second, each time over a new connection. The table says what was sent, the longest answer, and the largest resident
memory of the server. Evaluators and agents serve nothing.

Exit code 1 where an answer takes longer than a second, or the server exceeds its memory limit in the chart.
"""

import argparse
import asyncio
import json
import os
import resource
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
import zlib
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

from tandem.processes import launch
from tandem_operator import kinds, names
from tandem_operator.api import ApiServer, ListPart
from tandem_operator.informer import Cache, Informer
from tandem_operator.kinds import Kind
from tandem_operator.operator_metrics import OperatorMetrics, serve_health
from tests.support import ROOT
from tests.support.coordinator_process import Coordinator
from tests.support.elastic import TOKEN
from tests.support.ports import reserved_port
from tests.support.waiting import until

HOST = "127.0.0.1"
MAX_SECONDS = 1.0
LIMITS = {"operator": 512, "coordinator": 512, "coordinator's metrics": 512}
"""Memory limits in MiB: of the chart, and of the pods that the operator makes."""
UNPACKED_MIB = 2_000
FEW, MANY = 50, 5_000
HEADERS_BYTES = 56 * 1024
OBJECTS, PAGE = 100_000, 25
ATTACK_SECONDS = 12.0
"""Duration of an attack that keeps its connections: longer than the server keeps them."""
PROBE_SECONDS = 0.1
TIMEOUT = 60.0
BEFORE = {
    ("operator", "gzip"): "21.3 s",
    ("operator", "objects"): "some 450 MiB for 300,000",
    ("coordinator", "gzip"): "14.6 s (20 connections)",
    ("coordinator", "half-sent"): "+537 MiB",
    ("coordinator", "silent"): "none closed after 90 s",
}
"""What was measured at 33e9e768, before there were limits (issue 41)."""


# The attacker


def packed_zeros() -> bytes:
    """A gzip body of 2 MB that is `UNPACKED_MIB` once it is unpacked."""
    compressor, piece = zlib.compressobj(9, zlib.DEFLATED, 31), bytes(2**20)
    return b"".join(compressor.compress(piece) for _ in range(UNPACKED_MIB)) + compressor.flush()


async def send(port: int, *pieces: bytes, pause: float = 0.0, keeps: float = 0.0) -> None:
    """Send pieces over one connection, read what comes back, and keep the connection for some seconds."""
    with suppress(OSError, asyncio.TimeoutError):
        reader, writer = await asyncio.open_connection(HOST, port)
        try:
            for piece in pieces:
                writer.write(piece)
                await writer.drain()
                await asyncio.sleep(pause)
            async with asyncio.timeout(max(keeps, 0.5)):
                while await reader.read(2**16):
                    pass
        finally:
            writer.transport.abort()


async def side_by_side(count: int, connection: Callable[[], Awaitable[None]]) -> None:
    await asyncio.gather(*(connection() for _ in range(count)))


async def gzip(port: int) -> None:
    """50 gzip bodies of 2 MB that unpack to 2,000 MiB each."""
    body = packed_zeros()
    head = f"POST /metrics HTTP/1.1\r\nHost: x\r\nContent-Encoding: gzip\r\nContent-Length: {len(body)}\r\n\r\n"
    await side_by_side(FEW, lambda: send(port, head.encode(), body, keeps=ATTACK_SECONDS))


async def half_sent(port: int) -> None:
    """5,000 connections that send 56 KiB of headers, and no end of them."""
    headers = b"GET / HTTP/1.1\r\nHost: x\r\n" + b"".join(b"X-%d: %s\r\n" % (n, b"x" * 1000) for n in range(58))
    assert len(headers) >= HEADERS_BYTES
    await side_by_side(MANY, lambda: send(port, headers, keeps=ATTACK_SECONDS))


async def silent(port: int) -> None:
    """5,000 connections that send nothing."""
    await side_by_side(MANY, lambda: send(port, keeps=ATTACK_SECONDS))


async def slow(port: int) -> None:
    """500 connections that send a byte every half second."""
    request = b"GET /healthz HTTP/1.1\r\nHost: x\r\n\r\n"
    await side_by_side(500, lambda: send(port, *(bytes([byte]) for byte in request), pause=0.5))


async def pipelined(port: int) -> None:
    """50 connections with 10,000 requests each, in one piece."""
    requests = b"GET /healthz HTTP/1.1\r\nHost: x\r\n\r\n" * 10_000
    await side_by_side(FEW, lambda: send(port, requests, keeps=ATTACK_SECONDS))


async def endless(port: int) -> None:
    """50 connections with a chunked body that does not end."""
    head = b"POST /metrics HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n"
    chunk = b"10000\r\n" + bytes(2**16) + b"\r\n"
    await side_by_side(FEW, lambda: send(port, head, *[chunk] * 200, keeps=ATTACK_SECONDS))


async def reconnecting(port: int) -> None:
    """A new connection and a request for /metrics as fast as 50 clients can, for 12 s."""
    request, ends = b"GET /metrics HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n", time.monotonic() + ATTACK_SECONDS

    async def client() -> None:
        while time.monotonic() < ends:
            await send(port, request)

    await side_by_side(FEW, client)


async def attack_from_here(attack: Callable[[int], Awaitable[None]], port: int) -> None:
    """Run an attack. A connection that the server closes is no error here, but asyncio would report it as one."""
    asyncio.get_running_loop().set_exception_handler(lambda *_: None)
    await attack(port)


ATTACKS = {
    "gzip": gzip,
    "half-sent": half_sent,
    "silent": silent,
    "slow": slow,
    "pipelined": pipelined,
    "endless": endless,
    "reconnecting": reconnecting,
}


# The servers


@dataclass(frozen=True)
class Server:
    """A server that is attacked."""

    name: str
    pid: int
    port: int


@contextmanager
def coordinator(folder: Path) -> Iterator[list[Server]]:
    """A coordinator without agents; both of its ports."""
    found, port_file = Coordinator(folder), folder / "ports"
    command = [*launch.coordinator_command(HOST, 0, port_file), "--metrics-port", "0"]
    # Not forked from one that has torch: its memory is measured.
    variables = os.environ | {launch.RUN_DIR: str(found.rundir.path), launch.TOKEN: TOKEN}
    process = subprocess.Popen(command, env=variables, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        until(lambda: port_file.exists() and port_file.read_text(), "the coordinator's start")
        own, metrics = map(int, port_file.read_text().split())
        yield [Server("coordinator", process.pid, own), Server("coordinator's metrics", process.pid, metrics)]
    finally:
        process.kill()
        process.wait()


@contextmanager
def operator(folder: Path, objects: int = 0) -> Iterator[list[Server]]:
    """The operator's server and its informer, which lists so many objects.

    Args:
        objects: number of ConfigMaps and of pods with the label of a job that does not exist.
    """
    port_file = folder / f"operator-{objects}.port"
    process = subprocess.Popen(
        [sys.executable, "-m", "tests.soak.strangers", "--serve", str(port_file), "--objects", str(objects)], cwd=ROOT
    )
    try:
        until(port_file.exists, "the operator's start")
        yield [Server("operator", process.pid, int(port_file.read_text()))]
    finally:
        process.kill()
        process.wait()


class PlayedApi:
    """An API server that lists one job, and objects that say they belong to it or to a job that does not exist.

    Args:
        objects: number of ConfigMaps and of pods.
    """

    def __init__(self, objects: int) -> None:
        self._objects = objects

    async def pages(self, kind: Kind, namespace: str = "", selector: str = "") -> AsyncIterator[ListPart]:
        if kind is kinds.JOB:
            spec = {"trainer": {"command": ["true"]}}
            yield ListPart([{"metadata": self._metadata("present", 0) | {"generation": 1}, "spec": spec}], 1)
            return
        count = self._objects if kind in (kinds.POD, kinds.CONFIG_MAP) else 0
        for start in range(0, count, PAGE):
            bodies = []
            for number in range(start, min(start + PAGE, count)):
                labels = {names.JOB: ("present", "absent")[number % 2], names.ROLE: "worker", names.INDEX: str(number)}
                metadata = self._metadata(f"{kind.name}-{number}", number) | {"labels": labels}
                bodies.append({"metadata": metadata, "spec": {"containers": []}, "status": {"phase": "Pending"}})
            # As text, as an API server sends it.
            yield ListPart(json.loads(json.dumps(bodies)), 1)
            await asyncio.sleep(0)
        yield ListPart([], 1)

    def _metadata(self, name: str, number: int) -> dict[str, Any]:
        return {"name": name, "namespace": "lab", "uid": f"{name}-{number}", "resourceVersion": "1"}


async def serve_operator(port_file: Path, objects: int) -> None:
    """Run the operator's server and its informer in this process."""
    port, api = reserved_port(), cast("ApiServer", PlayedApi(objects))
    informer = Informer(api, Cache(), lambda key: None, ())
    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(serve_health(port, informer, OperatorMetrics()))
        write_whole(port_file, str(port))
        # Its probes are asked from the first list on.
        await asyncio.sleep(1.0)
        tasks.create_task(informer.sweep())


def write_whole(file: Path, text: str) -> None:
    """Write a file that a reader sees whole, or not at all."""
    file.with_suffix(".tmp").write_text(text)
    file.with_suffix(".tmp").rename(file)


# The measurement


@dataclass
class Measurement:
    """What one attack did to one server."""

    server: str
    attack: str
    sent: str
    slowest: float
    """The longest answer of /healthz, in seconds."""
    refused: int
    """Probes that got no answer, or another one than 200."""
    peak_mib: float

    @property
    def problems(self) -> list[str]:
        """Bounds that it broke."""
        found = [f"/healthz took {self.slowest:.2f} s"] if self.slowest > MAX_SECONDS else []
        found += [f"{self.refused} probes were not answered with 200"] if self.refused else []
        limit = LIMITS[self.server]
        return found + ([f"{self.peak_mib:.0f} MiB of {limit}"] if self.peak_mib > limit else [])


def probe(port: int) -> tuple[float, bool]:
    """Ask for /healthz over a new connection; returns the seconds that it took, and whether all is well."""
    started = time.monotonic()
    try:
        with socket.create_connection((HOST, port), timeout=TIMEOUT) as connection:
            connection.sendall(b"GET /healthz HTTP/1.1\r\nHost: x\r\n\r\n")
            answer = connection.recv(64)
    except OSError:
        return time.monotonic() - started, False
    # The coordinator's port of metrics has no such path, and says so.
    return time.monotonic() - started, answer.startswith((b"HTTP/1.1 200", b"HTTP/1.1 404"))


def peak_mib(pid: int) -> float:
    """The largest resident memory of a process since `reset_peak`."""
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return int(next(line for line in lines if line.startswith("VmHWM")).split()[1]) / 1024


def reset_peak(pid: int) -> None:
    with suppress(OSError):
        Path(f"/proc/{pid}/clear_refs").write_text("5")


def measure(server: Server, attack: str, sent: str, until_over: Callable[[], bool]) -> Measurement:
    """Probe a server until an attack is over."""
    reset_peak(server.pid)
    slowest, refused = 0.0, 0
    while not until_over():
        seconds, is_well = probe(server.port)
        slowest, refused = max(slowest, seconds), refused + (not is_well)
        time.sleep(PROBE_SECONDS)
    return Measurement(server.name, attack, sent, slowest, refused, peak_mib(server.pid))


def attacked(server: Server, attack: str) -> Measurement:
    """Let another process attack a server, and measure."""
    command = [sys.executable, "-m", "tests.soak.strangers", "--attack", attack, "--port", str(server.port)]
    with subprocess.Popen(command, cwd=ROOT) as attacker:
        found = measure(server, attack, ATTACKS[attack].__doc__ or "", lambda: attacker.poll() is not None)
        assert attacker.returncode == 0, attack
    return found


def filled(folder: Path) -> Measurement:
    """Let an operator list many objects, and measure."""
    with operator(folder, OBJECTS) as (server,):
        ends = time.monotonic() + TIMEOUT

        def is_over() -> bool:
            with suppress(OSError), urllib.request.urlopen(f"http://{HOST}:{server.port}/readyz", timeout=TIMEOUT):
                return True
            return time.monotonic() > ends

        sent = f"{OBJECTS:,} ConfigMaps and {OBJECTS:,} pods with the label of a job, of which half does not exist."
        return measure(server, "objects", sent, is_over)


def table(found: Sequence[Measurement]) -> str:
    """The table as Markdown."""
    lines = ["| server | what was sent | longest `/healthz` | peak memory | before |", "|---|---|---|---|---|"]
    for one in found:
        before = BEFORE.get((one.server, one.attack), "")
        lines.append(f"| {one.server} | {one.sent} | {one.slowest:.2f} s | {one.peak_mib:.0f} MiB | {before} |")
    return "\n".join(lines)


def main() -> None:
    """Attack, print the table, and exit with 1 where a bound is broken."""
    parser = argparse.ArgumentParser(prog="python -m tests.soak.strangers")
    parser.add_argument("--only", nargs="+", choices=[*ATTACKS, "objects"], default=[*ATTACKS, "objects"])
    parser.add_argument("--attack", choices=ATTACKS, help=argparse.SUPPRESS)
    parser.add_argument("--port", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--serve", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--objects", type=int, default=0, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    if arguments.attack:
        asyncio.run(attack_from_here(ATTACKS[arguments.attack], arguments.port))
        return
    if arguments.serve:
        asyncio.run(serve_operator(arguments.serve, arguments.objects))
        return
    found: list[Measurement] = []
    with tempfile.TemporaryDirectory(prefix="tandem-strangers-") as name, ExitStack() as stack:
        folder = Path(name)
        servers = [*stack.enter_context(operator(folder)), *stack.enter_context(coordinator(folder))]
        for server in servers:
            found += [attacked(server, attack) for attack in arguments.only if attack != "objects"]
        if "objects" in arguments.only:
            found.append(filled(folder))
    print(table(found))
    problems = [f"{one.server}, {one.attack}: {problem}" for one in found for problem in one.problems]
    print("\n".join(problems) or "all bounds were kept")
    sys.exit(1 if problems else 0)


if __name__ == "__main__":
    main()
