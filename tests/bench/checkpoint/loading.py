"""What it costs an evaluator to take up the weights of a checkpoint: seconds, and memory at the most.

    python -m tests.bench.checkpoint.loading [--millions 62] [--rounds 7]

Three ways in turn (A B C A B C), each in a process of its own that has evaluated one checkpoint before: Tandem's
evaluator, which checks every byte; safetensors' `load_file` and `load_state_dict`; `torch.load` and `load_state_dict`.
A few samples are evaluated, so that the weights were really there. Memory is the highest resident set of the process
during that (VmHWM, set back before), less what it had before it saw any weights. The file is in the page cache.
"""

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from tests.support import ROOT
from torch import Tensor, nn

from tandem.durable import encode
from tandem.manifest import FILE, WEIGHTS, Manifest, hash_file
from tandem_evaluator.evaluation import Evaluation
from tandem_trainer.checkpoint.reading import read_weights
from tandem_trainer.data import Samples

NAME = "step-000000001"
PICKLE = "weights.pt"
LAYERS, SAMPLES = 15, 8
GOAL = 1.2
"""Memory over the size of the weights."""
LIMIT_SECONDS = 120.0


class Wide(nn.Module):
    """Square layers, and a prediction of one of ten classes."""

    def __init__(self, parameters: float) -> None:
        super().__init__()
        width = round((parameters / LAYERS) ** 0.5)
        self.layers = nn.Sequential(*(nn.Sequential(nn.Linear(width, width), nn.ReLU()) for _ in range(LAYERS)))

    def forward(self, images: Tensor) -> Tensor:
        """[samples, …] to [samples, 10]."""
        found: Tensor = self.layers(images.flatten(1))
        return found[:, :10]


def main() -> None:
    """Measure and print a table. Exit code 1 if Tandem's evaluator takes more memory than it should."""
    parser = argparse.ArgumentParser(prog="python -m tests.bench.checkpoint.loading")
    parser.add_argument("--millions", type=float, default=62.0, help="parameters")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--side", choices=SIDES, help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.side:
        print(json.dumps(_once(options.side, options.folder, options.millions * 1e6)))
        return
    with tempfile.TemporaryDirectory(dir=ROOT / "runs") as folder:
        size = _write(Path(folder) / NAME, options.millions * 1e6)
        found: dict[str, list[dict[str, float]]] = {side: [] for side in SIDES}
        for _ in range(options.rounds):
            for side, records in found.items():
                command = [sys.executable, "-m", "tests.bench.checkpoint.loading", "--side", side]
                command += ["--folder", str(Path(folder) / NAME), "--millions", str(options.millions)]
                told = subprocess.run(
                    command, cwd=ROOT, check=True, stdout=subprocess.PIPE, text=True, timeout=LIMIT_SECONDS
                )
                records.append(json.loads(told.stdout.splitlines()[-1]))
    print(f"weights: {size / 1e6:.0f} MB, {options.rounds} rounds\n\n| side | s: median (range) | memory / weights |")
    print("|---|---|---|")
    for side, records in found.items():
        seconds, memory = [one["seconds"] for one in records], [one["bytes"] / size for one in records]
        spread = f"{statistics.median(seconds):.2f} ({min(seconds):.2f} to {max(seconds):.2f})"
        print(f"| {side} | {spread} | {statistics.median(memory):.2f} ({min(memory):.2f} to {max(memory):.2f}) |")
    sys.exit(0 if max(one["bytes"] for one in found["tandem"]) <= GOAL * size else 1)


def _write(folder: Path, parameters: float) -> int:
    """A checkpoint of random weights, and the same as a pickle. Returns their bytes."""
    folder.mkdir()
    torch.manual_seed(0)
    weights = Wide(parameters).state_dict()
    save_file(weights, folder / WEIGHTS)
    torch.save(weights, folder / PICKLE)
    entry = hash_file(folder / WEIGHTS)
    manifest = Manifest(name=NAME, step=1, generation=1, created_at=0.0, world_size=1, files=[entry])
    (folder / FILE).write_bytes(encode(manifest.sealed()))
    return entry.size


def _once(side: str, folder: Path, parameters: float) -> dict[str, float]:
    """One checkpoint to warm up, and one that is measured."""
    torch.set_num_threads(1)
    with torch.device("meta"):
        model = Wide(parameters).eval()
    width = model.layers[0][0].in_features
    before = _resident("VmRSS")
    evaluate = SIDES[side](
        model, Samples(torch.ones(SAMPLES, 1, 1, width), torch.zeros(SAMPLES, dtype=torch.int64), 10)
    )
    evaluate(folder)
    Path("/proc/self/clear_refs").write_text("5")
    began = time.perf_counter()
    evaluate(folder)
    return {"seconds": time.perf_counter() - began, "bytes": _resident("VmHWM") - before}


def _tandem(model: nn.Module, samples: Samples) -> Callable[[Path], None]:
    evaluation = Evaluation(samples, model)

    def evaluate(folder: Path) -> None:
        evaluation.run(read_weights(folder, Manifest.load(folder)), 0, 1)

    return evaluate


def _loading(load: Callable[[Path], dict[str, Tensor]]) -> Callable[[nn.Module, Samples], Callable[[Path], None]]:
    def prepared(model: nn.Module, samples: Samples) -> Callable[[Path], None]:
        filled = model.to_empty(device="cpu")

        def evaluate(folder: Path) -> None:
            filled.load_state_dict(load(folder))
            with torch.inference_mode():
                filled(samples.images)

        return evaluate

    return prepared


def _resident(field: str) -> int:
    """Bytes."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{field}:"))


SIDES: dict[str, Callable[[nn.Module, Samples], Callable[[Path], None]]] = {
    "tandem": _tandem,
    "safetensors": _loading(lambda folder: load_file(folder / WEIGHTS)),
    "torch.load": _loading(lambda folder: dict(torch.load(folder / PICKLE, weights_only=True))),
}

if __name__ == "__main__":
    main()
