"""Processes that a rank has started and leaves behind: loader workers, a data server, an inference engine with its GPU
memory.

A rank leads a session of its own, warm or cold. So the processes that it started are its process group, unless they
started another session on purpose, as the checkpoint writer does to finish its write.
"""

import os
import signal
from contextlib import suppress


def end_leftovers(pid: int) -> None:
    """Kill the processes that a rank has started, unless it ended with exit code 0. A script may leave processes
    running after a successful end.

    Args:
        pid: process id of the rank, a child of this process. It must not have been reaped: until then no other process
            can have its id.
    """
    if not hasattr(os, "waitid"):
        return
    try:
        end = os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    except ChildProcessError:
        return
    if end is None or (end.si_code == os.CLD_EXITED and end.si_status == 0):
        return
    end_group(pid)


def runs(pid: int) -> bool:
    """Return whether a child of this process has not ended yet."""
    if not hasattr(os, "waitid"):
        return False
    try:
        return os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None
    except ChildProcessError:
        return False


def end_group(pid: int) -> None:
    """Kill the remaining processes of a rank's process group, if any: as long as one is left, no other group can have
    its id."""
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(pid, signal.SIGKILL)
