"""The age of this process."""

import os
import sys
import time
from contextlib import suppress
from pathlib import Path

_IMPORTED = time.monotonic()


def process_age() -> float:
    """Seconds since this process started, to a hundredth of a second; where the system does not report it, since this
    module was imported."""
    if sys.platform == "linux":
        # psutil's create_time adds the system's boot time, which is a whole number of seconds.
        with suppress(OSError, ValueError, IndexError):
            fields = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
            started = int(fields[19]) / os.sysconf("SC_CLK_TCK")
            age = time.clock_gettime(time.CLOCK_BOOTTIME) - started
            if age >= 0:
                return age
    return time.monotonic() - _IMPORTED
