"""The processes of a local run: their owner, their environment, and the stacks of the ranks."""

import os
import pwd
import subprocess
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import psutil
from pydantic import ValidationError

from tandem.errors import UserError
from tandem.processes.launch import PULSE, RUN_DIR, module_command
from tandem.rundir.durable import read_json_or_none
from tandem.rundir.ownership import LOCK
from tandem.wire.stacks import Attachment, Inspection
from tandem_launcher.local.guardian import MARK, marked

INSPECT_SECONDS = 30.0
"""Timeout of an inspection of all ranks, in seconds; it takes half a second."""
ATTACH_SECONDS = 90.0
"""Timeout to attach a debugger, in seconds; the rank itself takes up to a minute."""
RANK = "RANK"
PRIVATE_VARIABLES = (
    *(MARK, PULSE, "TANDEM_FORK_SERVER"),
    *("MASTER_ADDR", "MASTER_PORT", "TORCHELASTIC_USE_AGENT_STORE", "TORCHELASTIC_RUN_ID"),
)
"""Variables that a shell beside the run must not inherit: the first would end it with the run's processes, and with the
others a script that is tried out would join the process group that trains."""
TERMINAL_VARIABLES = ("TERM", "COLORTERM", "COLUMNS", "LINES", "SHELL", "SHLVL", "DISPLAY", "SSH_AUTH_SOCK", "SSH_TTY")


@dataclass(frozen=True)
class ProcessContext:
    """Environment and working directory of a process."""

    variables: dict[str, str]
    folder: Path
    """The working directory."""
    rank: int | None = None
    """The rank whose variables these are, the first of a worker; None for other processes."""


def parent_process(path: Path) -> psutil.Process | None:
    """Return the `tandem run` process of a running run; None if it is unknown."""
    content = read_json_or_none(path / LOCK)
    pid = content.get("pid") if isinstance(content, dict) else None
    with suppress(psutil.Error, OSError):
        if isinstance(pid, int) and pid != os.getpid():
            process = psutil.Process(pid)
            # The process ID may have been reused; a process that has ended takes signals until it is reaped.
            is_same = process.create_time() <= (path / LOCK).stat().st_mtime + 1.0
            if is_same and process.status() != psutil.STATUS_ZOMBIE:
                return process
    return None


def check_owner(path: Path) -> None:
    """Check that this user may inspect the processes of a run.

    Raises:
        UserError: they belong to another user.
    """
    process = parent_process(path)
    if process is None or os.geteuid() == 0:
        return
    with suppress(psutil.Error):
        if (owner := process.uids().effective) != os.geteuid():
            name = user_name(owner)
            allowed = " and ".join(dict.fromkeys((name, "root")))
            raise UserError(f"{path} is a run of the user {name}; only {allowed} may look into its processes")


def inspect(path: Path, rank: int | None) -> Inspection:
    """Inspect the ranks of a run with `tandem_trainer.inspection`.

    Raises:
        UserError: the inspection failed.
    """
    output = _run_inspection(path, [] if rank is None else [f"--rank={rank}"], INSPECT_SECONDS)
    try:
        return Inspection.read_json(output)
    except ValidationError as error:
        raise UserError(f"the ranks of {path} cannot be inspected: {output[:200]!r}") from error


def attach(path: Path, rank: int) -> Attachment:
    """Prepare a rank of a run for a debugger.

    Raises:
        UserError: the rank does not answer.
    """
    output = _run_inspection(path, [f"--rank={rank}", "--attach"], ATTACH_SECONDS)
    try:
        return Attachment.read_json(output)
    except ValidationError as error:
        raise UserError(f"rank {rank} of {path} cannot be inspected: {output[:200]!r}") from error


def _run_inspection(path: Path, options: list[str], seconds: float) -> str:
    check_owner(path)
    command = module_command("tandem_trainer.inspection", "--run-dir", str(path.resolve()), *options)
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=seconds, check=False)
    except subprocess.TimeoutExpired:
        raise UserError(f"the ranks of {path} did not answer within {seconds:g} s") from None
    if done.returncode != 0:
        raise UserError(f"the ranks of {path} cannot be inspected: {done.stderr.strip()[-2000:]}")
    return done.stdout


def names(path: Path) -> list[str]:
    """Return the names of a running run's processes: coordinator, worker-0, evaluator-0."""
    return sorted({name for name, _ in _children(path)}, key=lambda name: (not name.startswith("c"), name))


def process_context(path: Path, name: str) -> ProcessContext:
    """Return the context of a process; for a worker that of its first rank, if the rank has started.

    Raises:
        UserError: there is no such process; the message lists the existing ones.
    """
    check_owner(path)
    matches = [process for child, process in _children(path) if child == name]
    if not matches:
        existing = ", ".join(names(path)) or "none"
        raise UserError(f"{path} has no process {name}; it has: {existing}")
    chosen, rank = matches[0], None
    with suppress(psutil.Error, OSError):
        descendants = [(_variable(process, RANK), process) for process in chosen.children(recursive=True)]
        ranks = [(int(number), process) for number, process in descendants if number.isdecimal()]
        if ranks:
            rank, chosen = min(ranks, key=lambda pair: (pair[0], pair[1].pid))
    return context_of(chosen, name, rank)


def context_of(process: psutil.Process, name: str, rank: int | None = None) -> ProcessContext:
    """Return the context of one process.

    Raises:
        UserError: the process has ended.
    """
    try:
        return ProcessContext(_public_variables(process.environ()), Path(process.cwd()), rank)
    except (psutil.Error, OSError) as error:
        raise UserError(f"{name} has just ended or restarted; try again") from error


def rundir_context(path: Path) -> ProcessContext:
    """Return the context of a shell in the run directory of a run that is over."""
    return ProcessContext({**os.environ, RUN_DIR: str(path.resolve())}, path.resolve())


def _public_variables(variables: dict[str, str]) -> dict[str, str]:
    inherited = {
        name: value for name, value in variables.items() if name not in (*PRIVATE_VARIABLES, *TERMINAL_VARIABLES)
    }
    return inherited | {name: os.environ[name] for name in TERMINAL_VARIABLES if name in os.environ}


def _children(path: Path) -> Iterator[tuple[str, psutil.Process]]:
    """Yield the child processes of `tandem run`, with their names."""
    content = read_json_or_none(path / LOCK)
    mark = str(content.get("mark", "")) if isinstance(content, dict) else ""
    parent = parent_process(path)
    if not mark or parent is None:
        return
    for process in marked(mark):
        with suppress(psutil.Error, OSError):
            name = _variable(process, MARK).split("/")[1:2]
            if name and process.ppid() == parent.pid and name[0] != "guardian":
                yield name[0], process


def _variable(process: psutil.Process, name: str) -> str:
    return str(process.environ().get(name, ""))


def user_name(number: int) -> str:
    """Return the name of a user; the number if it has no name."""
    try:
        return pwd.getpwuid(number).pw_name
    except KeyError:
        return str(number)
