"""Cost of a restore on the ranks of a node: seconds, peak memory, bytes read.

    python -m benchmarks.checkpoint.restoring [--gigabytes 4] [--ranks 2] [--rounds 5]

A model and its Adam moments, of this size together, are saved once. Then the sides take turns (A B A B), each in fresh
processes that have built the model and wait; before each turn the files are dropped from the page cache:

  tandem       as in a start: the ranks read and check each byte once, share it, and agree; then each loads the state;
               then they compare a digest
  by itself    each rank reads and checks everything into its own memory, and loads it
  cat          the files once through `cat`: the disk's own time

Seconds are from the first read until the slowest rank could take its next step. Memory is that of all ranks together
(the sum of their proportional set sizes, in which shared pages count once), sampled every few hundredths of a second,
minus their memory before they built the model. Bytes read are those of read calls.

Exit code 1 if a side failed, if Tandem's peak is above GOAL times the state of all ranks, or a byte is read twice.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch
from torch import nn

from benchmarks.goals import Outcome, Verdict, conclude
from tandem.rundir.checkpoint import DataPosition
from tandem.rundir.layout import RunDir
from tandem.rundir.lineage import GenerationRecord
from tandem_trainer.checkpoint.reader import read_contents
from tandem_trainer.checkpoint.restoring import compare, restore
from tandem_trainer.checkpoint.saving import Author, Saver
from tandem_trainer.checkpoint.train_state import TrainState
from tandem_trainer.process_group import Group
from tests.support import ROOT, manifests
from tests.support.ports import reserved_port

GOAL = 1.2
"""Goal for the memory over the state of all ranks."""
WIDTH = 4096
LOOK_SECONDS = 0.03
LIMIT_SECONDS = 600.0
COPIES = 3
"""Tensors for each parameter: the weights, and two moments."""


def main() -> int:
    """Measure; the exit code says whether the goals are met."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.checkpoint.restoring", description="Cost of a restore.")
    parser.add_argument("--gigabytes", type=float, default=4.0, help="of weights and moments")
    parser.add_argument("--ranks", type=int, default=2, help="on this node")
    parser.add_argument("--rounds", type=int, default=5, help="turns of each side")
    parser.add_argument("--rank", choices=SIDES, help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    layers = max(1, round(options.gigabytes * 1e9 / (WIDTH * WIDTH * 4 * COPIES)))
    if options.rank:
        _be_rank(SIDES[options.rank], options.folder, layers)
        return 0
    with tempfile.TemporaryDirectory(prefix="tandem-restoring-") as folder:
        rundir = _saved(Path(folder), layers)
        manifest = rundir.committed()[0]
        files = [rundir.checkpoint(manifest.name) / entry.path for entry in manifest.files]
        print(f"{manifest.size / 1e9:.2f} GB, {options.ranks} ranks, {options.rounds} rounds", flush=True)
        records: dict[str, list[dict[str, float]]] = {name: [] for name in (*SIDES, "cat")}
        for _ in range(options.rounds):
            for name, turns in records.items():
                _forget(files)
                turn = _cat(files) if name == "cat" else _turn(name, Path(folder), options, manifest.size)
                turns.append(turn)
                figures = ", ".join(f"{key} {value:.2f}" for key, value in turn.items())
                print(f"  {name}: {figures}", flush=True)
    return conclude(_judged(records))


def _judged(records: dict[str, list[dict[str, float]]]) -> list[Verdict]:
    print(f"\n{'':12} {'seconds':>22} {'memory / state':>15} {'read / size':>12}")
    for name, turns in records.items():
        seconds = sorted(turn["seconds"] for turn in turns)
        line = f"{name:12} {statistics.median(seconds):8.2f} ({seconds[0]:.2f} to {seconds[-1]:.2f})"
        if name != "cat":
            line += f" {max(turn['memory'] for turn in turns):15.2f} {max(turn['read'] for turn in turns):12.2f}"
        print(line)
    peak = max(turn["memory"] for turn in records["tandem"])
    read = max(turn["read"] for turn in records["tandem"])
    return [
        Verdict(Outcome.MET if peak <= GOAL else Outcome.MISSED, f"memory ≤ {GOAL} × state", f"at the most {peak:.2f}"),
        Verdict(Outcome.MET if read < 1.01 else Outcome.MISSED, "each byte is read once", f"at the most {read:.3f} ×"),
    ]


def _turn(name: str, folder: Path, options: argparse.Namespace, size: int) -> dict[str, float]:
    port = reserved_port()
    command = [sys.executable, "-m", "benchmarks.checkpoint.restoring", "--rank", name, "--folder", str(folder)]
    command += ["--gigabytes", str(options.gigabytes)]
    ranks = []
    for rank in range(options.ranks):
        variables = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": options.ranks, "MASTER_PORT": port}
        environment = os.environ | {key: str(value) for key, value in variables.items()}
        environment |= {"MASTER_ADDR": "127.0.0.1", "OMP_NUM_THREADS": "1"}
        pipe = subprocess.PIPE
        ranks.append(subprocess.Popen(command, cwd=ROOT, env=environment, stdin=pipe, stdout=pipe, text=True))
    try:
        before = sum(json.loads(_line(rank))["held"] for rank in ranks)
        for rank in ranks:
            assert rank.stdin is not None
            rank.stdin.write("go\n")
            rank.stdin.flush()
        peak, deadline = 0, time.monotonic() + LIMIT_SECONDS
        while not all((folder / f"done-{rank.pid}").exists() for rank in ranks):
            assert time.monotonic() < deadline, "it takes too long"
            assert all(rank.poll() is None for rank in ranks), "a rank has died"
            peak = max(peak, sum(_proportional_bytes(rank.pid) for rank in ranks))
            time.sleep(LOOK_SECONDS)
        answers = [json.loads(_line(rank)) for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
            rank.communicate()
    return {
        "seconds": max(answer["until"] for answer in answers) - min(answer["since"] for answer in answers),
        "memory": (peak - before) / (size * options.ranks),
        "read": sum(answer["read"] for answer in answers) / size,
    }


def _line(rank: "subprocess.Popen[str]") -> str:
    assert rank.stdout is not None
    line = rank.stdout.readline()
    assert line, "a rank has died"
    return line


def _be_rank(side: Callable[[RunDir, Group, TrainState], None], folder: Path, layers: int) -> None:
    memory = _proportional_bytes(os.getpid())
    train_state = _training(layers)
    group = Group.join()
    group.barrier()
    print(json.dumps({"held": memory}), flush=True)
    sys.stdin.readline()
    read, since = _read(), time.monotonic()
    side(RunDir(folder / "run"), group, train_state)
    answer = {"since": since, "until": time.monotonic(), "read": _read() - read}
    (folder / f"done-{os.getpid()}").touch()
    print(json.dumps(answer), flush=True)
    sys.stdin.readline()


def _tandem(rundir: RunDir, group: Group, train_state: TrainState) -> None:
    restored = restore(rundir, group, lambda loaded: train_state.check(loaded.contents))
    assert restored.loaded is not None
    train_state.load(restored.loaded.contents)
    restored.loaded = None
    restored.release()
    compare(group, train_state.replicated())


def _by_itself(rundir: RunDir, group: Group, train_state: TrainState) -> None:
    manifest = rundir.committed()[0]
    contents = read_contents(rundir.checkpoint(manifest.name), manifest)
    train_state.check(contents)
    train_state.load(contents)
    group.barrier()


SIDES = {"tandem": _tandem, "by itself": _by_itself}


def _training(layers: int) -> TrainState:
    """Build the model like a script, each page of it touched."""
    model = nn.ModuleList(nn.Linear(WIDTH, WIDTH, bias=False, device="meta") for _ in range(layers)).to_empty(
        device="cpu"
    )
    for number, parameter in enumerate(model.parameters()):
        parameter.data.fill_(number + 0.5)
    return TrainState(model, torch.optim.AdamW(model.parameters(), lr=1e-3, foreach=False))


def _saved(folder: Path, layers: int) -> RunDir:
    rundir = manifests.run_directory(folder / "run", manifests.job("restoring"))
    assert rundir.record_generation(GenerationRecord(generation=1, world_size=1, started_at=0.0))
    model = nn.ModuleList(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(layers))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, foreach=False)
    for parameter in model.parameters():
        parameter.grad = torch.full_like(parameter, 0.01)
    optimizer.step()
    saver = Saver(rundir, Author(1, None, 1), lambda: None, lambda outcome: None)
    saver.save(1, DataPosition(seed=0, epoch=0, cursor=0), TrainState(model, optimizer).contents({}))
    assert "committed" in saver.wait(), saver.wait()
    saver.close()
    return rundir


def _cat(files: list[Path]) -> dict[str, float]:
    since = time.monotonic()
    subprocess.run(["cat", *map(str, files)], stdout=subprocess.DEVNULL, check=True)
    return {"seconds": time.monotonic() - since}


def _forget(files: list[Path]) -> None:
    """Drop files from the page cache."""
    for path in files:
        with path.open("rb") as file:
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def _proportional_bytes(pid: int) -> int:
    """Proportional set size of a process, in bytes."""
    for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines():
        if line.startswith("Pss:"):
            return int(line.split()[1]) * 1024
    return 0


def _read() -> int:
    return int(Path("/proc/self/io").read_text().split("rchar: ")[1].split()[0])


if __name__ == "__main__":
    sys.exit(main())
