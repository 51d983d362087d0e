"""The children of one local run: their commands, variables and places."""

import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from tandem import launch
from tandem.cache import cache_folder, private_folder
from tandem.job import DistributedTrainingJob
from tandem.rundir.layout import RunDir
from tandem.supervision import Role
from tandem_cli.local.placement import Placement
from tandem_cli.local.process import Process

HOST = "127.0.0.1"
COORDINATOR = "coordinator"
KERNELS = "TORCHINDUCTOR_CACHE_DIR"
"""Where torch keeps what it has compiled. It runs whatever it finds there, so the folder has to be this user's own."""
LOOPBACK = "lo" if sys.platform == "linux" else "lo0"


@dataclass(frozen=True)
class Crew:
    """Builds the children of a run.

    Attributes:
        token: the secret that all but the evaluators know.
        mark: what all processes of this run carry in their environment.
        scratch: a private folder for temporary files, removed at the end.
        cores: how many the run may use.
        gpus: CUDA_VISIBLE_DEVICES of each replica; None leaves it alone.
        metrics_port: where the coordinator answers Prometheus without the token; None: nowhere.
    """

    job: DistributedTrainingJob
    run_dir: RunDir
    token: str
    mark: str
    scratch: Path
    placement: Placement
    cores: int
    gpus: Sequence[str] | None = None
    metrics_port: int | None = None

    @property
    def port_file(self) -> Path:
        """Where the coordinator writes the port it took."""
        return self.scratch / "port"

    def roles(self, trains: bool) -> dict[str, Role]:
        """Names of all children. A run that is complete needs no agents any more, only what evaluates the rest."""
        workers, evaluators = self.job.spec.workers, self.job.spec.evaluation
        names: dict[str, Role] = {COORDINATOR: "coordinator"}
        if trains:
            names |= {f"worker-{index}": "agent" for index in range(workers.replicas)}
        for replica in range(evaluators.replicas):
            names |= {f"evaluator-{replica}-{i}": "evaluator" for i in range(evaluators.processes_per_replica)}
        return names

    def coordinator(self, port: int) -> Process:
        """The coordinator, on a port that it keeps over all its lives (0: a free one, at first)."""
        command = launch.coordinator_command(HOST, port, self.port_file, metrics_port=self.metrics_port)
        variables = self._variables(COORDINATOR, f"{HOST}:{port}")
        return self._process(COORDINATOR, command, variables, self.placement.others)

    def agent(self, name: str, port: int) -> Process:
        """One replica."""
        index = int(name.rpartition("-")[2])
        endpoint = f"{HOST}:{port}"
        variables = self._variables(name, endpoint)
        variables.setdefault("OMP_NUM_THREADS", str(self.placement.threads))
        # All ranks are on this machine; the host's name may resolve to an interface that is down, or not at all.
        for library in ("GLOO", "NCCL"):
            variables.setdefault(f"{library}_SOCKET_IFNAME", LOOPBACK)
        if self.gpus is not None:
            variables["CUDA_VISIBLE_DEVICES"] = self.gpus[index]
        command = launch.agent_command(self.job, endpoint, HOST)
        return self._process(name, command, variables, self.placement.of_worker(index))

    def evaluator(self, name: str) -> Process:
        """One evaluator process: on CPUs, with one thread."""
        replica, _, index = name.rpartition("-")
        variables = self._variables(replica) | {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
        command = launch.evaluator_command(int(index))
        return self._process(name, command, variables, self.placement.others)

    def log(self, name: str) -> Path:
        """What a child prints."""
        return self.run_dir.log / f"{name}.txt"

    def _process(self, name: str, command: list[str], variables: dict[str, str], cores: tuple[int, ...]) -> Process:
        return Process(name, command, variables, self.log(name), self.mark, cores)

    def _variables(self, replica: str, endpoint: str = "") -> dict[str, str]:
        token = self.token if endpoint else ""
        own = launch.environment(self.job, self.run_dir.path.resolve(), replica, token, endpoint)
        return inherited(os.environ, self.scratch) | own


def inherited(environment: Mapping[str, str], scratch: Path) -> dict[str, str]:
    """The user's variables for a child. Temporary files go where they are removed; compiled kernels are kept."""
    mine = {name: value for name, value in environment.items() if name != launch.TOKEN}
    if KERNELS not in mine:
        mine[KERNELS] = str(private_folder(cache_folder() / "kernels") or scratch / "kernels")
    return mine | {"TMPDIR": str(scratch)}
