"""The guardian: waits until the parent has ended, for any reason, and then ends everything that its run started.

A process in a session of its own, so that a signal to the parent's group does not reach it. Its standard input is a
pipe whose other end the parent alone holds: the kernel closes that when the parent dies, by SIGKILL too. It then kills
all that carries the run's mark in its environment, again and again until there is nothing, and removes the run's
temporary files. It shares the parent's lock on the run directory, so that the next `tandem run` starts after it is
through.

Where the parent had a picture on the terminal, which it says through the pipe, the terminal is given back.

    python -m tandem_cli.local.guardian [--terminal DESCRIPTOR] MARK [PATH TO REMOVE…]
"""

import os
import shutil
import signal
import sys
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from pathlib import Path

import psutil

from tandem.launch import PULSE

MARK = "TANDEM_LOCAL"
"""Variable that says which local run a process belongs to: RUN/CHILD/LIFE."""

PICTURE, NO_PICTURE = b"+", b"-"
"""What the parent says when it begins to draw on the terminal, and when it has given it back."""
TRACKERS = ("multiprocessing.resource_tracker", "torch_shm_manager")
"""Processes that remove shared memory when those they serve are gone. They end by themselves and are killed last."""
TRACKER_SECONDS = 2.0
"""What trackers get for that; it takes them milliseconds."""
SWEEP_SECONDS = 60.0
"""How long killing is tried. Only a process that hangs in the kernel survives the first round."""


def marked(mark: str) -> list[psutil.Process]:
    """All living processes that belong to `mark`, a whole run or one life of a child, and what they started.

    Descendants count even if they have cleared their environment.
    """
    found: dict[int, psutil.Process] = {}
    for process in psutil.process_iter():
        with suppress(psutil.Error, OSError):
            value = process.environ().get(MARK, "")
            if (value + "/").startswith(mark + "/"):
                found[process.pid] = process
                for child in process.children(recursive=True):
                    found[child.pid] = child
    found.pop(os.getpid(), None)
    return [process for process in found.values() if _alive(process)]


def sweep(mark: str, seconds: float = SWEEP_SECONDS) -> list[psutil.Process]:
    """Kill all that belongs to `mark`, repeatedly, until none is left. Returns what could not be killed in time.

    An agent removes the pulse files of its ranks; of one that was killed, they are removed here.
    """
    deadline = time.monotonic() + seconds
    trackers_until = time.monotonic() + TRACKER_SECONDS
    pulses: set[Path] = set()
    while True:
        left = marked(mark)
        if not left or time.monotonic() > deadline:
            remove(pulses)
            return left
        pulses |= {folder for process in left if (folder := _pulse_folder(process))}
        spared = [process for process in left if _is_tracker(process)] if time.monotonic() < trackers_until else []
        for process in left:
            if process not in spared:
                with suppress(psutil.Error):
                    process.kill()
        time.sleep(0.02)


def remove(paths: Iterable[Path]) -> None:
    """Remove temporary files and folders of the run; what is not there is fine."""
    for path in paths:
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path, ignore_errors=True)
        else:
            with suppress(OSError):
                path.unlink()


def _alive(process: psutil.Process) -> bool:
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.Error:
        return False


def _pulse_folder(process: psutil.Process) -> Path | None:
    """Where a rank's pulse file is, if it is one of the folders that our rendezvous handler makes."""
    try:
        folder = process.environ().get(PULSE, "")
    except (psutil.Error, OSError):
        return None
    return Path(folder) if Path(folder).name.startswith("tandem-") else None


def _is_tracker(process: psutil.Process) -> bool:
    try:
        return any(tracker in " ".join(process.cmdline()) for tracker in TRACKERS)
    except psutil.Error:
        return False


def guard(mark: str, paths: list[Path], wait: Callable[[], bytes], terminal: int | None = None) -> int:
    """Wait for the parent's end, then clean up. Returns how many processes could not be killed.

    Args:
        wait: returns what the parent has said by then.
        terminal: a descriptor of the terminal that the parent draws on.
    """
    if wait().endswith(PICTURE) and terminal is not None:
        from tandem_cli.terminal.canvas import give_back  # rich takes a tenth of a second, which no run should wait for

        with suppress(OSError):
            give_back(terminal)
    left = sweep(mark)
    remove(paths)
    return len(left)


def main() -> None:
    """Guard the run whose mark is given until standard input ends."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    words, terminal = sys.argv[1:], None
    if words[0] == "--terminal":
        terminal, words = int(words[1]), words[2:]
    mark, *paths = words
    raise SystemExit(guard(mark, [Path(path) for path in paths], sys.stdin.buffer.read, terminal))


if __name__ == "__main__":
    main()
