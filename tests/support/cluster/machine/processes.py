"""The processes of the cluster. Each, with all that it starts, carries its name in its environment.

So they are found again by whoever looks, also after the program that started them is gone, and nothing else is ever
ended. The processes inside containers start with an environment of their own; they are found by control group.
"""

import os
import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import psutil

from tests.support.cluster.machine import ClusterError
from tests.support.cluster.machine.places import LOGS, STATE

MARK = "TANDEM_CLUSTER_PROCESS"
KILL_SECONDS = 10.0


def mark(name: str) -> dict[str, str]:
    """What a process carries in its environment to belong to the cluster, and to go with it at the latest."""
    return {MARK: f"{STATE}/{name}"}


@dataclass(frozen=True)
class Part:
    """A part of the cluster that this program has started."""

    name: str
    process: psutil.Process


def start(name: str, *command: str | Path, entering: tuple[str, ...] = (), folder: Path = STATE) -> Part:
    """Start a part in a session of its own: a Ctrl-C at the terminal does not reach it. It logs to log/NAME.log."""
    LOGS.mkdir(parents=True, exist_ok=True)
    words = [*entering, *map(str, command)]
    with (LOGS / f"{name}.log").open("ab") as log:
        process = subprocess.Popen(
            words,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            cwd=folder,
            env={**os.environ, **mark(name)},
            start_new_session=True,
        )
    # It outlives this program: without a code, Python warns that nobody has waited for it.
    process.returncode = 0
    return Part(name, psutil.Process(process.pid))


def marked(name: str = "") -> Iterator[psutil.Process]:
    """The processes of a part and of what it started; without a name, those of the whole cluster."""
    for process in psutil.process_iter():
        try:
            found = process.environ().get(MARK, "")
        except (psutil.NoSuchProcess, psutil.AccessDenied):
            continue
        if found == f"{STATE}/{name}" or (not name and found.startswith(f"{STATE}/")):
            yield process


def kill(name: str = "") -> None:
    """End a part of the cluster, or all of them, with SIGKILL.

    Raises:
        TimeoutError: some do not end.
    """
    deadline = time.monotonic() + KILL_SECONDS
    # A process shows no environment at the moment in which it becomes another program: two looks must find nothing.
    # Nor does one show any that has ended and was not yet reaped, so nobody waits for a parent that takes its time.
    looks = 0
    while looks < 2:
        processes = list(marked(name))
        looks = 0 if processes else looks + 1
        for process in processes:
            try:
                process.kill()
            except psutil.NoSuchProcess:
                pass
        if processes and time.monotonic() > deadline:
            raise TimeoutError(f"these processes do not end: {processes}")
        time.sleep(0.05)


def require_running(parts: Sequence[Part]) -> None:
    """Make sure that they still run.

    Raises:
        ClusterError: one has ended.
    """
    for part in parts:
        if not part.process.is_running() or part.process.status() == psutil.STATUS_ZOMBIE:
            raise ClusterError(f"{part.name} ended. {_last_words(part.name)}")


def wait_until(what: str, holds: Callable[[], bool], *, of: Part, seconds: float = 120.0) -> None:
    """Wait for something that a part brings about.

    Raises:
        ClusterError: the part ended, or the time is over.
    """
    deadline = time.monotonic() + seconds
    while not holds():
        require_running([of])
        if time.monotonic() > deadline:
            raise ClusterError(f"{what} did not come up in {seconds:.0f} s. {_last_words(of.name)}")
        time.sleep(0.2)


def _last_words(name: str) -> str:
    path = LOGS / f"{name}.log"
    lines = path.read_text(errors="replace").splitlines()[-15:]
    return "\n".join([f"Its log ends with:  ({path})", *lines])
