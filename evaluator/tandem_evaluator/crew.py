"""Runs several evaluator processes in one pod: starts them, restarts dead ones, and ends when all are done.

They share nothing but the run directory, as if they were in different pods. A killed process is restarted after a
growing pause, so that the others do not have to do its share; one whose exit code says that it cannot work ends them
all.
"""

import signal
import subprocess
import time
from types import FrameType

from tandem.processes import launch
from tandem.processes.exitcode import ExitCode
from tandem.processes.supervision import Child, has_succeeded, is_due, restart_delay
from tandem.processes.sync_process import exchanging

POLL_SECONDS = 0.2
HOPELESS = (ExitCode.CONFIGURATION, ExitCode.USAGE)


class _Member:
    def __init__(self, index: int) -> None:
        self.index = index
        self.child = Child(name=f"evaluator {index}", role="evaluator")
        self.process: subprocess.Popen[bytes] | None = None


def run_processes(processes: int) -> int:
    """Run this many evaluator processes until all are done, or until SIGTERM or SIGINT. Returns the exit code."""
    members = [_Member(index) for index in range(processes)]
    signals: list[int] = []

    def leave(number: int, _: FrameType | None) -> None:
        signals.append(number)

    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, leave)
    with exchanging():
        return _look_after_all(members, signals)


def _look_after_all(members: list[_Member], signals: list[int]) -> int:
    try:
        while not signals:
            for member in members:
                if (code := _look_after(member)) is not None:
                    return code
            if all(has_succeeded(member.child) for member in members):
                return ExitCode.DONE
            time.sleep(POLL_SECONDS)
        return ExitCode.INTERRUPTED if signals[0] == signal.SIGINT else ExitCode.PREEMPTED
    finally:
        _end(members)


def _look_after(member: _Member) -> int | None:
    """Start a process that is due; returns the exit code to end all of them with, if one cannot work."""
    now, child = time.monotonic(), member.child
    if member.process is None:
        if not has_succeeded(child) and is_due(child, now):
            member.process = subprocess.Popen(launch.evaluator_command(member.index))
            member.child = child.started(now)
        return None
    if (code := member.process.poll()) is None:
        return None
    member.process, member.child = None, child.ended(code, now)
    # A wrong configuration or usage concerns all processes alike, so a restart would not help.
    if code in HOPELESS:
        return code
    if code != ExitCode.DONE:
        print(f"{child.name} ended with code {code}; again in {restart_delay(member.child.failures):g} s", flush=True)
    return None


def _end(members: list[_Member]) -> None:
    """Ask the running processes to leave. They take a moment to release their claims; the pod's grace period is
    longer."""
    running = [member.process for member in members if member.process is not None]
    for process in running:
        process.terminate()
    for process in running:
        process.wait()
