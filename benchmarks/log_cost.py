"""Cost of a call of `tandem.log` for the training thread, in a job and outside of one: `python -m benchmarks.log_cost`.

The pulse and the disk are real, and the thread that writes the log is running. Each call is timed by itself: the median
is the usual cost of a step, and the slowest thousandth its worst.
"""

import os
import tempfile
import time
from pathlib import Path

import tandem
from tandem import script
from tandem.processes import launch
from tandem_trainer.pulse import PulseView

CALLS = 20_000
STEP_SECONDS = 0.001
"""Seconds between two calls: a thousand steps a second."""


def measure(label: str, **values: float) -> None:
    """Time calls, and print their cost."""
    tandem.log(step=0, loss=0.5, samples=64, total=CALLS, **values)
    durations = []
    for step in range(1, CALLS + 1):
        until = time.perf_counter() + STEP_SECONDS
        while time.perf_counter() < until:
            pass
        started = time.perf_counter()
        tandem.log(step=step, loss=0.5, samples=64, total=CALLS, **values)
        durations.append(time.perf_counter() - started)
    durations.sort()
    median, slowest = durations[CALLS // 2], durations[CALLS * 999 // 1000]
    print(f"{label:<34} median {median * 1e6:5.1f} µs   999 of 1,000 below {slowest * 1e6:6.1f} µs")


def main() -> None:
    """Measure."""
    os.environ.pop(script.STEP_LOG, None)
    measure("outside of a job")
    with tempfile.TemporaryDirectory() as folder:
        view = PulseView(Path(folder), 0)
        os.environ |= {launch.PULSE: folder, launch.RUN_DIR: f"{folder}/run", launch.GENERATION: "1"}
        os.environ |= {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", script.STEP_LOG: "tandem_trainer.step_log"}
        measure("in a job")
        measure("in a job, with two other values", perplexity=12.3, accuracy=0.9)
        view.close()


if __name__ == "__main__":
    main()
