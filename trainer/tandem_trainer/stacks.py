"""Stacks of a rank that hangs: where every thread of it is, written down before it is ended.

A rank registers a signal handler in C (faulthandler), which needs neither the interpreter lock nor the main thread: a
rank that hangs gives neither. The handler writes into a file beside the pulse that both rank and agent hold open. The
agent sends the signal, waits until the file has stopped growing, and writes it into the run directory, with what the
kernel says of the process. A rank that was stopped (SIGSTOP) is continued, so that it can answer.
"""

import faulthandler
import os
import signal
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

SIGNAL = signal.SIGRTMIN + 7
"""A script of the user's own has more use for SIGUSR1 and SIGUSR2."""
WAIT_SECONDS = 1.0
"""For the handler; it takes milliseconds."""
QUIET_SECONDS = 0.05
"""A file that has not grown for so long is complete."""
MOST_BYTES = 2**20


def answer_with_stacks(file: int) -> None:
    """Have this process write the stacks of all its threads to a descriptor whenever it gets SIGNAL."""
    faulthandler.register(SIGNAL, file, all_threads=True, chain=False)


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

    def close(self) -> None:
        """Let go of the descriptors."""
        os.close(self.pidfd)
        os.close(self.file)


def collect(subjects: list[Subject], folder: Path) -> None:
    """Ask all ranks, wait for the answers, and write one file for each.

    Raises:
        OSError: the folder cannot be written to.
    """
    states = [_of_the_kernel(subject.pid) for subject in subjects]
    for subject in subjects:
        for number in (SIGNAL, signal.SIGCONT):
            with suppress(ProcessLookupError):
                signal.pidfd_send_signal(subject.pidfd, number)
    answers = _wait([subject.file for subject in subjects])
    folder.mkdir(parents=True, exist_ok=True)
    for subject, state, answer in zip(subjects, states, answers, strict=True):
        head = f"rank {subject.rank}, process {subject.pid}, {subject.doing}\n"
        missing = "" if answer else f"No answer within {WAIT_SECONDS:g} s: the process is stuck in the kernel.\n"
        (folder / f"rank-{subject.rank}.txt").write_text(f"{head}\n{state}\n{missing}{answer}", encoding="utf-8")


def _wait(files: list[int]) -> list[str]:
    deadline = time.monotonic() + WAIT_SECONDS
    sizes, grown_at = [0] * len(files), time.monotonic()
    while time.monotonic() < deadline:
        now = [os.fstat(file).st_size for file in files]
        if now != sizes:
            sizes, grown_at = now, time.monotonic()
        if all(sizes) and time.monotonic() - grown_at >= QUIET_SECONDS:
            break
        time.sleep(0.01)
    return [os.pread(file, MOST_BYTES, 0).decode(errors="replace") for file in files]


def _of_the_kernel(pid: int) -> str:
    """State of each thread, and the kernel function it waits in."""
    lines = ["thread     state         waits in               name"]
    with suppress(OSError):
        for task in sorted(Path(f"/proc/{pid}/task").iterdir(), key=lambda task: int(task.name)):
            with suppress(OSError):
                state = next(
                    line.split(":", 1)[1].strip()
                    for line in (task / "status").read_text().splitlines()
                    if line.startswith("State")
                )
                name, waits = (task / "comm").read_text().strip(), (task / "wchan").read_text().strip()
                lines.append(f"{task.name:<10} {state:<13} {waits:<22} {name}")
    return "\n".join(lines) + "\n"


def is_stopped(pid: int) -> bool:
    """Whether the process was stopped by a signal (SIGSTOP), or by a debugger."""
    try:
        after_name = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2]
    except OSError:
        return False
    return after_name.split()[0] in ("T", "t")
