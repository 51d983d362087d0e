"""malloc settings: freed memory stays in the process instead of returning to the system between steps.

A step on a CPU allocates the same activations as the one before. glibc returns what lies free at the end of the heap to
the system once it is more than a threshold, and a new page costs a fault and 4 KiB of zeros: 5 of 53 milliseconds of a
step of the small convolutional network, and up to 12, by chance of what lies where (docs/measurements.md). Memory grows
to its peak and stays there, which is what a training process is given.

Rejected: the environment variables of glibc (they would have to be there before Python starts, and reach a user's own
script), another allocator (a library to ship, for the same effect).
"""

import ctypes

_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3
_MOST = 2**31 - 1
_LARGEST_MMAP_THRESHOLD = 2**25
"""Older versions refuse more. Blocks that are larger are mapped and unmapped each time, as before."""


def keep_freed_memory() -> bool:
    """Set it for this process; whether its C library can."""
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is None:
        return False
    # Setting one of the two stops glibc from adapting the other.
    large = bool(mallopt(_MMAP_THRESHOLD, _MOST)) or bool(mallopt(_MMAP_THRESHOLD, _LARGEST_MMAP_THRESHOLD))
    return large and bool(mallopt(_TRIM_THRESHOLD, _MOST))
