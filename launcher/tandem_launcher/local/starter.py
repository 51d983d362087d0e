"""Starts a child process: ties its life to the parent's, sets its CPU affinity, and executes its command.

Runs by path in an isolated interpreter (10 ms), so it imports only the standard library. `preexec_fn` would do the same
between fork and exec, where a parent with threads may deadlock.
"""

import ctypes
import json
import os
import signal
import sys
from contextlib import suppress
from pathlib import Path

PR_SET_PDEATHSIG = 1
LOWEST = 19
"""Niceness of the lowest priority."""


def die_with(parent: int) -> None:
    """Have the kernel kill this process when the thread that started it ends; exit if that thread has ended already."""
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        raise SystemExit(f"the process that started this one, {parent}, is gone")


def step_back(pid: int) -> None:
    """Lower a process and all its threads to idle priority.

    This takes three means, because each child leads a session of its own. With autogroups, the default of most
    desktops, the kernel first divides time among sessions and looks at niceness only within one, so the session must be
    niced too: of two busy processes on one core (Linux 6.18) the one of niceness 19 got 50 %, and 2 % with its session
    niced. Where autogroups are off, the idle class is below niceness 19: 0.3 % instead of 1.5 %.
    """
    _place(pid, LOWEST, idle=True)


def step_forward(pid: int) -> None:
    """Restore normal priority as far as the kernel allows it: fully for root, hardly for other users."""
    _place(pid, 0, idle=False)


def _place(pid: int, niceness: int, idle: bool) -> None:
    if sys.platform != "linux":
        with suppress(OSError):
            os.setpriority(os.PRIO_PROCESS, pid, niceness)
        return
    with suppress(OSError):
        Path(f"/proc/{pid}/autogroup").write_text(str(niceness))
    with suppress(OSError):
        for thread in Path(f"/proc/{pid}/task").iterdir():
            # Both calls act on a thread, in spite of their names.
            with suppress(OSError):
                os.setpriority(os.PRIO_PROCESS, int(thread.name), niceness)
            with suppress(OSError):
                policy = os.SCHED_IDLE if idle else os.SCHED_OTHER
                os.sched_setscheduler(int(thread.name), policy, os.sched_param(0))


def main() -> None:
    """Arguments: a JSON object with `parent`, `background` and `cores`, then the command."""
    settings = json.loads(sys.argv[1])
    die_with(settings["parent"])
    if settings["background"]:
        step_back(os.getpid())
    if settings["cores"]:
        os.sched_setaffinity(0, settings["cores"])
    command = sys.argv[2:]
    try:
        os.execvp(command[0], command)  # noqa: S606 - the command is built from the job
    except OSError as error:
        raise SystemExit(f"cannot start {command[0]}: {error.strerror}") from error


if __name__ == "__main__":
    main()
