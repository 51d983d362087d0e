"""A Python debugger that attaches to a rank: `tandem debug NAME N --attach`.

debugpy, inside the rank, listens on a port of the loopback address. It starts only on request, by a byte in the rank's
pulse file (tandem_trainer.pulse), which a thread of the rank reads twice a second. The file belongs to the rank's user
and has no name any more: it is reachable only through the rank's process, so only users who could signal the rank or
`kubectl exec` into its pod can send a request. Nothing outside of the machine or pod reaches the port.

    STATE_OFFSET    1 byte: one of STATES
    DETAIL_OFFSET   with `listens` and `attached` the port; with `refused` the reason; in ASCII, ended by a 0

While a debugger is attached, the rank's agent reports a pause (tandem_trainer.agent.local_ranks): a rank at a
breakpoint makes no step, and its group must not count as hung. The port stays open until the rank ends, because debugpy
cannot close it.

debugpy, because it stops code that already runs, reads and sets variables in every frame, and works with editors.
Rejected: pdb over a Unix socket (it stops one thread, and no editor supports it); `pdb -p` and `sys.remote_exec`
(Python 3.14 and later); gdb and py-spy (ptrace, which the Pod Security level `restricted` forbids); the order byte of
the pulse with its pipe (scripts obey no orders, and only the agent may write to the pipe); a signal (its Python
handler would run in the main thread, and a script may have one of its own).
"""

import mmap
import os
import sys
import threading
import time
from pathlib import Path
from typing import Literal, get_args

State = Literal["none", "asked", "starting", "listens", "attached", "refused"]
STATES: tuple[State, ...] = get_args(State)
STATE_OFFSET = 67
DETAIL_OFFSET = 832
MAX_DETAIL_BYTES = 190
LOOPBACK = "127.0.0.1"
POLL_SECONDS = 0.2
"""Interval of checks whether a debugger is attached, in seconds."""
ANSWER_SECONDS = 60.0
"""Time limit of the answer, in seconds: on a busy machine debugpy takes a dozen seconds to start."""
NOT_INSTALLED = (
    "debugpy is not installed there: add it to the rank's environment, its image, or the requirements.txt of --code"
)


class DebuggerSlot:
    """Part of a pulse file through which a debugger is requested. The rank writes all states except `asked`.

    Args:
        memory: mapping of the whole pulse file.
    """

    def __init__(self, memory: mmap.mmap) -> None:
        self._memory = memory

    @property
    def state(self) -> State:
        """State of the request."""
        return STATES[min(self._memory[STATE_OFFSET], len(STATES) - 1)]

    @property
    def detail(self) -> str:
        """Port of the debugger, or the reason why there is none."""
        return (
            self._memory[DETAIL_OFFSET : DETAIL_OFFSET + MAX_DETAIL_BYTES].partition(b"\0")[0].decode(errors="replace")
        )

    def put(self, state: State, detail: str | None = None) -> None:
        """Set the state; the detail first, since readers look at the state first."""
        if detail is not None:
            content = detail.encode("ascii", "replace")[: MAX_DETAIL_BYTES - 1]
            self._memory[DETAIL_OFFSET : DETAIL_OFFSET + MAX_DETAIL_BYTES] = content.ljust(MAX_DETAIL_BYTES, b"\0")
        self._memory[STATE_OFFSET] = STATES.index(state)

    def request(self, seconds: float = ANSWER_SECONDS) -> int | str:
        """Request a debugger, from another process. Returns the port on which it listens, or the reason why there is
        none."""
        if self.state in ("none", "refused"):
            self.put("asked")
        deadline = time.monotonic() + seconds
        while self.state in ("asked", "starting"):
            if time.monotonic() > deadline:
                if self.state == "asked":
                    # Withdraw the request: the rank must not open a port later.
                    self.put("none")
                return f"it did not answer within {seconds:g} s: code that holds the interpreter lock runs there"
            time.sleep(POLL_SECONDS / 4)
        return int(self.detail) if self.state in ("listens", "attached") else self.detail or "it has just ended"

    def answer(self) -> None:
        """Start to listen if a debugger is requested. The rank calls it periodically."""
        if self.state == "asked":
            self.put("starting")
            exempt_from_debugger(thread := threading.Thread(target=self._listen, name="tandem-debugger", daemon=True))
            thread.start()

    def _listen(self) -> None:
        # Silences a warning that frozen modules of the standard library have no breakpoints.
        os.environ.setdefault("PYDEVD_DISABLE_FILE_VALIDATION", "1")
        try:
            import debugpy
        except ImportError:
            self.put("refused", NOT_INSTALLED)
            return
        try:
            # Do not attach to loader workers and other child processes.
            debugpy.configure(subProcess=False)
            _, port = debugpy.listen((LOOPBACK, 0))
        except (OSError, RuntimeError) as error:
            self.put("refused", f"debugpy does not start: {error}")
            return
        self.put("listens", str(port))
        print(f"tandem: a debugger may attach to this rank (port {port} of {LOOPBACK})", file=sys.stderr, flush=True)
        while True:
            self.put("attached" if debugpy.is_client_connected() else "listens")
            time.sleep(POLL_SECONDS)


def exempt_from_debugger(thread: threading.Thread) -> None:
    """Exempt a thread from a debugger that stops all threads: a rank at a breakpoint still obeys its agent."""
    thread.pydev_do_not_trace = True  # type: ignore[attr-defined]
    thread.is_pydev_daemon_thread = True  # type: ignore[attr-defined]


def working_directory(pid: int) -> str:
    """Return the working directory of a process; empty if it is not known."""
    try:
        return str(Path(f"/proc/{pid}/cwd").readlink())
    except OSError:
        return ""
