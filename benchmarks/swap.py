"""The weights of the next checkpoint in an evaluator that is warm, beside a new process for each: `python -m
benchmarks.swap`.

Both sides evaluate the same checkpoints of one task with the code of `tandem_evaluator.task_program`, on CPUs. The data
is one sample, so that what is measured is the weights: their digest, the copy into the model, and in a new process also
imports and the model itself. Memory is anonymous memory: the file of weights is mapped, and its pages are the kernel's.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from benchmarks.goals import Outcome, Verdict, conclude, judge_median
from tandem.evaluation import Checkpoint
from tandem.job.tasks import Loop
from tandem_evaluator.task_program import TaskEvaluation
from tandem_trainer.task import Task

SIZES = {"0.06 GB": 0.06e9, "0.7 GB": 0.7e9, "3 GB": 3e9}
WIDTH = 2048
CHECKPOINTS = 2
MAX_RATIO, MAX_MEMORY = 0.5, 1.1
"""Goals: time of a swap over that of a new process; anonymous memory of a warm process at its peak over the weights,
beside what a process without a model has."""
SAMPLING_SECONDS = 0.005


class Wide(Task[None]):
    """A model of some size."""

    layers = 1

    def model(self) -> nn.Module:
        """Layers of 2,048 x 2,048."""
        return nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(self.layers)))

    def data(self, split: str) -> Any:
        """One sample."""
        return TensorDataset(torch.zeros(1, WIDTH))

    def loss(self, model: nn.Module, batch: Any) -> Tensor:
        """The mean output."""
        output: Tensor = model(batch[0])
        return output.mean(dim=1)

    def metrics(self, model: nn.Module, batch: Any) -> dict[str, Any]:
        """None besides the loss."""
        return {}


class Peak(threading.Thread):
    """Measures the most anonymous memory of this process, in bytes."""

    def __init__(self) -> None:
        super().__init__(daemon=True)
        self.bytes = 0
        self.start()

    def run(self) -> None:
        """Measure until the process ends."""
        while True:
            self.bytes = max(self.bytes, anonymous_bytes())
            time.sleep(SAMPLING_SECONDS)


def anonymous_bytes() -> int:
    """Anonymous memory of this process, in bytes."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("RssAnon"))


def evaluate(layers: int, folders: list[Path]) -> dict[str, Any]:
    """Evaluate checkpoints in this process: seconds of each, peak memory, and memory before the model exists."""
    before, peak = anonymous_bytes(), Peak()
    Wide.layers = layers
    subject = TaskEvaluation(Wide(None), Loop())
    seconds = []
    for folder in folders:
        started = time.monotonic()
        subject.run(Checkpoint(folder, folder / "weights.safetensors", 1, 0, 1))
        seconds.append(time.monotonic() - started)
    return {"seconds": seconds, "peak": max(peak.bytes, anonymous_bytes()), "before": before}


def child(layers: int, folders: list[Path]) -> tuple[float, dict[str, Any]]:
    """Evaluate checkpoints in a new process. Returns its seconds, imports included, and what it measured."""
    started = time.monotonic()
    command = [sys.executable, "-m", "benchmarks.swap", "--layers", str(layers), *map(str, folders)]
    output = subprocess.run(
        command, env={**os.environ, "OMP_NUM_THREADS": "1"}, stdout=subprocess.PIPE, text=True, check=True
    ).stdout
    return time.monotonic() - started, json.loads(output)


def measure(name: str, size: float, rounds: int, folder: Path) -> list[Verdict]:
    """Compare both sides in turns."""
    layers = max(1, round(size / (4 * WIDTH * WIDTH)))
    folders = []
    for number in range(CHECKPOINTS):
        folders.append(folder / f"{name.partition(' ')[0]}-{number}")
        folders[-1].mkdir()
        state = {f"{layer}.weight": torch.full((WIDTH, WIDTH), float(number)) for layer in range(layers)}
        save_file(state, folders[-1] / "weights.safetensors")
        del state
    ratios, warm, cold, memory = [], [], [], []
    for _ in range(rounds):
        _, together = child(layers, [folders[0], *folders, folders[0]])
        swaps = together["seconds"][1:]
        alone = [child(layers, [used])[0] for used in folders]
        warm.append(statistics.median(swaps))
        cold.append(statistics.median(alone))
        ratios.append(warm[-1] / cold[-1])
        memory.append((together["peak"] - together["before"]) / (4.0 * WIDTH * WIDTH * layers))
    for used in folders:
        (used / "weights.safetensors").unlink()
    print(
        f"{name}: swap {statistics.median(warm):.2f} s ({min(warm):.2f} to {max(warm):.2f}), new process "
        f"{statistics.median(cold):.2f} s ({min(cold):.2f} to {max(cold):.2f}), memory of the warm process "
        f"{statistics.median(memory):.2f} times the weights, {rounds} rounds",
        flush=True,
    )
    largest = max(memory)
    # What a process needs besides is a fixed amount, which counts only beside small weights.
    outcome = Outcome.MET if (largest - 1) * size <= max((MAX_MEMORY - 1) * size, 0.1e9) else Outcome.MISSED
    return [
        judge_median(f"{name}: a swap takes at most {MAX_RATIO} of a new process", ratios, MAX_RATIO, "of it"),
        Verdict(outcome, f"{name}: no second model in memory", f"{largest:.2f} times the weights at the peak"),
    ]


def main() -> int:
    """Measure all sizes. Returns the exit code."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.swap", description=__doc__)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--only", nargs="*", choices=SIZES, default=list(SIZES))
    parser.add_argument("--layers", type=int, help=argparse.SUPPRESS)
    parser.add_argument("folders", nargs="*", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.layers is not None:
        print(json.dumps(evaluate(options.layers, options.folders)))
        return 0
    verdicts: list[Verdict] = []
    with tempfile.TemporaryDirectory() as folder:
        for name in options.only:
            verdicts += measure(name, SIZES[name], options.rounds, Path(folder))
    return conclude(verdicts)


if __name__ == "__main__":
    sys.exit(main())
