"""malloc settings: freed memory stays in the process instead of returning to the system between steps.

A step on a CPU allocates the same activations as the one before. glibc returns what lies free at the end of the heap to
the system once it is more than a threshold, and a new page costs a fault and 4 KiB of zeros: 5 of 53 milliseconds of a
step of the small convolutional network, and up to 12, by chance of what lies where (docs/measurements.md). Memory grows
to its peak and stays there, which is what a training process is given.

Under fsdp a rank puts the weights of a block together again and again. From the heap, tensors that stay come to lie in
the holes between such blocks, and the heap grows to twice what is in use. There, blocks of a MiB and more return to the
system when they are freed. The pages cost processor time instead, and memory is what fsdp is chosen for. Measured with
59 million parameters on two ranks (docs/measurements.md): 578 MB, 678 MB with 2 MiB, 700 with 4, 800 with 8, 1279
without; the processor seconds of a step are 1.9, 1.5, 1.5, 1.4 and 0.8. A model of less than LARGE_BYTES has little to
save: its ranks keep what they freed, as all others do.

A script of the user's own decides itself what becomes of its memory. But the faults that a layout brings by chance are
nobody's decision, and in ranks that are forked there were more: two ranks of `benchmarks/throughput/bare_ddp.py` had
4,800 to 21,300 a second in five runs, under torchrun 3,800 to 8,500 in three, and each took 4 µs. So they begin with
the thresholds that glibc arrives at by itself once a block of 32 MiB was freed, and had 18: at most 64 MiB lie free at
the end of the heap, and larger blocks return at once. Who has set a threshold in the environment keeps it.

Evaluators begin there, too. One that scored a language model of 0.8 million parameters in batches of 32 passages had
57,000 faults a second, which took more than a fifth of its time, and zeroed pages for which it shares the memory with
training. A program is told by variables, which its children inherit.

Rejected: variables for ranks and for scripts (they would have to be there before Python starts, and reach the children
of a user's script), another allocator (a library to ship, for the same effect).
"""

import ctypes
import os
from collections.abc import Mapping

_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3
_MAX_COUNT = 2**31 - 1
_MAX_MMAP_THRESHOLD = 2**25
"""Largest threshold that older versions accept. Larger blocks are mapped and unmapped each time, as before."""
_BY_ENVIRONMENT = ("MALLOC_", "GLIBC_TUNABLES")
"""Prefixes of environment variables that set malloc's thresholds."""
LARGE_BYTES = 2**26
"""Size of a model's weights from which on large blocks return to the system under fsdp, in bytes."""
_RETURNED = 2**20
"""Minimum size of a block that returns to the system, in bytes, where large ones do."""


def keep_freed_memory() -> bool:
    """Keep freed memory in this process; returns whether its C library can."""
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is None:
        return False
    # Setting one of the two stops glibc from adapting the other.
    large = bool(mallopt(_MMAP_THRESHOLD, _MAX_COUNT)) or bool(mallopt(_MMAP_THRESHOLD, _MAX_MMAP_THRESHOLD))
    return large and bool(mallopt(_TRIM_THRESHOLD, _MAX_COUNT))


def use_adapted_thresholds() -> bool:
    """Start with the thresholds at which glibc's own adaptation ends, unless the environment sets others; returns
    whether that is done."""
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is None or _is_configured(os.environ):
        return False
    large = bool(mallopt(_MMAP_THRESHOLD, _MAX_MMAP_THRESHOLD))
    return large and bool(mallopt(_TRIM_THRESHOLD, 2 * _MAX_MMAP_THRESHOLD))


def adapted_environment(environment: Mapping[str, str]) -> dict[str, str]:
    """Return the environment variables that start a program with these thresholds, for glibc only."""
    if _is_configured(environment):
        return {}
    return {
        "MALLOC_MMAP_THRESHOLD_": str(_MAX_MMAP_THRESHOLD),
        "MALLOC_TRIM_THRESHOLD_": str(2 * _MAX_MMAP_THRESHOLD),
    }


def _is_configured(environment: Mapping[str, str]) -> bool:
    return any(name.startswith(_BY_ENVIRONMENT) for name in environment)


def return_large_blocks() -> bool:
    """Return large blocks to the system as soon as they are freed, from now on; returns whether the C library can."""
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    return mallopt is not None and bool(mallopt(_MMAP_THRESHOLD, _RETURNED))
