"""Several evaluator processes in one pod: starts them, starts a dead one again, ends when all are done.

They share nothing but the run directory, as if they were in different pods. One that was killed is started again after
a pause that grows, so that the others do not have to do its share; one that says that it cannot work ends them all.
"""

import signal
import subprocess
import time
from dataclasses import dataclass
from types import FrameType

from tandem import launch
from tandem.exitcode import ExitCode

FIRST_PAUSE, LONGEST_PAUSE = 1.0, 60.0
"""Seconds before the second restart in a row, doubled for each further one."""
POLL_SECONDS = 0.2
HOPELESS = (ExitCode.CONFIGURATION, ExitCode.USAGE)


@dataclass
class _Member:
    index: int
    process: subprocess.Popen[bytes] | None = None
    due: float = 0.0
    pause: float = FIRST_PAUSE
    done: bool = False


def run_crew(processes: int) -> int:
    """Run so many evaluator processes until all are done, or until SIGTERM or SIGINT. Returns the exit code."""
    members = [_Member(index) for index in range(processes)]
    asked: list[int] = []

    def leave(number: int, _: FrameType | None) -> None:
        asked.append(number)

    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, leave)
    try:
        while not asked:
            for member in members:
                if (code := _look_after(member)) is not None:
                    return code
            if all(member.done for member in members):
                return ExitCode.DONE
            time.sleep(POLL_SECONDS)
        return ExitCode.INTERRUPTED if asked[0] == signal.SIGINT else ExitCode.PREEMPTED
    finally:
        _end(members)


def _look_after(member: _Member) -> int | None:
    """Start one that is due; the code to end all with if one cannot work."""
    now = time.monotonic()
    if member.done or now < member.due:
        return None
    if member.process is None:
        member.process = subprocess.Popen(launch.evaluator_command(member.index))
    code = member.process.poll()
    if code is None:
        return None
    member.process = None
    if code in HOPELESS:
        return code
    member.done = code == ExitCode.DONE
    if not member.done:
        print(f"evaluator {member.index} ended with code {code}; again in {member.pause:.0f} s", flush=True)
        member.due, member.pause = now + member.pause, min(LONGEST_PAUSE, 2 * member.pause)
    return None


def _end(members: list[_Member]) -> None:
    """Ask those that still run to leave. They take a moment to give back what they hold; the pod's grace is longer."""
    running = [member.process for member in members if member.process is not None]
    for process in running:
        process.terminate()
    for process in running:
        process.wait()
