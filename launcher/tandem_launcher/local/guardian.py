"""The guardian: waits until the parent has ended, for any reason, and then ends everything that its run started.

A process in a session of its own, so that a signal to the parent's group does not reach it. Its standard input is a
pipe whose other end the parent alone holds: the kernel closes that when the parent dies, by SIGKILL too. It then kills
every process that carries the run's mark in its environment, repeatedly until none is left, and removes the run's
temporary files. It shares the parent's lock on the run directory, so the next `tandem run` starts only after the
clean-up.

The parent reports through the pipe whether it draws on the terminal. If it died while it did, the guardian restores the
terminal.

    python -m tandem_launcher.local.guardian [--terminal DESCRIPTOR] MARK [PATH TO REMOVE…]
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

from tandem.processes.launch import PULSE

MARK = "TANDEM_LOCAL"
"""Environment variable with the local run that a process belongs to: RUN/CHILD/LIFE."""

PICTURE, NO_PICTURE = b"+", b"-"
"""Bytes that the parent sends when it starts to draw on the terminal, and when it has restored it."""
TRACKERS = ("multiprocessing.resource_tracker", "torch_shm_manager")
"""Processes that remove shared memory when the processes they serve are gone. They end by themselves; killed last."""
TRACKER_SECONDS = 2.0
"""Grace period of trackers, in seconds; they need milliseconds."""
SWEEP_SECONDS = 60.0
"""Timeout of a sweep, in seconds. Only a process that hangs in the kernel survives the first round."""


def marked(mark: str) -> list[psutil.Process]:
    """Living processes that belong to `mark`, a whole run or one life of a child, and all their descendants.

    Descendants count even if they have cleared their environment.
    """
    processes: dict[int, psutil.Process] = {}
    for process in psutil.process_iter():
        with suppress(psutil.Error, OSError):
            # The environment is inherited, so the mark also finds processes in sessions of their own.
            value = process.environ().get(MARK, "")
            if (value + "/").startswith(mark + "/"):
                processes[process.pid] = process
                # A descendant may have cleared its environment.
                for child in process.children(recursive=True):
                    processes[child.pid] = child
    # The caller must not kill itself.
    processes.pop(os.getpid(), None)
    return [process for process in processes.values() if _alive(process)]


def sweep(mark: str, seconds: float = SWEEP_SECONDS) -> list[psutil.Process]:
    """Kill every process that belongs to `mark`, repeatedly, until none is left; return those that survive.

    An agent removes the pulse files of its ranks. A killed agent cannot, so the sweep removes them.
    """
    deadline = time.monotonic() + seconds
    trackers_until = time.monotonic() + TRACKER_SECONDS
    pulses: set[Path] = set()
    while True:
        survivors = marked(mark)
        if not survivors or time.monotonic() > deadline:
            remove(pulses)
            return survivors
        # Read before the kill: the environment of a dead process cannot be read.
        pulses |= {folder for process in survivors if (folder := _pulse_folder(process))}
        # Shared memory would outlive a tracker that is killed before it has removed it.
        spared_trackers = (
            [process for process in survivors if _is_tracker(process)] if time.monotonic() < trackers_until else []
        )
        for process in survivors:
            if process not in spared_trackers:
                with suppress(psutil.Error):
                    process.kill()
        # A process may have forked between the listing and its kill, so look again.
        time.sleep(0.02)


def remove(paths: Iterable[Path]) -> None:
    """Remove temporary files and folders of the run; missing ones are ignored."""
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
    """Folder of a rank's pulse file, if our rendezvous handler created it."""
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
    """Wait for the parent's end, then clean up; return the number of processes that could not be killed.

    Args:
        wait: blocks until the parent has ended, and returns the bytes that it sent.
        terminal: descriptor of the terminal that the parent draws on.
    """
    # The last byte counts: the parent may have drawn and restored the terminal several times.
    if wait().endswith(PICTURE) and terminal is not None:
        from tandem_launcher.terminal.canvas import (
            give_back,  # rich takes a tenth of a second, which no run should wait for
        )

        with suppress(OSError):
            give_back(terminal)
    # Processes first: a living one could write new temporary files.
    survivors = sweep(mark)
    remove(paths)
    return len(survivors)


def main() -> None:
    """Guard the run of the mark in the arguments until standard input ends."""
    # Signals for the parent must not end the process that cleans up after it.
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    args, terminal = sys.argv[1:], None
    if args[0] == "--terminal":
        terminal, args = int(args[1]), args[2:]
    mark, *paths = args
    raise SystemExit(guard(mark, [Path(path) for path in paths], sys.stdin.buffer.read, terminal))


if __name__ == "__main__":
    main()
