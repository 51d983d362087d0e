"""Agents that one coordinator can serve: the real process, and simulated agents in this one, over HTTP on loopback.

python -m benchmarks.scale [--agents 1000 10000] [--seconds 20] [--heartbeat 1] [--processes 1]

Each agent has a connection of its own and speaks the protocol of `/v1/sync` as tandem_trainer.agent.heartbeat does,
with a report of each of its ranks in every heartbeat; it stops its ranks in no time. Figures:

    first     from the first connection until all agents have received the first generation
    failed    from one agent's report that a worker failed until all agents have received the next generation
    killed    from the end of one agent's connection until all others have received the next generation; of that, 1 s is
              the time that the lost agent has to come back
    cores     processor use of the coordinator while all train and send heartbeats
    answer    response time of a request that is not held back (`/healthz`, 20 a second) while all train; p50, p99
    late      delay of the response to a heartbeat beyond the heartbeat time; p99
    rss       resident memory of the coordinator at the end, and its peak

With --viewers, that many viewers have the live page open meanwhile, half of them on phones, and the run has a log of
--logged steps that the page reads first. (`watched` is the kilobytes a second that each of them receives.)

The goals are for up to GOAL_AGENTS agents. Exit code 1 if one is missed; with more agents there is none.
"""

import argparse
import asyncio
import json
import os
import re
import resource
import secrets
import signal
import subprocess
import sys
import tempfile
import time
import zlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median, quantiles
from typing import Any

from benchmarks.goals import Outcome, Verdict, exit_code
from tandem.job.resource import DistributedTrainingJob
from tandem.processes import launch
from tandem.rundir.layout import RunDir
from tests.support import manifests

TOKEN = "the-token-of-this-bench"
GOAL_AGENTS = 1000
FORMED_SECONDS, CORES = 2.0, 0.5
"""Goals: seconds until all agents have the first generation, and cores of the coordinator while all train."""
CONNECTING = 200
"""Connections that are opened at a time."""
ORDER = re.compile(rb'"order": ?"(\w+)"')
GENERATION = re.compile(rb'"generation": ?(\d+)')


@dataclass
class Crowd:
    """All agents of one run."""

    port: int
    heartbeat: float
    processes: int
    generations: dict[int, int] = field(default_factory=dict)
    """Number of agents that have received each generation."""
    received_generation: asyncio.Event = field(default_factory=asyncio.Event)
    late: list[float] = field(default_factory=list)
    measuring: bool = False
    received: int = 0
    requests: int = 0

    def count(self, generation: int) -> None:
        """Count an agent that has received the generation."""
        self.generations[generation] = self.generations.get(generation, 0) + 1
        self.received_generation.set()

    async def until(self, generation: int, count: int, seconds: float) -> None:
        """Wait until this many agents have received the generation."""
        async with asyncio.timeout(seconds):
            while self.generations.get(generation, 0) < count:
                self.received_generation.clear()
                await self.received_generation.wait()


class Agent(asyncio.Protocol):
    """One simulated agent."""

    def __init__(self, crowd: Crowd, index: int, before: "Agent | None" = None) -> None:
        self.crowd, self.index = crowd, index
        self.state, self.reason, self.generation, self.step = "joining", "Started", 0, 0
        self.transport: asyncio.Transport | None = None
        self._buffer = bytearray()
        self._expected = 0
        self._sent_at = 0.0
        name = {
            "replica": f"worker-{index}",
            "incarnation": secrets.token_hex(6),
            "address": f"10.{index >> 8 & 255}.{index & 255}.{secrets.randbelow(255)}",
            "port": 30_000 + secrets.randbelow(30_000),
        }
        self._name = before._name if before else json.dumps(name | {"processes": crowd.processes})[:-1]

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self.transport = transport

    def send(self) -> None:
        """Send a heartbeat."""
        assert self.transport is not None
        self._sent_at = time.perf_counter()
        self.crowd.requests += 1
        generation = self.generation or "null"
        body = f'{self._name}, "state": "{self.state}", "reason": "{self.reason}", "generation": {generation}'
        if self.state == "running":
            self.step += 1
            body += f', "ranks": [{", ".join(self._report(rank) for rank in range(self.crowd.processes))}]'
        body += "}"
        self.transport.write(
            f"POST /v1/sync HTTP/1.1\r\nHost: 127.0.0.1\r\nAuthorization: Bearer {TOKEN}\r\n"
            f"Content-Type: application/json\r\nAccept-Encoding: gzip\r\n"
            f"Content-Length: {len(body)}\r\n\r\n{body}".encode()
        )

    def data_received(self, data: bytes) -> None:
        self._buffer += data
        if not self._expected:
            end = self._buffer.find(b"\r\n\r\n")
            if end < 0:
                return
            head = bytes(self._buffer[:end]).lower()
            self._expected = end + 4 + int(head.partition(b"content-length:")[2].split(b"\r\n")[0])
        if len(self._buffer) >= self._expected:
            response = bytes(self._buffer[: self._expected])
            del self._buffer[: self._expected]
            self._expected = 0
            self._answered(response)

    def _answered(self, response: bytes) -> None:
        self.crowd.received += len(response)
        if not response.startswith(b"HTTP/1.1 200"):
            raise RuntimeError(response.decode(errors="replace"))
        if b"gzip" in response[:300].lower():
            head, _, body = response.partition(b"\r\n\r\n")
            response = head + _opened(body)
        order = ORDER.search(response)
        assert order is not None, response[:300]
        if order[1] == b"run" and self.state == "joining":
            generation = GENERATION.search(response)
            assert generation is not None
            self.state, self.reason, self.generation = "running", "", int(generation[1])
            self.crowd.count(self.generation)
        elif order[1] == b"run":
            if self.crowd.measuring:
                self.crowd.late.append(time.perf_counter() - self._sent_at - self.crowd.heartbeat)
        elif order[1] == b"rejoin":
            self.state, self.reason = "joining", "MembershipChanged"
        assert order[1] != b"end", response
        self.send()

    def _report(self, rank: int) -> str:
        number = self.index * self.crowd.processes + rank
        return (
            f'{{"rank": {number}, "step": {self.step}, "phase": "train", "totalSteps": 1000000, "epoch": 1.25, '
            f'"loss": 0.734512, "throughput": 81234.5, "busySeconds": 0.1234, "saves": true, "cpu": 0.97, "gpu": 0.98, '
            f'"gpuMemoryBytes": 71234567890}}'
        )


_packed: tuple[bytes, bytes] = (b"", b"")


def _opened(body: bytes) -> bytes:
    """Decompress the start of a response; a generation is decompressed once for all agents."""
    global _packed
    if _packed[0] != body:
        _packed = (body, zlib.decompressobj(31).decompress(body, 4096))
    return _packed[1]


class Process:
    """The coordinator's process as the kernel sees it."""

    def __init__(self, pid: int) -> None:
        self._proc = Path(f"/proc/{pid}")

    def cpu_seconds(self) -> float:
        fields = (self._proc / "stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")

    def memory(self, name: str) -> float:
        """Memory in MiB."""
        lines = (self._proc / "status").read_text().splitlines()
        return next(int(line.split()[1]) / 1024 for line in lines if line.startswith(name))


class Audience:
    """Viewers of the live page."""

    def __init__(self, port: int) -> None:
        self._port = port
        self._looking: list[asyncio.Task[None]] = []
        self.received = 0

    async def enter(self, viewers: int) -> None:
        """Invite viewers, and open the page."""
        for number in range(viewers):
            word = json.loads(await self._ask("POST", "/v1/invitation", f"Authorization: Bearer {TOKEN}"))["word"]
            body = json.dumps({"word": word})
            head = await self._ask("POST", "/open", f"Content-Length: {len(body)}", body, head=True)
            cookie = re.search(rb"Set-Cookie: ([^;]+)", head, re.IGNORECASE)
            assert cookie is not None, head
            style = "narrow" if number % 2 else "wide"
            self._looking.append(asyncio.create_task(self._stream(style, cookie[1].decode())))

    async def leave(self) -> None:
        """Close the pages."""
        for task in self._looking:
            task.cancel()
        await asyncio.gather(*self._looking, return_exceptions=True)

    async def _ask(self, method: str, path: str, header: str, body: str = "", head: bool = False) -> bytes:
        reader, writer = await asyncio.open_connection("127.0.0.1", self._port)
        writer.write(
            f"{method} {path} HTTP/1.1\r\nHost: 127.0.0.1\r\nConnection: close\r\n{header}\r\n\r\n{body}".encode()
        )
        response = await reader.read()
        writer.close()
        return response if head else response.partition(b"\r\n\r\n")[2]

    async def _stream(self, style: str, cookie: str) -> None:
        reader, writer = await asyncio.open_connection("127.0.0.1", self._port)
        try:
            writer.write(
                f"GET /page/stream?look={style} HTTP/1.1\r\nHost: 127.0.0.1\r\nCookie: {cookie}\r\n\r\n".encode()
            )
            while piece := await reader.read(2**16):
                self.received += len(piece)
        finally:
            writer.close()


def _log(rundir: RunDir, steps: int) -> None:
    """Write the log of a run of this many steps."""
    with (rundir.log / "train-g000001.jsonl").open("w") as log:
        for step in range(1, steps + 1):
            log.write(f'{{"kind": "step", "time": {1.7e9 + step}, "step": {step}, "loss": 0.5, "samples": 64}}\n')


async def measure(
    agents: int, heartbeat: float, seconds: float, processes: int, viewers: int, logged: int
) -> dict[str, object]:
    """Measure one run."""
    with tempfile.TemporaryDirectory(prefix="tandem-scale-") as folder:
        rundir = RunDir(Path(folder) / "run")
        rundir.create()
        _log(rundir, logged)
        rundir.write_job(_job(agents, heartbeat, processes))
        port_file = Path(folder) / "port"
        output = (Path(folder) / "coordinator.txt").open("wb")
        coordinator = subprocess.Popen(  # noqa: ASYNC220 - nothing else happens yet
            launch.coordinator_command("127.0.0.1", 0, port_file),
            env=os.environ | {"TANDEM_RUN_DIR": str(rundir.path), "TANDEM_TOKEN": TOKEN},
            stdout=output,
            stderr=subprocess.STDOUT,
        )
        try:
            while not port_file.exists():
                assert coordinator.poll() is None, (Path(folder) / "coordinator.txt").read_text()
                await asyncio.sleep(0.02)
            crowd = Crowd(int(port_file.read_text()), heartbeat, processes)
            return await _figures(crowd, agents, seconds, Process(coordinator.pid), viewers)
        finally:
            coordinator.send_signal(signal.SIGTERM)
            coordinator.wait()
            output.close()


async def _figures(crowd: Crowd, agents: int, seconds: float, process: Process, viewers: int) -> dict[str, object]:
    idle = process.memory("VmRSS")
    limit = 60.0
    started = time.perf_counter()
    members = await _connect(crowd, agents)
    connected = time.perf_counter()
    await crowd.until(1, agents, limit)
    formed = time.perf_counter()
    first_bytes, formation_cpu = crowd.received, process.cpu_seconds()

    await asyncio.sleep(2 * crowd.heartbeat)
    audience = Audience(crowd.port)
    await audience.enter(viewers)
    crowd.measuring, crowd.requests = True, 0
    cpu, since = process.cpu_seconds(), time.perf_counter()
    answers = await _probe(crowd.port, seconds)
    elapsed = time.perf_counter() - since
    cores, rate = (process.cpu_seconds() - cpu) / elapsed, crowd.requests / elapsed
    crowd.measuring = False
    late = crowd.late
    await audience.leave()

    reported_at = time.perf_counter()
    members[0] = await _fail(crowd, members[0])
    await crowd.until(2, agents, limit)
    failed = time.perf_counter() - reported_at

    await asyncio.sleep(2 * crowd.heartbeat)
    victim = members[-1].transport
    assert victim is not None
    victim.abort()
    killed = time.perf_counter()
    await crowd.until(3, agents - 1, limit)
    return {
        "agents": agents,
        "viewers": viewers,
        "watched": audience.received / elapsed / max(1, viewers) / 1000,
        "heartbeat": crowd.heartbeat,
        "processes": crowd.processes,
        "first": formed - started,
        "connecting": connected - started,
        "firstCpuSeconds": formation_cpu,
        "answerBytes": first_bytes / agents,
        "failed": failed,
        "killed": time.perf_counter() - killed,
        "cores": cores,
        "heartbeatsPerSecond": rate,
        "answerP50": median(answers),
        "answerP99": quantiles(answers, n=100)[98],
        "lateP99": max(0.0, quantiles(late, n=100)[98]),
        "rssIdle": idle,
        "rss": process.memory("VmRSS"),
        "rssPeak": process.memory("VmHWM"),
    }


async def _probe(port: int, seconds: float) -> list[float]:
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    answers = []
    until = time.perf_counter() + seconds
    while time.perf_counter() < until:
        sent_at = time.perf_counter()
        # Without the token the connection is closed with its first answer.
        writer.write(f"GET /healthz HTTP/1.1\r\nHost: 127.0.0.1\r\nAuthorization: Bearer {TOKEN}\r\n\r\n".encode())
        await reader.readuntil(b"}")
        answers.append(time.perf_counter() - sent_at)
        await asyncio.sleep(0.05)
    writer.close()
    return answers


async def _fail(crowd: Crowd, agent: Agent) -> Agent:
    """A worker of the agent fails: the agent closes the request that is held back, and reports on a new connection."""
    assert agent.transport is not None
    agent.transport.abort()
    loop = asyncio.get_running_loop()
    _, new_agent = await loop.create_connection(lambda: Agent(crowd, agent.index, agent), "127.0.0.1", crowd.port)
    new_agent.state, new_agent.generation, new_agent.step, new_agent.reason = (
        "running",
        agent.generation,
        agent.step,
        "WorkerFailed",
    )
    new_agent.send()
    return new_agent


async def _connect(crowd: Crowd, agents: int) -> list[Agent]:
    loop = asyncio.get_running_loop()
    gate = asyncio.Semaphore(CONNECTING)

    async def connect(index: int) -> Agent:
        async with gate:
            _, agent = await loop.create_connection(lambda: Agent(crowd, index), "127.0.0.1", crowd.port)
        agent.send()
        return agent

    return list(await asyncio.gather(*(connect(index) for index in range(agents))))


def _job(agents: int, heartbeat: float, processes: int) -> DistributedTrainingJob:
    return manifests.job(
        "scale",
        trainer={"command": ["train.py"]},
        workers={"replicas": agents, "processesPerReplica": processes},
        elasticity={
            "heartbeatSeconds": heartbeat,
            "lostAfterSeconds": max(3.0, 3 * heartbeat),
            "growCooldownSeconds": 3600,
        },
    )


def judge(figures: Mapping[str, Any]) -> list[Verdict]:
    """Judge the goals of one run; none if there are more agents than the goals are for."""
    if figures["agents"] > GOAL_AGENTS:
        return []
    goals = {
        f"formed within {FORMED_SECONDS:g} s": (figures["first"], FORMED_SECONDS),
        f"at most {CORES:g} cores while all train": (figures["cores"], CORES),
    }
    return [
        Verdict(
            Outcome.MET if value <= bound else Outcome.MISSED, f"{figures['agents']} agents: {goal}", f"{value:.2f}"
        )
        for goal, (value, bound) in goals.items()
    ]


def main() -> int:
    """Measure and print one line of JSON for each number of agents, and the verdicts to standard error."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--agents", type=int, nargs="+", default=[1000, 10_000])
    parser.add_argument(
        "--heartbeat", type=float, nargs="+", default=[1.0], help="seconds; one, or one for each number"
    )
    parser.add_argument("--processes", type=int, default=1, help="ranks of each agent")
    parser.add_argument("--viewers", type=int, nargs="+", default=[0], help="viewers of the live page")
    parser.add_argument("--logged", type=int, default=0, help="steps that the run has logged before")
    parser.add_argument("--seconds", type=float, default=20.0, help="how long to measure steady training")
    args = parser.parse_args()
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    heartbeats = args.heartbeat if len(args.heartbeat) > 1 else args.heartbeat * len(args.agents)
    verdicts: list[Verdict] = []
    for agents, heartbeat in zip(args.agents, heartbeats, strict=True):
        for viewers in args.viewers:
            figures = asyncio.run(measure(agents, heartbeat, args.seconds, args.processes, viewers, args.logged))
            rounded = {name: round(value, 4) if isinstance(value, float) else value for name, value in figures.items()}
            print(json.dumps(rounded), flush=True)
            verdicts += judge(figures)
    for verdict in verdicts:
        print(verdict, file=sys.stderr)
    return exit_code(verdicts)


if __name__ == "__main__":
    sys.exit(main())
