"""How fast this machine is at the moment: a fixed piece of work, timed beside what is judged.

The machines that run the tiers are shared. The same tier took 7.4 minutes on one and 12.2 on another, on which the same
`import torch` took 1.2 and 2.0 s. A limit in seconds therefore says more of the machine than of the tests; a limit in
multiples of this work says something of the tests.

The work is what tests do most: two processes at a time, one for each core, that start Python, import torch and compute.
"""

import statistics
import subprocess
import sys
import time

ROUNDS = 3
REFERENCE = 1.8
"""Seconds of a round on the machine that the budgets mean: two quiet cores, on which `import torch` takes 1.2 s."""
WORK = """
import torch
torch.set_num_threads(1)
square = torch.randn(256, 256)
for _ in range(200):
    square @ square
sum(number * number % 7 for number in range(1_000_000))
"""


def pace() -> float:
    """How many times longer work takes here and now than on the machine that the budgets mean.

    Never less than 1: tests also wait, and waiting is no shorter on a faster machine.
    """
    return max(1.0, statistics.median(_round() for _ in range(ROUNDS)) / REFERENCE)


def _round() -> float:
    began = time.perf_counter()
    workers = [subprocess.Popen([sys.executable, "-c", WORK]) for _ in range(2)]
    codes = [worker.wait(timeout=120) for worker in workers]
    if any(codes):
        raise RuntimeError("the work that tells how fast this machine is has failed")
    return time.perf_counter() - began
