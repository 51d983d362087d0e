"""Stack dumps of a rank that hangs: the stacks of all its threads, written before it is ended.

A rank registers a signal handler in C (faulthandler), which needs neither the interpreter lock nor the main thread: a
rank that hangs gives neither. The handler writes into a file beside the pulse that both rank and agent hold open. The
agent asks one thread after the other, the main thread first, reads what each wrote, and puts all of it into the run
directory, with what the kernel says of the process. A rank that was stopped (SIGSTOP) is continued, so that it can
answer.

Each thread writes its own stack, while it can do nothing else. Rejected: one signal, whose handler writes the stacks of
all threads. The others run on meanwhile, and one that returned from a call while it was written down crashed the
rank, so that the rest was missing (seen once in some dozen times).

The kernel tells when a handler has returned: its signal is neither pending for the thread nor blocked in it. That the
file has not grown for a while would say nothing on a busy machine, where the handler has to wait for a processor. And
no two handlers may overlap: faulthandler lets the second one return without a word.
"""

import ctypes
import faulthandler
import logging
import os
import select
import signal
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

log = logging.getLogger("tandem.agent")

SIGNAL = signal.SIGRTMIN + 7
"""A script of the user's own has more use for SIGUSR1 and SIGUSR2."""
WAIT_SECONDS = 1.5
"""For all threads of all ranks of a replica; each takes a millisecond."""
LOOK_SECONDS = 0.001
SILENT_SECONDS = 0.2
"""For a moment the signal is not pending any more, and the handler not begun yet: so long that may take at most."""
MOST_BYTES = 2**20


def answer_with_stacks(file: int) -> None:
    """Have each thread of this process write its stack to a descriptor whenever it gets SIGNAL."""
    faulthandler.register(SIGNAL, file, all_threads=False, chain=False)


@dataclass(frozen=True)
class Subject:
    """A rank whose stacks are wanted."""

    rank: int
    pid: int
    pidfd: int
    file: int
    """Where it answers."""
    doing: str
    """What it said last of itself, in words."""

    @property
    def lives(self) -> bool:
        """Whether the process number is still its own."""
        poll = select.poll()
        poll.register(self.pidfd, select.POLLIN)
        return not poll.poll(0)

    def close(self) -> None:
        """Let go of the descriptors."""
        os.close(self.pidfd)
        os.close(self.file)


@dataclass(frozen=True)
class _Thread:
    number: int
    name: str
    state: str
    waits_in: str
    """Function of the kernel."""


def collect(subjects: list[Subject], folder: Path) -> None:
    """Ask all ranks, wait for the answers, and write one file for each.

    Raises:
        OSError: the folder cannot be written to.
    """
    deadline = time.monotonic() + WAIT_SECONDS
    threads = {subject: _threads(subject.pid) for subject in subjects}
    stacks: dict[Subject, list[str]] = {subject: [] for subject in subjects}
    for subject in subjects:
        with suppress(ProcessLookupError):
            signal.pidfd_send_signal(subject.pidfd, signal.SIGCONT)
    for subject, found in threads.items():
        _let_finish(subject, found, deadline)
    # All main threads before any other, should time run out.
    for place in range(max((len(found) for found in threads.values()), default=0)):
        for subject, found in threads.items():
            if place < len(found) and (stack := _stack(subject, found[place], deadline)):
                stacks[subject].append(f"Thread {found[place].number} ({found[place].name}), {stack}")
    folder.mkdir(parents=True, exist_ok=True)
    for subject in subjects:
        text = _written(subject, threads[subject], stacks[subject])
        (folder / f"rank-{subject.rank}.txt").write_text(text, encoding="utf-8")


def write_stacks(subjects: list[Subject], folder: Path) -> None:
    """Collect their stacks, and let go of them. A folder that cannot be written to is told in the log."""
    try:
        collect(subjects, folder)
        log.warning("event=stacks-written folder=%s ranks=%s", folder, [subject.rank for subject in subjects])
    except OSError:
        log.exception("event=stacks-not-written folder=%s", folder)
    finally:
        for subject in subjects:
            subject.close()


def is_stopped(pid: int) -> bool:
    """Whether the process was stopped by a signal (SIGSTOP), or by a debugger."""
    try:
        after_name = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2]
    except OSError:
        return False
    return after_name.split()[0] in ("T", "t")


def _let_finish(subject: Subject, threads: list[_Thread], deadline: float) -> None:
    """Wait a moment for threads that were asked by an earlier call and did not come to answer on a busy machine: what
    they write must not be taken for the answer of another one, whose handler would return without a word meanwhile."""
    until = min(deadline, time.monotonic() + SILENT_SECONDS)
    while any(_is_late(subject, thread) for thread in threads) and time.monotonic() < until:
        time.sleep(LOOK_SECONDS)


def _stack(subject: Subject, thread: _Thread, deadline: float) -> str:
    """What the thread writes; nothing if it knows no Python, blocks the signal, or does not answer in time."""
    before = os.fstat(subject.file).st_size
    if not subject.lives or _is_answering(subject, thread) == "yes" or not _send(subject.pid, thread.number):
        return ""
    silent_until = time.monotonic() + SILENT_SECONDS
    while (answering := _is_answering(subject, thread)) != "no":
        now = time.monotonic()
        silent = os.fstat(subject.file).st_size == before
        if now > deadline or (answering == "perhaps" and (not silent or now > silent_until)):
            _let_finish(subject, [thread], deadline)
            break
        time.sleep(LOOK_SECONDS)
    answer = os.pread(subject.file, MOST_BYTES, before).decode(errors="replace")
    return answer[:1].lower() + answer[1:]


def _send(process: int, thread: int) -> bool:
    """Send SIGNAL to one thread."""
    return int(ctypes.CDLL(None).tgkill(process, thread, int(SIGNAL))) == 0


def _is_answering(subject: Subject, thread: _Thread) -> Literal["yes", "perhaps", "no"]:
    """Whether the signal is on its way to the thread, or blocked in it, as it is while its handler runs. A thread that
    sleeps has not got it, or is done with it; one that runs may be between the two."""
    pending, blocked, sleeps = _signals(subject, thread)
    if pending or blocked:
        return "yes"
    return "no" if sleeps else "perhaps"


def _is_late(subject: Subject, thread: _Thread) -> bool:
    """Whether a thread has yet to answer, or is about it. One that blocks the signal for good mostly sleeps."""
    pending, blocked, sleeps = _signals(subject, thread)
    return pending or (blocked and not sleeps)


def _signals(subject: Subject, thread: _Thread) -> tuple[bool, bool, bool]:
    """Whether the signal is pending for the thread, whether it is blocked in it, and whether the thread sleeps."""
    try:
        status = Path(f"/proc/{subject.pid}/task/{thread.number}/status").read_text()
    except OSError:
        return False, False, True
    fields = dict(line.split(":", 1) for line in status.splitlines() if line.startswith(("State", "SigPnd", "SigBlk")))
    pending, blocked = (bool(int(fields[mask], 16) >> (SIGNAL - 1) & 1) for mask in ("SigPnd", "SigBlk"))
    return pending, blocked, fields["State"].strip().startswith("S")


def _written(subject: Subject, threads: list[_Thread], stacks: list[str]) -> str:
    lines = [f"rank {subject.rank}, process {subject.pid}, {subject.doing}", ""]
    lines.append("thread     state         waits in               name")
    lines += [f"{thread.number:<10} {thread.state:<13} {thread.waits_in:<22} {thread.name}" for thread in threads]
    if not stacks:
        lines += ["", f"No answer within {WAIT_SECONDS:g} s: the process is stuck in the kernel."]
    return "\n".join(lines) + "\n\n" + "\n".join(stacks)


def _threads(pid: int) -> list[_Thread]:
    """All threads as the kernel sees them, the main thread first."""
    found = []
    with suppress(OSError):
        for task in sorted(
            Path(f"/proc/{pid}/task").iterdir(), key=lambda task: (int(task.name) != pid, int(task.name))
        ):
            with suppress(OSError):
                status = (task / "status").read_text()
                name, waits_in = (task / "comm").read_text().strip(), (task / "wchan").read_text().strip()
                state = status.partition("\nState:")[2].splitlines()[0].strip()
                found.append(_Thread(int(task.name), name, state, waits_in))
    return found
