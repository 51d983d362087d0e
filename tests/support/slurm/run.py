"""`tandem submit --slurm` as a user types it, and eyes to watch the job with."""

import copy
import json
from collections.abc import Mapping
from pathlib import Path
from subprocess import CompletedProcess
from typing import Any

import yaml

from tandem.rundir.layout import RunDir
from tandem.wire.coordinator_client import CoordinatorClient, CoordinatorRefused, Unreachable
from tandem.wire.status import Snapshot
from tandem_cli.local.run_view import endpoint
from tests.support import EXAMPLES
from tests.support.processes import tandem
from tests.support.ranks import records
from tests.support.slurm.machine import Slurm
from tests.support.waiting import until

DIGITS = EXAMPLES / "digits.yaml"
PROFILES: dict[str, Any] = {
    "default": "main",
    "profiles": {
        "main": {
            "partition": "main",
            "time": "60",
            "env": {"GLOO_SOCKET_IFNAME": "lo"},
            "evaluators": {"partition": "cpu"},
            "replaceNodes": False,
        },
        "away": {"partition": "away"},
        "beside": {"partition": "main", "time": "60", "env": {"GLOO_SOCKET_IFNAME": "lo"}},
        "whole": {
            "partition": "all",
            "time": "60",
            "env": {"GLOO_SOCKET_IFNAME": "lo"},
            "sbatch": ["--exclusive"],
        },
    },
}
"""As of a typical cluster; on this one all nodes share the loopback address."""

ENDLESS = ("--set", "trainer.loop.epochs=100000", "--set", "checkpoint.everySteps=1000000")
"""No checkpoint comes but those that a change makes."""
GIVEN_UP_SECONDS = 300.0
"""For SLURM to give up a node that is lost; seen: 52 s where little else runs, and more than 120."""


class SlurmRun:
    """One run in a folder, which is the shared file system.

    Args:
        manifest: the job's.
        name: of its run directory, where it is not that of the job.
    """

    def __init__(self, slurm: Slurm, folder: Path, manifest: Path = DIGITS, name: str = "") -> None:
        self.slurm, self.folder, self._manifest = slurm, folder, manifest
        self.path = folder / "runs" / (name or manifest.stem)
        self._where = ["--run-dir", f"runs/{name}"] if name else []
        self.run_dir = RunDir(self.path)
        (folder / "config" / "tandem").mkdir(parents=True, exist_ok=True)
        self.profile("main", metricsTargets=str(self.targets))
        self.targets.mkdir(exist_ok=True)

    def profile(self, name: str, **fields: Any) -> None:
        """Write the user's profiles, one of them with these fields, too."""
        profiles = copy.deepcopy(PROFILES)
        profiles["profiles"][name].update(fields)
        (self.folder / "config" / "tandem" / "slurm.yaml").write_text(yaml.safe_dump(profiles))

    @property
    def targets(self) -> Path:
        """Where Prometheus looks for targets."""
        return self.folder / "targets"

    def variables(self) -> Mapping[str, str]:
        home = {"XDG_CONFIG_HOME": str(self.folder / "config"), "XDG_STATE_HOME": str(self.folder / "state")}
        return self.slurm.variables() | home

    def tandem(self, *words: str | Path) -> CompletedProcess[str]:
        return tandem(*words, cwd=self.folder, variables=self.variables())

    def submit(self, *words: str) -> str:
        """Give it to SLURM; returns the number of the training."""
        done = self.tandem("submit", "--slurm", self._manifest, *self._where, *words)
        assert done.returncode == 0, done.stderr
        return self.job

    @property
    def job(self) -> str:
        """The number of the training."""
        return str(json.loads((self.path / "slurm" / "submission.json").read_text())["training"])

    def state(self) -> str:
        """As squeue says it, with the reason; empty if it is not in the queue."""
        lines = self.slurm.ask("squeue", "--noheader", "--format=%i %T %r").splitlines()
        return next((line.partition(" ")[2] for line in lines if line.startswith(f"{self.job} ")), "")

    def queue(self) -> str:
        return self.slurm.ask("squeue", "--noheader")

    def snapshot(self) -> Snapshot | None:
        """What the coordinator says; None while there is none."""
        found = endpoint(self.path)
        try:
            if found is not None:
                with CoordinatorClient(*found, timeout=2.0) as client:
                    return client.status()
        except (Unreachable, CoordinatorRefused, ValueError):
            pass
        return None

    def trains(self, world: int, after: int = 0) -> int:
        """Wait until a group of that size has made a step after that one; returns the step."""

        def look() -> int | None:
            found = self.snapshot()
            progress = found.status.progress if found else None
            if found is None or progress is None or found.status.world_size != world or progress.step <= after:
                return None
            return progress.step

        return until(look, f"a step of {world} ranks after step {after}", otherwise=self.output)

    def on(self, nodes: set[str], after: int = 0) -> int:
        """Wait until a group on these nodes has made a step after that one; returns the step."""

        def look() -> int | None:
            found = self.snapshot()
            progress = found.status.progress if found else None
            if found is None or progress is None or progress.step <= after:
                return None
            there = {member.node for member in found.members if member.ranks}
            return progress.step if found.status.world_size == len(nodes) and there == nodes else None

        return until(look, f"a step on {nodes} after step {after}", GIVEN_UP_SECONDS, otherwise=self.output)

    def gone(self) -> None:
        """Wait until the training has left the queue."""
        until(lambda: not self.state(), "the end of the job", otherwise=self.output)

    def output(self) -> str:
        """What the batch scripts have printed."""
        return "\n".join(f"{file.name}:\n{file.read_text()}" for file in sorted((self.folder / "logs").glob("*.out")))


def repeated(run: SlurmRun) -> list[int]:
    """Steps that were made more than once."""
    made = [record["step"] for record in records(run.run_dir, "step")]
    return sorted({step for step in made if made.count(step) > 1})


def saved(run: SlurmRun) -> int:
    """The step of the newest checkpoint."""
    return max((one.step for one in run.run_dir.committed()), default=0)
