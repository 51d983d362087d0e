"""Freed memory is kept: the pages of one step are there for the next one."""

import subprocess
import sys

FAULTS = """
import ctypes, platform, resource, sys
from tandem.memory import keep_freed_memory
libc = ctypes.CDLL(None)
libc.malloc.restype, libc.malloc.argtypes, libc.free.argtypes = ctypes.c_void_p, [ctypes.c_size_t], [ctypes.c_void_p]
if sys.argv[1] == "keep":
    assert keep_freed_memory()
SIZES = (30, 30, 30, 20)
def step():
    blocks = [libc.malloc(size << 20) for size in SIZES]
    for block, size in zip(blocks, SIZES):
        ctypes.memset(block, 1, size << 20)
    for block in blocks:
        libc.free(block)
step()
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
for _ in range(20):
    step()
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


def faults(how: str) -> int:
    command = [sys.executable, "-c", FAULTS, how]
    return int(subprocess.run(command, capture_output=True, text=True, timeout=60, check=True).stdout)


def test_a_step_finds_the_pages_of_the_one_before() -> None:
    assert faults("keep") < 100
    assert faults("give back") > 10_000, "or the setting is of no use here"
