"""A Python debugger that attaches to a rank: `tandem debug NAME N --attach`.

debugpy, inside the rank, listens on a port of the loopback address. It begins only when it is asked to, by a byte in
the rank's pulse file (tandem_trainer.pulse), which a thread of the rank reads twice a second. The file belongs to the
rank's user and has no name any more: only who may look into the rank's process finds it, so only who could signal the
rank or `kubectl exec` into its pod can ask. Nothing outside of the machine or pod reaches the port.

    AT          1 byte: one of STATES
    AT_WORDS    with `listens` and `attached` the port; with `refused` why; in ASCII, ended by a 0

While a debugger is attached, the rank's agent says that it pauses (tandem_trainer.local_ranks): a rank that stands at
a breakpoint makes no step, and its group must not count as hung. The port stays open until the rank ends, because
debugpy cannot close it.

debugpy, because it stops code that already runs, reads and sets variables in every frame, and is what editors speak.
Rejected: pdb over a Unix socket (it stops one thread, and no editor speaks it); `pdb -p` and `sys.remote_exec`
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
AT = 67
AT_WORDS = 832
MAX_WORDS = 190
LOOPBACK = "127.0.0.1"
LOOK_SECONDS = 0.2
"""Between two looks at whether a debugger is attached."""
ANSWER_SECONDS = 60.0
"""For the answer: on a busy machine debugpy takes a dozen seconds to start."""
MISSING = (
    "debugpy is not installed there: add it to the rank's environment, its image, or the requirements.txt of --code"
)


class DebuggerSlot:
    """The part of a pulse file by which a debugger is asked for. The rank writes all states but `asked`.

    Args:
        memory: of the whole file.
    """

    def __init__(self, memory: mmap.mmap) -> None:
        self._memory = memory

    @property
    def state(self) -> State:
        """How far it is."""
        return STATES[min(self._memory[AT], len(STATES) - 1)]

    @property
    def words(self) -> str:
        """The port, or why there is no debugger."""
        return self._memory[AT_WORDS : AT_WORDS + MAX_WORDS].partition(b"\0")[0].decode(errors="replace")

    def put(self, state: State, words: str | None = None) -> None:
        """Set the state; the words before it, since who reads looks at the state first."""
        if words is not None:
            content = words.encode("ascii", "replace")[: MAX_WORDS - 1]
            self._memory[AT_WORDS : AT_WORDS + MAX_WORDS] = content.ljust(MAX_WORDS, b"\0")
        self._memory[AT] = STATES.index(state)

    def ask(self, seconds: float = ANSWER_SECONDS) -> int | str:
        """Ask for a debugger, from another process: the port on which it listens, or why there is none."""
        if self.state in ("none", "refused"):
            self.put("asked")
        until = time.monotonic() + seconds
        while self.state in ("asked", "starting"):
            if time.monotonic() > until:
                if self.state == "asked":
                    # Nobody waits any more: it must not open a port later.
                    self.put("none")
                return f"it did not answer within {seconds:g} s: code that holds the interpreter lock runs there"
            time.sleep(LOOK_SECONDS / 4)
        return int(self.words) if self.state in ("listens", "attached") else self.words or "it has just ended"

    def answer(self) -> None:
        """Begin to listen if somebody has asked. The rank calls it now and then."""
        if self.state == "asked":
            self.put("starting")
            keep_out(thread := threading.Thread(target=self._listen, name="tandem-debugger", daemon=True))
            thread.start()

    def _listen(self) -> None:
        # It warns that modules of the standard library that are frozen have no breakpoints.
        os.environ.setdefault("PYDEVD_DISABLE_FILE_VALIDATION", "1")
        try:
            import debugpy
        except ImportError:
            self.put("refused", MISSING)
            return
        try:
            # Not into the loader's workers and whatever else the rank starts.
            debugpy.configure(subProcess=False)
            _, port = debugpy.listen((LOOPBACK, 0))
        except (OSError, RuntimeError) as error:
            self.put("refused", f"debugpy does not start: {error}")
            return
        self.put("listens", str(port))
        print(f"tandem: a debugger may attach to this rank (port {port} of {LOOPBACK})", file=sys.stderr, flush=True)
        while True:
            self.put("attached" if debugpy.is_client_connected() else "listens")
            time.sleep(LOOK_SECONDS)


def keep_out(thread: threading.Thread) -> None:
    """Have a debugger that stops all threads not stop this one: a rank at a breakpoint obeys its agent all the same."""
    thread.pydev_do_not_trace = True  # type: ignore[attr-defined]
    thread.is_pydev_daemon_thread = True  # type: ignore[attr-defined]


def folder_of(pid: int) -> str:
    """Where a process works; empty if that is not known."""
    try:
        return str(Path(f"/proc/{pid}/cwd").readlink())
    except OSError:
        return ""
