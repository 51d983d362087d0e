"""Commands on the nodes of a run, by srun beside the steps of its jobs: stacks of ranks, a debugger, and a shell."""

import signal
import subprocess
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from pydantic import ValidationError

from tandem.errors import UserError
from tandem.formatting import printable
from tandem.processes.launch import module_command
from tandem.wire.stacks import Attachment, Inspection, RankStacks
from tandem_launcher.local.processes import ATTACH_SECONDS
from tandem_launcher.slurm import jobs, scheduler
from tandem_launcher.slurm.jobs import NodeAllocation
from tandem_launcher.slurm.scheduler import SlurmError

MAX_PARALLEL = 8
"""Number of nodes that are inspected concurrently."""


def allocations(path: Path) -> dict[str, NodeAllocation]:
    """Return the node of each process of a run, by name.

    Raises:
        UserError: the run is another user's, or SLURM does not answer.
    """
    submission = jobs.own_submission(path)
    by_name: dict[str, NodeAllocation] = {}
    for job in [*jobs.running_extensions(path), submission.training]:
        by_name |= {name: NodeAllocation(job, node) for name, node in scheduler.steps(job).items()}
    for index, (job, node) in scheduler.elements(submission.evaluation or "").items():
        by_name[f"evaluator-{index}"] = NodeAllocation(job, node)
    if host := scheduler.batch_host(submission.training):
        by_name["coordinator"] = NodeAllocation(submission.training, host)
    return by_name


def inspect(path: Path, rank: int | None) -> Inspection:
    """Inspect the ranks of a run, each on its own node.

    Raises:
        UserError: no node answers.
    """
    workers = {allocation for name, allocation in allocations(path).items() if name.startswith("worker-")}
    options = [] if rank is None else [f"--rank={rank}"]
    inspections: list[Inspection] = []
    errors: list[UserError] = []
    with ThreadPoolExecutor(MAX_PARALLEL) as pool:
        for future in [pool.submit(_inspect_node, path, allocation, options) for allocation in workers]:
            try:
                inspections.append(future.result())
            except UserError as error:
                errors.append(error)
    if errors and not inspections:
        raise errors[0]
    # A rank may be in several answers; the one with the most threads is of its own node.
    # A node may list a rank twice, once without stacks: the one with the most threads counts.
    ranks = {
        rank.rank: rank
        for inspection in inspections
        for rank in sorted(inspection.ranks, key=lambda rank: len(rank.threads))
    }
    return Inspection(ranks=[ranks[number] for number in sorted(ranks)])


def _inspect_node(path: Path, allocation: NodeAllocation, options: Sequence[str]) -> Inspection:
    output = _run_inspection(path, allocation, options, scheduler.SECONDS)
    try:
        return Inspection.read_json(output)
    except ValidationError as error:
        raise SlurmError(f"the answer of {allocation.node} cannot be read: {printable(output[:200])!r}") from error


def attach(path: Path, stacks: RankStacks) -> tuple[Attachment, str]:
    """Prepare a rank for a debugger; return the attachment and the node.

    Raises:
        UserError: the rank does not answer.
    """
    allocation = _allocation_of(path, stacks.replica)
    output = _run_inspection(path, allocation, [f"--rank={stacks.rank}", "--attach"], ATTACH_SECONDS)
    try:
        return Attachment.read_json(output), allocation.node
    except ValidationError as error:
        raise SlurmError(f"the answer of {allocation.node} cannot be read: {printable(output[:200])!r}") from error


def shell(path: Path, process: str) -> int:
    """Open a shell with the environment of a process on its node and this terminal; return its exit code.

    Raises:
        UserError: there is no such process; the message lists the existing ones.
    """
    command = _srun(path, _allocation_of(path, process), "tandem_cli.slurm.shell", str(path.resolve()), process)
    command.insert(1, "--pty")
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        return subprocess.call(command)
    except OSError as error:
        raise SlurmError(f"srun cannot be started: {error.strerror}") from error
    finally:
        signal.signal(signal.SIGINT, before)


def _allocation_of(path: Path, name: str) -> NodeAllocation:
    by_name = allocations(path)
    if name not in by_name:
        existing = ", ".join(sorted(by_name)) or "none"
        raise UserError(f"{path} has no process {name}; it has: {existing}")
    return by_name[name]


def _run_inspection(path: Path, allocation: NodeAllocation, options: Sequence[str], seconds: float) -> str:
    """Run an inspection on a node, and return its last line: modules and Python's start-up may print others."""
    inspection = _srun(path, allocation, "tandem_trainer.inspection", "--run-dir", str(path.resolve()), *options)
    output = scheduler.run(*inspection, seconds=seconds)
    return output.strip().rpartition("\n")[2]


def _srun(path: Path, allocation: NodeAllocation, module: str, *args: str) -> list[str]:
    """Return the command that runs a module on a node, beside its steps."""
    options = ["--overlap", "--quiet", "--nodes=1", "--ntasks=1", "--cpus-per-task=1"]
    *prefix, python = jobs.own_submission(path).python
    started = [*prefix, *module_command(module, *args, python=python)]
    return ["srun", f"--jobid={allocation.job}", f"--nodelist={allocation.node}", *options, *started]
