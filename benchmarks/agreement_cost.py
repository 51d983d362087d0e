"""Cost of the agreement of two ranks on samples, weights and moments: `python -m benchmarks.agreement_cost`.

It includes the comparison at the first save of the state that a restart would lose. Votes with the digest of samples
and votes without it take turns, A B A B, in the same processes. Time is processor time of all threads of a rank, so
other processes hardly affect it.
"""

import os
import statistics
import time
from collections.abc import Callable

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import Tensor, nn

from tandem_trainer.agreement import SampleDigest
from tandem_trainer.checkpoint.replicas import Replicas
from tandem_trainer.checkpoint.train_state import TrainState
from tandem_trainer.corruption import SamplePlan
from tandem_trainer.data.order import Order, Passes
from tandem_trainer.process_group import VOTE_SECONDS, Group

RANKS, ROUNDS, REPEATS = 2, 21, 200
STEP_SECONDS = 0.01
BATCH = 64
SAVE_SECONDS = 60.0
"""The default of `checkpoint.everySeconds`."""
LAYERS, WIDTH = 100, 1000
"""Shape of a model with 100 million parameters, 0.4 GB."""


def processor_seconds(do: Callable[[], object]) -> float:
    """Measure the processor seconds of one call, over all threads of this process."""
    started = time.process_time()
    for _ in range(REPEATS):
        do()
    return (time.process_time() - started) / REPEATS


def bare(losses: Tensor) -> None:
    """Vote on everything but samples."""
    ballot = torch.cat([torch.tensor([0.0, 0.0, 0.0, 0.01]), losses])
    dist.all_reduce(ballot)
    ballot.tolist()


def measure(rank: int, port: int) -> None:
    """Measure both votes in turns on one rank; rank 0 prints."""
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    torch.set_num_threads(1)
    dist.init_process_group("gloo", rank=rank, world_size=RANKS)
    group = Group(rank, RANKS, rank, torch.device("cpu"))
    ids, taken_samples = torch.arange(BATCH), SampleDigest()
    losses = torch.ones(round(VOTE_SECONDS / STEP_SECONDS))
    without, with_digest = [], []
    for _ in range(ROUNDS):
        without.append(processor_seconds(lambda: bare(losses)))
        with_digest.append(
            processor_seconds(lambda: group.vote(losses, False, False, False, taken_samples.digest, STEP_SECONDS))
        )
    step = statistics.median(processor_seconds(lambda: taken_samples.add(7, ids, 0)) for _ in range(ROUNDS))
    plan, steps = SamplePlan(Passes(Order(60_000, BATCH, seed=0), 1)), iter(range(10**9))
    planned = statistics.median(processor_seconds(lambda: plan.add(1, next(steps) % 900, ids)) for _ in range(ROUNDS))
    model = nn.ModuleList([nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS)])
    for parameter in model.parameters():
        parameter.data.fill_(0.5)
    optimizer = torch.optim.AdamW(model.parameters(), foreach=True)
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 1000)
    train_state = TrainState(model, optimizer, None, {"schedule": schedule})
    replicas = Replicas(group, train_state.replicas, str)
    save = statistics.median(processor_seconds(lambda: replicas.compare(1)) for _ in range(3))
    started = time.process_time()
    train_state.copy_objects()
    schedule.last_epoch += 1
    lost = train_state.lost_in_round_trip(group)
    once = time.process_time() - started
    assert not lost
    vote = statistics.median(b - a for a, b in zip(without, with_digest, strict=True))
    a_step = step + planned + vote * STEP_SECONDS / VOTE_SECONDS + save * STEP_SECONDS / SAVE_SECONDS
    if rank == 0:
        print(f"digest of a step's {BATCH} ids            {step * 1e6:8.1f} µs")
        print(f"the same ids by their order             {planned * 1e6:8.1f} µs")
        print(f"vote without the digest                 {statistics.median(without) * 1e6:8.1f} µs")
        print(f"more with it                            {vote * 1e6:8.1f} µs")
        print(f"state before a save, {LAYERS * WIDTH * WIDTH:,}   {save * 1e6:8.1f} µs")
        print(f"round trip of a schedule, once          {once * 1e6:8.1f} µs")
        print(f"share of a step of {STEP_SECONDS * 1e3:.0f} ms                {100 * a_step / STEP_SECONDS:8.3f} %")
    dist.destroy_process_group()


def main() -> None:
    """Measure."""
    store = dist.TCPStore("127.0.0.1", 0, is_master=True)
    port = store.port
    del store
    mp.spawn(measure, (port,), RANKS)  # type: ignore[no-untyped-call]


if __name__ == "__main__":
    main()
