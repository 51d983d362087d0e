"""What the head of a job on SLURM starts: the coordinator beside it, and by srun agents and evaluators on the nodes."""

import os
import re
import subprocess
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from tandem import launch
from tandem.job import DistributedTrainingJob
from tandem.rundir.layout import RunDir
from tandem.supervision import SAVING_SECONDS
from tandem_cli.local.local_run import COORDINATOR
from tandem_cli.slurm.extension import outside
from tandem_cli.slurm.jobs import Place
from tandem_cli.slurm.step import HERE, LEAVE

ENDED = re.compile(rb"event=step-ended name=\S+ code=(-?\d+)$", re.MULTILINE)
"""The last line of a step (tandem_cli.slurm.step)."""
BEGUN = re.compile(rb"^--- .*, start on ", re.MULTILINE)
"""Its first line."""
MAX_SAID = 2**16
"""Bytes that srun may say before that line."""


@dataclass
class Step:
    """One child, by srun or on this node, over one life."""

    name: str
    command: Sequence[str]
    environment: Mapping[str, str]
    log: Path
    node: str = ""
    """Where srun starts it; empty: here."""
    _process: subprocess.Popen[bytes] | None = field(default=None, repr=False)
    _from: int = 0

    def start(self) -> None:
        """Begin."""
        self._from = self.log.stat().st_size if self.log.exists() else 0
        with self.log.open("ab", buffering=0) as output:
            self._process = subprocess.Popen(
                self.command, env=self.environment, stdin=subprocess.PIPE, stdout=output, stderr=subprocess.STDOUT
            )
        # A head that waits for a pipe could not do anything else.
        if self._process.stdin is not None:
            os.set_blocking(self._process.stdin.fileno(), False)

    def ended(self) -> int | None:
        """The exit code of srun, or of the step here; None while it runs."""
        if self._process is None or (code := self._process.poll()) is None:
            return None
        self._say(LEAVE, last=True)
        return code

    def outcome(self) -> int | None:
        """The exit code of the process itself, once it has ended: minus a signal's number if one ended it.

        None if it was never started, or was lost with its node: srun then ends with a code that says nothing of it.
        """
        with suppress(OSError), self.log.open("rb") as printed:
            printed.seek(self._from)
            codes = [int(found[1]) for line in printed if (found := ENDED.search(line))]
            return codes[-1] if codes else None
        return None

    def preamble(self) -> str | None:
        """What srun has said before the step began; None once it has begun."""
        said = b""
        with suppress(OSError), self.log.open("rb") as printed:
            printed.seek(self._from)
            said = printed.read(MAX_SAID)
        return None if BEGUN.search(said) else said.decode(errors="replace")

    def ask(self) -> None:
        """Ask it to save and leave."""
        self._say(LEAVE, last=True)

    def greet(self) -> None:
        """Say that the head is there."""
        self._say(HERE)

    def _say(self, word: bytes, last: bool = False) -> None:
        pipe = None if self._process is None else self._process.stdin
        if pipe is not None and not pipe.closed:
            with suppress(OSError):
                pipe.write(word)
            with suppress(OSError):
                pipe.close() if last else pipe.flush()

    def kill(self) -> None:
        """End it at once. What srun has started ends when it finds its standard input closed."""
        self.ask()
        if self._process is not None:
            self._process.kill()

    def close(self) -> None:
        """Kill it if it runs, and wait for that."""
        self.kill()
        if self._process is not None:
            self._process.wait()


@dataclass(frozen=True)
class Crew:
    """Builds the children of a job on SLURM.

    Attributes:
        srun: the command that starts a step, up to the node; empty: there are no steps.
        container: words before the Python of agents and evaluators.
        token: the secret that all but the evaluators know.
        scratch: a private folder of this node.
        job_id: the number of the job of SLURM.
        saving_seconds: what a process on a node gets between SIGTERM and SIGKILL.
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
        """The Python of agents and evaluators."""
        return "python" if self.container else sys.executable

    @property
    def port_file(self) -> Path:
        """Where the coordinator writes the port it took."""
        return self.scratch / "port"

    def coordinator(self, endpoint: str, port: int, metrics_port: int | None) -> Step:
        """The coordinator, on ports that it keeps over all its lives (0: a free one, at first).

        Args:
            metrics_port: where it answers Prometheus without the token; None: nowhere.
        """
        command = launch.coordinator_command(launch.EVERYWHERE, port, self.port_file, metrics_port=metrics_port)
        variables = launch.environment(self.job, self.run_dir.path, COORDINATOR, self.token, endpoint)
        return self._here(COORDINATOR, command, variables)

    def agent(self, name: str, place: Place, address: str, endpoint: str) -> Step:
        """One replica."""
        # torchrun has to end its ranks before it is ended itself.
        shutdown = max(0, launch.SHUTDOWN_SECONDS + int(self.saving_seconds - SAVING_SECONDS))
        command = launch.agent_command(self.job, endpoint, address, shutdown, self.python)
        variables = launch.environment(self.job, self.run_dir.path, name, self.token, endpoint)
        variables[launch.NODE] = place.node
        if cores := os.environ.get("SLURM_CPUS_PER_TASK", ""):
            variables.setdefault("OMP_NUM_THREADS", str(max(1, int(cores) // self.job.spec.workers.processes)))
        return self._on(place, name, [*self.container, *command], variables)

    def evaluators(self, name: str, place: Place | None) -> Step:
        """The processes of one evaluator replica."""
        count = self.job.spec.evaluation.processes_per_replica
        # On the GPUs of its node others train; SLURM gives a step those of its job.
        evaluators = launch.evaluators_command(count, self.python)
        command = ["env", "CUDA_VISIBLE_DEVICES=", *self.container, *evaluators]
        variables = launch.evaluator_environment(self.job, self.run_dir.path, name)
        if place is None:
            return self._here(name, command, variables)
        # Beside the ranks they run on what those leave free.
        return self._on(place, name, ["nice", "-n", "19", *command], variables)

    def log(self, name: str) -> Path:
        """What a child prints."""
        return self.run_dir.log / f"{name}.txt"

    def _on(self, place: Place, name: str, command: Sequence[str], variables: Mapping[str, str]) -> Step:
        words, inherited = [*self.srun, f"--nodelist={place.node}", f"--job-name={name}"], dict(os.environ)
        if place.job != self.job_id:
            words, inherited = [*words, f"--jobid={place.job}"], outside(os.environ)
        step = self._step(name, command, self.job_id)
        return Step(name, [*words, *step], {**inherited, **variables}, self.log(name), place.node)

    def _here(self, name: str, command: Sequence[str], variables: Mapping[str, str]) -> Step:
        return Step(name, self._step(name, command), os.environ | variables, self.log(name))

    def _step(self, name: str, command: Sequence[str], job_id: str = "") -> list[str]:
        return launch.module_command("tandem_cli.slurm.step", job_id, name, str(self.saving_seconds), *command)
