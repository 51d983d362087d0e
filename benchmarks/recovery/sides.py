"""The contestants: how each one's job is started, where its authority on membership is, and how its log is read.

All have two replicas of one gloo rank each, the same machine, the same network. The *authority* decides who is in the
group: Tandem's coordinator at a place of its own; for c10d with the best settings a store at a place of its own; for
c10d with the defaults, the store inside the first replica's agent; for torchft its lighthouse, at a place of its own.
"""

import importlib.util
import json
import signal
import subprocess
import sys
import time
from abc import ABC, abstractmethod
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil

from benchmarks.recovery.analysis import Line, parse
from benchmarks.recovery.surroundings import Network, end, kill, marked, spawn
from tandem.job.resource import Elasticity
from tandem.processes import launch
from tandem.rundir.layout import RunDir
from tests.support import manifests
from tests.support.lines import read_lines

SCRIPT = Path(__file__).with_name("script.py")
TORCHFT_SCRIPT = SCRIPT.with_name("torchft_script.py")
SESSION_SCRIPT = SCRIPT.with_name("session_script.py")
AUTHORITY = "authority"
PORT = 29400
TOKEN = "the-token-of-this-bench"
FOREVER = 1_000_000
LEAVE_SECONDS = 45.0
"""Timeout for a job to end after SIGTERM; torchrun gives ranks 30 s by default."""
TEARDOWN_SECONDS = 2.0
"""Time in which the kernel frees the memory of dead processes."""


class Side(ABC):
    """Job of one contestant, in a folder and a network of its own."""

    name = ""
    summary = ""
    """Description for the table's legend, one line."""
    full = 2
    hang_seconds = 0.0
    """Seconds after which a stopped rank is noticed; 0 if unspecified."""

    def __init__(self, folder: Path, network: Network) -> None:
        self.folder, self.network = folder, network
        self.replicas = [place for place in network.places if place != AUTHORITY][: self.full]
        self.agents: dict[str, subprocess.Popen[bytes]] = {}
        self.shared: set[str] = set()
        folder.mkdir(parents=True)

    def start(self) -> None:
        """Start the authority and all replicas."""
        self.start_authority()
        for replica in self.replicas:
            self.start_replica(replica)

    @property
    def first(self) -> str:
        """The replica that a first-time user would call the master."""
        return self.replicas[0]

    @property
    def authority_place(self) -> str:
        """Place of the authority."""
        return AUTHORITY

    @classmethod
    def is_installed(cls) -> bool:
        """Whether all that it needs is installed."""
        return True

    @abstractmethod
    def start_authority(self) -> None:
        """Start the authority on membership."""

    @abstractmethod
    def kill_authority(self) -> None:
        """Kill the authority with SIGKILL."""

    def replace_authority(self) -> None:
        """Restart the authority at its place, as a supervisor does."""
        self.start_authority()

    @abstractmethod
    def command(self, replica: str) -> tuple[list[str], dict[str, str]]:
        """The agent's command and variables."""

    @abstractmethod
    def lines(self) -> list[Line]:
        """Read the log of all ranks so far, in order of time."""

    @abstractmethod
    def marks(self) -> list[tuple[float, str]]:
        """Read further times for the breakdown: when a generation was closed and opened."""

    def start_replica(self, replica: str) -> None:
        """Start one replica's agent."""
        command, variables = self.command(replica)
        self.agents[replica] = spawn(self.network, replica, command, variables, self.folder / f"{replica}.txt")

    def kill_agent(self, replica: str) -> None:
        """Kill an agent alone; its ranks continue."""
        agent = self.agents.pop(replica)
        agent.kill()
        agent.wait()

    def kill_node(self, replica: str) -> None:
        """Kill an agent and all its processes at once, as the loss of a node does."""
        agent = self.agents.pop(replica)
        for pid in [agent.pid, *self._descendants(agent.pid)]:
            kill(pid)
        agent.wait()

    def ranks(self, replica: str) -> list[int]:
        """Processes that train at a replica."""
        agent = self.agents.get(replica)
        return [] if agent is None else [pid for pid in self._descendants(agent.pid) if self._is_rank(pid)]

    def ended(self) -> list[str]:
        """Replicas whose agents have ended by themselves."""
        return [replica for replica, agent in self.agents.items() if agent.poll() is not None]

    def orphans(self) -> list[psutil.Process]:
        """Processes whose agent is dead."""
        living = {pid for agent in self.agents.values() for pid in [agent.pid, *self._descendants(agent.pid)]}
        own = living | {process.pid for process in self.other_processes()}
        return [process for process in marked(self.network.mark) if process.pid not in own]

    def other_processes(self) -> list[subprocess.Popen[bytes]]:
        """Processes that are not agents."""
        return []

    def close(self) -> list[str]:
        """End the job like a user, with SIGTERM; returns what remains of it, and removes that."""
        self.network.heal_all()
        for process in [*self.agents.values(), *self.other_processes()]:
            self._resume(process.pid)
            process.terminate()
        deadline = time.monotonic() + LEAVE_SECONDS
        for process in [*self.agents.values(), *self.other_processes()]:
            with suppress(subprocess.TimeoutExpired):
                process.wait(max(0.1, deadline - time.monotonic()))
        # The kernel needs a moment to end the processes that die with an agent.
        deadline = time.monotonic() + TEARDOWN_SECONDS
        while (remaining := marked(self.network.mark)) and time.monotonic() < deadline:
            time.sleep(0.05)
        leftovers = [f"process {_described(process)}" for process in remaining]
        end(remaining)
        leftovers += [f"port {port} at {place}" for place, ports in self.network.listeners().items() for port in ports]
        return leftovers + [f"folder {path}" for path in sorted(self.shared) if Path(path).exists()]

    def remember(self) -> None:
        """Note the shared folders of its processes, so that `close` can check that they are gone."""
        for process in marked(self.network.mark):
            with suppress(psutil.Error, OSError):
                if path := process.environ().get(launch.PULSE):
                    self.shared.add(path)

    def _descendants(self, pid: int) -> list[int]:
        try:
            return [child.pid for child in psutil.Process(pid).children(recursive=True)]
        except psutil.NoSuchProcess:
            return []

    @abstractmethod
    def _is_rank(self, pid: int) -> bool:
        """Whether a process trains."""

    def _resume(self, pid: int) -> None:
        for process_id in [pid, *self._descendants(pid)]:
            kill(process_id, signal.SIGCONT)


class Scripted(Side):
    """Runs the ordinary script, and reads its log."""

    def __init__(self, folder: Path, network: Network) -> None:
        super().__init__(folder, network)
        self._read: dict[Path, tuple[int, list[Line]]] = {}

    def variables(self, replica: str) -> dict[str, str]:
        """Variables of the script."""
        return {"RECOVERY_FOLDER": str(self.folder), "RECOVERY_REPLICA": replica}

    def lines(self) -> list[Line]:
        for path in self.folder.glob("writer-*.txt"):
            replica, _, pid = path.stem.removeprefix("writer-").rpartition("-")
            offset, parsed = self._read.get(path, (0, []))
            with path.open("rb") as file:
                file.seek(offset)
                content = file.read()
            content = content[: content.rfind(b"\n") + 1]
            if content:
                parsed = parsed + parse(content.decode(), replica, int(pid))
                self._read[path] = (offset + len(content), parsed)
        return sorted((line for _, parsed in self._read.values() for line in parsed), key=lambda line: line.time)

    def _is_rank(self, pid: int) -> bool:
        return any(self.folder.glob(f"writer-*-{pid}.txt"))

    def trip(self, moment: str) -> None:
        """Have the next rank that saves or restores killed in the middle of it."""
        (self.folder / f"trip-{moment}").touch()


class Torchrun(Scripted):
    """`torchrun --rdzv-backend=c10d` with its default settings; the store is in the first replica's agent."""

    name = "c10d"
    summary = "torchrun --rdzv-backend=c10d as it comes (with a high --max-restarts)"

    @property
    def authority_place(self) -> str:
        return self.first

    def start_authority(self) -> None:
        """Do nothing: the store starts with the first replica."""

    def kill_authority(self) -> None:
        self.kill_node(self.first)

    def replace_authority(self) -> None:
        self.start_replica(self.first)

    def command(self, replica: str) -> tuple[list[str], dict[str, str]]:
        # torchrun decides by host name whether it hosts the store; here all share the machine's name.
        host = f"is_host={'true' if replica == self.first else 'false'}"
        return self._torchrun(replica, self.first, host), self.variables(replica)

    def marks(self) -> list[tuple[float, str]]:
        return []

    def _torchrun(self, replica: str, host: str, settings: str, *more: str) -> list[str]:
        return [
            *(sys.executable, "-m", "torch.distributed.run"),
            *("--nnodes=1:2", "--nproc-per-node=1", f"--max-restarts={FOREVER}"),
            *("--rdzv-backend=c10d", f"--rdzv-endpoint={self.network.address(host)}:{PORT}", "--rdzv-id=recovery"),
            *(f"--rdzv-conf={settings}", f"--local-addr={self.network.address(replica)}"),
            *more,
            str(SCRIPT),
        ]


STORE = """
import sys, threading
from torch.distributed import TCPStore
store = TCPStore("0.0.0.0", int(sys.argv[1]), is_master=True, wait_for_workers=False)
threading.Event().wait()
"""


class Served(Scripted):
    """A side whose authority is a process of its own, at a place of its own."""

    def __init__(self, folder: Path, network: Network) -> None:
        super().__init__(folder, network)
        self._server: subprocess.Popen[bytes] | None = None

    @property
    def authority_place(self) -> str:
        return AUTHORITY

    @abstractmethod
    def server(self) -> list[str]:
        """Arguments of Python for the authority."""

    def start_authority(self) -> None:
        command = [sys.executable, "-c", *self.server()]
        self._server = spawn(self.network, AUTHORITY, command, {}, self.folder / "authority.txt")

    def kill_authority(self) -> None:
        assert self._server is not None
        self._server.kill()
        self._server.wait()

    def replace_authority(self) -> None:
        self.start_authority()

    def other_processes(self) -> list[subprocess.Popen[bytes]]:
        return [self._server] if self._server else []


class BestTorchrun(Served, Torchrun):
    """c10d with the best settings found: quick timeouts, no shared store, the rendezvous store outside of the group."""

    name = "c10d-best"
    summary = "the same with the best settings found, and its store at a place of its own"

    def server(self) -> list[str]:
        return [STORE, str(PORT)]

    def command(self, replica: str) -> tuple[list[str], dict[str, str]]:
        # With keep_alive_max_attempt=2 the node that stayed and the one that returns end as two groups (3 of 3 here): a
        # heartbeat is due every second, is skipped if its timer is a millisecond early, and then comes after two, when
        # the other node has already taken its sender for dead.
        settings = "is_host=false,last_call_timeout=1,keep_alive_interval=1,keep_alive_max_attempt=3"
        command = self._torchrun(replica, AUTHORITY, settings, "--monitor-interval=0.05", "--shutdown-timeout=2")
        return command, self.variables(replica) | {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}


LIGHTHOUSE = """
import json, sys, threading
from torchft.coordination import LighthouseServer
server = LighthouseServer(bind=f"0.0.0.0:{sys.argv[1]}", min_replicas=1, **json.loads(sys.argv[2]))
threading.Event().wait()
"""


class Torchft(Served):
    """torchft, with its default settings: survivors keep their process, and a step that fails is dropped."""

    name = "torchft"
    summary = "torchft 0.2.0 as it comes, with the loop of its README"
    lighthouse: dict[str, int] = {}
    timeout_seconds = 60.0
    """Timeout of its collectives; its default."""
    wrapper = "ddp"
    """Its wrapper around the model: `ddp`, its DistributedDataParallel, or `pure`, its PureDistributedDataParallel."""

    @classmethod
    def is_installed(cls) -> bool:
        return importlib.util.find_spec("torchft") is not None

    def server(self) -> list[str]:
        return [LIGHTHOUSE, str(PORT), json.dumps(self.lighthouse)]

    def command(self, replica: str) -> tuple[list[str], dict[str, str]]:
        address = self.network.address(replica)
        command = [
            *(sys.executable, "-m", "torch.distributed.run"),
            *("--nnodes=1", "--nproc-per-node=1", f"--max-restarts={FOREVER}", "--monitor-interval=0.05"),
            *("--rdzv-backend=c10d", f"--rdzv-endpoint={address}:{PORT}", "--rdzv-conf=is_host=true"),
            *(f"--local-addr={address}", str(TORCHFT_SCRIPT)),
        ]
        own = {
            "TORCHFT_LIGHTHOUSE": f"http://{self.network.address(AUTHORITY)}:{PORT}",
            "RECOVERY_ADDRESS": address,
            "RECOVERY_TIMEOUT": f"{self.timeout_seconds}",
            "RECOVERY_WRAPPER": self.wrapper,
        }
        return command, self.variables(replica) | own

    def marks(self) -> list[tuple[float, str]]:
        return []


class BestTorchft(Torchft):
    """torchft with the best settings found."""

    name = "torchft-best"
    summary = "the same with the best settings found"
    lighthouse = {"heartbeat_timeout_ms": 300, "quorum_tick_ms": 20, "join_timeout_ms": 1000}
    timeout_seconds = 5.0
    wrapper = "pure"


BEST = {"heartbeatSeconds": 0.5, "growCooldownSeconds": 1.0, "hangSeconds": 5.0}
"""Settings of Tandem with the fastest recovery here, like those of c10d-best."""


class Coordinated(Side):
    """Job and coordinator of all Tandem sides: default settings, except that any number of failures is allowed."""

    trainer: dict[str, Any] = {}
    evaluators: dict[str, Any] = {"replicas": 0}
    elasticity: dict[str, Any] = {}
    hang_seconds = Elasticity().hang_seconds

    def __init__(self, folder: Path, network: Network) -> None:
        super().__init__(folder, network)
        self.run_dir = RunDir(folder / "run")
        self.job = manifests.job(
            "recovery",
            trainer=self.trainer,
            workers={"replicas": self.full, "minReplicas": 1},
            evaluators=self.evaluators,
            checkpoint={"everySteps": 25},
            elasticity={"maxRestarts": FOREVER} | self.elasticity,
        )
        self.run_dir.create()
        self.run_dir.write_job(self.job)
        self._coordinator: subprocess.Popen[bytes] | None = None

    @property
    def endpoint(self) -> str:
        """Address of the coordinator."""
        return f"{self.network.address(AUTHORITY)}:{PORT}"

    def start_authority(self) -> None:
        command = launch.coordinator_command("0.0.0.0", PORT)
        variables = launch.environment(self.job, self.run_dir.path, "coordinator", TOKEN, self.endpoint)
        self._coordinator = spawn(self.network, AUTHORITY, command, variables, self.folder / "coordinator.txt")

    def kill_authority(self) -> None:
        assert self._coordinator is not None
        self._coordinator.kill()
        self._coordinator.wait()

    def other_processes(self) -> list[subprocess.Popen[bytes]]:
        return [self._coordinator] if self._coordinator else []

    def command(self, replica: str) -> tuple[list[str], dict[str, str]]:
        command = launch.agent_command(self.job, self.endpoint, self.network.address(replica))
        return command, launch.environment(self.job, self.run_dir.path, replica, TOKEN, self.endpoint)

    def marks(self) -> list[tuple[float, str]]:
        lines = read_lines(self.run_dir.log / "coordinator.jsonl")[0]
        return [(line["time"], line["kind"]) for line in lines if line["kind"] in ("closed", "generation")]


class Tandem(Coordinated, Scripted):
    """Tandem with default settings and the same ordinary script."""

    name = "tandem"
    summary = "Tandem as it comes, with the same script (and a high maxRestarts)"
    trainer = {"command": [str(SCRIPT)]}

    def command(self, replica: str) -> tuple[list[str], dict[str, str]]:
        command, variables = super().command(replica)
        return command, variables | self.variables(replica)


class BestTandem(Tandem):
    """Tandem with the best settings found."""

    name = "tandem-best"
    summary = "the same with the best settings found"
    # The script cannot save on request, so with the defaults the group only grows after a minute.
    elasticity = BEST | {"growAfterSeconds": 0.5}
    hang_seconds = BEST["hangSeconds"]


class BestColdTandem(BestTandem):
    """Tandem with the best settings found, without warm starts."""

    name = "tandem-cold-best"
    summary = "tandem-best without warm starts"
    elasticity = BestTandem.elasticity | {"warmStart": False}


class TandemTrainer(Coordinated):
    """Tandem with default settings and its built-in trainer: ranks with heartbeats, checkpoints with fencing."""

    name = "tandem-trainer"
    summary = "Tandem as it comes, with its built-in trainer (and a high maxRestarts)"
    trainer = {
        "task": "image-classification",
        "parameters": {"model": "baby-cnn", "data": {"name": "synthetic", "samples": 4096, "imageSize": 16}},
        "loop": {"globalBatchSize": 128, "epochs": FOREVER},
    }

    def __init__(self, folder: Path, network: Network) -> None:
        super().__init__(folder, network)
        self._offsets: dict[Path, int] = {}
        self._worlds: dict[str, int] = {}
        self._started_at: dict[str, float] = {}
        self._lines: list[Line] = []

    def lines(self) -> list[Line]:
        for path in sorted(self.run_dir.log.glob("train-g*.jsonl")):
            records, self._offsets[path] = read_lines(path, self._offsets.get(path, 0))
            group = path.stem.removeprefix("train-")
            for record in records:
                self._lines += self._translated(group, record)
        self._lines.sort(key=lambda line: line.time)
        return list(self._lines)

    def _translated(self, group: str, record: dict[str, Any]) -> list[Line]:
        if record["kind"] == "start":
            self._worlds[group], self._started_at[group] = record["worldSize"], record["time"]
        # Survivors log again what the lost rank may not have written.
        if record["time"] < self._started_at.get(group, 0.0):
            return []
        event = {"start": "restored", "step": "step", "checkpoint": "saved"}.get(record["kind"])
        if event is None:
            return []
        return [Line(record["time"], event, group, self._worlds[group], 0, record["step"])]

    def _is_rank(self, pid: int) -> bool:
        try:
            process = psutil.Process(pid)
            # A forked rank has its agent's command line and a name of its own.
            return process.name() == "tandem-rank" or (
                process.cmdline()[-2:] == ["-m", "tandem_trainer"] and not _stands_in(process)
            )
        except psutil.Error:
            return False


class BestTandemTrainer(TandemTrainer):
    """The built-in trainer with the best settings found."""

    name = "tandem-trainer-best"
    summary = "the same with the best settings found"
    elasticity = BEST
    hang_seconds = BEST["hangSeconds"]


class RegroupingTrainer(BestTandemTrainer):
    """The built-in trainer, whose ranks keep their process and their step."""

    name = "tandem-regroup-best"
    summary = "the same with onMembershipChange: Regroup"
    elasticity = BEST | {"onMembershipChange": "Regroup"}


class RegroupingSession(RegroupingTrainer):
    """A loop of the user's own with a session, whose ranks keep their process and their step."""

    name = "tandem-regroup-session-best"
    summary = "the same with a session in a loop of the user's own"
    trainer = {"command": [str(SESSION_SCRIPT)]}


SIDES: dict[str, type[Side]] = {
    side.name: side
    for side in (
        *(Tandem, BestTandem, BestColdTandem),
        *(TandemTrainer, BestTandemTrainer, RegroupingTrainer, RegroupingSession),
        *(Torchrun, BestTorchrun),
        *(Torchft, BestTorchft),
    )
}
"""Sides in the order of their turns and of the table. Names of those with the best settings found end in `-best`;
the others have the defaults."""


def _stands_in(process: psutil.Process) -> bool:
    """Whether it is an agent, a fork server, or the stub of a forked rank."""
    args = process.cmdline()
    return "tandem_trainer.agent" in args or any(word.endswith("stub.py") for word in args)


def _described(process: psutil.Process) -> str:
    with suppress(psutil.Error):
        facts = f"{process.pid} {process.name()} ({process.status()}, child of {process.ppid()})"
        return f"{facts} {' '.join(process.cmdline())[:120]}"
    return str(process.pid)
