"""A real coordinator and real torchrun agents on one machine, for tests that kill them."""

import json
import os
import signal
import subprocess
import time
import urllib.request
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import psutil

from tandem.processes import launch
from tandem.processes.launch import endpoint
from tandem.wire.coordinator_client import CoordinatorClient, Unreachable
from tandem.wire.status import Snapshot
from tests.support import ROOT, SCRIPTS, manifests
from tests.support.ports import reserved_port
from tests.support.waiting import until
from tests.support.zygote import Forked

T = TypeVar("T")
TOKEN = "the-token-of-these-tests"
SCRIPT = SCRIPTS / "steps.py"
HEARTBEAT_SECONDS = 0.5


@dataclass(frozen=True)
class Step:
    """One line of a rank's file."""

    at: float
    step: int
    world: int
    generation: int
    rank: int
    pid: int


class Elastic:
    """One job: a run directory, its coordinator, its agents."""

    def __init__(
        self,
        path: Path,
        replicas: int = 2,
        aware: bool = True,
        total: int = 1_000_000,
        host: str = "127.0.0.1",
        **spec: Any,
    ) -> None:
        self.path, self.host = path, host
        self.folder = ROOT
        """Working folder of agents that are started from now on."""
        elasticity = {"heartbeatSeconds": HEARTBEAT_SECONDS, "lostAfterSeconds": 3.0, "growCooldownSeconds": 0.5}
        elasticity |= {"growAfterSeconds": 0.5}
        whole = {
            "trainer": {"command": [str(SCRIPT)]},
            "workers": {"replicas": replicas},
            "elasticity": elasticity | spec.pop("elasticity", {}),
            **spec,
        }
        self.job = manifests.job("elastic", **whole)
        self.rundir = manifests.run_directory(path / "run", self.job)
        self.port = reserved_port()
        self.coordinator: subprocess.Popen[bytes] | Forked | None = None
        self.agents: dict[str, subprocess.Popen[bytes] | Forked] = {}
        self.extra = {"STEPS_AWARE": str(int(aware)), "STEPS_TOTAL": str(total), "OMP_NUM_THREADS": "1"}

    # Processes

    def start(self, *replicas: str) -> "Elastic":
        self.start_coordinator()
        for replica in replicas:
            self.start_agent(replica)
        return self

    def start_coordinator(self) -> None:
        port_file = self.path / "port"
        port_file.unlink(missing_ok=True)
        self.coordinator = self._fork("coordinator", launch.coordinator_command(self.host, self.port, port_file))
        self.port = int(until(lambda: port_file.exists() and port_file.read_text(), "the coordinator's start"))

    def start_agent(self, replica: str) -> None:
        command = launch.agent_command(self.job, endpoint(self.host, self.port), self.host, shutdown_seconds=2)
        warm = self.job.spec.elasticity.warm_start
        self.agents[replica] = (self._fork if warm else self._spawn)(replica, command)

    def ranks_of(self, replica: str) -> list[int]:
        """A replica's training processes: forked ones, or children of the agent where ranks start cold."""
        agent = psutil.Process(self.agents[replica].pid)
        if self.job.spec.elasticity.warm_start:
            return [process.pid for process in agent.children(recursive=True) if process.name() == "tandem-rank"]
        return [process.pid for process in agent.children()]

    def kill_rank(self, replica: str) -> float:
        """Kill a replica's first rank; returns when."""
        now = time.time()
        os.kill(self.ranks_of(replica)[0], signal.SIGKILL)
        return now

    def kill_agent(self, replica: str) -> float:
        """Kill an agent and its ranks, as the loss of a node does; returns when."""
        children, now = self.ranks_of(replica), time.time()
        agent = self.agents.pop(replica)
        agent.kill()
        for child in children:
            with suppress(ProcessLookupError):
                os.kill(child, signal.SIGKILL)
        agent.wait()
        return now

    def kill_coordinator(self) -> None:
        self.coordinator.kill()
        self.coordinator.wait()

    def close(self) -> None:
        """End everything that was started: at once, as nodes are lost. Only ranks that start cold may outlive that."""
        processes = [*self.agents.values(), *([self.coordinator] if self.coordinator else [])]
        for process in processes:
            if self.job.spec.elasticity.warm_start:
                process.kill()
            else:
                process.terminate()
        for process in processes:
            try:
                process.wait(15)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()

    def __enter__(self) -> "Elastic":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # What can be seen

    def client(self, token: str = TOKEN) -> CoordinatorClient:
        return CoordinatorClient(endpoint(self.host, self.port), token)

    def snapshot(self) -> Snapshot | None:
        with self.client() as client, suppress(Unreachable):
            return client.status()
        return None

    def set_target(self, replicas: int) -> None:
        """Wish for another number of replicas, as the operator does."""
        wish = json.dumps({"replicas": replicas}).encode()
        where = f"http://{endpoint(self.host, self.port)}/v1/target"
        request = urllib.request.Request(where, wish, {"Authorization": f"Bearer {TOKEN}"}, method="POST")
        urllib.request.urlopen(request, timeout=10).close()

    def steps(self) -> list[Step]:
        """All steps of all ranks, in the order of time."""
        found = []
        for path in self.rundir.path.glob("steps-*-*.txt"):
            _, generation, rank = path.stem.split("-")
            for line in path.read_text().splitlines():
                words = line.split()
                if len(words) == 4:
                    at, step, world, pid = words
                    found.append(Step(float(at), int(step), int(world), int(generation), int(rank), int(pid)))
        return sorted(found, key=lambda step: step.at)

    def step_after(self, at: float, world: int, generation: int = 0) -> Step:
        """The first step after a moment, by a group of that many ranks."""
        return until(
            lambda: next(
                (
                    s
                    for s in self.steps()
                    if s.at > at and s.world == world and s.generation > generation and s.rank == 0
                ),
                None,
            ),
            f"a step with {world} ranks",
        )

    def output(self, name: str) -> str:
        return (self.path / f"{name}.txt").read_text()

    def _environment(self, name: str) -> dict[str, str]:
        own = launch.environment(self.job, self.rundir.path, name, TOKEN, f"127.0.0.1:{self.port}")
        return {**os.environ, **own, launch.NODE: f"node-of-{name}", **self.extra}

    def _spawn(self, name: str, command: list[str]) -> subprocess.Popen[bytes]:
        with (self.path / f"{name}.txt").open("ab") as output:
            return subprocess.Popen(command, env=self._environment(name), stdout=output, stderr=subprocess.STDOUT)

    def _fork(self, name: str, command: list[str]) -> Forked:
        module, *words = command[command.index("-m") + 1 :]
        with (self.path / f"{name}.txt").open("ab") as output:
            return Forked(module, words, self._environment(name), output, cwd=self.folder)
