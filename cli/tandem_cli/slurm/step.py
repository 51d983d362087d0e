"""What srun starts on a node: one process of a job, which is asked to leave through the standard input.

    python -m tandem_cli.slurm.step JOB NAME SECONDS COMMAND…

SECONDS are what the command gets between SIGTERM and SIGKILL.

JOB is the head's, which may have this step on a node of another job (tandem_cli.slurm.extension). It is empty for a
step that is lost with the head, on the same node.

SLURM sends a signal to all processes of a step, so data loaders would die of the SIGTERM by which an agent is asked to
save, and the save with them. srun itself ends its step at SIGTERM. The standard input, whose other end the head holds,
reaches this process alone. The head writes LEAVE and closes it; every now and then it writes a line to say that it is
there.

If the input ends without that word, or nothing is heard, the head may be lost with its node. With `--no-kill` SLURM
then keeps the job, without a batch script, until its time limit (seen with 22.05). Once SLURM has taken the node of the
batch script from the job, this process requeues the job. So it does not end before it has heard from the head once more
after the command's end: an agent may end because of the very loss that leaves its job without a head.

Imports nothing but the standard library: it starts on every node.
"""

import os
import re
import select
import signal
import subprocess
import sys
import time
from contextlib import suppress
from types import FrameType

LEAVE = b"leave\n"
HERE = b"\n"
HERE_SECONDS = 1.0
"""Between two lines of the head. A command that ends by itself is reported this much later at the most."""
SILENT_SECONDS = 60.0
"""So long without a line, and the head may be lost."""
LOOK_SECONDS = 15.0
"""Between two questions to SLURM whether it is."""
LOST_SECONDS = 1800.0
"""How long is asked once the input has ended. SLURM gives a node up after its SlurmdTimeout, 300 s by default."""
POLL_SECONDS = 0.1
NOT_STARTED = 127
"""The shell's exit code for a command that is not there."""


class _Input:
    """What the head says.

    Attributes:
        said_leave: whether it has asked the step to leave.
        ended: whether it will say nothing more.
        heard_at: when it has said something last.
    """

    def __init__(self) -> None:
        self.said_leave = self.ended = False
        self.heard_at = time.monotonic()

    def listen(self, seconds: float) -> None:
        if self.ended:
            time.sleep(seconds)
        elif select.select([0], [], [], seconds)[0]:
            said = os.read(0, 4096)
            self.said_leave = self.said_leave or LEAVE in said
            self.ended = not said
            if said:
                self.heard_at = time.monotonic()

    @property
    def is_lost(self) -> bool:
        """Whether the head may be lost."""
        return not self.said_leave and (self.ended or time.monotonic() - self.heard_at > SILENT_SECONDS)

    def answers(self) -> bool:
        """Wait until the head says something from now on; False if it may be lost."""
        asked_at = time.monotonic()
        while not self.said_leave and self.heard_at < asked_at:
            if self.is_lost:
                return False
            self.listen(POLL_SECONDS)
        return True


def main() -> int:
    """Run the command; returns its exit code."""
    job, name, seconds, *command = sys.argv[1:]
    patience = float(seconds)
    print(f"--- {time.strftime('%Y-%m-%d %H:%M:%S')} {name}, start on {os.uname().nodename}", flush=True)
    signalled = False

    def note(number: int, frame: FrameType | None) -> None:
        """SLURM has sent it to the command, too."""
        nonlocal signalled
        signalled = True

    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, note)
    try:
        process = subprocess.Popen(command, stdin=subprocess.DEVNULL)
    except OSError as error:
        print(f"cannot start {command[0]}: {error.strerror}", flush=True)
        _say_end(name, NOT_STARTED)
        return NOT_STARTED
    head, asked_at, look_at, orphaned = _Input(), 0.0, 0.0, False
    while (code := process.poll()) is None:
        head.listen(POLL_SECONDS)
        now = time.monotonic()
        if job and head.is_lost and now >= look_at:
            look_at = now + LOOK_SECONDS
            orphaned = orphaned or _is_orphan(job) is True
        if not asked_at and (head.said_leave or head.ended or orphaned):
            asked_at = now
            if not signalled:
                process.terminate()
        if asked_at and now - asked_at > patience:
            process.kill()
    _say_end(name, code)
    if job and not head.answers():
        _requeue_orphan(job, head)
    return code if code >= 0 else 128 - code


def _say_end(name: str, code: int) -> None:
    now, fraction = time.strftime("%Y-%m-%d %H:%M:%S"), int(time.time() % 1 * 1000)
    # Nobody reads it where srun is lost with the head.
    with suppress(OSError):
        print(f"{now},{fraction:03d} level=INFO event=step-ended name={name} code={code}", flush=True)


def _requeue_orphan(job: str, head: _Input) -> None:
    """Wait until SLURM knows that the head's node is lost, and put the job into the queue again.

    Where SLURM refuses, as a controller that is busy does, it is asked again.
    """
    until = time.monotonic() + LOST_SECONDS
    while head.is_lost and time.monotonic() < until:
        is_orphan = _is_orphan(job)
        if is_orphan is None or (is_orphan and _scontrol("requeue", job) is not None):
            return
        head.listen(LOOK_SECONDS)


def _is_orphan(job: str) -> bool | None:
    """Whether SLURM has taken the node of the batch script from the job; None if the job does not run any more.

    False also where SLURM does not say.
    """
    shown = _scontrol("--oneliner", "show", "job", job) or ""
    state = re.search(r"JobState=(\S+)", shown)
    if state is not None and state[1] not in ("RUNNING", "SUSPENDED"):
        return None
    host, nodes = re.search(r"BatchHost=(\S+)", shown), re.search(r"(?<!\w)NodeList=(\S+)", shown)
    if state is None or host is None or nodes is None:
        return False
    names = (_scontrol("show", "hostnames", nodes[1]) or "").split()
    return bool(names) and host[1] not in names


def _scontrol(*words: str) -> str | None:
    """What it prints; None where it refuses."""
    try:
        words = ("scontrol", *words)
        done = subprocess.run(words, capture_output=True, text=True, errors="replace", timeout=30, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout if done.returncode == 0 else None


if __name__ == "__main__":
    sys.exit(main())
