"""What srun starts on a node: one process of a job, which is asked to leave when the standard input ends.

    python -m tandem_cli.slurm.step NAME COMMAND…

SLURM sends a signal to all processes of a step, so data loaders would die of the SIGTERM by which an agent is asked to
save, and the save with them. srun itself ends its step at SIGTERM. The standard input, whose other end the head holds,
reaches this process alone, and ends also when the head dies.
"""

import os
import select
import signal
import subprocess
import sys
import time
from types import FrameType

SAVING_SECONDS = 45.0
"""What a process gets between SIGTERM and SIGKILL, as on a laptop (tandem.supervision)."""
POLL_SECONDS = 0.1


def main() -> int:
    """Run the command; returns its exit code."""
    name, *command = sys.argv[1:]
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
        return 127
    asked_at: float | None = None
    while (code := process.poll()) is None:
        if asked_at is not None:
            if time.monotonic() - asked_at > SAVING_SECONDS:
                process.kill()
            time.sleep(POLL_SECONDS)
        elif select.select([0], [], [], POLL_SECONDS)[0] and not os.read(0, 4096):
            asked_at = time.monotonic()
            if not signalled:
                process.terminate()
    now, fraction = time.strftime("%Y-%m-%d %H:%M:%S"), int(time.time() % 1 * 1000)
    print(f"{now},{fraction:03d} level=INFO event=step-ended name={name} code={code}", flush=True)
    return code if code >= 0 else 128 - code


if __name__ == "__main__":
    sys.exit(main())
