"""Stack dumps of a rank that hangs: the stacks of all its threads, written before it is ended.

A rank registers a signal handler in C (faulthandler), which needs neither the interpreter lock nor the main thread: a
hanging rank provides neither. The handler writes into a file beside the pulse that both rank and agent hold open. The
agent asks one thread after the other, the main thread first, reads what each wrote, and puts all of it into the run
directory, with what the kernel says of the process. A rank that was stopped (SIGSTOP) is continued, so that it can
answer.

Each thread writes its own stack, while it can do nothing else. Rejected: one signal, whose handler writes the stacks of
all threads. The others run on meanwhile, and one that returned from a call while it was written down crashed the
rank, so that the rest was missing (seen once in some dozen times).

The kernel tells when a handler has returned: its signal is neither pending for the thread nor blocked in it. That the
file has not grown for a while would say nothing on a busy machine, where the handler has to wait for a processor. And
no two handlers may overlap: faulthandler lets the second one return without a word. So a rank's agent and
`tandem debug` (tandem_trainer.inspection) hold a lock on its file while they ask it.
"""

import ctypes
import faulthandler
import fcntl
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
"""Signal that asks a thread for its stack; scripts are more likely to use SIGUSR1 and SIGUSR2."""
WAIT_SECONDS = 1.5
"""Time limit for the stacks of all threads of a replica's ranks, in seconds; each takes a millisecond."""
POLL_SECONDS = 0.001
SILENT_SECONDS = 0.2
"""Maximum time between the moment at which the signal is not pending any more and the first byte of the handler, in
seconds."""
MAX_BYTES = 2**20
LOCK_SECONDS = 0.5
"""Maximum wait for a lock that another process holds, in seconds; a hanging group is ended soon."""
PATIENT_SECONDS = 10.0
"""Time limit for the lock, and for all answers, where training goes on and a person waits, in seconds."""
PATIENT_SILENT_SECONDS = 3.0
"""SILENT_SECONDS of a main thread in that case: on a busy machine it has to wait for a processor first."""


def answer_with_stacks(file: int) -> None:
    """Make each thread of this process write its stack to a descriptor when it gets SIGNAL."""
    faulthandler.register(SIGNAL, file, all_threads=False, chain=False)


@dataclass(frozen=True)
class Subject:
    """A rank whose stacks are to be dumped."""

    rank: int
    pid: int
    pidfd: int
    file: int
    """Descriptor of the file that the rank writes its stacks to."""
    doing: str
    """Last report of the rank on its activity, as text."""

    @property
    def lives(self) -> bool:
        """Whether the process still lives, so that its number is its own."""
        poll = select.poll()
        poll.register(self.pidfd, select.POLLIN)
        return not poll.poll(0)

    def close(self) -> None:
        """Close the descriptors."""
        os.close(self.pidfd)
        os.close(self.file)


@dataclass(frozen=True)
class Thread:
    """A thread of a rank, as the kernel sees it."""

    number: int
    name: str
    state: str
    waits_in: str
    """Function of the kernel."""


Stacks = dict[Thread, str]
"""Stack of each thread of a rank, the main thread first; empty if the thread wrote nothing."""


def read_stacks(subjects: list[Subject], only_main: bool = False, resume: bool = False) -> list[Stacks]:
    """Ask all ranks for their stacks, and wait for the answers. A rank without the handler is not asked: the signal
    would end it.

    Args:
        only_main: ask the main threads alone.
        resume: continue a process that was stopped (SIGSTOP); one that stays stopped does not answer.
    """
    locked = [_lock_file(subject.file, LOCK_SECONDS if resume else PATIENT_SECONDS) for subject in subjects]
    deadline = time.monotonic() + (WAIT_SECONDS if resume else PATIENT_SECONDS)
    dumps: list[Stacks] = [dict.fromkeys(_threads(subject.pid), "") for subject in subjects]
    try:
        for subject in subjects if resume else ():
            with suppress(ProcessLookupError):
                signal.pidfd_send_signal(subject.pidfd, signal.SIGCONT)
        requests = [
            (subject, stacks, list(stacks)[:1] if only_main else list(stacks))
            for subject, stacks in zip(subjects, dumps, strict=True)
            if answers(subject.pid) and (resume or not is_stopped(subject.pid))
        ]
        for subject, _, threads in requests:
            _wait_for_late_answers(subject, threads, deadline)
        # All main threads before any other, should time run out.
        for index in range(max((len(threads) for _, _, threads in requests), default=0)):
            for subject, stacks, threads in requests:
                if index < len(threads):
                    silent = SILENT_SECONDS if resume or index else PATIENT_SILENT_SECONDS
                    stacks[threads[index]] = _stack(subject, threads[index], deadline, silent)
    finally:
        for subject, is_locked in zip(subjects, locked, strict=True):
            if is_locked:
                # The file lies in memory, and may be asked for again and again. The rank appends to it.
                with suppress(OSError):
                    os.ftruncate(subject.file, 0)
                fcntl.flock(subject.file, fcntl.LOCK_UN)
    return dumps


def collect(subjects: list[Subject], folder: Path) -> None:
    """Write the stacks of a hanging group's ranks, one file for each. Ranks that were stopped are continued.

    Raises:
        OSError: the folder cannot be written to.
    """
    dumps = read_stacks(subjects, resume=True)
    folder.mkdir(parents=True, exist_ok=True)
    for subject, stacks in zip(subjects, dumps, strict=True):
        (folder / f"rank-{subject.rank}.txt").write_text(_format(subject, stacks), encoding="utf-8")


def write_stacks(subjects: list[Subject], folder: Path) -> None:
    """Collect the stacks of ranks, and close the ranks. A folder that cannot be written to is only logged."""
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


def answers(pid: int) -> bool:
    """Whether a process has the handler that `answer_with_stacks` registers."""
    return bool(_signal_bit(Path(f"/proc/{pid}/status"), "SigCgt"))


def _lock_file(file: int, seconds: float) -> bool:
    """Lock the file of a rank's answers; return False if another process has it for so many seconds."""
    deadline = time.monotonic() + seconds
    while True:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return True
        except OSError:
            if time.monotonic() > deadline:
                return False
            time.sleep(POLL_SECONDS)


def _signal_bit(status: Path, field: str) -> int:
    """Return SIGNAL's bit in one of the signal masks that the kernel shows of a process."""
    with suppress(OSError):
        for line in status.read_text().splitlines():
            if line.startswith(f"{field}:"):
                return int(line.partition(":")[2], 16) >> (SIGNAL - 1) & 1
    return 0


def _wait_for_late_answers(subject: Subject, threads: list[Thread], deadline: float) -> None:
    """Wait a moment for threads that have not answered an earlier request, on a busy machine: their stack must not be
    taken for the answer of another thread, whose handler would return without a word meanwhile."""
    give_up_at = min(deadline, time.monotonic() + SILENT_SECONDS)
    while any(_is_late(subject, thread) for thread in threads) and time.monotonic() < give_up_at:
        time.sleep(POLL_SECONDS)


def _stack(subject: Subject, thread: Thread, deadline: float, silent_seconds: float) -> str:
    """Return the stack that a thread writes; empty if the thread does not run Python, blocks the signal, or does not
    answer in time."""
    size_before = os.fstat(subject.file).st_size
    if not subject.lives or _is_answering(subject, thread) == "yes" or not _send(subject.pid, thread.number):
        return ""
    silent_until = time.monotonic() + silent_seconds
    while (answering := _is_answering(subject, thread)) != "no":
        now = time.monotonic()
        silent = os.fstat(subject.file).st_size == size_before
        if now > deadline or (answering == "perhaps" and (not silent or now > silent_until)):
            _wait_for_late_answers(subject, [thread], deadline)
            break
        time.sleep(POLL_SECONDS)
    answer = os.pread(subject.file, MAX_BYTES, size_before).decode(errors="replace")
    return answer[:1].lower() + answer[1:]


def _send(process: int, thread: int) -> bool:
    """Send SIGNAL to one thread."""
    return int(ctypes.CDLL(None).tgkill(process, thread, int(SIGNAL))) == 0


def _is_answering(subject: Subject, thread: Thread) -> Literal["yes", "perhaps", "no"]:
    """Return whether the signal is on its way to the thread, or blocked in it, as it is while its handler runs. A
    thread that sleeps has not got it, or is done with it; one that runs may be between the two."""
    pending, blocked, sleeps = _signal_state(subject, thread)
    if pending or blocked:
        return "yes"
    return "no" if sleeps else "perhaps"


def _is_late(subject: Subject, thread: Thread) -> bool:
    """Return whether a thread has yet to answer, or is answering. One that blocks the signal for good mostly sleeps."""
    pending, blocked, sleeps = _signal_state(subject, thread)
    return pending or (blocked and not sleeps)


def _signal_state(subject: Subject, thread: Thread) -> tuple[bool, bool, bool]:
    """Return whether the signal is pending for the thread, whether it is blocked in it, and whether the thread
    sleeps."""
    try:
        status = Path(f"/proc/{subject.pid}/task/{thread.number}/status").read_text()
    except OSError:
        return False, False, True
    fields = dict(line.split(":", 1) for line in status.splitlines() if line.startswith(("State", "SigPnd", "SigBlk")))
    pending, blocked = (bool(int(fields[mask], 16) >> (SIGNAL - 1) & 1) for mask in ("SigPnd", "SigBlk"))
    return pending, blocked, fields["State"].strip().startswith("S")


def _format(subject: Subject, stacks: Stacks) -> str:
    lines = [f"rank {subject.rank}, process {subject.pid}, {subject.doing}", ""]
    lines.append("thread     state         waits in               name")
    lines += [f"{thread.number:<10} {thread.state:<13} {thread.waits_in:<22} {thread.name}" for thread in stacks]
    if not any(stacks.values()):
        lines += ["", f"No answer within {WAIT_SECONDS:g} s: the process is stuck in the kernel."]
    texts = [f"Thread {thread.number} ({thread.name}), {stack}" for thread, stack in stacks.items() if stack]
    return "\n".join(lines) + "\n\n" + "\n".join(texts)


def _threads(pid: int) -> list[Thread]:
    """Return all threads of a process, the main thread first."""
    threads = []
    with suppress(OSError):
        for task in sorted(
            Path(f"/proc/{pid}/task").iterdir(), key=lambda task: (int(task.name) != pid, int(task.name))
        ):
            with suppress(OSError):
                status = (task / "status").read_text()
                name, waits_in = (task / "comm").read_text().strip(), (task / "wchan").read_text().strip()
                state = status.partition("\nState:")[2].splitlines()[0].strip()
                threads.append(Thread(int(task.name), name, state, waits_in))
    return threads
