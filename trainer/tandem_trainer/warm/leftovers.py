"""What a rank has started and leaves behind: loader workers, a data server, an inference engine with its GPU memory.

A rank leads a session of its own, warm or cold. So what it has started is its process group, unless that began another
session on purpose, as the checkpoint writer does, which finishes the write.
"""

import os
import signal
from contextlib import suppress


def end_leftovers(pid: int) -> None:
    """Kill what a rank has started, if it has ended otherwise than with exit code 0. What a script leaves running
    behind a good end is its own business.

    Args:
        pid: of the rank, a child of this process. It must not have been reaped: until then its number is nobody else's.
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
    """Whether a child of this process has not ended yet."""
    if not hasattr(os, "waitid"):
        return False
    try:
        return os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None
    except ChildProcessError:
        return False


def end_group(pid: int) -> None:
    """Kill what is left of a rank's process group, if anything is: as long as there is one in it, its number is nobody
    else's."""
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(pid, signal.SIGKILL)
