"""The training script of torchft's side: the loop of `script`, made fault-tolerant as torchft's README describes it.

Each replica is a group of its own, with one rank, and takes a batch of its own. A step counts once torchft has
committed it. A batch whose step was not committed is gone, on all replicas: the loop goes on with the next one. Such a
batch is logged as `dropped`. The group's word is the number of torchft's quorum, its rank that of the participants.
"""

import os
import socket
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F

# Replicas give this name to each other, and here all of them share the machine's.
socket.gethostname = lambda: os.environ["RECOVERY_ADDRESS"]

import torchft  # type: ignore[import-not-found,unused-ignore]  # noqa: E402
from torchft.ddp import PureDistributedDataParallel  # type: ignore[import-not-found,unused-ignore]  # noqa: E402

SAVE_EVERY = 25
STEP_SECONDS = 0.02
TIMEOUT = timedelta(seconds=float(os.environ["RECOVERY_TIMEOUT"]))
folder = Path(os.environ["RECOVERY_FOLDER"])
replica = os.environ["RECOVERY_REPLICA"]
number = int(replica.rpartition("-")[2])
log = (folder / f"writer-{replica}-{os.getpid()}.txt").open("a", buffering=1)
saved_at = folder / "checkpoint.pt"


def log_event(event: str, world: int, rank: int) -> None:
    print(f"{time.time():.4f} {event} q{manager._quorum_id} {world} {rank} {manager.current_step()}", file=log)


def state() -> dict[str, Any]:
    return {"model": model.state_dict(), "optimizer": plain.state_dict()}


def load(content: dict[str, Any]) -> None:
    model.load_state_dict(content["model"])
    plain.load_state_dict(content["optimizer"])


torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(64, 256), torch.nn.ReLU(), torch.nn.Linear(256, 10))
plain = torch.optim.SGD(model.parameters(), lr=0.01)
manager = torchft.Manager(
    pg=torchft.ProcessGroupGloo(timeout=TIMEOUT),
    load_state_dict=load,
    state_dict=state,
    min_replica_size=1,
    timeout=TIMEOUT,
    replica_id=replica,
    hostname=os.environ["RECOVERY_ADDRESS"],
)
if saved_at.exists():
    content = torch.load(saved_at, weights_only=True)
    load(content)
    manager.load_state_dict(content["torchft"])
# A collective that fails while its DistributedDataParallel waits ends the process by an assertion in its own hook
# (torchft 0.2.0, about every other kill); its other wrapper averages tensor by tensor, and goes on.
wrapper = PureDistributedDataParallel if os.environ["RECOVERY_WRAPPER"] == "pure" else torchft.DistributedDataParallel
replicated = wrapper(manager, model)
optimizer = torchft.Optimizer(manager, plain)

batch = 0
while True:
    started = time.perf_counter()
    before = manager.current_step()
    optimizer.zero_grad()
    generator = torch.Generator().manual_seed(2 * batch + number)
    batch += 1
    images, labels = torch.randn(32, 64, generator=generator), torch.randint(10, (32,), generator=generator)
    loss: torch.Tensor = F.cross_entropy(replicated(images), labels)
    torch.autograd.backward(loss)
    optimizer.step()
    rank, world = manager.participating_rank(), manager.num_participants()
    step = manager.current_step()
    if rank is not None:
        log_event("step" if step > before else "dropped", world, rank)
    if rank == 0 and step > before and step % SAVE_EVERY == 0:
        temporary = saved_at.with_suffix(f".{os.getpid()}")
        torch.save(state() | {"torchft": manager.state_dict()}, temporary)
        temporary.replace(saved_at)
        log_event("saved", world, rank)
    time.sleep(max(0.0, STEP_SECONDS - (time.perf_counter() - started)))
