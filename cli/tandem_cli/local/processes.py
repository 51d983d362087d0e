"""The processes of a run on this machine: whose they are, their variables, and the stacks of its ranks."""

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
from tandem.launch import PULSE, RUN_DIR, module_command
from tandem.rundir.durable import read_json_or_none
from tandem.rundir.ownership import LOCK
from tandem.stacks import Attachment, Inspection
from tandem_cli.local.guardian import MARK, marked

SECONDS = 30.0
"""For the stacks of all ranks; they take half a second."""
ATTACH_SECONDS = 90.0
"""For a debugger; the rank itself takes up to a minute."""
RANK = "RANK"
LEFT_OUT = (
    *(MARK, PULSE, "TANDEM_FORK_SERVER"),
    *("MASTER_ADDR", "MASTER_PORT", "TORCHELASTIC_USE_AGENT_STORE", "TORCHELASTIC_RUN_ID"),
)
"""Variables that a process beside the run must not have: by the first it would be ended with the run's, and by the
others a script that is tried out would join the group that trains."""
OF_THE_TERMINAL = ("TERM", "COLORTERM", "COLUMNS", "LINES", "SHELL", "SHLVL", "DISPLAY", "SSH_AUTH_SOCK", "SSH_TTY")


@dataclass(frozen=True)
class Surroundings:
    """What a process of a run was started with."""

    variables: dict[str, str]
    folder: Path
    """Where it works."""
    rank: int | None = None
    """Whose variables these are: the first rank of a worker; None for another process."""


def starter(path: Path) -> psutil.Process | None:
    """The `tandem run` of a run that is going on; None where it is not known."""
    content = read_json_or_none(path / LOCK)
    pid = content.get("pid") if isinstance(content, dict) else None
    with suppress(psutil.Error, OSError):
        if isinstance(pid, int) and pid != os.getpid():
            process = psutil.Process(pid)
            # The number may be another process's by now.
            if process.create_time() <= (path / LOCK).stat().st_mtime + 1.0:
                return process
    return None


def check_owner(path: Path) -> None:
    """
    Raises:
        UserError: the processes of a run are another user's, and this one may not look at them.
    """
    process = starter(path)
    if process is None or os.geteuid() == 0:
        return
    with suppress(psutil.Error):
        if (owner := process.uids().effective) != os.geteuid():
            whose = user_name(owner)
            allowed = " and ".join(dict.fromkeys((whose, "root")))
            raise UserError(f"{path} is a run of the user {whose}; only {allowed} may look into its processes")


def inspect(path: Path, rank: int | None) -> Inspection:
    """The ranks of a run, as `tandem_trainer.inspection` finds them.

    Raises:
        UserError: they cannot be asked.
    """
    said = _asked(path, [] if rank is None else [f"--rank={rank}"], SECONDS)
    try:
        return Inspection.read_json(said)
    except ValidationError as error:
        raise UserError(f"the ranks of {path} cannot be asked: {said[:200]!r}") from error


def attach(path: Path, rank: int) -> Attachment:
    """Have a rank of a run let a debugger attach.

    Raises:
        UserError: it cannot be asked.
    """
    said = _asked(path, [f"--rank={rank}", "--attach"], ATTACH_SECONDS)
    try:
        return Attachment.read_json(said)
    except ValidationError as error:
        raise UserError(f"rank {rank} of {path} cannot be asked: {said[:200]!r}") from error


def _asked(path: Path, words: list[str], seconds: float) -> str:
    check_owner(path)
    command = module_command("tandem_trainer.inspection", "--run-dir", str(path.resolve()), *words)
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=seconds, check=False)
    except subprocess.TimeoutExpired:
        raise UserError(f"the ranks of {path} could not be asked within {seconds:g} s") from None
    if done.returncode != 0:
        raise UserError(f"the ranks of {path} cannot be asked: {done.stderr.strip()[-2000:]}")
    return done.stdout


def names(path: Path) -> list[str]:
    """The processes of a run that is going on: coordinator, worker-0, evaluator-0."""
    return sorted({name for name, _ in _children(path)}, key=lambda name: (not name.startswith("c"), name))


def surroundings(path: Path, name: str) -> Surroundings:
    """What a process of a run has; of a worker, what its first rank has, as far as that has been started.

    Raises:
        UserError: there is no such process; names those that there are.
    """
    check_owner(path)
    found = [process for known, process in _children(path) if known == name]
    if not found:
        there = ", ".join(names(path)) or "none"
        raise UserError(f"no process of {path} is called {name}; there are: {there}")
    chosen, rank = found[0], None
    with suppress(psutil.Error, OSError):
        ranks = [(int(of), one) for one in chosen.children(recursive=True) if (of := _variable(one, RANK)).isdecimal()]
        if ranks:
            rank, chosen = min(ranks, key=lambda found: (found[0], found[1].pid))
    return surroundings_of(chosen, name, rank)


def surroundings_of(process: psutil.Process, name: str, rank: int | None = None) -> Surroundings:
    """What one process has.

    Raises:
        UserError: it is gone.
    """
    try:
        return Surroundings(_without_ours(process.environ()), Path(process.cwd()), rank)
    except (psutil.Error, OSError) as error:
        raise UserError(f"{name} has just ended, or started again; try again") from error


def beside(path: Path) -> Surroundings:
    """What a process has that looks at a run that is over."""
    return Surroundings({**os.environ, RUN_DIR: str(path.resolve())}, path.resolve())


def _without_ours(variables: dict[str, str]) -> dict[str, str]:
    kept = {name: value for name, value in variables.items() if name not in (*LEFT_OUT, *OF_THE_TERMINAL)}
    return kept | {name: os.environ[name] for name in OF_THE_TERMINAL if name in os.environ}


def _children(path: Path) -> Iterator[tuple[str, psutil.Process]]:
    """The processes that `tandem run` has started, with their names."""
    content = read_json_or_none(path / LOCK)
    mark = str(content.get("mark", "")) if isinstance(content, dict) else ""
    parent = starter(path)
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
    """The name of a user; the number, where nobody knows it."""
    try:
        return pwd.getpwuid(number).pw_name
    except KeyError:
        return str(number)
