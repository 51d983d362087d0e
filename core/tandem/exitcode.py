"""Exit codes of training processes and of the commands: an interface, not an accident.

Values from 64 on follow sysexits.h where it has a word for them. What torchrun or a shell may return itself is avoided.
docs/reference/exit-codes.md is generated from this module.

That takes up to two seconds with torch, for which a user who has pressed Ctrl-C, a pod that is drained or a group that
starts again would wait, and threads of gloo may abort the process meanwhile.
"""

import atexit
import os
import sys
import threading
from collections.abc import Callable
from contextlib import suppress
from enum import IntEnum
from typing import NoReturn


class ExitCode(IntEnum):
    """How a process or a run ended."""

    DONE = 0
    """Complete, or stopped early on purpose, which status and screen say. A script of your own that ends so on all
    ranks is complete, too, unless it ends in the middle of a session: then it has failed."""
    FAILED = 1
    """Ended with an error. Of a rank: counted against `elasticity.maxRestarts`, and shown with its own traceback."""
    USAGE = 2
    """The command line, the manifest, or what it needs is wrong; nothing was started, or nothing that could work. The
    message says what to change."""
    DIVERGED = 65
    """The loss stayed NaN, infinite or worse than untrained. Lower the learning rate, warm up, or clip gradients;
    trying the same again does not help."""
    REWOUND = 66
    """The loss became useless: the next generation starts from an older checkpoint and leaves data out. Counted against
    nothing, and at most three times in a run."""
    OUT_OF_MEMORY = 67
    """A micro-batch did not fit into memory: the next generation takes half of it at the most. Counted against nothing,
    because it ends at one sample."""
    HUNG = 70
    """No step within the hang time; counted against `elasticity.maxRestarts`."""
    LEFT_OUT = 71
    """Groups failed again and again because of this replica, and the others go on without it."""
    SUPERSEDED = 74
    """A newer generation exists; this process must not write any more. Counted against nothing."""
    PREEMPTED = 75
    """Saved and left because it was asked to; it is started again."""
    PEER_LOST = 76
    """Another rank vanished and took the collective with it. Counted against nothing: the cause is counted there."""
    CONFIGURATION = 78
    """The job cannot work as it is written; never tried again. `tandem run` then ends with 2."""
    INTERRUPTED = 130
    """You pressed Ctrl-C. What could be saved is saved, and the same command goes on."""


OF_COMMANDS = frozenset(
    {ExitCode.DONE, ExitCode.FAILED, ExitCode.USAGE, ExitCode.DIVERGED, ExitCode.INTERRUPTED},
)
"""What `tandem run` ends with; the other commands end with some of these."""


def depart(code: int | str | None, finally_: Callable[[], object] = lambda: None) -> NoReturn:
    """End this process. Threads are waited for and exit functions called, as at Python's own end.

    Args:
        code: what SystemExit holds: None is 0, and a text is printed and means 1.
        finally_: called after the exit functions.
    """
    if code is not None and not isinstance(code, int):
        print(code, file=sys.stderr)
        code = 1
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    finally_()
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError, ValueError):
            stream.flush()
    os._exit((code or 0) & 0xFF)
