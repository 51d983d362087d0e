"""One rank: steps of a DistributedDataParallel model, and between them saves of each side in turn. Started by torchrun.

A step ends with a small all-reduce in which the ranks agree whether the save is done, so that all take the same steps
after it. It is part of every step, before and after a save.

Ranks that are elsewhere take no steps and save their part: they stand for ranks on other machines with processors of
their own, and leave this machine's free processors to the others.
"""

import argparse
import itertools
import json
import os
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any

import psutil
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from benchmarks.checkpoint.sides import SIDES, Side

LAYERS, BATCH = 15, 16
WARM_STEPS, MIN_AFTER, MAX_AFTER = 2, 3, 200
SAMPLE_SECONDS = 0.02


class Loop:
    """Model, optimizer and steps."""

    def __init__(self, megabytes: float, elsewhere: int) -> None:
        torch.manual_seed(0)
        # Weights and two moments, four bytes each.
        width = round((megabytes * 1e6 / 12 / LAYERS) ** 0.5)
        self.model = nn.Sequential(*(nn.Sequential(nn.Linear(width, width), nn.ReLU()) for _ in range(LAYERS)))
        local_ranks = dist.get_world_size() - elsewhere
        group = dist.new_group(list(range(local_ranks)))
        self._is_here = dist.get_rank() < local_ranks
        self._parallel: nn.Module = self.model
        if self._is_here:
            self._parallel = DistributedDataParallel(self.model, process_group=group, gradient_as_bucket_view=True)
        self.optimizer = torch.optim.Adam(self.model.parameters(), lr=1e-5, fused=True)
        self._samples = torch.randn(BATCH, width)
        self.steps = 0

    def bytes(self) -> int:
        """Size of the state: parameters and moments."""
        states = (tensor for state in self.optimizer.state.values() for tensor in state.values())
        return sum(tensor.nbytes for tensor in [*self.model.parameters(), *states] if isinstance(tensor, Tensor))

    def step(self, finished: bool) -> tuple[float, bool]:
        """Take a step. Returns its seconds, and whether all ranks have finished."""
        started = time.perf_counter()
        # Ranks elsewhere need the optimizer's moments, too.
        if self._is_here or self.steps == 0:
            self._parallel(self._samples).square().mean().backward()
            self.optimizer.step()
            self.optimizer.zero_grad()
        votes = torch.tensor([float(finished)])
        dist.all_reduce(votes, op=dist.ReduceOp.MIN)
        self.steps += 1
        return time.perf_counter() - started, bool(votes.item())


def main() -> None:
    """Measure; rank 0 prints one record a line."""
    parser = argparse.ArgumentParser()
    parser.add_argument("mode", choices=["time", "memory"])
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--megabytes", type=float, required=True)
    parser.add_argument("--rounds", type=int, required=True)
    parser.add_argument("--seconds", type=float, required=True, help="begin no round after so long")
    parser.add_argument("--steps", type=int, required=True)
    parser.add_argument("--elsewhere", type=int, required=True, help="so many of the ranks take no steps")
    parser.add_argument("--sides", nargs="+", required=True)
    options = parser.parse_args()
    dist.init_process_group("gloo", timeout=timedelta(seconds=120))
    loop = Loop(options.megabytes, options.elsewhere)
    for _ in range(WARM_STEPS):
        loop.step(finished=True)
    report({"kind": "state", "bytes": loop.bytes(), "ranks": dist.get_world_size()})
    if options.mode == "time":
        measure_times(loop, options)
    else:
        measure_memory(loop, options)
    dist.barrier()
    dist.destroy_process_group()


def report(record: dict[str, Any]) -> None:
    """Print a record as a line, on rank 0."""
    if dist.get_rank() == 0:
        print(json.dumps(record), flush=True)


def over_ranks(value: float) -> list[float]:
    """Gather a number from every rank, on every rank."""
    gathered = [torch.zeros(1, dtype=torch.float64) for _ in range(dist.get_world_size())]
    dist.all_gather(gathered, torch.tensor([value], dtype=torch.float64))
    return [tensor.item() for tensor in gathered]


def measure_times(loop: Loop, options: argparse.Namespace) -> None:
    """Measure rounds of all sides in turn. The first one warms up memory and processes and is excluded."""
    sides = {
        name: SIDES[name](options.folder / name.replace(" ", "-"), loop.model, loop.optimizer) for name in options.sides
    }
    started = time.monotonic()
    for number in itertools.count():
        late = max(over_ranks(float(time.monotonic() - started > options.seconds)))
        if number > options.rounds or late:
            break
        for name, side in sides.items():
            record = measure_save(loop, side, options.steps)
            if number > 0:
                report({"kind": "save", "side": name, "round": number} | record)
    for side in sides.values():
        side.close()


def measure_save(loop: Loop, side: Side, steps: int) -> dict[str, Any]:
    """Take steps, save, and take the steps that follow until the save is done on all ranks."""
    # Dirty pages of other sides must not be written during this side's turn.
    dist.barrier()
    if dist.get_rank() == 0:
        os.sync()
    dist.barrier()
    for _ in range(WARM_STEPS):
        loop.step(finished=True)
    before = [loop.step(finished=True)[0] for _ in range(steps)]
    dist.barrier()
    started, computed = time.perf_counter(), time.thread_time()
    problem = ""
    try:
        side.save(loop.steps)
    except Exception as error:
        # A side that fails is counted; the others continue.
        problem = repr(error)
    blocked, computed = time.perf_counter() - started, time.thread_time() - computed
    after: list[float] = []
    finished = False
    while len(after) < MIN_AFTER or not finished:
        seconds, finished = loop.step(bool(problem) or side.done())
        after.append(seconds)
        if len(after) >= MAX_AFTER:
            problem = f"not done after {MAX_AFTER} steps"
            break
    commit = 0.0
    try:
        commit = side.ended() - started
    except RuntimeError as error:
        problem = problem or repr(error)
    record = {
        "blocked": max(over_ranks(blocked)),
        "computed": max(over_ranks(computed)),
        "commit": max(over_ranks(commit)),
        "before": before,
        "after": after,
        "failed": max(over_ranks(float(bool(problem)))) > 0,
        "problem": problem,
    }
    side.clear()
    return record


def measure_memory(loop: Loop, options: argparse.Namespace) -> None:
    """Measure the memory that one side adds to the ranks and their processes, at the peak and afterwards."""
    (name,) = options.sides
    for _ in range(options.steps):
        loop.step(finished=True)
    before = proportional_bytes()
    with peak() as highest:
        side = SIDES[name](options.folder / "memory", loop.model, loop.optimizer)
        for _ in range(2):
            side.save(loop.steps)
            finished = False
            while not finished:
                _, finished = loop.step(side.done())
    record = {"peak": sum(over_ranks(highest[0] - before)), "after": sum(over_ranks(proportional_bytes() - before))}
    report({"kind": "memory", "side": name} | record)
    side.close()


def proportional_bytes() -> int:
    """Memory of this process and its children; shared pages are divided among their processes."""
    total = 0
    for process in (psutil.Process(), *psutil.Process().children(recursive=True)):
        try:
            text = Path(f"/proc/{process.pid}/smaps_rollup").read_text()
        except (FileNotFoundError, ProcessLookupError):
            continue  # it has just ended
        total += next(int(line.split()[1]) * 1024 for line in text.splitlines() if line.startswith("Pss:"))
    return total


@contextmanager
def peak() -> Iterator[list[float]]:
    """Sample the peak memory while the block runs."""
    highest, stop = [0.0], threading.Event()

    def sample() -> None:
        while not stop.wait(SAMPLE_SECONDS):
            highest[0] = max(highest[0], float(proportional_bytes()))

    thread = threading.Thread(target=sample)
    thread.start()
    try:
        yield highest
    finally:
        stop.set()
        thread.join()


if __name__ == "__main__":
    main()
