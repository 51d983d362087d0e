"""Training processes started by hand, as torchrun would: for tests of the trainer without agents and coordinator."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from tandem.rundir.layout import RunDir
from tests.support import manifests
from tests.support.manifests import images
from tests.support.ports import reserved_port
from tests.support.waiting import until
from tests.support.warm import warm_command, warm_environment


def make_rundir(path: Path, config: dict[str, Any], **spec: Any) -> RunDir:
    trainer = images(config)
    return manifests.run_directory(path, manifests.job("test", trainer=trainer, **spec))


class Ranks:
    """The ranks of one generation; killed when the test ends."""

    def __init__(
        self, rundir: RunDir, world_size: int, *command: str, cold: bool = False, imports: tuple[str, ...] = ()
    ) -> None:
        """By default those of the job's task.

        Args:
            imports: modules that are imported once for all ranks of the test session that name the same ones.
            cold: imports nothing beforehand, for libraries that look at the environment when they are imported.
        """
        arguments = command or ("-m", "tandem_trainer")
        self.processes = []
        port = reserved_port()
        for rank in range(world_size):
            environment = os.environ | {
                "RANK": str(rank),
                "LOCAL_RANK": str(rank),
                "WORLD_SIZE": str(world_size),
                "MASTER_ADDR": "127.0.0.1",
                "MASTER_PORT": str(port),
                "OMP_NUM_THREADS": "1",
                "TANDEM_RUN_DIR": str(rundir.path),
                "TANDEM_REPLICA": f"worker-{rank}",
            }
            self.processes.append(
                subprocess.Popen(
                    [sys.executable, *arguments] if cold else warm_command(*arguments),
                    env=environment if cold else environment | warm_environment(*imports),
                    stdout=subprocess.PIPE,
                    stderr=subprocess.STDOUT,
                    text=True,
                    start_new_session=True,
                )
            )

    def __enter__(self) -> "Ranks":
        return self

    def __exit__(self, *ignored: object) -> None:
        for process in self.processes:
            process.kill()
            process.communicate()

    def describe(self) -> str:
        """Exit codes by now, and the end of what each has printed; those that run are killed."""
        codes = [process.poll() for process in self.processes]
        for process in self.processes:
            process.kill()
        output = [process.communicate(timeout=10)[0][-2000:] for process in self.processes]
        return "\n".join(f"rank {rank}, exit code {codes[rank]}:\n{text}" for rank, text in enumerate(output))

    def finish(self, seconds: float = 120) -> tuple[list[int], str]:
        """Wait for all; exit codes in rank order, and everything they printed."""
        deadline = time.monotonic() + seconds
        output = [process.communicate(timeout=max(1.0, deadline - time.monotonic()))[0] for process in self.processes]
        return [process.returncode for process in self.processes], "\n".join(output)


def run(rundir: RunDir, world_size: int = 1, *command: str, imports: tuple[str, ...] = ()) -> str:
    """Train to the end, without wrong numbers; returns what was printed."""
    before = records(rundir, "corruption")
    with Ranks(rundir, world_size, *command, imports=imports) as ranks:
        codes, output = ranks.finish()
    assert codes == [0] * world_size, output
    assert records(rundir, "corruption") == before
    return output


def kill_when_saved(
    rundir: RunDir, world_size: int, *command: str, imports: tuple[str, ...] = (), saves: int = 1
) -> list[int]:
    """Train until there are more checkpoints, and kill the last rank; the exit codes of all."""
    known = len(rundir.checkpoint_names())
    with Ranks(rundir, world_size, *command, imports=imports) as ranks:
        until(lambda: len(rundir.checkpoint_names()) >= known + saves, "checkpoints", otherwise=ranks.describe)
        os.kill(ranks.processes[-1].pid, signal.SIGKILL)
        codes, _ = ranks.finish()
    assert not rundir.ended()
    return codes


def last_line(output: str) -> str:
    """What a script prints after its loop."""
    return next(line for line in output.splitlines() if line.startswith("after the loop"))


def records(rundir: RunDir, kind: str) -> list[dict[str, Any]]:
    """Lines of the training log of one kind, generation after generation."""
    lines = [line for path in sorted(rundir.log.glob("train-g*.jsonl")) for line in path.read_text().splitlines()]
    return [record for record in map(json.loads, filter(None, lines)) if record["kind"] == kind]


def losses(rundir: RunDir) -> dict[int, float]:
    """Training loss by step; a later generation overrides."""
    return {record["step"]: record["loss"] for record in records(rundir, "step")}


def sample_ids(rundir: RunDir) -> dict[int, str]:
    return {record["step"]: record["ids"] for record in records(rundir, "step")}
