"""Cost of loading the weights of a checkpoint into an evaluator: seconds, peak memory, bytes read.

    python -m benchmarks.checkpoint.loading [--millions 62] [--rounds 7]

The sides take turns (A B C A B C), each in a process of its own that has evaluated one checkpoint before. Between two
checkpoints no side's model has weights, and each side loads them as its own documentation recommends, so that no side
holds them twice:

  tandem                    the evaluator's own reader: every byte is compared with the manifest's checksums
  safetensors               `load_file`, `load_state_dict(assign=True)`
  torch.load                `torch.load(mmap=True)`, `load_state_dict(assign=True)`
  torch.load after XXH3     the same, after comparing the file's checksums with those in a manifest
  dcp.load                  `to_empty`, and `torch.distributed.checkpoint.load` in place

A few samples are evaluated, so that the weights are really loaded. The files are in the page cache. Memory is the peak
resident set of the process meanwhile (VmHWM, reset before), minus its size before any weights; pages of the file itself
are reported separately, because the kernel may reclaim them. Bytes read are those of read calls, and those pages. To
test whether a side verifies, one byte in the middle of the weights is changed: the side refuses the file or evaluates
it.

Exit code 1 if a side failed, if Tandem's evaluator takes more memory than GOAL, or evaluates the changed weights.
"""

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from benchmarks.goals import Outcome, Verdict, conclude
from tandem.rundir.checkpoint import FILE, WEIGHTS, Manifest
from tandem.rundir.durable import encode
from tandem_evaluator.evaluation import Evaluation
from tandem_trainer.checkpoint.reader import read_weights
from tandem_trainer.data import Samples
from tests.support import ROOT
from tests.support.checkpoints import hash_file

NAME = "step-000000001"
PICKLE, DCP = "weights.pt", "dcp"
LAYERS, SAMPLES = 15, 8
GOAL = 1.2
"""Goal for the memory over the size of the weights."""
LIMIT_SECONDS = 120.0
Record = dict[str, Any]
"""Seconds, peak bytes, bytes of them that are pages of the file, bytes read; or a problem."""


class Wide(nn.Module):
    """Square layers, and a prediction of one of ten classes."""

    def __init__(self, parameters: float) -> None:
        super().__init__()
        width = round((parameters / LAYERS) ** 0.5)
        self.layers = nn.Sequential(*(nn.Sequential(nn.Linear(width, width), nn.ReLU()) for _ in range(LAYERS)))

    def forward(self, images: Tensor) -> Tensor:
        """[samples, …] to [samples, 10]."""
        outputs: Tensor = self.layers(images.flatten(1))
        return outputs[:, :10]


def main() -> None:
    """Measure, and print a table and the verdicts."""
    options = _options()
    if options.side:
        run = _tries if options.damaged else _once
        print(json.dumps(run(options.side, options.folder, options.millions * 1e6)))
        return
    (ROOT / "runs").mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory(dir=ROOT / "runs") as name:
        folder = Path(name) / NAME
        size = _write(folder, options.millions * 1e6)
        by_side: dict[str, list[Record]] = {side: [] for side in SIDES}
        for _ in range(options.rounds):
            for side, records in by_side.items():
                records.append(_in_process(side, folder, options.millions))
        for path in (folder / WEIGHTS, folder / PICKLE, *(folder / DCP).glob("*.distcp")):
            _damage(path)
        verifies = {side: _in_process(side, folder, options.millions, "--damaged").get("refused") for side in SIDES}
    print(f"weights: {size / 1e6:.0f} MB, {options.rounds} rounds\n\n{written(by_side, verifies, size)}\n")
    sys.exit(conclude(judged(by_side, verifies, size)))


def written(by_side: Mapping[str, Sequence[Record]], verifies: Mapping[str, str | None], size: int) -> str:
    """Format the table. Pure."""
    lines = [
        "| side | verifies | s: median (range) | memory at the most / weights | of that, pages of the file "
        "| bytes read / weights | failed |",
        "|---|---|---|---|---|---|---|",
    ]
    for side, records in by_side.items():
        good = [record for record in records if "problem" not in record]
        failed = f"{len(records) - len(good)} of {len(records)}"
        if not good:
            lines.append(f"| {side} | {_verifies(verifies[side])} | – | – | – | – | {failed} |")
            continue
        seconds = [record["seconds"] for record in good]
        cells = [
            f"{statistics.median(seconds):.2f} ({min(seconds):.2f} to {max(seconds):.2f})",
            *(f"{statistics.median(record[name] for record in good) / size:.2f}" for name in ("most", "pages", "read")),
        ]
        lines.append(f"| {side} | {_verifies(verifies[side])} | {' | '.join(cells)} | {failed} |")
    return "\n".join(lines)


def judged(by_side: Mapping[str, Sequence[Record]], verifies: Mapping[str, str | None], size: int) -> list[Verdict]:
    """Judge the goals. Pure."""
    problems = [
        f"{side}: {record['problem']}" for side, records in by_side.items() for record in records if "problem" in record
    ]
    if problems:
        return [Verdict(Outcome.MISSED, "every side loads the weights", "; ".join(problems))]
    peak = max(record["most"] for record in by_side["tandem"]) / size
    outcome = Outcome.MET if peak <= GOAL else Outcome.MISSED
    refused = verifies["tandem"]
    return [
        Verdict(
            outcome, f"an evaluator holds the weights once: at most {GOAL:g} times their size", f"{peak:.2f} times"
        ),
        Verdict(
            Outcome.MET if refused else Outcome.MISSED,
            "an evaluator refuses weights of which a byte has changed",
            refused or "it evaluated them",
        ),
    ]


def _verifies(refused: str | None) -> str:
    return "every byte" if refused else "no"


def _in_process(side: str, folder: Path, millions: float, *args: str) -> Record:
    command = [sys.executable, "-m", "benchmarks.checkpoint.loading", "--side", side]
    command += ["--folder", str(folder), "--millions", str(millions), *args]
    try:
        ended = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=LIMIT_SECONDS)
    except subprocess.TimeoutExpired:
        return {"problem": f"not within {LIMIT_SECONDS:g} s"}
    if ended.returncode != 0:
        return {
            "problem": ended.stderr.strip().splitlines()[-1] if ended.stderr.strip() else f"code {ended.returncode}"
        }
    record: Record = json.loads(ended.stdout.splitlines()[-1])
    return record


def _write(folder: Path, parameters: float) -> int:
    """Write a checkpoint of random weights, also as a pickle, and as dcp writes them. Returns their bytes."""
    folder.mkdir()
    torch.manual_seed(0)
    weights = Wide(parameters).state_dict()
    save_file(weights, folder / WEIGHTS)
    torch.save(weights, folder / PICKLE)
    with warnings.catch_warnings(action="ignore", category=UserWarning):
        # It says that this is no distributed run.
        dcp.save(weights, checkpoint_id=folder / DCP, no_dist=True)
    entries = [hash_file(folder / WEIGHTS), hash_file(folder / PICKLE)]
    manifest = Manifest(name=NAME, step=1, generation=1, created_at=0.0, world_size=1, files=entries)
    (folder / FILE).write_bytes(encode(manifest.sealed()))
    return sum(tensor.nbytes for tensor in weights.values())


def _damage(path: Path) -> None:
    """Change one byte in the middle, which is in a weight."""
    with path.open("r+b") as file:
        file.seek(path.stat().st_size // 2)
        byte = file.read(1)
        file.seek(-1, 1)
        file.write(bytes([byte[0] ^ 1]))


def _once(side: str, folder: Path, parameters: float) -> Record:
    """Evaluate one checkpoint to warm up and to count the bytes read, and a second one that is timed."""
    evaluate, before = _prepared(side, parameters), _resident("VmRSS")
    pages: list[int] = []
    read = _read_calls()
    evaluate(folder, lambda: pages.append(_mapped(folder)))
    read = _read_calls() - read
    Path("/proc/self/clear_refs").write_text("5")
    started = time.perf_counter()
    evaluate(folder, lambda: None)
    seconds = time.perf_counter() - started
    return {
        "seconds": seconds,
        "most": _resident("VmHWM") - before,
        "pages": max(pages),
        "read": read + max(pages),
    }


def _tries(side: str, folder: Path, parameters: float) -> Record:
    """Test whether a side refuses the weights in the folder, and with which message."""
    try:
        _prepared(side, parameters)(folder, lambda: None)
    except Exception as error:
        return {"refused": f"{type(error).__name__}: {error}"}
    return {"refused": None}


Evaluate = Callable[[Path, Callable[[], None]], None]
"""Loads the weights in a folder, evaluates, calls the function while the weights are in memory, and releases them."""


def _prepared(side: str, parameters: float) -> Evaluate:
    torch.set_num_threads(1)
    with torch.device("meta"):
        model = Wide(parameters).eval()
    width = round((parameters / LAYERS) ** 0.5)
    samples = Samples(torch.ones(SAMPLES, 1, 1, width), torch.zeros(SAMPLES, dtype=torch.int64), 10)
    return SIDES[side](model, samples)


def _tandem(model: nn.Module, samples: Samples) -> Evaluate:
    evaluation = Evaluation(samples, model)

    def evaluate(folder: Path, while_loaded: Callable[[], None]) -> None:
        weights = read_weights(folder, Manifest.load(folder))

        def may_continue() -> bool:
            while_loaded()
            return True

        evaluation.run(weights, 0, 1, may_continue)

    return evaluate


def _taking(take: Callable[[nn.Module, Path], None]) -> Callable[[nn.Module, Samples], Evaluate]:
    """Make a side that fills a model without weights by `take`."""

    def prepared(model: nn.Module, samples: Samples) -> Evaluate:
        shapes = model.state_dict()

        def evaluate(folder: Path, while_loaded: Callable[[], None]) -> None:
            take(model, folder)
            with torch.inference_mode():
                model(samples.images)
            while_loaded()
            model.load_state_dict(shapes, assign=True)

        return evaluate

    return prepared


def _safetensors(model: nn.Module, folder: Path) -> None:
    model.load_state_dict(load_file(folder / WEIGHTS), assign=True)


def _torch(model: nn.Module, folder: Path) -> None:
    model.load_state_dict(torch.load(folder / PICKLE, weights_only=True, mmap=True), assign=True)


def _verified_torch(model: nn.Module, folder: Path) -> None:
    if hash_file(folder / PICKLE) != Manifest.load(folder).entry(PICKLE):
        raise ValueError(f"{PICKLE} does not match its checksums")
    _torch(model, folder)


def _dcp(model: nn.Module, folder: Path) -> None:
    model.to_empty(device="cpu")
    dcp.load(model.state_dict(), checkpoint_id=folder / DCP, no_dist=True)


SIDES: dict[str, Callable[[nn.Module, Samples], Evaluate]] = {
    "tandem": _tandem,
    "safetensors": _taking(_safetensors),
    "torch.load": _taking(_torch),
    "torch.load after XXH3": _taking(_verified_torch),
    "dcp.load": _taking(_dcp),
}


def _resident(field: str) -> int:
    """Memory in bytes."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{field}:"))


def _read_calls() -> int:
    """Bytes that read calls of this process have returned."""
    lines = Path("/proc/self/io").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("rchar:"))


def _mapped(folder: Path) -> int:
    """Bytes of the files in a folder that are mapped and resident."""
    total, inside = 0, False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        columns = line.split()
        if not columns[0].endswith(":"):
            inside = str(folder) in line
        elif inside and columns[0] == "Rss:":
            total += int(columns[1]) * 1024
    return total


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.checkpoint.loading")
    parser.add_argument("--millions", type=float, default=62.0, help="parameters")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--side", choices=SIDES, help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--damaged", action="store_true", help=argparse.SUPPRESS)
    return parser.parse_args()


if __name__ == "__main__":
    main()
