"""Exit codes of training processes and of the commands: an interface, not an accident.

Values from 64 on follow sysexits.h where it defines a matching one. Codes that torchrun or a shell may return are
avoided. docs/reference/exit-codes.md is generated from this module.

`exit_process` ends a process without Python's own finalization. That takes up to two seconds with torch, for which a
user who has pressed Ctrl-C, a pod that is drained or a group that restarts would wait, and threads of gloo may abort
the process meanwhile.
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
    """Exit code of a process or a run."""

    DONE = 0
    """Complete, or stopped early on purpose, which status and screen show. A script of your own whose ranks all exit
    with 0 is complete, too, unless it ends in the middle of a session: then it has failed."""
    FAILED = 1
    """Ended with an error. For a rank: counted against `elasticity.maxRestarts`, and shown with its own traceback."""
    USAGE = 2
    """The command line, the manifest, or a requirement is wrong; nothing was started, or nothing that could work. The
    message says what to change."""
    DIVERGED = 65
    """The loss stayed NaN, infinite or worse than untrained. Lower the learning rate, warm up, or clip gradients;
    retrying without a change does not help."""
    REWOUND = 66
    """The loss became useless: the next generation starts from an older checkpoint and skips data. Not counted, and at
    most three times in a run."""
    OUT_OF_MEMORY = 67
    """A micro-batch did not fit into memory: the next generation takes at most half of it. Not counted, because it ends
    at one sample."""
    HUNG = 70
    """No step within the hang time; counted against `elasticity.maxRestarts`."""
    LEFT_OUT = 71
    """Groups failed repeatedly because of this replica, and the others continue without it."""
    SUPERSEDED = 74
    """A newer generation exists; this process must not write any more. Not counted."""
    PREEMPTED = 75
    """Saved and left on request; it is restarted."""
    PEER_LOST = 76
    """Another rank vanished during a collective. Not counted: the cause is counted there."""
    CONFIGURATION = 78
    """The job cannot work as written; never retried. `tandem run` then ends with 2."""
    INTERRUPTED = 130
    """You pressed Ctrl-C. Everything that could be saved is saved, and the same command continues."""


COMMAND_EXIT_CODES = frozenset(
    {ExitCode.DONE, ExitCode.FAILED, ExitCode.USAGE, ExitCode.DIVERGED, ExitCode.INTERRUPTED},
)
"""Exit codes of `tandem run`; the other commands end with some of these."""


def exit_process(code: int | str | None, finally_: Callable[[], object] = lambda: None) -> NoReturn:
    """End this process. Threads are joined and exit functions called, as in Python's own finalization.

    Args:
        code: argument of SystemExit: None is 0, and a text is printed and means 1.
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
