"""Commands on the nodes of a run, by srun beside the steps of its jobs: stacks of ranks, a debugger, and a shell."""

import signal
import subprocess
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from pydantic import ValidationError

from tandem.errors import UserError
from tandem.formatting import printable
from tandem.launch import module_command
from tandem.stacks import Attachment, Inspection, RankStacks
from tandem_cli.local.processes import ATTACH_SECONDS
from tandem_cli.slurm import jobs, scheduler
from tandem_cli.slurm.jobs import Place
from tandem_cli.slurm.scheduler import SlurmError

AT_ONCE = 8
"""Nodes that are asked at the same time."""


def places(path: Path) -> dict[str, Place]:
    """The processes of a run that SLURM runs, by name.

    Raises:
        UserError: it is another user's, or SLURM does not say.
    """
    submission = jobs.own(path)
    found: dict[str, Place] = {}
    for job in [*jobs.running_extensions(path), submission.training]:
        found |= {name: Place(job, node) for name, node in scheduler.steps(job).items()}
    for index, (job, node) in scheduler.elements(submission.evaluation or "").items():
        found[f"evaluator-{index}"] = Place(job, node)
    if host := scheduler.batch_host(submission.training):
        found["coordinator"] = Place(submission.training, host)
    return found


def inspect(path: Path, rank: int | None) -> Inspection:
    """The ranks of a run, each as its own node finds it.

    Raises:
        UserError: no node of it can be asked.
    """
    workers = {place for name, place in places(path).items() if name.startswith("worker-")}
    words = [] if rank is None else [f"--rank={rank}"]
    found: list[Inspection] = []
    errors: list[UserError] = []
    with ThreadPoolExecutor(AT_ONCE) as askers:
        for asked in [askers.submit(_inspected, path, place, words) for place in workers]:
            try:
                found.append(asked.result())
            except UserError as error:
                errors.append(error)
    if errors and not found:
        raise errors[0]
    ranks = {one.rank: one for answer in found for one in sorted(answer.ranks, key=lambda one: len(one.threads))}
    return Inspection(ranks=[ranks[number] for number in sorted(ranks)])


def _inspected(path: Path, place: Place, words: Sequence[str]) -> Inspection:
    said = _asked(path, place, words, scheduler.SECONDS)
    try:
        return Inspection.read_json(said)
    except ValidationError as error:
        raise SlurmError(f"the answer of {place.node} cannot be read: {printable(said[:200])!r}") from error


def attach(path: Path, one: RankStacks) -> tuple[Attachment, str]:
    """Have a rank let a debugger attach; returns where, and the node.

    Raises:
        UserError: it cannot be asked.
    """
    place = _of(path, one.replica)
    said = _asked(path, place, [f"--rank={one.rank}", "--attach"], ATTACH_SECONDS)
    try:
        return Attachment.read_json(said), place.node
    except ValidationError as error:
        raise SlurmError(f"the answer of {place.node} cannot be read: {printable(said[:200])!r}") from error


def shell(path: Path, who: str) -> int:
    """A shell with the variables of a process, on its node and this terminal; returns its exit code.

    Raises:
        UserError: there is no such process; names those that there are.
    """
    words = _srun(path, _of(path, who), "tandem_cli.slurm.shell", str(path.resolve()), who)
    words.insert(1, "--pty")
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        return subprocess.call(words)
    except OSError as error:
        raise SlurmError(f"srun cannot be started: {error.strerror}") from error
    finally:
        signal.signal(signal.SIGINT, before)


def _of(path: Path, name: str) -> Place:
    found = places(path)
    if name not in found:
        there = ", ".join(sorted(found)) or "none"
        raise UserError(f"no process of {path} is called {name}; there are: {there}")
    return found[name]


def _asked(path: Path, place: Place, words: Sequence[str], seconds: float) -> str:
    """The last line that the inspection on a node prints: modules and Python's start-up may print lines before."""
    inspection = _srun(path, place, "tandem_trainer.inspection", "--run-dir", str(path.resolve()), *words)
    said = scheduler.ask(*inspection, seconds=seconds)
    return said.strip().rpartition("\n")[2]


def _srun(path: Path, place: Place, module: str, *words: str) -> list[str]:
    """The command that starts a module of ours on a node."""
    beside = ["--overlap", "--quiet", "--nodes=1", "--ntasks=1", "--cpus-per-task=1"]
    *before, python = jobs.own(path).python
    started = [*before, *module_command(module, *words, python=python)]
    return ["srun", f"--jobid={place.job}", f"--nodelist={place.node}", *beside, *started]
