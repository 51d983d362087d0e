"""A step that srun starts on a node: runs one process of a job, which the head stops through the standard input.

    python -m tandem_launcher.slurm.step JOB NAME SECONDS COMMAND…

SECONDS is the grace period of the command between SIGTERM and SIGKILL.

JOB is the job of the head; the step may run on a node of another job (tandem_launcher.slurm.extension). It is empty for
a step on the head's own node, which is lost together with the head.

SLURM sends a signal to all processes of a step, so the SIGTERM that asks an agent to save would also kill its data
loaders, and the save with them. srun itself ends its step at SIGTERM. The standard input, whose other end the head
holds, reaches this process only. The head writes LEAVE and closes it; every second it writes a PING.

If the input ends without LEAVE, or no PING arrives, the head may be lost with its node. With `--no-kill` SLURM then
keeps the job, without a batch script, until its time limit (seen with 22.05). Once SLURM has removed the node of the
batch script from the job, this process requeues the job. So after the command's end it waits for one more PING: the
agent may have ended because of the very loss that leaves its job without a head.

Imports only the standard library, because it starts on every node.
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
PING = b"\n"
PING_SECONDS = 1.0
"""Interval of pings, in seconds; also the longest delay of the exit after a command that ends by itself."""
SILENT_SECONDS = 60.0
"""Time without a ping after which the head may be lost, in seconds."""
CHECK_SECONDS = 15.0
"""Interval at which SLURM is asked whether the head is lost, in seconds."""
LOST_SECONDS = 1800.0
"""Timeout of these checks after the end of the input, in seconds. SLURM's SlurmdTimeout is 300 s by default."""
POLL_SECONDS = 0.1
NOT_STARTED = 127
"""The shell's exit code for a command that does not exist."""


class _HeadPipe:
    """The messages of the head, on the standard input.

    Attributes:
        is_leaving: whether the head has asked the step to exit.
        is_closed: whether the input has ended.
        last_message_at: time of the last message.
    """

    def __init__(self) -> None:
        self.is_leaving = self.is_closed = False
        self.last_message_at = time.monotonic()

    def listen(self, seconds: float) -> None:
        if self.is_closed:
            time.sleep(seconds)
        elif select.select([0], [], [], seconds)[0]:
            message = os.read(0, 4096)
            self.is_leaving = self.is_leaving or LEAVE in message
            self.is_closed = not message
            if message:
                self.last_message_at = time.monotonic()

    @property
    def is_lost(self) -> bool:
        """Whether the head may be lost with its node."""
        return not self.is_leaving and (self.is_closed or time.monotonic() - self.last_message_at > SILENT_SECONDS)

    def answers(self) -> bool:
        """Wait for the next message of the head; return False if it may be lost."""
        started_at = time.monotonic()
        while not self.is_leaving and self.last_message_at < started_at:
            if self.is_lost:
                return False
            self.listen(POLL_SECONDS)
        return True


def main() -> int:
    """Run the command; return its exit code."""
    job, name, seconds, *command = sys.argv[1:]
    grace_seconds = float(seconds)
    print(f"--- {time.strftime('%Y-%m-%d %H:%M:%S')} {name}, start on {os.uname().nodename}", flush=True)
    is_signalled = False

    def note(number: int, frame: FrameType | None) -> None:
        """Note that SLURM has sent a signal, which the command got too."""
        nonlocal is_signalled
        is_signalled = True

    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, note)
    try:
        process = subprocess.Popen(command, stdin=subprocess.DEVNULL)
    except OSError as error:
        print(f"cannot start {command[0]}: {error.strerror}", flush=True)
        _print_end(name, NOT_STARTED)
        return NOT_STARTED
    head, terminated_at, next_check, is_orphan = _HeadPipe(), 0.0, 0.0, False
    while (code := process.poll()) is None:
        head.listen(POLL_SECONDS)
        now = time.monotonic()
        # A lost head cannot ask the command to save, and nobody else would.
        if job and head.is_lost and now >= next_check:
            next_check = now + CHECK_SECONDS
            is_orphan = is_orphan or _is_orphan(job) is True
        if not terminated_at and (head.is_leaving or head.is_closed or is_orphan):
            terminated_at = now
            # A second SIGTERM would interrupt the save that the first one started.
            if not is_signalled:
                process.terminate()
        if terminated_at and now - terminated_at > grace_seconds:
            process.kill()
    _print_end(name, code)
    if job and not head.answers():
        _requeue_orphan(job, head)
    return code if code >= 0 else 128 - code


def _print_end(name: str, code: int) -> None:
    now, fraction = time.strftime("%Y-%m-%d %H:%M:%S"), int(time.time() % 1 * 1000)
    # If srun is lost with the head, nobody reads the output.
    with suppress(OSError):
        print(f"{now},{fraction:03d} level=INFO event=step-ended name={name} code={code}", flush=True)


def _requeue_orphan(job: str, head: _HeadPipe) -> None:
    """Wait until SLURM knows that the head's node is lost, and requeue the job.

    A refused requeue, for example by a busy controller, is repeated.
    """
    deadline = time.monotonic() + LOST_SECONDS
    while head.is_lost and time.monotonic() < deadline:
        is_orphan = _is_orphan(job)
        if is_orphan is None or (is_orphan and _scontrol("requeue", job) is not None):
            return
        head.listen(CHECK_SECONDS)


def _is_orphan(job: str) -> bool | None:
    """Whether SLURM has removed the node of the batch script from the job; None if the job does not run any more.

    False also if SLURM does not answer.
    """
    output = _scontrol("--oneliner", "show", "job", job) or ""
    state = re.search(r"JobState=(\S+)", output)
    if state is not None and state[1] not in ("RUNNING", "SUSPENDED"):
        return None
    host, nodes = re.search(r"BatchHost=(\S+)", output), re.search(r"(?<!\w)NodeList=(\S+)", output)
    if state is None or host is None or nodes is None:
        return False
    names = (_scontrol("show", "hostnames", nodes[1]) or "").split()
    return bool(names) and host[1] not in names


def _scontrol(*args: str) -> str | None:
    """Run scontrol; return its output, or None if it failed."""
    try:
        args = ("scontrol", *args)
        done = subprocess.run(args, capture_output=True, text=True, errors="replace", timeout=30, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout if done.returncode == 0 else None


if __name__ == "__main__":
    sys.exit(main())
