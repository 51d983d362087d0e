"""How long this process has existed."""

import os
import sys
import time
from contextlib import suppress
from pathlib import Path

_IMPORTED = time.monotonic()


def process_age() -> float:
    """Seconds since this process began, to a hundredth of one; where the system does not tell, since this module was
    imported."""
    if sys.platform == "linux":
        # Not psutil's create_time: the time of the system's start that it adds is a whole number of seconds.
        with suppress(OSError, ValueError, IndexError):
            fields = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
            began = int(fields[19]) / os.sysconf("SC_CLK_TCK")
            age = time.clock_gettime(time.CLOCK_BOOTTIME) - began
            if age >= 0:
                return age
    return time.monotonic() - _IMPORTED
