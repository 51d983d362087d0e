"""Builds the processes of a job on SLURM: the coordinator beside the head, agents and evaluators on nodes by srun."""

import os
import re
import subprocess
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from tandem.job.resource import DistributedTrainingJob
from tandem.processes import launch
from tandem.processes.supervision import SAVING_SECONDS
from tandem.rundir.layout import RunDir
from tandem_launcher.local.local_run import COORDINATOR
from tandem_launcher.printed_log import MAX_PART_BYTES, TAIL_BYTES, LogLimiter, read_tail
from tandem_launcher.slurm.extension import outer_environment
from tandem_launcher.slurm.jobs import NodeAllocation
from tandem_launcher.slurm.step import LEAVE, PING

ENDED = re.compile(rb"event=step-ended name=\S+ code=(-?\d+)$", re.MULTILINE)
"""Last line of a step (tandem_launcher.slurm.step)."""
STARTED = re.compile(rb"^--- .*, start on ", re.MULTILINE)
"""First line of a step."""
MAX_PREAMBLE_BYTES = 2**16
"""Bytes of srun's output before that line that are read."""


@dataclass
class SlurmStep:
    """One life of a child process, started by srun or on this node."""

    name: str
    command: Sequence[str]
    environment: Mapping[str, str]
    log: Path
    node: str = ""
    """Node on which srun starts it; empty: this node."""
    max_log_bytes: int = MAX_PART_BYTES
    _process: subprocess.Popen[bytes] | None = field(default=None, repr=False)
    _log_offset: int = 0
    """Place at which this life begins in the log, or in its earlier part if a new one has begun since."""
    _parts_before: int = 0
    """Number of parts of the log that had begun before this life."""
    _is_limited: bool = False

    def __post_init__(self) -> None:
        self._limiter = LogLimiter(self.log, self.max_log_bytes)

    def start(self) -> None:
        """Start the process."""
        self._parts_before += self._new_parts()
        self._log_offset = self.log.stat().st_size if self.log.exists() else 0
        with self.log.open("ab", buffering=0) as output:
            self._process = subprocess.Popen(
                self.command, env=self.environment, stdin=subprocess.PIPE, stdout=output, stderr=subprocess.STDOUT
            )
        # A full pipe must not block the head.
        if self._process.stdin is not None:
            os.set_blocking(self._process.stdin.fileno(), False)

    def ended(self) -> int | None:
        """Return the exit code of srun, or of the local step; None while it runs."""
        if self._process is None or (code := self._process.poll()) is None:
            return None
        self._write(LEAVE, closes=True)
        return code

    def outcome(self) -> int | None:
        """Return the exit code of the process itself, -N for signal N.

        None if it never started, or was lost with its node: srun's exit code then tells nothing about it.
        """
        if self._new_parts():
            # Its last line may be the last one of the earlier part.
            codes = [int(match[1]) for match in ENDED.finditer(self._tail())]
            return codes[-1] if codes else None
        with suppress(OSError), self.log.open("rb") as printed:
            printed.seek(self._log_offset)
            codes = [int(match[1]) for line in printed if (match := ENDED.search(line))]
            return codes[-1] if codes else None
        return None

    def limit_log(self) -> bool:
        """Keep the log below its bound; return whether it has exceeded it for the first time."""
        self._limiter.poll()
        was_limited, self._is_limited = self._is_limited, self._limiter.parts > 0
        return self._is_limited and not was_limited

    def preamble(self) -> str | None:
        """Return srun's output before the step's start; None once the step has started."""
        if new_parts := self._new_parts():
            # Only a step that has started prints so much.
            output = self._tail()
            is_started = new_parts > 1 or len(output) >= TAIL_BYTES or STARTED.search(output)
            return None if is_started else output.decode(errors="replace")
        output = b""
        with suppress(OSError), self.log.open("rb") as printed:
            printed.seek(self._log_offset)
            output = printed.read(MAX_PREAMBLE_BYTES)
        return None if STARTED.search(output) else output.decode(errors="replace")

    def _new_parts(self) -> int:
        """Return the number of parts of the log that have begun in this life. Waits for the end of a copy."""
        self._limiter.wait()
        return self._limiter.parts - self._parts_before

    def _tail(self) -> bytes:
        """Return the end of what this life has printed, once a new part has begun."""
        return read_tail(self.log, self._log_offset if self._new_parts() == 1 else 0).encode()

    def ask(self) -> None:
        """Ask it to save and exit."""
        self._write(LEAVE, closes=True)

    def ping(self) -> None:
        """Tell the step that the head is alive."""
        self._write(PING)

    def _write(self, message: bytes, closes: bool = False) -> None:
        pipe = None if self._process is None else self._process.stdin
        if pipe is not None and not pipe.closed:
            with suppress(OSError):
                pipe.write(message)
            with suppress(OSError):
                pipe.close() if closes else pipe.flush()

    def kill(self) -> None:
        """Kill it. The process that srun started ends when its standard input closes."""
        self.ask()
        if self._process is not None:
            self._process.kill()

    def close(self) -> None:
        """Kill it if it runs, and wait for its end."""
        self.kill()
        if self._process is not None:
            self._process.wait()


@dataclass(frozen=True)
class SlurmProcessFactory:
    """Builds the child processes of a job on SLURM.

    Attributes:
        srun: command that starts a step, without the node; empty: there are no steps.
        container: command before the Python of agents and evaluators.
        token: the coordinator's secret; all children but the evaluators get it.
        scratch: a private folder of this node.
        job_id: ID of the SLURM job.
        saving_seconds: grace period of a process on a node between SIGTERM and SIGKILL, in seconds.
    """

    job: DistributedTrainingJob
    run_dir: RunDir
    srun: Sequence[str]
    container: Sequence[str]
    token: str
    scratch: Path
    job_id: str
    saving_seconds: float = SAVING_SECONDS

    @property
    def python(self) -> str:
        """Return the Python of agents and evaluators."""
        return "python" if self.container else sys.executable

    @property
    def port_file(self) -> Path:
        """File in which the coordinator writes its port."""
        return self.scratch / "port"

    def coordinator(self, endpoint: str, port: int, metrics_port: int | None) -> SlurmStep:
        """Build the coordinator, on ports that it keeps across restarts (0: the first life picks a free one).

        Args:
            metrics_port: port on which it serves metrics without the token; None: no such port.
        """
        command = launch.coordinator_command(launch.ALL_ADDRESSES, port, self.port_file, metrics_port=metrics_port)
        variables = launch.environment(self.job, self.run_dir.path, COORDINATOR, self.token, endpoint)
        return self._local_step(COORDINATOR, command, variables)

    def agent(self, name: str, allocation: NodeAllocation, address: str, endpoint: str) -> SlurmStep:
        """Build the agent of one replica."""
        # torchrun must end its ranks before it is killed itself.
        shutdown = max(0, launch.SHUTDOWN_SECONDS + int(self.saving_seconds - SAVING_SECONDS))
        command = launch.agent_command(self.job, endpoint, address, shutdown, self.python)
        variables = launch.environment(self.job, self.run_dir.path, name, self.token, endpoint)
        variables[launch.NODE] = allocation.node
        if cores := os.environ.get("SLURM_CPUS_PER_TASK", ""):
            variables.setdefault("OMP_NUM_THREADS", str(max(1, int(cores) // self.job.spec.workers.processes)))
        return self._remote_step(allocation, name, [*self.container, *command], variables)

    def evaluators(self, name: str, allocation: NodeAllocation | None) -> SlurmStep:
        """Build the processes of one evaluator replica."""
        count = self.job.spec.evaluation.processes_per_replica
        # Ranks train on the GPUs of the node, which SLURM also gives to this step.
        evaluators = launch.evaluators_command(count, self.python)
        command = ["env", "CUDA_VISIBLE_DEVICES=", *self.container, *evaluators]
        variables = launch.evaluator_environment(self.job, self.run_dir.path, name)
        if allocation is None:
            return self._local_step(name, command, variables)
        # The lowest priority: ranks train on the same node.
        return self._remote_step(allocation, name, ["nice", "-n", "19", *command], variables)

    def log(self, name: str) -> Path:
        """Return the log file of a child's output."""
        return self.run_dir.log / f"{name}.txt"

    def _remote_step(
        self, allocation: NodeAllocation, name: str, command: Sequence[str], variables: Mapping[str, str]
    ) -> SlurmStep:
        srun, inherited = [*self.srun, f"--nodelist={allocation.node}", f"--job-name={name}"], dict(os.environ)
        if allocation.job != self.job_id:
            # An extension's node: the variables of the head's own job would limit srun to that job.
            srun, inherited = [*srun, f"--jobid={allocation.job}"], outer_environment(os.environ)
        step = self._step_command(name, command, self.job_id)
        return SlurmStep(name, [*srun, *step], {**inherited, **variables}, self.log(name), allocation.node)

    def _local_step(self, name: str, command: Sequence[str], variables: Mapping[str, str]) -> SlurmStep:
        return SlurmStep(name, self._step_command(name, command), os.environ | variables, self.log(name))

    def _step_command(self, name: str, command: Sequence[str], job_id: str = "") -> list[str]:
        return launch.module_command("tandem_launcher.slurm.step", job_id, name, str(self.saving_seconds), *command)
