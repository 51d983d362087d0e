"""How a process ends that has imported torch: as Python would, but without taking the interpreter apart.

That takes up to two seconds with torch, for which a user who has pressed Ctrl-C, a pod that is drained or a group that
starts again would wait, and threads of gloo may abort the process meanwhile.
"""

import atexit
import os
import sys
import threading
from collections.abc import Callable
from contextlib import suppress
from typing import NoReturn


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
