"""One rank, whose memory is measured during training. Started by torchrun; each rank writes its figures.

It does what tandem_trainer.train does, without a run directory and without saves: a save needs shared memory for a
rank's part of the state, under every strategy alike (docs/development/benchmarks.md).

Figures are resident memory (VmHWM of /proc/self/status, MB of 10^6 bytes) above that of the process just before it
created the model: with torch, the data, the process group and torch's lazily loaded parts in place. The kernel records
the peak, so none is missed between two samples; writing 5 to /proc/self/clear_refs resets it to the current size. That
is done once the model is split, because each rank creates the whole model first; the peak until then is reported beside
it.
"""

import argparse
import itertools
import json
import time
from functools import partial
from pathlib import Path

import torch
from torch import nn

from benchmarks.strategies.work import LARGE, RANKS
from tandem.job.tasks import Loop
from tandem_trainer.checkpoint.sharding import to_local
from tandem_trainer.data.keyed import mixed
from tandem_trainer.data.order import Order
from tandem_trainer.malloc import keep_freed_memory
from tandem_trainer.models.dropout import key_dropout
from tandem_trainer.process_group import Group
from tandem_trainer.strategies import strategy_of
from tandem_trainer.train import Stepper, examples_of, supply_of


def resident(name: str) -> float:
    """Memory in MB: VmRSS, the current size, or VmHWM, the peak since it was reset."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(f"{name}:"):
            return int(line.split()[1]) * 1024 / 1e6
    raise OSError(f"/proc/self/status has no {name}")


def set_peak_back() -> None:
    """Reset the peak to the current size (proc_pid_clear_refs(5))."""
    Path("/proc/self/clear_refs").write_text("5")


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--strategy", required=True)
    parser.add_argument("--steps", type=int, required=True)
    parser.add_argument("--output", type=Path, required=True, help="folder; each rank writes a file into it")
    options = parser.parse_args()
    keep_freed_memory()  # as tandem_trainer.__main__ does
    group, task = Group.join(), LARGE.task
    loop = Loop.parse(LARGE.loop(options.strategy, options.steps))
    dataset = task.data("train")
    order = Order(len(dataset), loop.global_batch_size, loop.seed, drop_last=True)
    # Parts that torch loads lazily are no part of the state: a step of a model of 64 weights loads them.
    first = strategy_of(loop, group, 1)
    tiny: nn.Module = nn.Linear(8, 8, bias=False)
    examples = partial(examples_of, task, dataset, 0, len(dataset))
    first.shard(tiny, task, examples)
    tiny_optimizer = task.optimizer(tiny, loop.optimizer)
    first.wrap(tiny)(torch.ones(1, 8)).sum().backward()
    tiny_optimizer.step()
    del tiny, tiny_optimizer

    # A new strategy, as in a process that trains this model alone: the reuse of freed memory depends on its size.
    strategy = strategy_of(loop, group, 1)
    before = resident("VmRSS")
    set_peak_back()
    torch.manual_seed(mixed(loop.seed))
    model = task.model()
    count = sum(parameter.numel() for parameter in model.parameters())
    draws = key_dropout(model)
    strategy.shard(model, task, examples)
    start, after_split = resident("VmHWM"), resident("VmRSS")
    set_peak_back()
    optimizer = task.optimizer(model, loop.optimizer)
    forward = strategy.wrap(model)
    scaler = torch.amp.GradScaler(group.device.type, enabled=False)
    stepper = Stepper(task, loop, strategy, forward, draws, optimizer, scaler)
    supply = supply_of(task, dataset, order, loop, strategy, range(options.steps))
    peaks: list[float] = []
    took = [time.process_time()]
    for step in range(options.steps):
        stepper.take(step, supply.read(step), [loop.optimizer.learning_rate])
        peaks.append(resident("VmHWM") - before)
        took.append(time.process_time())
    weights = sum(to_local(parameter).nbytes for parameter in model.parameters())
    moments = sum(
        to_local(value).nbytes
        for state in optimizer.state.values()
        for value in state.values()
        if torch.is_tensor(value)
    )
    record = {
        "strategy": options.strategy,
        "rank": group.rank,
        "parameters": count,
        "before": before,
        "start": start - before,
        "afterSplit": after_split - before,
        "peak": peaks[-1],
        "peaks": peaks,
        "processorSeconds": [after - before for before, after in itertools.pairwise(took)],
        "state": {"weights": weights, "gradients": weights, "moments": moments},
    }
    (options.output / f"{group.rank}.json").write_text(json.dumps(record))
    assert group.world_size == RANKS
    group.leave()


if __name__ == "__main__":
    main()
